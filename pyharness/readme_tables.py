"""The tables of figures of README.md and docs/, as Markdown, from what is stored and the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness import gaps, logits_table, manifest, models_table, toolchain
from pyharness.figures import (
    BENCH,
    EARLIER_SIGN,
    EARLIER_TELLS,
    best_peer,
    dates,
    days,
    fastest,
    fastest_of_ours,
    is_peer,
    kernel_cell,
    ours_of,
    points,
    state_mib,
    stored,
    timed_at,
)
from pyharness.listing import table
from pyharness.markdown import between, refresh, wrapped
from pyharness.spec import parse_id

README = toolchain.ROOT / "README.md"
#: Pages of suites that the README does not show.
_PAGES = {logits_table.SUITE: toolchain.ROOT / "docs" / "torch.md"}
#: What the README's sample listing shows, of what `invoke generate` lists for a d_state: one target.
_SAMPLE, _SAMPLE_TARGET = ("recurrent", 128, "f32", "f32"), "sm_90"
#: What the foundation set out to reach in f32 on an H200.
PREFILL_GOAL_US, PREFILL_GOAL_OF_PADDED, DECODE_GOAL = 450.0, 3.0, 1.10
#: What Mamba-1 is to reach: peers' times over ours in prefill and decode, and decode's time over its ceiling from some
#: MiB of states on.
MAMBA1_PREFILL_GOAL, MAMBA1_DECODE_GOAL, MAMBA1_CEILING_GOAL, MAMBA1_LARGE_MIB = 1.5, 1.0, 1.05, 64


def readme_table(suite: str, folder: Path = BENCH) -> str:
    """The stored figures of a suite as Markdown: tables of a line a kernel (of `update`, `ssd` and `selective`: of a
    line a point), beside the ceilings, and what they say.

    Raises:
        SsmError: nothing is stored.
    """
    tables = {
        "update": _decode_table,
        "ssd": _prefill_table,
        "selective": _mamba1_table,
        "launch": _launch_table,
        models_table.SUITE: models_table.table,
        logits_table.SUITE: logits_table.table,
    }
    table_of = tables.get(suite, _device_table)
    shown = "\n\n".join(table_of(document) for document in stored(suite, folder))
    return f"{shown}\n\n{EARLIER_SIGN}: {EARLIER_TELLS}." if f" {EARLIER_SIGN} " in shown else shown


def _title(document: Mapping[str, Any]) -> str:
    when = days(dates(document))
    return f"{document['device']}, driver {document['driver']}, nvcc {document['compiler']}, {when}"


_DECODE_CEILINGS = ("slots", "ascending", "contiguous")
#: What decode set out to reach, by MiB of f32 states: few are latency, many are bytes, and other states are held
#: against f32 where that has 256 MiB.
DECODE_SMALL_MIB, DECODE_LARGE_MIB, DECODE_WHOLE_MIB = 8, 32, 256
DECODE_STATE_GOALS = {"bf16": 0.55, "f16": 0.55, "i8": 0.32}


def _decode_table(document: Mapping[str, Any]) -> str:
    """A line a point: the ceilings, the best of ours in both orders of visits, and the best peer."""
    head = ("decode", "MiB of state", *_DECODE_CEILINGS, "ours", "kernel", "ours, ascending", "best peer", "which")
    prose = (
        f"{_title(document)}. Microseconds of one call whose states are cold. Three ceilings read and write the same "
        "states and do nothing else: in the order of the sequences (slots), in that of the slots (ascending) and in "
        "one range (contiguous). In brackets the time as a multiple of the first, for ours in ascending order of the "
        "last."
    )
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * 5 + " --- | ---: | ---: | --- |"]
    for name, point in points(document):
        lines.append("| " + " | ".join(_decode_cells(point, timed_at(document, name))) + " |")
    return "\n\n".join([wrapped(prose), "\n".join(lines), *_findings(document, decode_goals(document))])


def _findings(document: Mapping[str, Any], *goals_: str) -> list[str]:
    """What stands below a table: goals, where there are any, and what the figures lack."""
    return [wrapped(text) for text in (*goals_, *gaps.sentences(document)) if text]


def decode_goals(document: Mapping[str, Any]) -> str:
    """Decode's goals beside what is reached, of states of every type where none is named."""
    gains: list[float] = []
    above: dict[str, list[float]] = {"large": [], "ordered": [], "small": []}
    whole: dict[str, list[float]] = {}
    for name, point in document["points"].items():
        rows = timed_at(document, name)
        ours = fastest(ours_of(rows))
        ordered = fastest([row for row in rows if "order" in row])
        peer = best_peer(rows)
        if ours is None:
            continue
        us, ceilings, mib = ours["us"]["median"], ours["ceilings"], state_mib(point)
        if peer:
            gains.append(peer["us"]["median"] / us)
        if state_mib(dict(point, state="f32")) == DECODE_WHOLE_MIB:
            whole.setdefault(point["state"], []).append(us)
        if mib >= DECODE_LARGE_MIB:
            above["large"].append(us / ceilings["slots"])
            if ordered:
                above["ordered"].append(ordered["us"]["median"] / ordered["ceilings"]["contiguous"])
        elif mib <= DECODE_SMALL_MIB:
            above["small"].append(us - ceilings["slots"])
    texts = []
    if gains:
        won = sum(gain > 1 for gain in gains)
        texts.append(
            f"faster than the best peer: at {won} of {len(gains)} points, {min(gains):.2f}x at the least, "
            f"{_verdict(1.0, min(gains))}"
        )
    for kind, text, goal in (
        ("large", f"at most 2 % above the slots' ceiling from {DECODE_LARGE_MIB} MiB on", 1.02),
        ("ordered", "in ascending order at most 3 % above one range there", 1.03),
    ):
        if above[kind]:
            most, within = max(above[kind]), sum(ratio <= goal for ratio in above[kind])
            texts.append(
                f"{text}: at {within} of {len(above[kind])}, {100 * (most - 1):.0f} % at the most, "
                f"{_verdict(most, goal)}"
            )
    if above["small"]:
        most = max(above["small"])
        texts.append(
            f"at most 0.5 us above it up to {DECODE_SMALL_MIB} MiB: {min(above['small']):.2f} to {most:.2f} us, "
            f"{_verdict(most, 0.5)}"
        )
    for state, goal in DECODE_STATE_GOALS.items():
        if whole.get(state) and whole.get("f32"):
            share = min(whole[state]) / min(whole["f32"])
            texts.append(f"{state} states at most {goal:g}x of f32's time: {share:.2f}x, {_verdict(share, goal)}")
    return f"Goals: {'; '.join(texts)}." if texts else ""


def _decode_cells(point: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def figure(row: Mapping[str, Any] | None, ceiling: str = "slots") -> str:
        if row is None:
            return "-"
        us = row["us"]["median"]
        return f"{us:.2f} ({us / row['ceilings'][ceiling]:.2f}x)"

    ours = fastest(ours_of(rows))
    ascending = fastest([row for row in rows if "order" in row])
    peer = best_peer(rows)
    sizes = f"{point['heads']} heads x {point['head_dim']} x {point['d_state']}"
    return [
        f"{point['sequences']} x {point['tokens']}, {sizes}, {point['io']} s{point['state']}",
        f"{state_mib(point):g}",
        *(f"{ours['ceilings'][kind]:.2f}" if ours else "-" for kind in _DECODE_CEILINGS),
        figure(ours),
        kernel_cell(ours) if ours else "-",
        figure(ascending, "contiguous"),
        figure(peer),
        str(peer["kernel"]) if peer else "-",
    ]


#: How the cells of Mamba-1's table name ceilings.
_MAMBA1_CEILINGS = {"exp": "exponentials", "fma": "FP32", "bytes": "bytes", "slots": "states", "moved": "all bytes"}


def _mamba1_table(document: Mapping[str, Any]) -> str:
    """A line a point: the ceilings, the best of ours and the best peer."""
    head = ("Mamba-1", "ceilings", "ours", "kernel", "best peer", "which", "peer / ours")
    prose = (
        f"{_title(document)}. Microseconds of one call whose data are cold. Ceilings of prefill: the bytes that must "
        "move, as a copy; four FP32 instructions and one exponential a state element and token. Of decode: the states "
        "read and written in the order of the sequences, and one range of as many bytes as inputs, y and states have "
        "together. In brackets the time as a multiple of the highest."
    )
    lines = ["| " + " | ".join(head) + " |", "| --- | --- | ---: | --- | ---: | --- | ---: |"]
    gains: dict[str, list[float]] = {"prefill": [], "decode": []}
    over: list[float] = []
    for name, point in points(document):
        rows = timed_at(document, name)
        ours = fastest(ours_of(rows))
        peer = best_peer(rows)
        lines.append("| " + " | ".join(_mamba1_cells(point, ours, peer)) + " |")
        if ours and peer:
            gains[point["job"]].append(peer["us"]["median"] / ours["us"]["median"])
        if ours and point["job"] == "decode" and state_mib(point) >= MAMBA1_LARGE_MIB:
            over.append(ours["ratio"])
    return "\n\n".join([wrapped(prose), "\n".join(lines), *_findings(document, mamba1_goals(gains, over))])


def _mamba1_cells(
    point: Mapping[str, Any], ours: Mapping[str, Any] | None, peer: Mapping[str, Any] | None
) -> list[str]:
    ceilings = ours["ceilings"] if ours else {}
    shown = [f"{name} {ceilings[kind]:.1f}" for kind, name in _MAMBA1_CEILINGS.items() if kind in ceilings]
    us = ours["us"]["median"] if ours else 0.0
    return [
        f"{point['job']} {point['sequences']} x {point['tokens']}, {point['heads']} channels x {point['d_state']}, "
        f"{point['io']} s{point['state']}",
        ", ".join(shown),
        f"{us:.2f} ({ours['ratio']:.2f}x)" if ours else "-",
        kernel_cell(ours) if ours else "-",
        f"{peer['us']['median']:.2f}" if peer else "-",
        str(peer["kernel"]) if peer else "-",
        f"{peer['us']['median'] / us:.2f}" if ours and peer else "-",
    ]


def mamba1_goals(gains: Mapping[str, Sequence[float]], over: Sequence[float]) -> str:
    """Mamba-1's goals beside what is reached.

    Args:
        gains: of "prefill" and "decode", at each point that a peer ran, its time over ours.
        over: our time over the ceiling at each decode point of many states.
    """
    texts = []
    for job, goal in (("prefill", MAMBA1_PREFILL_GOAL), ("decode", MAMBA1_DECODE_GOAL)):
        if gains[job]:
            least = min(gains[job])
            wanted = f"{goal:g}x as fast as" if goal > 1 else "faster than"
            texts.append(f"{job} {wanted} the best peer: {least:.2f}x at the least, {_verdict(goal, least)}")
    if over:
        most = max(over)
        texts.append(
            f"decode within {100 * (MAMBA1_CEILING_GOAL - 1):.0f} % of its ceiling from {MAMBA1_LARGE_MIB} MiB of "
            f"states on: {100 * (most - 1):.0f} % above it at the most, {_verdict(most, MAMBA1_CEILING_GOAL)}"
        )
    return f"Goals: {'; '.join(texts)}." if texts else ""


#: Of prompts: how many times as fast as the best peer; the most microseconds, at a d_state of 64 those of another
#: package's Hopper kernel; how many times the time of 4096 tokens 131072 may take.
PREFILL_GAINS = {"prefill_1x512_bf16": 2.0} | dict.fromkeys(
    ("prefill_1x4096_bf16", "prefill_8x1024_bf16", "prefill_1x32768_bf16"), 3.0
)
PREFILL_MOST_US = {
    "prefill_8x1024_64_d_state_bf16": 80.8,
    "prefill_4x4096_64_d_state_bf16": 150.2,
    "prefill_1x4096_f32": 267.0,
}
PREFILL_LONG, PREFILL_LONG_GOAL = ("prefill_1x4096_bf16", "prefill_1x131072_bf16"), 35.0


def prefill_goals(document: Mapping[str, Any]) -> str:
    """The goals of prompts beside what is reached, at the points that have both times."""
    ours = {name: row for name in document["points"] if (row := fastest_of_ours(timed_at(document, name), "ssd"))}
    us = {name: row["us"]["median"] for name, row in ours.items()}
    texts = []
    for name, goal in PREFILL_GAINS.items():
        peer = best_peer(timed_at(document, name))
        if name in us and peer:
            gain = peer["us"]["median"] / us[name]
            texts.append(f"{goal:g}x as fast as the best peer at `{name}`: {gain:.2f}x, {_verdict(goal, gain)}")
    texts += [
        f"at most {most:g} us at `{name}`: {us[name]:.1f}, {_verdict(us[name], most)}"
        for name, most in PREFILL_MOST_US.items()
        if name in us
    ]
    short, long = (us.get(name, 0.0) for name in PREFILL_LONG)
    if short and long:
        texts.append(
            f"131072 tokens in at most {PREFILL_LONG_GOAL:g}x the time of 4096: {long / short:.1f}x, "
            f"{_verdict(long / short, PREFILL_LONG_GOAL)}"
        )
    return f"Goals: {'; '.join(texts)}." if texts else ""


#: How the cells of the table of prompts name ceilings.
_PREFILL_CEILINGS = {"bytes": "bytes", "products": "products"}
#: Of f32 operands: a line each.
_PRECISIONS = ("split", "tf32")


def _prefill_table(document: Mapping[str, Any]) -> str:
    """A line a point and precision: the ceilings, the best of `ssd`, of `recurrent` and of the peers, and errors."""
    head = ("prefill", *_PREFILL_CEILINGS, "ours", "kernel", "`recurrent`", "best peer", "peer / ours", "y", "state")
    prose = (
        f"{_title(document)}. Microseconds of one call whose data are cold, final states written. Two ceilings: the "
        "bytes that must move, as a copy, and C . S and x^T . B of every state element and token at the rate of matrix "
        "products measured in the same run; in brackets the time as a multiple of the higher. y and state are the "
        "errors against the float64 oracle in relative norm, ours / the peer's."
    )
    lines = ["| " + " | ".join(head) + " |", "| --- | ---: | ---: | ---: | --- |" + " ---: |" * 5]
    for name, point in points(document):
        rows = timed_at(document, name)
        for precision in _PRECISIONS if point["io"] == "f32" else ("",):
            cells = _prefill_cells(point, rows, precision)
            if cells:
                lines.append("| " + " | ".join(cells) + " |")
    return "\n\n".join([wrapped(prose), "\n".join(lines), *_findings(document, prefill_goals(document))])


def _prefill_cells(point: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], precision: str) -> list[str]:
    """One line of the table, or nothing where no kernel of that precision was timed."""
    own = [(row, parse_id(row["kernel"])) for row in rows if not is_peer(row)]
    ours = fastest([row for row, spec in own if spec.family == "ssd" and getattr(spec, "precision", "") == precision])
    if ours is None:
        return []
    recurrent = fastest_of_ours(rows, "recurrent")
    peer = best_peer(rows)

    def us(row: Mapping[str, Any] | None) -> str:
        return f"{row['us']['median']:.1f}" if row else "-"

    def errors(kind: str) -> str:
        return " / ".join(f"{row[kind]:.1e}" for row in (ours, peer) if row)

    lengths = point.get("lengths") or ()
    many = f"{point['sequences']} x {f'{min(lengths)}..' if lengths else ''}{point['tokens']}"
    sizes = f"{point['heads']} heads x {point['head_dim']} x {point['d_state']}, {point['groups']} groups"
    return [
        f"{many}, {sizes}, {point['io']}",
        *(f"{ours['ceilings'][kind]:.1f}" for kind in _PREFILL_CEILINGS),
        f"{us(ours)} ({ours['ratio']:.2f}x)",
        kernel_cell(ours),
        us(recurrent),
        f"{us(peer)} ({peer['kernel']})" if peer else "-",
        f"{peer['us']['median'] / ours['us']['median']:.2f}" if peer else "-",
        errors("error_of_y"),
        errors("error_of_state"),
    ]


#: How the columns of the table of launches are named.
_LAUNCH_KINDS = {"node": "graph node", "plan": "plan", "launch": "launch", "answer": "until the result is there"}


def _launch_table(document: Mapping[str, Any]) -> str:
    """A line a kernel, an empty one first."""
    prose = (
        f"{_title(document)}. Microseconds of one call of the smallest problem of each family, one sequence whose data "
        "are in the caches: a node of a CUDA graph, on the device; a plan and a queued launch, on the host, from "
        "Python; and a call from Python until its result is there."
    )
    lines = [f"| launching | launches | {' | '.join(_LAUNCH_KINDS.values())} |", "| --- |" + " ---: |" * 5]
    for row in [{"kernel": "an empty kernel", "launches": 1} | document["empty"], *document["rows"]]:
        if "failed" not in row:
            name = row["kernel"] if is_peer(row) or "family" not in row else kernel_cell(row)
            us = [f"{row[kind]['median']:.2f}" if kind in row else "-" for kind in _LAUNCH_KINDS]
            lines.append(f"| {name} | {row.get('launches', '-')} | {' | '.join(us)} |")
    missing = [f"Not run: {row['kernel']}: {row['failed']}" for row in document["rows"] if "failed" in row]
    return "\n\n".join([wrapped(prose), "\n".join(lines), *map(wrapped, missing)])


def _device_table(document: Mapping[str, Any]) -> str:
    by_shape: dict[tuple[Any, ...], list[str]] = {}
    for name, point in document["points"].items():
        by_shape.setdefault(tuple(point[size] for size in _SHAPE), []).append(name)
    parts = [
        wrapped(
            f"{_title(document)}. Microseconds of one call whose data are cold: rotating problems keep them out of the "
            "L2 cache. In brackets the time as a multiple of the ceiling."
        )
    ]
    for shape, names in sorted(by_shape.items(), key=lambda item: (item[0][0] != "f32", item[0])):
        io, heads, head_dim, d_state, groups, state = shape
        parts.append(f"{heads} heads x {head_dim} head_dim x {d_state} d_state, {groups} groups, {io}, state {state}:")
        parts.append(_shape_table(document, io, sorted(names, reverse=True)))
    return "\n\n".join([*parts, *_findings(document, goals(document), compile_time_sizes(document))])


def _shape_table(document: Mapping[str, Any], io: str, names: Sequence[str]) -> str:
    rows = [row for row in document["rows"] if row["point"] in names and "us" in row]
    lines = [f"| {io} | " + " | ".join(_heading(document["points"][name]) for name in names) + " |"]
    lines.append("| --- |" + " ---: |" * len(names))
    ceilings = {row["point"]: row["ceilings"] for row in rows}
    for kind in dict.fromkeys(kind for name in names for kind in ceilings.get(name, ()) if kind != "us"):
        cells = [f"{ceilings[name][kind]:.1f}" if kind in ceilings.get(name, ()) else "" for name in names]
        lines.append(f"| ceiling: {_CEILINGS[kind]} | " + " | ".join(cells) + " |")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        found = {row["point"]: row for row in rows if row["kernel"] == kernel}
        cells = [f"{found[n]['us']['median']:.1f} ({found[n]['ratio']:.2f}x)" if n in found else "" for n in names]
        name = kernel if any(map(is_peer, found.values())) else f"`{kernel}`"
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _timed(document: Mapping[str, Any], job: str) -> list[Mapping[str, Any]]:
    """Our rows of a job in f32, fastest first."""
    names = {name for name, point in document["points"].items() if (point["job"], point["io"]) == (job, "f32")}
    rows = [row for row in ours_of(document["rows"]) if row["point"] in names and "us" in row]
    return sorted(rows, key=lambda row: row["us"]["median"])


def _layout_time(rows: Sequence[Mapping[str, Any]], layout: str) -> float:
    """The time of the fastest kernel of a layout, 0 where none was timed."""
    times = (row["us"]["median"] for row in rows if getattr(parse_id(row["kernel"]), "layout", "") == layout)
    return float(next(times, 0.0))


def goals(document: Mapping[str, Any]) -> str:
    """The foundation's goals in f32 beside what some stored figures reach; empty where they lack a job."""
    prefill, decode = _timed(document, "prefill"), _timed(document, "decode")
    if not prefill or not decode:
        return ""
    us, padded = prefill[0]["us"]["median"], _layout_time(prefill, "padded")
    reached = [f"prefill {us / 1000:.3f} ms, {_verdict(us, PREFILL_GOAL_US)}"]
    if padded:
        reached.append(f"{padded / us:.1f}x as fast as `padded`, {_verdict(PREFILL_GOAL_OF_PADDED, padded / us)}")
    over = 100 * (decode[0]["ratio"] - 1)
    reached.append(f"decode {over:.0f} % above its ceiling, {_verdict(decode[0]['ratio'], DECODE_GOAL)}")
    return (
        f"Goals in f32: prefill in {PREFILL_GOAL_US / 1000:.2f} ms and {PREFILL_GOAL_OF_PADDED:.0f}x as fast as "
        f"`padded`, decode within {100 * (DECODE_GOAL - 1):.0f} % of its ceiling. The fastest kernel of each: "
        f"{'; '.join(reached)}."
    )


def _verdict(found: float, most: float) -> str:
    return "reached" if found <= most else "not reached"


def compile_time_sizes(document: Mapping[str, Any]) -> str:
    """What sizes that are known to the compiler gain: `padded` against `generic`; empty where one was not timed."""
    shares = []
    for job in ("prefill", "decode"):
        rows = _timed(document, job)
        padded, generic = _layout_time(rows, "padded"), _layout_time(rows, "generic")
        if not padded or not generic:
            return ""
        shares.append(f"{generic / padded:.2f}x the time of `padded` in {job} ({generic:.1f} for {padded:.1f} us)")
    return (
        f"What sizes known to the compiler gain: `generic`, which is `padded` with every size at run time, takes "
        f"{' and '.join(shares)}."
    )


_SHAPE = ("io", "heads", "head_dim", "d_state", "groups", "state")
_CEILINGS = {
    "slots": "the states read and written, in slot order",
    "ascending": "the same in ascending order of slots",
    "contiguous": "the same bytes in one range",
    "bytes": "the bytes that must move, as a copy",
    "fma": "three FP32 instructions a state element and token",
    "exp": "one exponential a state element and token",
    "moved": "one range of as many bytes as inputs, y and states have",
    "products": "two matrix products a state element and token",
}


def _heading(point: Mapping[str, Any]) -> str:
    start = "resumed" if point["resume"] else "fresh"
    return f"{point['job']} {point['sequences']} x {point['tokens']}, {start}"


def sample_listing(folder: Path = manifest.FOLDER) -> list[dict[str, Any]]:
    """What `invoke generate` lists for one target, from the manifest: all but the seconds, which are not stored."""
    rows = []
    for row in manifest.read_all(folder):
        spec, image = row.kernel, row.targets.get(_SAMPLE_TARGET)
        if image is None or (spec.family, spec.d_state, spec.io, spec.state) != _SAMPLE:
            continue
        usage = image.usage.values()
        rows.append(
            {
                "id": row.id,
                "target": _SAMPLE_TARGET,
                "registers": max(use["registers"] for use in usage),
                "spills": max(use["local_bytes"] for use in usage),
                "shared": max(use["static_shared"] for use in usage) + image.dynamic_shared,
                "bytes": image.bytes,
            }
        )
    return rows


def page_of(suite: str) -> Path:
    """The page that shows the figures of a suite."""
    return _PAGES.get(suite, README)


def refreshed_page(
    text: str, suite: str, folder: Path = BENCH, rows: Path = manifest.FOLDER, page: str = README.name
) -> str:
    """A page with the figures of a suite, and where it has it the sample listing, as they are stored.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    text = between(text, f"bench:{suite}", readme_table(suite, folder), page)
    if page != README.name:
        return text
    return between(text, "listing", f"```\n{table(sample_listing(rows))}\n```", page)


def write_page(suite: str, path: Path | None = None, folder: Path = BENCH, rows: Path = manifest.FOLDER) -> bool:
    """Bring the page of a suite in line with what is stored; whether that changed it.

    Args:
        path: of the page, by default that in the repository.
        folder: the stored figures.
        rows: the manifest, of which the sample listing is made.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    page = path or page_of(suite)
    return refresh(page, lambda text: refreshed_page(text, suite, folder, rows, page.name))
