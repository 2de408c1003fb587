"""`invoke tune`: which kernel of the catalogue is fastest for which problem, measured over a grid of problems.

Each problem's kernels are timed by a short protocol; those within a margin of the fastest, and the fastest of each
family, are timed again by the full one, and of these the fastest of each family becomes an entry of the problem in
generated/selection.json. What was measured is kept in generated/bench/<device>/tune.json after each problem, so an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyharness import gpus, manifest, measure, select, toolchain
from pyharness.build import Track, silent
from pyharness.catalogue import CATALOGUE
from pyharness.errors import DeviceError, NoKernel
from pyharness.families.recurrent import RecurrentSpec
from pyharness.figures import stored, stored_path
from pyharness.markdown import between, refresh, wrapped
from pyharness.select import Features
from pyharness.spec import KernelSpec, parse_id
from pyharness.workload import Point

SUITE = "tune"
PAGE = toolchain.ROOT / "docs" / "embedding.md"
#: Kernels within this share of the fastest by the short protocol are timed by the full one.
FINALIST_MARGIN = 1.10

_DECODE_BATCHES = (1, 4, 16, 64, 256)
_PREFILL = ((1, 512), (1, 4096), (8, 1024))
#: Heads and groups: one of eight ranks of a large model, a small model, a large one.
_HEADS = ((16, 1), (64, 8), (128, 8))

#: What is tuned by default, d_state 128 with f32 states.
GRID: tuple[Point, ...] = tuple(
    point
    for io in ("f32", "bf16")
    for heads, groups in _HEADS
    for point in (
        *(Point("decode", batch, 1, True, heads=heads, groups=groups, io=io) for batch in _DECODE_BATCHES),
        *(Point("prefill", count, tokens, False, heads=heads, groups=groups, io=io) for count, tokens in _PREFILL),
    )
)


def _reported(device: str, target: str, layout: str, microseconds: float) -> select.Entry:
    kernel = RecurrentSpec(d_state=128, layout=layout).id
    return select.Entry(
        device, target, "recurrent", 64, 64, 128, 8, "f32", "f32", 64, 4096, kernel, microseconds, "reported"
    )  # fmt: skip


#: Prefill of 1 x 4096 as an engine that had block, slices, interleaved and padded reported it. `tiled` is newer.
REPORTED = (
    _reported("NVIDIA RTX PRO 6000", "sm_120", "padded", 3500.0),
    _reported("NVIDIA GeForce RTX 3070", "sm_86", "interleaved", 5900.0),
)

#: Times kernels at a point: `pyharness.measure.measure` without its other parameters.
Measure = Callable[[Mapping[Point, Sequence[str]], measure.Protocol, int], list[dict[str, Any]]]


@dataclass(frozen=True)
class Bench:
    """Where a run measures: what the stored document is of, and what times kernels there."""

    device: str
    target: str
    driver: str
    cuda: str
    compiler: str
    time: Measure


def bench_on(ordinal: int) -> Bench:
    """The bench of a GPU.

    Raises:
        DeviceError: there is none.
    """
    from pyharness.device import get

    gpu, driver = get(ordinal), gpus.driver()
    version = toolchain.find_compiler().version
    return Bench(gpu.name, gpu.target, driver.version, driver.cuda, version, measure.measure)


def candidates(point: Point, family: str | None, catalogue: Sequence[KernelSpec]) -> list[str]:
    """The kernels that take a point and that selection may take, of a family or of all."""
    return [
        spec.id
        for spec in catalogue
        if family in (None, spec.family)
        and not select.unfit(Features(point.geometry, point.io, point.state), spec, None)
    ]


def chosen_points(names: Sequence[str], grid: Sequence[Point] = GRID) -> list[Point]:
    """Points of the grid by name; all without names.

    Raises:
        NoKernel: a name is not of the grid.
    """
    known = {point.name: point for point in grid}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise NoKernel(f"--points must name some of {', '.join(known)}, found {', '.join(wrong)}")
    return [known[name] for name in names] if names else list(grid)


def _header(bench: Bench) -> dict[str, Any]:
    return {
        "suite": SUITE,
        "device": bench.device,
        "target": bench.target,
        "driver": bench.driver,
        "cuda": bench.cuda,
        "compiler": bench.compiler,
        "protocol": measure.PROTOCOL,
    }


def _started(bench: Bench, path: Path, again: bool) -> dict[str, Any]:
    """The record to go on with: what is stored, if it was measured with this driver and compiler.

    Raises:
        DeviceError: it was measured otherwise.
    """
    header = _header(bench)
    fresh = header | {"date": "", "points": {}, "rows": [], "short": []}
    if again or not path.is_file():
        return fresh
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name, value in header.items() if stored.get(name) != value]
    if other:
        raise DeviceError(
            f"{path.name}: {', '.join(f'{name} {header[name]!r}' for name in other)} was wanted, found "
            f"{', '.join(repr(stored.get(name)) for name in other)}: measure it anew with --again"
        )
    return stored


def _done(document: Mapping[str, Any], point: Point, kernels: Sequence[str]) -> bool:
    """Whether a point was measured with just these kernels, each of the bytes that the manifest has now."""
    found = {row["kernel"]: row for row in document["short"] if row["point"] == point.name}
    if set(found) != set(kernels):
        return False
    return all(manifest.is_promised(kernel, row.get("image")) for kernel, row in found.items())


def _finalists(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    timed = {row["kernel"]: float(row["us"]["median"]) for row in rows if "us" in row}
    order = sorted(timed, key=lambda kernel: (timed[kernel], kernel))
    best: dict[str, str] = {}
    for kernel in order:
        best.setdefault(parse_id(kernel).family, kernel)
    limit = min(timed.values(), default=math.inf) * FINALIST_MARGIN
    return [kernel for kernel in order if timed[kernel] <= limit or kernel in best.values()]


def _without(document: Mapping[str, Any], part: str, point: Point) -> list[dict[str, Any]]:
    return [row for row in document[part] if row["point"] != point.name]


def tune(
    family: str | None = None,
    points: Sequence[str] = (),
    *,
    again: bool = False,
    ordinal: int = 0,
    bench: Bench | None = None,
    track: Track = silent,
    grid: Sequence[Point] = GRID,
    catalogue: Sequence[KernelSpec] = CATALOGUE,
    path: Path | None = None,
) -> dict[str, Any]:
    """Measure the grid, or what is left of it, and bring the selection table in line.

    Args:
        family: only kernels of this family.
        points: only these points of the grid, by name.
        again: measure also what is stored.
        ordinal: the GPU.
        bench: where to measure instead of the GPU.
        track: shows progress, a step a point.
        grid: the points.
        catalogue: the kernels.
        path: the record; by default generated/bench/<device>/tune.json.

    Returns:
        The record. Its "rows" are by the full protocol, its "short" ones by the short one.

    Raises:
        NoKernel: a point is not of the grid, or no kernel takes any.
        DeviceError: there is no GPU, or the record was measured with another driver or compiler.
    """
    wanted = {point: candidates(point, family, catalogue) for point in chosen_points(points, grid)}
    wanted = {point: kernels for point, kernels in wanted.items() if kernels}
    if not wanted:
        known = ", ".join(sorted({spec.family for spec in catalogue}))
        raise NoKernel(f"a kernel of family {family!r} for the points was wanted, found none; families: {known}")
    there = bench or bench_on(ordinal)
    record = path or stored_path(there.device, SUITE)
    document = _started(there, record, again)
    left = {point: kernels for point, kernels in wanted.items() if not _done(document, point, kernels)}
    with track("tune", len(left)) as progress:
        for point, kernels in left.items():
            short = there.time({point: kernels}, measure.SHORT, ordinal)
            finalists = _finalists(short)
            full = there.time({point: finalists}, measure.FULL, ordinal) if finalists else []
            document["points"][point.name] = point.stored()
            document["short"] = _without(document, "short", point) + short
            document["rows"] = _without(document, "rows", point) + full
            document["date"] = gpus.today()
            toolchain.publish_json(record, document)
            progress.step(point.name)
    return document


def winners(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a point: the fastest kernel, its time, its multiple of the ceiling, and the next."""
    found = []
    for name in document["points"]:
        rows = [row for row in document["rows"] if row["point"] == name and "us" in row]
        rows.sort(key=lambda row: (row["us"]["median"], row["kernel"]))
        if rows:
            best, *others = rows
            found.append(
                {
                    "point": name,
                    "kernel": best["kernel"],
                    "us": best["us"]["median"],
                    "ratio": f"{best['ratio']:.2f}",
                    "next": others[0]["kernel"] if others else "",
                    "next_us": others[0]["us"]["median"] if others else "",
                }
            )
    return found


def with_reported(table: select.Table) -> select.Table:
    """A table with the reported entries, where nothing was measured for their problem on their device."""
    known = {(entry.device, entry.batch_heads, entry.tokens, entry.heads, entry.io) for entry in table.entries}
    new = [e for e in REPORTED if (e.device, e.batch_heads, e.tokens, e.heads, e.io) not in known]
    return select.Table((*table.entries, *new), table.defaults)


def write_table(path: Path = select.TABLE_PATH, benches: Path = select.BENCHES) -> select.Table:
    """Write generated/selection.json: what the stored benches and records say, then what was reported.

    Returns:
        The table.
    """
    kept = tuple(entry for entry in select.committed_table().entries if entry.source == "default")
    table = select.Table(kept, select.committed_table().defaults)
    table = with_reported(select.refreshed_table(table, benches))
    toolchain.publish_json(path, select.table_document(table))
    select.committed_table.cache_clear()
    return table


def page_table(document: Mapping[str, Any]) -> str:
    """The winners of a record as Markdown."""
    title = (
        f"{document['device']}, driver {document['driver']}, nvcc {document['compiler']}, {document['date']}: "
        f"microseconds of a call, and their multiple of the ceiling of the same run."
    )
    lines = [
        wrapped(title),
        "",
        "| problem | fastest kernel | us | x ceiling | next | us |",
        "| --- | --- | ---: | ---: | --- | ---: |",
    ]
    for row in winners(document):
        after = f"`{row['next']}` | {row['next_us']:.2f}" if row["next"] else " | "
        lines.append(f"| {row['point']} | `{row['kernel']}` | {row['us']:.2f} | {row['ratio']} | {after} |")
    return "\n".join(lines)


def refreshed(text: str, folder: Path = select.BENCHES) -> str:
    """The page with the winners of every stored record between its markers.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    tables = "\n\n".join(page_table(document) for document in stored(SUITE, folder))
    return between(text, SUITE, tables, PAGE.name)


def write_page(page: Path = PAGE, folder: Path = select.BENCHES) -> bool:
    """Bring the page in line with what is stored; whether that changed it.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    return refresh(page, lambda text: refreshed(text, folder))
