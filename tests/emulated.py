"""Texts of kernels in the emulator: broken ones, with arguments that lie; and that bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pyharness import ScanProblem, scan
from pyharness.args import SCAN_ARGS
from pyharness.binding import bind, outputs
from pyharness.compare import compare
from pyharness.emulator import EmulatorBuffer, EmulatorLaunch, run
from pyharness.errors import EmulatorError
from pyharness.scan import ScanResult, run_emulator
from pyharness.spec import KernelSpec, Plan
from pyharness.toolchain import cuda_include_dirs


def run_text(
    source: str,
    spec: KernelSpec,
    problem: ScanProblem,
    *,
    plan: Plan | None = None,
    grid: int = 0,
    flags: int = 0,
    rows: int = 0,
    arrays: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> ScanResult:
    """Run a text as `run_emulator` does, with other launches or arguments than those that are right.

    Args:
        plan: the launches and the workspace; None for the spec's own.
        grid: blocks of every launch, 0 for those of the plan.
        flags: bits that are set in the arguments besides those that are true.
        rows: the argument of that name, 0 for the plan's.
        arrays: buffers by name in place of the problem's.
        seed: order of threads between barriers.
    """
    plan = spec.plan(problem.geometry) if plan is None else plan
    results = outputs(problem)
    binding = bind(problem, plan, results)
    buffers = [
        EmulatorBuffer(b.name, (arrays or {}).get(b.name, b.array), b.writable, b.initialised, b.must_write)
        for b in binding.buffers
    ]
    launches = [
        EmulatorLaunch(step.entry, (grid, 1, 1) if grid else step.grid, step.block, step.shared_bytes)
        for step in plan.launches
    ]

    def pack(addresses: Mapping[str, int]) -> bytes:
        record = np.frombuffer(binding.pack(addresses), SCAN_ARGS).copy()
        record["flags"] |= np.uint32(flags)
        record["rows"] = rows or record["rows"]
        return record.tobytes()

    run(source, launches, buffers, pack, seed=seed, include_dirs=cuda_include_dirs())
    return ScanResult(results.y, results.state, spec.id, "emulator", results.state_scale)


def kinds(error: EmulatorError) -> set[str]:
    """Which rules were broken."""
    return {finding.kind for finding in error.findings}


def assert_right(problem: ScanProblem, spec: KernelSpec, name: str = "", backend: str = "emulator") -> ScanResult:
    """What a kernel makes of a problem is the oracle's result, within the bound of `compare`.

    Args:
        name: of the problem, for the message.
    """
    result = scan(problem, spec.id, backend)
    errors = compare(result, problem)
    assert errors.ok, f"{', '.join(filter(None, (spec.id, name)))}: {errors}"
    return result


def assert_same_bits_anywhere(problem: ScanProblem, spec: KernelSpec) -> None:
    """The second of four sequences gives the same bits alone and among others, and the batch in any order.

    Another order of threads and blocks as well.
    """
    whole = scan(problem, spec.id, "emulator")
    assert problem.read_slots is not None
    tokens, slot = slice(int(problem.offsets[1]), int(problem.offsets[2])), problem.read_slots[1:2]
    rows = {name: getattr(problem, name)[tokens] for name in ("x", "dt", "B", "C", "z")}
    alone = scan(replace(problem, **rows, cu_seqlens=None, read_slots=slot), spec.id, "emulator")
    assert alone.y.tobytes() == whole.y[tokens].tobytes()
    assert alone.state[slot[0]].tobytes() == whole.state[slot[0]].tobytes()
    shuffled = replace(problem, sequence_order=np.array([3, 1, 0, 2], np.int32))
    again = run_emulator(shuffled, spec, seed=5, resident_blocks=3)
    assert again.y.tobytes() == whole.y.tobytes()
    assert again.state.tobytes() == whole.state.tobytes()
