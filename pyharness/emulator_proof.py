"""Proof without a GPU: kernels' own sources in the emulator against the oracle, stored by the sha256 of the source."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness import grades, manifest, toolchain, vet
from pyharness.cases import Case, Options, Shape, draw
from pyharness.catalogue import CATALOGUE
from pyharness.compare import compare
from pyharness.errors import DeviceError, NoKernel, SsmError
from pyharness.families import SsdSpec
from pyharness.problem import ScanProblem
from pyharness.render import render
from pyharness.scan import ScanResult, run_emulator
from pyharness.spec import KernelSpec

_SEEDS = (0, 1)


def proof_cases(spec: KernelSpec) -> Iterator[Case]:
    """The sanitizer's cases of a kernel, where it takes them, and a decode batch."""
    for case in vet.sanitizer_cases(spec):
        if not spec.refusal(case.build().geometry):
            yield case
    options = Options(io=spec.io, state=spec.state, dt_f32=True, fresh="mixed", z=True, slots="moved", padding=3)
    for d_state in vet.d_states(spec)[:1]:
        shape = Shape((1, 2, 1, 1), 2, vet.head_dim_of(spec, 5), d_state, 1)
        yield Case(f"decode n{d_state} {spec.io} s{spec.state}", functools.partial(draw, 8, shape, options))


def _run(problem: ScanProblem, spec: KernelSpec, seed: int) -> ScanResult:
    made = run_emulator(problem, spec, seed=seed)
    return ScanResult(made.y, made.state, spec.id, "emulator", made.state_scale)


def _bytes(array: NDArray[Any]) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _check_bits(spec: KernelSpec) -> None:
    """A sequence has the same bits alone and in its batch, and the batch in any order of threads."""
    options = Options(io=spec.io, state=spec.state, dt_f32=True, fresh="mixed", z=True)
    # Longer than a chunk where chunks are multiplied, so that one is handed over to the next.
    longest = spec.chunk + 6 if isinstance(spec, SsdSpec) else 6
    shape = Shape((longest, 1, 3), 2, vet.head_dim_of(spec, 9), vet.d_states(spec)[0], 2)
    problem = draw(21, shape, options)
    first, again = (_run(problem, spec, seed) for seed in _SEEDS)
    if _bytes(first.y) != _bytes(again.y) or _bytes(first.state) != _bytes(again.state):
        raise DeviceError(f"{spec.id}: another order of threads gave other bits")
    assert problem.read_slots is not None
    for s in range(problem.sequences):
        lone, slot = _run(vet.alone(problem, s), spec, 0), int(problem.read_slots[s])
        rows = slice(int(problem.offsets[s]), int(problem.offsets[s + 1]))
        if _bytes(lone.y) != _bytes(first.y[rows]) or _bytes(lone.state[slot]) != _bytes(first.state[slot]):
            raise DeviceError(f"{spec.id}: sequence {s} has other bits alone than in its batch")


def prove(spec: KernelSpec) -> dict[str, Any]:
    """Prove one kernel's source: kernel, cases, worst error over what is allowed, and where.

    Raises:
        SsmError: it breaks a rule of the emulator, is wrong, or its bits depend on the batch.
    """
    worst, worst_case, count = 0.0, "", 0
    for case in proof_cases(spec):
        problem = case.build()
        errors = compare(_run(problem, spec, 0), problem)
        if not errors.ok:
            raise DeviceError(f"{spec.id}, {case.name}: {errors}")
        count += 1
        share = errors.share
        if share >= worst:
            worst, worst_case = share, case.name
    _check_bits(spec)
    return {"kernel": spec.id, "cases": count, "worst": round(worst, 3), "worst_case": worst_case}


def vet_on_emulator(
    family: str | None = None,
    *,
    again: bool = False,
    progress: Callable[[str], None] | None = None,
    catalogue: Sequence[KernelSpec] = CATALOGUE,
    folder: Path = grades.FOLDER,
) -> dict[str, Any]:
    """Prove the catalogue's sources that have no proof yet, and store the proofs of all that are current.

    Args:
        family: only kernels of this family.
        again: also those that have a proof.
        progress: told before each kernel.
        catalogue: the kernels.
        folder: where `grades.EMULATOR` is kept; it is written after each kernel, so an interrupted run resumes.

    Returns:
        What was stored.

    Raises:
        NoKernel: nothing in the catalogue is of that family.
        DeviceError: kernels failed; the proofs of the others are stored, and the message names those that failed.
    """
    tell = progress or (lambda _: None)
    wanted = [spec for spec in catalogue if family in (None, spec.family)]
    if not wanted:
        known = ", ".join(sorted({spec.family for spec in catalogue}))
        raise NoKernel(f"family {family!r} has no kernel in the catalogue; on offer: {known}")
    path = folder / grades.EMULATOR
    kept = json.loads(path.read_text(encoding="utf-8"))["sources"] if path.is_file() else {}
    shas = {manifest.source_sha256(render(spec)): spec for spec in catalogue}
    sources = {sha: found for sha, found in kept.items() if sha in shas}
    failed = []
    for sha, spec in shas.items():
        if spec not in wanted or (sha in sources and not again):
            continue
        tell(spec.id)
        sources.pop(sha, None)
        try:
            sources[sha] = prove(spec)
        except SsmError as error:
            failed.append(f"{spec.id}: {error}")
        _store(path, sources)
    _store(path, sources)
    if failed:
        raise DeviceError(f"{len(failed)} of {len(wanted)} kernels failed on the emulator:\n" + "\n".join(failed))
    return {"sources": sources}


def _store(path: Path, sources: dict[str, Any]) -> None:
    toolchain.publish_json(path, {"sources": sources})
