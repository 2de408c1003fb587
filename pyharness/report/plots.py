"""Which plots are made of stored figures: time over tokens and batch, ratio to peers, roofline, errors, sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from markupsafe import Markup

from pyharness.figures import best_peer, dates, fastest_of_ours, is_peer, points, timed_at
from pyharness.manifest import Row
from pyharness.report import svg
from pyharness.report.svg import Axis, Bar, Mark, Series
from pyharness.spec import TARGETS, parse_id
from pyharness.workload import Point

Document = Mapping[str, Any]
Timed = Mapping[str, Any]

#: Colours of families where several are shown.
ROLES = {"recurrent": "third", "update": "fifth", "selective": "fourth", "ssd": "ours"}
#: Points of a line, at least.
_LEAST = 3


@dataclass(frozen=True)
class Plot:
    """A picture and what is said under it.

    Attributes:
        name: of its element and file.
        title: one line.
        drawing: the SVG.
        reading: how it is to be read.
        dates: of the figures in it.
    """

    name: str
    title: str
    drawing: Markup
    reading: str
    dates: tuple[str, ...] = ()


def point_of(stored: Mapping[str, Any]) -> Point:
    """The point that a document stores."""
    return Point(**{name: stored[name] for name in {field.name for field in fields(Point)} & set(stored)})


def shape(point: Point) -> str:
    """The sizes of a point but for its sequences and tokens: 64 heads x 64 x 128, 8 groups, bf16."""
    groups = f"{point.groups} group{'s' if point.groups > 1 else ''}"
    types = point.io if point.state == "f32" else f"{point.io}, state {point.state}"
    if point.mamba1:
        return f"{point.heads} channels x {point.d_state}, {types}"
    return f"{point.heads} heads x {point.head_dim} x {point.d_state}, {groups}, {types}"


def many(point: Point) -> str:
    """Sequences and tokens of a point: 8 x 1024, or 32 x 1..2000 where lengths differ."""
    return f"{point.sequences} x {f'{min(point.lengths)}..' if point.lengths else ''}{point.tokens}"


def _ceiling(row: Timed, kind: str = "us") -> float:
    return float(row["ceilings"][kind])


def lines_over(document: Document, varying: str) -> list[list[Point]]:
    """Points that differ in one size alone, ascending, the longest such run first."""
    runs: dict[tuple[Any, ...], list[Point]] = {}
    for point in map(point_of, document["points"].values()):
        if not point.lengths:
            rest = tuple(getattr(point, field.name) for field in fields(Point) if field.name != varying)
            runs.setdefault(rest, []).append(point)
    found = [sorted(run, key=lambda point: int(getattr(point, varying))) for run in runs.values()]
    return sorted((run for run in found if len(run) >= _LEAST), key=len, reverse=True)


def _mark(point: Point, row: Timed, x: float, y: float) -> Mark:
    us = row["us"]
    spread = f"{us['median']:.2f} us ({us['low']:.2f} to {us['high']:.2f})"
    about = f"{many(point)}, {shape(point)}: {row['kernel']}, {spread}"
    return Mark(x, y, about, {"point": point.name, "kernel": row["kernel"], "us": us["median"]})


#: Chooses a timing of a point.
Choice = Callable[[Sequence[Timed]], "Timed | None"]


def _lines(
    document: Document,
    run: Sequence[Point],
    varying: str,
    choices: Iterable[tuple[str, str, Choice]],
    height: Callable[[Timed], float],
) -> tuple[list[Series], list[Timed]]:
    """A line for each choice over the points of a run that have such a timing, and the timings in them.

    Args:
        choices: label, role of the colour, and what is chosen.
        height: of a timing.
    """
    series, used = [], []
    for label, role, choose in choices:
        found = [(point, row) for point in run if (row := choose(timed_at(document, point.name))) is not None]
        if found:
            marks = [_mark(point, row, getattr(point, varying), height(row)) for point, row in found]
            series.append(Series(label, role, marks))
            used += [row for _, row in found]
    return series, used


def _median(row: Timed) -> float:
    return float(row["us"]["median"])


def _counted(run: Sequence[Point], varying: str) -> str:
    """What the axis of a run counts."""
    sequences, tokens = run[0].sequences, run[0].tokens
    if varying == "tokens":
        return "tokens of one sequence" if sequences == 1 else f"tokens of each of {sequences} sequences"
    return "sequences of one token each" if tokens == 1 else f"sequences of {tokens} tokens each"


def over(document: Document, run: Sequence[Point], varying: str, family: str, name: str) -> Plot | None:
    """The time of a call over tokens or sequences: ours, `recurrent` where it stands beside, the best peer, ceiling."""

    def ours(rows: Sequence[Timed]) -> Timed | None:
        return fastest_of_ours(rows, family)

    choices: list[tuple[str, str, Choice]] = [("ours", "ours", ours), ("best peer", "peer", best_peer)]
    if family != "recurrent":
        choices.append(("recurrent", "third", lambda rows: fastest_of_ours(rows, "recurrent")))
    series, used = _lines(document, run, varying, choices, _median)
    mine = [(point, row) for point in run if (row := ours(timed_at(document, point.name))) is not None]
    if len(mine) < _LEAST:
        return None
    marks = [Mark(getattr(p, varying), _ceiling(row), f"ceiling {_ceiling(row):.2f} us") for p, row in mine]
    series.append(Series("ceiling", "roof", marks, dashed=True, shape="none"))
    times = [mark.y for one in series for mark in one.marks]
    what = _counted(run, varying)
    x_axis = svg.powers(what, [getattr(point, varying) for point in run])
    title = f"{run[0].job.capitalize()} over {varying}: {shape(run[0])}"
    about = f"Microseconds of one call over {what}, {shape(run[0])}, by {', '.join(one.label for one in series)}."
    drawing = svg.plot(series, x_axis, svg.decades("microseconds of one call", times), about)
    reading = "Both axes are logarithmic; lower is faster."
    return Plot(name, title, drawing, reading, dates(document, used))


def above_ceiling(document: Document, run: Sequence[Point], varying: str, family: str, name: str) -> Plot | None:
    """The time as a multiple of the ceiling: small differences that a logarithmic axis of times hides."""
    choices: list[tuple[str, str, Choice]] = [
        ("ours", "ours", lambda rows: fastest_of_ours(rows, family)),
        ("best peer", "peer", best_peer),
    ]
    series, used = _lines(document, run, varying, choices, lambda row: _median(row) / _ceiling(row))
    if not series or len(series[0].marks) < _LEAST:
        return None
    highest = max(mark.y for one in series for mark in one.marks)
    lowest = min(1.0, *(mark.y for one in series for mark in one.marks))
    step = 0.1 if highest - lowest < 0.8 else 0.5 if highest - lowest < 4 else 1.0
    y_axis = svg.linear("multiple of the ceiling", lowest, highest, step)
    what = _counted(run, varying)
    x_axis = svg.powers(what, [getattr(point, varying) for point in run])
    about = f"Time as a multiple of the ceiling over {what}, {shape(run[0])}."
    title = f"How far above the ceiling: {shape(run[0])}"
    reading = "1 is a kernel that moves the same bytes and does nothing else; lower is better."
    return Plot(name, title, svg.plot(series, x_axis, y_axis, about), reading, dates(document, used))


@dataclass(frozen=True)
class Ratio:
    """A point at which a peer ran: the peer's time over ours, above 1 where ours is faster."""

    suite: str
    point: Point
    ours: Timed
    peer: Timed

    @property
    def value(self) -> float:
        return float(self.peer["us"]["median"] / self.ours["us"]["median"])


def ratios(documents: Iterable[Document]) -> list[Ratio]:
    """Every point at which a peer ran, each with the fastest of ours and of the peers.

    Of a point that several documents have it is the one with our faster kernel: one that selection takes.
    """
    found: dict[str, Ratio] = {}
    for document in documents:
        for name, stored in document["points"].items():
            rows = timed_at(document, name)
            ours, peer = fastest_of_ours(rows), best_peer(rows)
            known = found.get(name)
            if ours and peer and (known is None or _median(ours) < _median(known.ours)):
                found[name] = Ratio(document["suite"], point_of(stored), ours, peer)
    return list(found.values())


def against_peers(found: Sequence[Ratio], titles: Mapping[str, str]) -> Plot | None:
    """Our ratio to the best peer at each point, wins to the right and losses to the left."""
    if not found:
        return None
    groups = []
    for suite in dict.fromkeys(ratio.suite for ratio in found):
        bars = []
        for ratio in sorted((r for r in found if r.suite == suite), key=lambda r: -r.value):
            won = ratio.value >= 1
            data = {"point": ratio.point.name, "ours": ratio.ours["us"]["median"], "peer": ratio.peer["us"]["median"]}
            hint = (
                f"{many(ratio.point)}, {shape(ratio.point)}: ours {ratio.ours['us']['median']:.2f} us "
                f"({ratio.ours['kernel']}), {ratio.peer['kernel']} {ratio.peer['us']['median']:.2f} us"
            )
            mark = Mark(ratio.value, 0, hint, data)
            bars.append(Bar(_brief(ratio.point), mark, "ours" if won else "peer", _near_one(ratio.value)))
        groups.append((titles.get(suite, suite), bars))
    values = [ratio.value for ratio in found]
    low, high = min(0.8, *values) / 1.3, max(1.25, *values) * 1.12
    ticks = tuple(tick for tick in (0.125, 0.25, 0.5, 0.8, 1, 1.25, 1.5, 2, 3, 4, 6, 8, 16) if low <= tick <= high)
    x_axis = Axis("time of the best peer / ours", low, high, ticks, read=lambda value: f"{value:g}")
    wins = sum(value >= 1 for value in values)
    about = f"The best peer's time over ours at {len(values)} points: ours is faster at {wins}."
    drawing = svg.lollipops(groups, x_axis, 1, about)
    reading = (
        "Right of 1 ours is faster, left of it the peer is. Each line: sequences x tokens, then the sizes that differ "
        "from 64 heads x 64 x 128 in bf16."
    )
    return Plot("ratio", "Ours and the best peer, point by point", drawing, reading)


def _near_one(value: float) -> str:
    """A ratio with as many digits as tell on which side of 1 it is."""
    return f"{value:.3f}" if 0.99 < value < 1.01 else f"{value:.2f}"


def _brief(point: Point) -> str:
    """What tells a point from others of its suite, in few letters."""
    parts = [many(point)]
    if point.mamba1:
        parts.append(f"{point.heads} ch")
    else:
        if point.heads != 64:
            parts.append(f"{point.heads} h")
        if (point.head_dim, point.d_state) != (64, 128):
            parts.append(f"{point.head_dim}x{point.d_state}")
    if point.io != "bf16":
        parts.append(point.io)
    if point.state != "f32":
        parts.append(f"s{point.state}")
    return " ".join(parts)


@dataclass(frozen=True)
class Roof:
    """A ceiling of the roofline: state updates a second, or, of memory, bytes a second."""

    label: str
    bytes_a_second: float = 0.0
    updates_a_second: float = 0.0


def roofs(documents: Iterable[Document]) -> list[Roof]:
    """The ceilings as they were measured beside the kernels, each at its highest."""
    memory, issue = 0.0, {"fma": 0.0, "products": 0.0, "exp": 0.0}
    for document in documents:
        for row in document["rows"]:
            if "us" not in row or row["point"] not in document["points"]:
                continue
            point, ceilings = point_of(document["points"][row["point"]]), row["ceilings"]
            if "bytes" in ceilings:
                memory = max(memory, point.moved_bytes / ceilings["bytes"] * 1e6)
            if "contiguous" in ceilings and not point.mamba1:
                memory = max(memory, 2 * point.sequences * point.slot_bytes / ceilings["contiguous"] * 1e6)
            for kind in issue:
                # The rate of products in 16 bits, of FMAs as Mamba-2 has them: three an update.
                if kind in ceilings and not (kind == "products" and point.io == "f32"):
                    if kind == "fma" and point.mamba1:
                        continue
                    issue[kind] = max(issue[kind], point.updates / ceilings[kind] * 1e6)
    named = {
        "fma": "FP32, 3 instructions an update",
        "products": "tensor cores, 4 FLOP an update",
        "exp": "an exponential an update",
    }
    found = [Roof(f"memory {memory / 1e12:.2f} TB/s", bytes_a_second=memory)] if memory else []
    return found + [Roof(named[kind], updates_a_second=rate) for kind, rate in issue.items() if rate]


def roofline(documents: Sequence[Document]) -> Plot | None:
    """State updates a second over updates a byte: every point's fastest kernel of each family beneath the roofs."""
    marks: dict[str, list[Mark]] = {}
    for document in documents:
        for name, stored in document["points"].items():
            point, rows = point_of(stored), timed_at(document, name)
            for family in ROLES:
                row = fastest_of_ours(rows, family)
                if row is not None:
                    intensity = point.updates / point.moved_bytes
                    rate = point.updates / row["us"]["median"] * 1e6
                    marks.setdefault(family, []).append(_mark(point, row, intensity, rate))
    known = roofs(documents)
    if not marks or not known:
        return None
    every = [mark for found in marks.values() for mark in found]
    x_axis = svg.decades("state updates a byte moved", [*(m.x for m in every), min(m.x for m in every) / 2])
    limits = [roof.updates_a_second for roof in known if roof.updates_a_second]
    y_axis = svg.decades("state updates a second", [*(m.y for m in every), *limits], lambda v: f"{_power(v)}")
    series = []
    for family, found in marks.items():
        series.append(Series(family, ROLES[family], found, joined=False))
    for roof in known:
        if roof.bytes_a_second:
            end = min(x_axis.high, max([*limits, y_axis.high]) / roof.bytes_a_second, y_axis.high / roof.bytes_a_second)
            begin = max(x_axis.low, y_axis.low / roof.bytes_a_second)
            # Its name stands where the line is steep and free: at three quarters of its length.
            middle = begin * (end / begin) ** 0.75
            ends = [Mark(value, value * roof.bytes_a_second, roof.label) for value in (begin, middle, end)]
        else:
            ends = [Mark(value, roof.updates_a_second, roof.label) for value in (x_axis.low, x_axis.high)]
        series.append(Series("", "roof", ends, dashed=True, shape="none", note=roof.label))
    about = f"State updates a second over updates a byte; roofs: {'; '.join(roof.label for roof in known)}."
    reading = (
        "A state update is one element of a state moved on by one token. Dashed, measured beside the kernels: "
        + "; ".join(f"{roof.label}" + _rate(roof) for roof in known)
        + ". A kernel that is bound by nothing else stands on the lowest roof above it."
    )
    drawing = svg.plot(series, x_axis, y_axis, about, height=340)
    return Plot("roofline", "Roofline: every point's fastest kernel of each family", drawing, reading)


def _rate(roof: Roof) -> str:
    return f" ({roof.updates_a_second / 1e12:.1f}e12 a second)" if roof.updates_a_second else ""


def _power(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = value / 10**exponent
    return f"{factor:g}e{exponent}"


def errors(document: Document, title: str) -> Plot | None:
    """Relative error of y against the oracle at each point, ours and the best peer's; `title` names the suite."""
    bars: list[Bar] = []
    used: list[Timed] = []
    for name, stored in points(document):
        point, rows = point_of(stored), timed_at(document, name)
        own, *others = [row for row in (fastest_of_ours(rows), best_peer(rows)) if row and row.get("error_of_y")] or [
            {}
        ]
        if not own or is_peer(own):
            continue
        marks = []
        for row in (own, *others):
            value = row["error_of_y"]
            hint = f"{many(point)}, {shape(point)}: {row['kernel']}, y {value:.1e}"
            marks.append(Mark(value, 0, hint, {"point": name, "kernel": row["kernel"], "error": value}))
        used += [own, *others]
        text = " / ".join(f"{mark.x:.1e}" for mark in marks)
        bars.append(Bar(_brief(point), marks[0], "ours", text, tuple((mark, "peer") for mark in marks[1:])))
    if not bars:
        return None
    values = [row["error_of_y"] for row in used]
    low, high = 10.0 ** math.floor(math.log10(min(values)) - 0.3), max(values) * 3
    ticks = tuple(10.0**power for power in range(round(math.log10(low)), 1) if 10.0**power <= high)
    x_axis = Axis("||y - oracle|| / ||oracle||", low, high, ticks, read=lambda value: f"{value:.0e}")
    drawing = svg.lollipops([("", bars)], x_axis, low, f"Relative error of y against the float64 oracle: {title}.")
    return Plot(
        f"errors-{document['suite']}",
        title,
        drawing,
        "Shorter is better. Filled: ours; a ring: the best peer's.",
        dates(document, used),
    )


def worst_of_proofs(images: Sequence[tuple[str, str, float]]) -> Plot | None:
    """Of each proven image the largest error as a share of what is allowed, a line a family.

    Args:
        images: kernel, the case of its largest error, and that error over what is allowed.
    """
    if not images:
        return None
    strips: dict[str, list[Mark]] = {}
    for kernel, case, worst in sorted(images):
        hint = f"{kernel}: {worst:g} of what is allowed, at {case}"
        strips.setdefault(parse_id(kernel).family, []).append(Mark(worst, 0, hint, {"kernel": kernel}))
    x_axis = svg.linear("largest error / what is allowed", 0, 1, 0.25)
    lines = [(family, ROLES[family], marks) for family, marks in strips.items()]
    drawing = svg.strips(lines, x_axis, f"The largest error of each of {len(images)} proven images, by family.")
    reading = "A ring an image; 1 is the limit that the tests set."
    return Plot("proofs", "How much of the tolerance is used", drawing, reading)


def sizes(rows: Sequence[Row]) -> Plot:
    """Bytes of all images by target and family."""
    families = list(dict.fromkeys(row.family for row in rows))
    bars = []
    for target in TARGETS:
        parts = []
        for family in families:
            images = [row.targets[target] for row in rows if row.family == family and target in row.targets]
            total = sum(image.bytes for image in images)
            if images:
                hint = f"{family} for {target}: {len(images)} images, {total} bytes"
                parts.append((ROLES[family], total / 2**20, hint))
        bars.append((target, parts))
    highest = max(sum(value for _, value, _ in parts) for _, parts in bars)
    x_axis = svg.linear("MiB of images, before packing", 0, highest, 1 if highest < 8 else 2)
    legend = [(family, ROLES[family]) for family in families]
    drawing = svg.stacks(bars, legend, x_axis, "MiB of all images by target and family.")
    return Plot("sizes", "Size by target", drawing, "A package compresses them to some two thirds.")
