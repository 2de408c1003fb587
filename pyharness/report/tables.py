"""The tables of the page: what is in the catalogue, what is proven, measured, used and kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyharness import grades, logits_table, models_table
from pyharness.figures import best_peer, earlier_sign, fastest_of_ours, is_peer, points, timed_at
from pyharness.grades import Proofs
from pyharness.manifest import Row
from pyharness.occupancy import MULTIPROCESSORS, occupancy
from pyharness.replay import Row as Replayed
from pyharness.report.plots import many, point_of, shape
from pyharness.spec import TARGETS, Geometry, KernelSpec

#: How the cells of the proofs' table say a grade, and the class of their colour.
GRADES = {"device": "device", "emulator": "emulator", "unproven": "none"}

#: A table of every timing is folded if it has more lines.
_LONG = 40


@dataclass(frozen=True)
class Cell:
    """What a cell says, with a class of page.css and a hint that shows when it is pointed at."""

    text: str
    kind: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under their titles.

    Attributes:
        name: of its element.
        caption: what it shows.
        columns: title of each and whether it holds numbers.
        folded: whether it is shown only when asked for.
    """

    name: str
    caption: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False


def _cells(values: Iterable[Any]) -> list[Cell]:
    return [value if isinstance(value, Cell) else Cell(str(value)) for value in values]


def _kernel(name: str, sign: str = "") -> Cell:
    return Cell(f"{name}{sign}", "kernel")


def _columns(text: str) -> list[tuple[str, bool]]:
    """Titles, comma-separated; one that begins with # is of numbers."""
    titles = [title.strip() for title in text.split(",")]
    return [(title.removeprefix("#").strip(), title.startswith("#")) for title in titles]


def of_markdown(name: str, caption: str, text: str) -> Table:
    """The first table of a Markdown page, as a command writes it there."""
    lines = [line for line in text.partition("\n| ")[2].partition("\n\n")[0].splitlines() if line]
    head, rule, *rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines]
    columns = [(title, mark.endswith(":")) for title, mark in zip(head, rule, strict=True)]
    shown = [[_kernel(cell.strip("`")) if cell.startswith("`") else Cell(cell) for cell in row] for row in rows]
    return Table(name, caption, columns, shown)


def catalogue(rows: Sequence[Row]) -> Table:
    """A line a kernel: family, types, configuration, launches, images."""
    lines = []
    for row in rows:
        told = ("d_state", "io", "state")
        rest = [f"{name} {value}" for name, value in row.spec.items() if name not in told and value not in ("", 0)]
        n = row.spec["d_state"] or "any"
        types = (row.spec["io"], row.spec["state"])
        lines.append(
            _cells([_kernel(row.id), row.family, n, *types, ", ".join(rest), len(row.entries), len(row.targets)])
        )
    columns = _columns("kernel, family, # d_state, io, state, configuration, # launches, # images")
    return Table("catalogue", f"{len(rows)} kernels", columns, lines)


def proofs(rows: Sequence[Row], proven: Proofs) -> Table:
    """A line a kernel, a column a target: how far its image is proven, or why there is none."""
    lines = []
    for row in rows:
        cells = [_kernel(row.id)]
        for target in TARGETS:
            if target not in row.targets:
                cells.append(Cell("-", "absent", row.excluded.get(target, "no image")))
                continue
            grade = proven.grade(row, target)
            text = GRADES[grade.level]
            hint = f"{grade}; {grade.cases} cases, largest error {grade.worst:g} of what is allowed"
            cells.append(Cell(text, text, hint if grade.cases else str(grade)))
        lines.append(cells)
    columns = [("kernel", False), *((target, False) for target in TARGETS)]
    return Table(
        "proofs-by-image",
        "How far each image is proven: on a device, in the emulator, not; -: there is no image",
        columns,
        lines,
    )


def proof_counts(rows: Sequence[Row], proven: Proofs) -> dict[str, int]:
    """Images by the level of their grade."""
    found = dict.fromkeys(grades.LEVELS, 0)
    for row in rows:
        for target in row.targets:
            found[proven.grade(row, target).level] += 1
    return found


def replays(place: str, rows: Sequence[Replayed]) -> Table:
    """The peers' test suites on our kernels, as they are stored for a place."""
    lines = []
    for row in rows:
        worst = (f"{row.worst:.2g}", f"{row.ours:.2g}") if row.cases > row.no_kernel else ("", "")
        lines.append(_cells([row.suite, row.family, row.cases, row.passed, row.no_kernel, *worst]))
    columns = _columns("suite, family, # cases, # passed, # no kernel, # of the peer's tolerance, # of ours")
    return Table(f"replays-{place}", f"Test suites of other packages, {place}", columns, lines)


def best_by_point(document: Mapping[str, Any]) -> Table:
    """A line a point: the ceilings, our fastest kernel, the best peer, and their ratio."""
    lines = []
    for name, stored in points(document):
        point, rows = point_of(stored), timed_at(document, name)
        ours, peer = fastest_of_ours(rows), best_peer(rows)
        cells = [Cell(f"{point.job} {many(point)}"), Cell(shape(point))]
        if ours is None:
            lines.append([*cells, *_cells(["-"] * 8)])
            continue
        us, kinds = ours["us"], {kind: value for kind, value in ours["ceilings"].items() if kind != "us"}
        cells.append(Cell(f"{ours['ceilings']['us']:.2f}", hint=", ".join(f"{k} {v:.2f}" for k, v in kinds.items())))
        cells += _cells([f"{us['median']:.2f}", f"{us['low']:.2f} to {us['high']:.2f}", f"{ours['ratio']:.2f}"])
        if peer is None:
            cells += _cells(["-", "-"])
        else:
            ratio = peer["us"]["median"] / us["median"]
            cells += [Cell(f"{peer['us']['median']:.2f}"), Cell(f"{ratio:.2f}", "won" if ratio >= 1 else "lost")]
        cells += [_kernel(ours["kernel"], earlier_sign(ours)), Cell(peer["kernel"] if peer else "-")]
        lines.append(cells)
    columns = _columns(
        "point, sizes, # ceiling, # ours, # spread, # x ceiling, # best peer, # peer / ours, our kernel, peer"
    )
    return Table(f"best-{document['suite']}", "Microseconds of one call: the fastest at each point", columns, lines)


def every_timing(document: Mapping[str, Any]) -> Table:
    """Every row of a suite, peers that did not run with their reason."""
    lines = []
    for row in document["rows"]:
        name = ", ".join(filter(None, (row["kernel"], row.get("order", ""))))
        who = Cell(name, "peer" if is_peer(row) else "kernel")
        if "us" not in row:
            lines.append([Cell(row["point"]), who, *_cells(["-"] * 6), Cell(row["failed"])])
            continue
        us = row["us"]
        errors = [f"{row[kind]:.1e}" if kind in row else "" for kind in ("error_of_y", "error_of_state")]
        allowed = f"{row['error']:.2f}" if "error" in row else ""
        numbers = (f"{us['median']:.2f}", f"{us['low']:.2f} to {us['high']:.2f}", f"{row['ratio']:.2f}")
        lines.append([Cell(row["point"]), who, *_cells([*numbers, *errors, allowed, ""])])
    columns = _columns(
        "point, kernel, # us, # spread, # x ceiling, # error of y, # error of state, # of what is allowed, did not run"
    )
    name = f"all-{document['suite']}"
    return Table(name, f"Every timing: {len(document['rows'])} rows", columns, lines, folded=len(lines) > _LONG)


def launches(document: Mapping[str, Any], kinds: Sequence[str]) -> Table:
    """What launching costs, by family, an empty kernel first."""
    lines = []
    for row in [{"kernel": "an empty kernel", "family": "-", "launches": 1} | document["empty"], *document["rows"]]:
        us = [f"{row[kind]['median']:.2f}" if kind in row else "-" for kind in kinds]
        who = Cell(row["kernel"], "peer" if is_peer(row) else "kernel")
        lines.append([Cell(row["family"]), who, *_cells([row.get("launches", "-"), *us, row.get("failed", "")])])
    columns = _columns("family, kernel, # launches") + [(kind, True) for kind in kinds] + [("did not run", False)]
    return Table("launch", "Microseconds of a call of the smallest problem", columns, lines)


def models(document: Mapping[str, Any]) -> Table:
    """The scan's share of a whole model, by step and scan."""
    lines = []
    for row in models_table.rows(document):
        point = document["points"][row["point"]]
        job = "decode" if point["tokens"] == 1 else "prefill"
        step = f"{job} {point['sequences']} x {point['tokens']}"
        times = [f"{row['scan_us']:.1f}", f"{row['scans_us']:.0f}"]
        times += [f"{row[name]:.1f}" for name in ("layer_us", "others_us", "total_us")]
        share, rate = f"{100 * row['share']:.1f} %", f"{row['tokens_per_second']:.0f}"
        lines.append(
            [Cell(step), Cell(row["scan"]), _kernel(row["kernel"], earlier_sign(row)), *_cells([*times, share, rate])]
        )
    scans = f"{document['layers']['linear_attention']} scans"
    columns = _columns(
        f"step, scan, kernel, # 1 scan, # {scans}, # layer, # all else, # stack, # scans' share, # tokens/s"
    )
    return Table("models", f"Microseconds of a scan, of its layer and of {document['model']}'s stack", columns, lines)


def logits(document: Mapping[str, Any]) -> Table:
    """How far logits are from those of PyTorch's own code in f32, by model and scan."""
    columns = [("model", False), *((title.replace("`", ""), True) for title in logits_table.COLUMNS.values())]
    lines = []
    for rows in logits_table.by_model(document).values():
        like = next(iter(rows.values()))["like"]
        lines.append([Cell(like), *_cells(logits_table.cells(rows))])
    caption = (
        f"Logits: relative distance from PyTorch's in f32, prompt of {document['prompt']} / {document['steps']} decoded"
    )
    return Table("logits", caption, columns, lines)


def native_times(document: Mapping[str, Any]) -> Table | None:
    """A call from Go beside one from PyCUDA, of the same images over the same data."""
    lines = [
        [
            *(Cell(row["point"]), _kernel(row["kernel"], earlier_sign(row))),
            *(Cell(f"{row[name]:.2f}") for name in ("go_us", "pycuda_us")),
            Cell(f"{row['ratio']:.3f}", "won" if row["ratio"] <= 1 else "lost"),
        ]
        for row in document.get("beside", ())
    ]
    columns = _columns("point, kernel, # Go, # PyCUDA, # Go / PyCUDA")
    return (
        Table("native", "Microseconds of a call on a stream, from Go and from Python", columns, lines)
        if lines
        else None
    )


def native_benchmarks(document: Mapping[str, Any]) -> Table | None:
    """What the Go benchmarks report, as they name it."""
    lines = [
        [Cell(name, "kernel"), Cell(f"{value:.0f}" if value >= 1000 else f"{value:g}"), Cell(unit)]
        for name, values in sorted(document.get("benchmarks", {}).items())
        for unit, value in values.items()
    ]
    columns = _columns("Go benchmark, # value, unit")
    return Table("native-benchmarks", "What the Go benchmarks report", columns, lines) if lines else None


def _usual(spec: KernelSpec) -> Geometry:
    """A geometry that a kernel takes, for the shape of its blocks."""
    sizes: dict[str, Any] = spec.fields()
    head_dim = 1 if spec.family == "selective" else int(sizes.get("head_dim", 0)) or 64
    tokens = 1 if spec.family == "update" else 4096
    heads, groups = (8192, 1) if head_dim == 1 else (64, 8)
    return Geometry(tokens, 1, heads, head_dim, groups, spec.d_state or 128, longest=tokens)


def resources(rows: Sequence[Row], target: str) -> Table:
    """A line a launch of each kernel with an image for a target: registers, shared memory, blocks, occupancy."""
    lines = []
    for row in rows:
        image = row.targets.get(target) or row.targets.get(f"{target}a")
        if image is None or target not in MULTIPROCESSORS:
            continue
        for launch in row.kernel.plan(_usual(row.kernel)).launches:
            usage = image.usage[launch.entry]
            threads = launch.block[0] * launch.block[1] * launch.block[2]
            shared = usage["static_shared"] + launch.shared_bytes
            held = occupancy(target, threads, usage["registers"], shared)
            entry = launch.entry.removeprefix(row.kernel.symbol()).removeprefix("_")
            numbers = (threads, usage["registers"], usage["local_bytes"], shared, held.blocks, held.warps)
            lines.append([_kernel(row.id), *_cells([entry, *numbers, f"{100 * held.share:.0f} %", held.limit])])
    columns = _columns(
        "kernel, entry, # threads, # registers, # spills, # shared bytes, # blocks, # warps, # occupancy, limited by"
    )
    caption = f"What a block uses on {target}, and what a multiprocessor holds"
    return Table(f"resources-{target}", caption, columns, lines)


def image_sizes(rows: Sequence[Row]) -> Table:
    """A line a kernel, a column a target: bytes of its image."""
    lines = [
        [_kernel(row.id), *_cells(row.targets[target].bytes if target in row.targets else "-" for target in TARGETS)]
        for row in rows
    ]
    totals = [sum(row.targets[target].bytes for row in rows if target in row.targets) for target in TARGETS]
    lines.append([Cell("all", "total"), *(Cell(str(total), "total") for total in totals)])
    columns = [("kernel", False), *((target, True) for target in TARGETS)]
    return Table("image-sizes", "Bytes of each image", columns, lines, folded=True)


def earlier(entries: Sequence[Mapping[str, Any]], documents: Mapping[str, Mapping[str, Any]]) -> Table:
    """A line an earlier figure of a point, beside what it takes now."""
    lines = []
    for entry in entries:
        document = documents.get(entry["suite"])
        now = fastest_of_ours(timed_at(document, entry["point"])) if document else None
        cells = _cells([entry["point"], entry["date"], f"{entry['us']:.2f}", _kernel(entry["kernel"])])
        if now is None:
            lines.append([*cells, *_cells(["-", "-", "-"])])
            continue
        gain = entry["us"] / now["us"]["median"]
        cells += _cells([f"{now['us']['median']:.2f}", _kernel(now["kernel"])])
        lines.append([*cells, Cell(f"{gain:.2f}", "won" if gain >= 1 else "lost")])
    columns = _columns("point, until, # us then, kernel then, # us now, kernel now, # then / now")
    return Table("history", "What other machine code has replaced", columns, lines)
