"""Plots as SVG text: axes, lines with a label at their end, and marks that say their values.

Colours are names of plot.css, which has them for light and dark. Every mark carries its figures as `data-` attributes,
and every tick its value, so that a reader of the file, a test among them, can tell what stands where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup, escape

#: Units of the drawing: a plot is as wide as a phone's screen and is not scaled down there.
WIDTH, HEIGHT = 440, 300
#: Of a label's letters, at 11 units height.
_LETTER = 6.1
_LABEL_GAP = 13
_TOP, _BOTTOM, _LEFT = 30, 40, 48


def element(name: str, attributes: Mapping[str, Any] | None = None, *children: str) -> Markup:
    """One element; text among the children is escaped, and `None` and empty attributes are left out."""
    written = "".join(
        f' {key}="{escape(f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value)}"'
        for key, value in (attributes or {}).items()
        if value is not None and value != ""
    )
    inside = Markup("").join(children)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def short(value: float) -> str:
    """A number of a tick: 4096 is 4k, 131072 is 128k, 0.5 is 0.5."""
    if value >= 1024 and value == int(value) and int(value) % 1024 == 0:
        return f"{int(value) // 1024}k"
    return f"{value:g}"


@dataclass(frozen=True)
class Axis:
    """One direction: what it says, from where to where, at which values it has ticks, and how they read."""

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = True
    read: Callable[[float], str] = short

    def at(self, value: float) -> float:
        """Where a value stands, from 0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def decades(title: str, values: Iterable[float], read: Callable[[float], str] = short) -> Axis:
    """A logarithmic axis with ticks at 1, 2 and 5 of each decade, fewer where there are many decades."""
    found = list(values)
    low, high = min(found) / 1.15, max(found) * 1.15
    span = math.log10(high / low)
    steps = (1, 2, 5) if span < 2.3 else (1, 3) if span < 3.3 else (1,)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return Axis(title, low, high, tuple(tick for tick in ticks if low <= tick <= high), read=read)


def powers(title: str, values: Iterable[float], most: int = 7) -> Axis:
    """A logarithmic axis with ticks at powers of two, no more than so many."""
    found = list(values)
    low, high = min(found), max(found)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, -(-(last - first + 1) // most))
    ticks = tuple(2.0**power for power in range(first, last + 1, step))
    margin = (high / low) ** 0.03
    return Axis(title, low / margin, high * margin, ticks)


def linear(title: str, low: float, high: float, step: float) -> Axis:
    """An axis of equal steps from at most `low` to at least `high`."""
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(index * step, 9) for index in range(first, last + 1))
    return Axis(title, ticks[0], ticks[-1], ticks, log=False, read=lambda value: f"{value:g}")


@dataclass(frozen=True)
class Mark:
    """A measured value: where it stands, what it says when pointed at, and its figures as data attributes."""

    x: float
    y: float
    title: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """Marks of one colour (`role`, a class of plot.css), joined by a line or not, named at the last one.

    `shape` is "dot", "ring", or "none" for a line without marks. `note` ends over the last mark but one of three, else
    it begins where the line does.
    """

    label: str
    role: str
    marks: Sequence[Mark]
    joined: bool = True
    dashed: bool = False
    shape: str = "dot"
    note: str = ""


class _Frame:
    """Where values stand in a drawing."""

    def __init__(self, x: Axis, y: Axis, width: float, height: float, right: float) -> None:
        self.x_axis, self.y_axis, self.height, self.width = x, y, height, width
        self._left, self._right, self._top, self._bottom = _LEFT, width - right, _TOP, height - _BOTTOM

    def x(self, value: float) -> float:
        return self._left + self.x_axis.at(value) * (self._right - self._left)

    def y(self, value: float) -> float:
        return self._bottom - self.y_axis.at(value) * (self._bottom - self._top)

    def axes(self) -> Markup:
        """Grid lines with their ticks' values, and the titles: of y above, of x below."""
        parts: list[str] = []
        for tick in self.y_axis.ticks:
            y = self.y(tick)
            parts.append(element("line", {"class": "grid", "x1": self._left, "x2": self._right, "y1": y, "y2": y}))
            about = {"class": "tick y", "x": self._left - 6, "y": y + 3.5, "data-value": f"{tick:.9g}"}
            parts.append(element("text", about, self.y_axis.read(tick)))
        for tick in self.x_axis.ticks:
            x = self.x(tick)
            parts.append(
                element("line", {"class": "grid", "x1": x, "x2": x, "y1": self._bottom, "y2": self._bottom + 4})
            )
            about = {"class": "tick x", "x": x, "y": self._bottom + 16, "data-value": f"{tick:.9g}"}
            parts.append(element("text", about, self.x_axis.read(tick)))
        parts.append(element("text", {"class": "title", "x": 0, "y": 12}, self.y_axis.title))
        middle = (self._left + self._right) / 2
        parts.append(element("text", {"class": "title x", "x": middle, "y": self.height - 6}, self.x_axis.title))
        return element("g", {"class": "axes"}, *parts)


def _apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Places as near as possible to what is wanted, in its order, at least so far apart and within bounds."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    last = low - gap
    for index in order:
        last = placed[index] = max(wanted[index], last + gap)
    limit = high
    for index in reversed(order):
        limit = placed[index] = min(placed[index], limit)
        limit -= gap
    return placed


def _data(mark: Mark) -> dict[str, str]:
    """A mark's figures as attributes, with all their digits."""
    return {f"data-{name}": str(value) for name, value in mark.data.items()}


def _mark(mark: Mark, frame: _Frame, role: str, shape: str) -> Markup:
    data = _data(mark)
    place = {"cx": frame.x(mark.x), "cy": frame.y(mark.y), "r": 3.5}
    about = {"class": f"mark {shape} {role}", "data-x": f"{mark.x:.6g}", "data-y": f"{mark.y:.6g}"}
    return element("circle", about | place | data, element("title", None, mark.title))


def plot(series: Sequence[Series], x: Axis, y: Axis, about: str, height: float = HEIGHT) -> Markup:
    """Series over two axes. `about` is what the picture shows, in one sentence, for who does not see it."""
    right = 8 + _LETTER * max((len(one.label) for one in series), default=0)
    frame = _Frame(x, y, WIDTH, height, right)
    drawn: list[str] = [frame.axes()]
    for one in series:
        places = " ".join(f"{frame.x(mark.x):.2f},{frame.y(mark.y):.2f}" for mark in one.marks)
        if one.joined and len(one.marks) > 1:
            kind = "line dashed" if one.dashed else "line"
            drawn.append(element("polyline", {"class": f"{kind} {one.role}", "points": places}))
        if one.shape != "none":
            drawn += [_mark(mark, frame, one.role, one.shape) for mark in one.marks]
        if one.note:
            ends = len(one.marks) > 2
            under = one.marks[-2 if ends else 0]
            about_note = {"class": f"note {'end' if ends else 'begin'} {one.role}", "y": frame.y(under.y) - 5}
            about_note["x"] = frame.x(under.x) + (-4 if ends else 4)
            drawn.append(element("text", about_note, one.note))
    named = [(one, *_end(one, frame)) for one in series if one.label]
    heights = _apart([frame.y(mark.y) for _, mark, _ in named], _LABEL_GAP, _TOP, height - _BOTTOM)
    for (one, mark, side), place in zip(named, heights, strict=True):
        end_x, end_y = frame.x(mark.x), frame.y(mark.y)
        if abs(end_y - place) > 4:
            leader = {"x1": end_x + 5 * side, "y1": end_y, "x2": end_x + 9 * side, "y2": place}
            drawn.append(element("line", {"class": "leader"} | leader))
        at = {"class": f"label {one.role}", "x": end_x + 10 * side, "y": place + 3.5}
        drawn.append(element("text", at | ({"text-anchor": "end"} if side < 0 else {}), one.label))
    return _svg(drawn, WIDTH, height, about)


def _end(series: Series, frame: _Frame) -> tuple[Mark, int]:
    """The mark at which a name stands and on which side of it, 1 right or -1 left: behind a line, beside a cloud."""
    if series.joined:
        return series.marks[-1], 1
    ordered = sorted(series.marks, key=lambda mark: mark.x)
    left, right = ordered[0], ordered[-1]
    return (left, -1) if frame.x(left.x) > frame.width / 2 else (right, 1)


@dataclass(frozen=True)
class _Lying:
    """Where values stand in a drawing whose only axis lies below it."""

    x_axis: Axis
    left: float
    right: float
    height: float

    def at(self, value: float) -> float:
        return self.left + self.x_axis.at(value) * (self.right - self.left)

    def axis(self, origin: float | None = None, top: float = 4) -> list[str]:
        """Grid lines, their ticks' values and the title."""
        foot = self.height - 38
        parts: list[str] = []
        free = -math.inf
        for tick in self.x_axis.ticks:
            x, said = self.at(tick), self.x_axis.read(tick)
            kind = "grid origin" if tick == origin else "grid"
            parts.append(element("line", {"class": kind, "x1": x, "x2": x, "y1": top, "y2": foot}))
            half = _LETTER * len(said) / 2
            # A tick whose value would run into the one before has a line alone.
            if x - half > free:
                free = x + half + _LETTER / 2
                about = {"class": "tick x", "x": x, "y": foot + 14, "data-value": f"{tick:.9g}"}
                parts.append(element("text", about, said))
        middle = (self.left + self.right) / 2
        parts.append(element("text", {"class": "title x", "x": middle, "y": self.height - 6}, self.x_axis.title))
        return parts


@dataclass(frozen=True)
class Bar:
    """A line of `lollipops`: its name, the mark, the colour, what stands beside it, and rings with their colours."""

    name: str
    mark: Mark
    role: str
    text: str
    rings: Sequence[tuple[Mark, str]] = ()


def lollipops(groups: Sequence[tuple[str, Sequence[Bar]]], x: Axis, origin: float, about: str) -> Markup:
    """Values as marks on a line each, from an origin to both sides, under their groups' names if any."""
    line, head = 19.0, 24.0
    lines = sum(len(bars) for _, bars in groups)
    height = 44 + lines * line + sum(head for title, _ in groups if title)
    letters = max((len(bar.name) for _, bars in groups for bar in bars), default=0)
    beside = max((len(bar.text) for _, bars in groups for bar in bars), default=0)
    left, right = 10 + 6.2 * letters, WIDTH - 14 - 6.2 * beside
    lying = _Lying(x, left, right, height)
    drawn = lying.axis(origin)
    y = 4.0
    for title, bars in groups:
        if title:
            y += head
            drawn.append(element("text", {"class": "group", "x": 0, "y": y - 6}, title))
        for bar in bars:
            y += line
            middle = y - line / 2
            end = lying.at(bar.mark.x)
            drawn.append(element("text", {"class": "name", "x": left - 8, "y": middle + 3.5}, bar.name))
            stem = {"class": f"stem {bar.role}", "x1": lying.at(origin), "x2": end, "y1": middle, "y2": middle}
            drawn.append(element("line", stem))
            for mark, shape in ((bar.mark, f"dot {bar.role}"), *((ring, f"clear {role}") for ring, role in bar.rings)):
                about_mark = {"class": f"mark {shape}", "cx": lying.at(mark.x), "cy": middle, "r": 4}
                about_mark["data-x"] = f"{mark.x:.6g}"
                drawn.append(element("circle", about_mark | _data(mark), element("title", None, mark.title)))
            beyond = bar.mark.x >= origin
            if beyond:
                end = max([end, *(lying.at(ring.x) for ring, _ in bar.rings)])
            side = {"class": f"value {bar.role}", "x": end + (8 if beyond else -8), "y": middle + 3.5}
            if not beyond:
                side["text-anchor"] = "end"
            drawn.append(element("text", side, bar.text))
    return _svg(drawn, WIDTH, height, about)


def strips(lines: Sequence[tuple[str, str, Sequence[Mark]]], x: Axis, about: str) -> Markup:
    """Values as rings along a line each: its name, its colour, its marks."""
    line = 30.0
    height = 44 + len(lines) * line
    left = 10 + 6.6 * max((len(name) for name, _, _ in lines), default=0)
    right = WIDTH - 20.0
    lying = _Lying(x, left, right, height)
    drawn = lying.axis()
    for index, (name, role, marks) in enumerate(lines):
        middle = index * line + line / 2 + 2
        drawn.append(element("text", {"class": "name", "x": left - 10, "y": middle + 3.5}, name))
        drawn.append(element("line", {"class": "grid", "x1": left, "x2": right, "y1": middle, "y2": middle}))
        for mark in marks:
            data = _data(mark)
            about_mark = {"class": f"mark clear {role}", "cx": lying.at(mark.x), "cy": middle, "r": 5}
            about_mark["data-x"] = f"{mark.x:.6g}"
            drawn.append(element("circle", about_mark | data, element("title", None, mark.title)))
    return _svg(drawn, WIDTH, height, about)


def stacks(
    bars: Sequence[tuple[str, Sequence[tuple[str, float, str]]]],
    legend: Sequence[tuple[str, str]],
    x: Axis,
    about: str,
) -> Markup:
    """Horizontal bars of parts: of each its name and the role, value and hint of each part; the sum at the end.

    The legend, names and roles, stands above.
    """
    line, head = 26.0, 20.0
    height = 44 + head + len(bars) * line
    left = 12 + 6.6 * max((len(name) for name, _ in bars), default=0)
    right = WIDTH - 52.0
    lying = _Lying(x, left, right, height)
    drawn = lying.axis(top=head)
    place_of_name = left
    for name, role in legend:
        drawn.append(element("text", {"class": f"label {role}", "x": place_of_name, "y": 12}, name))
        place_of_name += 16 + 6.6 * len(name)
    for index, (name, parts) in enumerate(bars):
        y = head + index * line + 5
        drawn.append(element("text", {"class": "name", "x": left - 8, "y": y + 11.5}, name))
        sum_so_far = 0.0
        for role, value, hint in parts:
            begin = lying.at(sum_so_far)
            sum_so_far += value
            # A hair of paper between parts.
            place = {"x": begin, "y": y, "width": max(lying.at(sum_so_far) - begin - 1, 0.5), "height": 16.0}
            about_part = {"class": f"part {role}", "data-target": name, "data-value": f"{value:g}"}
            drawn.append(element("rect", about_part | place, element("title", None, hint)))
        total = {"class": "value ink", "x": lying.at(sum_so_far) + 5, "y": y + 12, "data-total": f"{sum_so_far:g}"}
        drawn.append(element("text", total, f"{sum_so_far:.2f}"))
    return _svg(drawn, WIDTH, height, about)


def _svg(drawn: Sequence[str], width: float, height: float, about: str) -> Markup:
    attributes = {"class": "plot", "viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": about}
    return element("svg", attributes, *drawn)


def standalone(drawing: Markup, style: str) -> str:
    """A drawing as a file of its own, with the style that it needs."""
    text = str(drawing).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = text.partition(">")
    return f"{head}>\n<style>\n{style.strip()}\n</style>\n{rest}\n"
