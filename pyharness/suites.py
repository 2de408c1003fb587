"""The suites of `invoke bench`: what is measured under a name, and where its figures are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyharness import build, launch_cost, measure
from pyharness.errors import NoKernel
from pyharness.families import RecurrentSpec, SelectiveSpec, SsdSpec, UpdateSpec
from pyharness.workload import Point


@dataclass(frozen=True)
class Suite:
    """A suite by its name.

    Attributes:
        family: whose kernels it times; empty for all.
    """

    name: str
    family: str

    @property
    def stored(self) -> str:
        """The name of its file in generated/bench/<device>."""
        return self.family or self.name


SUITES = (
    Suite("ancestor", RecurrentSpec.family),  # every layout at the first kernel's two sizes
    Suite("decode", UpdateSpec.family),  # of Mamba-2, by batch, heads and stored type
    Suite("prefill", SsdSpec.family),  # of Mamba-2, by tokens, batch and model
    Suite("mamba1", SelectiveSpec.family),  # prefill and decode
    Suite(launch_cost.SUITE, ""),  # what a plan and a launch cost, by family
)


def chosen(names: str = "", family: str = "", points: Sequence[Point] = ()) -> list[Suite]:
    """Suites by their names, comma-separated, or by the family that they time; else those that have a point; else all.

    Raises:
        NoKernel: there is no such suite.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {suite.name: suite for suite in SUITES}
    wrong = [name for name in wanted if name not in known]
    if wrong:
        raise NoKernel(f"--suite must name some of {', '.join(known)}, found {', '.join(wrong)}")
    found = [known[name] for name in dict.fromkeys(wanted)] or list(SUITES)
    if points and not wanted and not family:
        found = [suite for suite in found if set(points) & set(measure.TABLES.get(suite.family, ()))]
    if family:
        if family not in measure.TABLES:
            raise NoKernel(f"family {family!r} has no table of timings; on offer: {', '.join(measure.TABLES)}")
        found = [suite for suite in found if suite.family == family]
        if not found:
            raise NoKernel(f"no suite of {names} times family {family!r}")
    return found


def run(
    suite: Suite,
    points: Sequence[Point] = (),
    kernels: Sequence[str] = (),
    ordinal: int = 0,
    track: build.Track = build.silent,
    peers: bool = False,
) -> dict[str, Any]:
    """Measure a suite and store it; gives what was stored.

    Args:
        suite: one of SUITES.
        points: measure these alone, and keep the other stored rows; those of other suites are left out.
        kernels: further ids.
        ordinal: the GPU.
        track: shows the progress.
        peers: also time other packages' kernels.

    Raises:
        NoKernel: none of the points is of the suite.
        DeviceError: there is no GPU, or a kernel is wrong or failed.
    """
    if suite.stored == launch_cost.SUITE:
        if points or kernels:
            raise NoKernel(f"suite {suite.name} has points and kernels of its own: leave --points and --kernels out")
        return launch_cost.bench(ordinal=ordinal, track=track, peers=peers)
    return measure.bench(suite.family, points, kernels, ordinal=ordinal, track=track, peers=peers)
