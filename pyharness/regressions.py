"""What got slower: figures of one device held against earlier ones of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pyharness import figures
from pyharness.errors import SsmError
from pyharness.figures import is_peer, stored_path


@dataclass(frozen=True)
class Change:
    """One kernel at one point in both figures.

    Attributes:
        order: "ascending" where the sequences were visited in the order of their slots, else empty.
        before, now: microseconds of one call: "median", "low" and "high" of the rounds.
        peer: whether it is another package's kernel.
    """

    point: str
    kernel: str
    order: str
    before: Mapping[str, float]
    now: Mapping[str, float]
    peer: bool

    @property
    def growth(self) -> float:
        """How much longer it takes, as a share: 0.05 is 5 % longer."""
        return self.now["median"] / self.before["median"] - 1

    @property
    def slower(self) -> bool:
        """Whether it got slower beyond the spread: its fastest round takes longer than the slowest did before."""
        return self.now["low"] > self.before["high"]

    @property
    def faster(self) -> bool:
        """Whether it got faster beyond the spread."""
        return self.now["high"] < self.before["low"]

    def __str__(self) -> str:
        name = ", ".join(filter(None, (self.kernel, self.order)))
        us = f"{self.before['median']:.2f} -> {self.now['median']:.2f} us"
        return f"{self.point} {name}: {us} ({100 * self.growth:+.1f} %)"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Every kernel that was timed at a point in both figures.

    Raises:
        SsmError: they are of different devices.
    """
    if before["device"] != now["device"]:
        raise SsmError(f"earlier figures of {now['device']} were wanted to compare with, found {before['device']}")
    earlier = {_key(row): us for row in before["rows"] if (us := _us(row))}
    found = []
    for row in now["rows"]:
        old, us = earlier.get(_key(row)), _us(row)
        if old and us:
            found.append(Change(*_key(row), old, us, is_peer(row)))
    return found


def _us(row: Mapping[str, Any]) -> Mapping[str, float] | None:
    """The time of a call; of a launch that of its node, as a host's clock tells more of the host than of a kernel."""
    return row.get("us") or row.get("node")


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["point"], row["kernel"], row.get("order", "")


def report(found: Sequence[Change]) -> list[str]:
    """What changed beyond the spread, as lines; the last one counts.

    Peers are named as well: if they changed alike, the device did, not the kernels.
    """
    lines = [f"slower: {change}" for change in found if change.slower]
    lines += [f"faster: {change}" for change in found if change.faster]
    ours = [change for change in found if not change.peer]
    counts = [f"{sum(change.slower for change in ours)} slower beyond the spread"]
    counts.append(f"{sum(change.faster for change in ours)} faster")
    typical = [f"median change {100 * median(change.growth for change in ours):+.1f} %"] if ours else []
    return [*lines, ", ".join([f"{len(ours)} of our timings compared", *counts, *typical])]


def failing(found: Sequence[Change], share: float) -> list[Change]:
    """Our timings that got slower beyond the spread and by more than a share."""
    return [change for change in found if not change.peer and change.slower and change.growth > share]


def percentage(text: str) -> float:
    """The share that "5%" or "5" means.

    Raises:
        SsmError: it is neither.
    """
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise SsmError(f"a percentage such as 5% was wanted, found {text!r}")
    return value / 100


def earlier(suite: str, where: str | bool, ordinal: int = 0) -> dict[str, Any]:
    """The figures that a run is to be compared with.

    Args:
        suite: the name under which they are stored.
        where: a file or folder of figures; empty or True for what is stored of the device.
        ordinal: the GPU.

    Raises:
        SsmError: there are none, or there is no GPU.
    """
    if isinstance(where, str) and where:
        return read(Path(where), suite)
    from pyharness.device import get

    return read(stored_path(get(ordinal).name, suite), suite)


def read(where: Path, suite: str) -> dict[str, Any]:
    """The figures of a suite from a file, or from a folder of them such as generated/bench/nvidia-h200.

    Raises:
        SsmError: there are none.
    """
    path = where / f"{suite}.json" if where.is_dir() else where
    if not path.is_file():
        raise SsmError(f"earlier figures of {suite} were wanted to compare with, found nothing at {path}")
    document = figures.read(path)
    if document["suite"] != suite:
        found = document["suite"]
        raise SsmError(f"{path.name}: figures of {suite} were wanted to compare with, found those of {found}")
    return document
