"""Why a kernel is chosen: the choice with its grade, the time to expect, and the runners-up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pyharness import gpus, grades, manifest, select
from pyharness.manifest import Row
from pyharness.select import Device, Features, Selection
from pyharness.spec import parse_id

#: How many of the other kernels that were measured for a problem are told, besides the fastest of each family.
RUNNERS_UP = 3


@dataclass(frozen=True)
class Candidate:
    """A kernel that was measured for the entry that the choice came from.

    Attributes:
        microseconds: of one call.
        refused: why selection does not take it for the problem, empty where it could.
    """

    id: str
    microseconds: float
    refused: str = ""

    def __str__(self) -> str:
        refused = f" (not taken: {self.refused})" if self.refused else ""
        return f"{self.id}, {self.microseconds:.1f} us{refused}"


@dataclass(frozen=True)
class Explanation:
    """A choice and what to know of it.

    Attributes:
        features: what the choice was made for, which is not the problem itself in invariant mode.
        target: of the image that would run; empty without a device.
        grade: of that image; without a device, of the source.
        microseconds: of one call of the entry's problem, 0 where nothing was measured or reported.
        expected_for: the entry's problem, device and source, empty where there is none.
        runners_up: what else was fast for that problem on that device, fastest first.
    """

    selection: Selection
    features: Features
    target: str
    grade: grades.Grade
    microseconds: float
    expected_for: str
    runners_up: tuple[Candidate, ...]

    def lines(self) -> list[str]:
        """The explanation for a terminal."""
        chosen = [self.selection.why, *self.selection.steps, f"grade: {self.grade}"]
        if not self.microseconds:
            return [*chosen, "expected time: not known, nothing was measured"]
        chosen.append(f"expected time: {self.microseconds:.1f} us for {self.expected_for}")
        return chosen + [f"runner-up: {one}" for one in self.runners_up]

    def document(self) -> dict[str, Any]:
        """The explanation as JSON."""
        return {
            "id": self.selection.id,
            "why": self.selection.why,
            "steps": list(self.selection.steps),
            "target": self.target,
            "grade": vars(self.grade),
            "microseconds": self.microseconds or None,
            "expected_for": self.expected_for or None,
            "runners_up": [vars(one) for one in self.runners_up],
        }


def image_target(row: Row, device: Device) -> str:
    """The target whose image of a kernel runs on a device: its exact or own, a lower minor version, PTX; or empty."""
    number = device.target.removeprefix("sm_").rstrip("a")
    if number.isdigit():
        best = gpus.target_for(int(number) // 10, int(number) % 10)
        for target in (f"{device.target}a", device.target, best):
            if target in row.targets:
                return target
    return "compute_80" if "compute_80" in row.targets else ""


def _entry(features: Features, device: Device | None, kernel: str) -> select.Entry | None:
    """The nearest entry of a kernel on a device, or on another of its target; of decode where the problem is."""
    if device is None:
        return None
    g = features.geometry
    alike = [
        entry
        for entry in select.committed_table().entries
        if entry.kernel == kernel
        and entry.target == device.target
        and (entry.d_state, entry.io, entry.state) == (g.d_state, features.io, features.state)
        and entry.decode == features.decode
        and entry.microseconds
    ]
    return min(
        alike,
        key=lambda entry: (entry.device != device.name, select.remoteness(features, entry), entry.device),
        default=None,
    )


def _measured_beside(entry: select.Entry, benches: Path) -> list[Candidate]:
    """What the stored benches of the entry's device hold of ours for its problem, fastest first."""
    found: dict[str, float] = {}
    for timed in select.timings(select.stored_benches(benches)):
        if select.same_problem(timed, entry):
            found[timed.kernel] = min(float(timed.microseconds), found.get(timed.kernel, math.inf))
    return sorted((Candidate(kernel, us) for kernel, us in found.items()), key=lambda one: (one.microseconds, one.id))


def _refusal(kernel: str, features: Features, device: Device | None, family: str | None) -> str:
    """Why selection does not take a kernel that was measured, or an empty string."""
    spec = parse_id(kernel)
    if family not in (None, spec.family):
        return f"it is not of the family {family}"
    if kernel not in select.catalogue_ids():
        return "it is not in the catalogue and runs by its full id alone"
    return select.unfit(features, spec, device)


def explain(
    features: Features,
    device: Device | None = None,
    *,
    family: str | None = None,
    invariant: bool = False,
    benches: Path = select.BENCHES,
) -> Explanation:
    """Choose a kernel and tell all that is known of the choice.

    Args:
        features: the problem.
        device: the GPU, or None where no device matters.
        family: take only kernels of this family.
        invariant: choose by geometry and the sequence's own length alone.
        benches: stored figures.

    Raises:
        NoKernel: nothing takes the problem.
        ImageError: the manifest or a file of proofs is malformed.
    """
    asked = select.invariant(features) if invariant else features
    chosen = select.choose(asked, device, family=family)
    row, proofs = manifest.read(chosen.id), grades.stored()
    target = image_target(row, device) if device else ""
    grade = proofs.grade(row, target) if target else proofs.sources.get(row.source_sha256, grades.Grade("unproven"))
    entry = _entry(asked, device, chosen.id)
    if entry is None:
        return Explanation(chosen, asked, target, grade, 0.0, "", ())
    where = (
        f"{entry.batch_heads // entry.heads} sequences, {entry.tokens} tokens, {entry.heads} heads x {entry.head_dim} "
        f"on {entry.device} ({entry.source})"
    )
    beside = [one for one in _measured_beside(entry, benches) if one.id != chosen.id]
    first: dict[str, Candidate] = {}
    for one in beside:
        first.setdefault(parse_id(one.id).family, one)
    told = [one for number, one in enumerate(beside) if number < RUNNERS_UP or one in first.values()]
    others = tuple(replace(one, refused=_refusal(one.id, asked, device, family)) for one in told)
    return Explanation(chosen, asked, target, grade, entry.microseconds, where, others)
