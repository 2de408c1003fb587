"""A mixed batch split into launches of two kernels over the same arrays, in the emulator: nothing is repacked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyharness.binding import Outputs, bind, outputs
from pyharness.cases import Options, Shape, draw
from pyharness.compare import compare
from pyharness.emulator import EmulatorBuffer, EmulatorLaunch, run
from pyharness.families import RecurrentSpec, UpdateSpec
from pyharness.problem import ScanProblem
from pyharness.render import render
from pyharness.scan import ScanResult
from pyharness.select import DECODE_TOKENS
from pyharness.spec import KernelSpec
from pyharness.toolchain import cuda_include_dirs

LENGTHS = (1, 20, 3, 0, 9, 8, 1)


def _launch(problem: ScanProblem, spec: KernelSpec, visited: list[int], results: Outputs) -> None:
    """Run a kernel on some sequences of a problem; the list is as long as the batch, its rest out of range."""
    order = np.full(problem.sequences, -1, np.int32)
    order[: len(visited)] = visited
    # A part of a batch is no ScanProblem, whose order is a permutation: the list is put in after the check.
    part = replace(problem)
    object.__setattr__(part, "sequence_order", order)
    longest = max((int(problem.lengths[s]) for s in visited), default=0)
    plan = spec.plan(replace(problem.geometry, longest=longest))
    binding = bind(part, plan, results)
    buffers = [
        EmulatorBuffer(b.name, b.array, b.writable, initialised=b.initialised or b.name == "y", must_write=False)
        for b in binding.buffers
    ]
    launches = [EmulatorLaunch(step.entry, step.grid, step.block, step.shared_bytes) for step in plan.launches]
    run(render(spec), launches, buffers, binding.pack, include_dirs=cuda_include_dirs())


@pytest.mark.parametrize(
    "decode",
    [UpdateSpec(d_state=128), RecurrentSpec(d_state=128, lanes=16, rows=8, warps=1, chunk=2)],
    ids=lambda spec: spec.id,
)
def test_two_kernels_share_a_mixed_batch(decode: KernelSpec) -> None:
    options = Options(fresh="mixed", z=True, tail=2, padding=4, slots="moved")
    problem = draw(3, Shape(LENGTHS, 2, 9, 128, 1), options)
    prefill = RecurrentSpec(d_state=128)
    short = [s for s in range(problem.sequences) if problem.lengths[s] <= DECODE_TOKENS]
    long = [s for s in range(problem.sequences) if problem.lengths[s] > DECODE_TOKENS]
    assert short
    assert long
    results = outputs(problem)
    _launch(problem, decode, short, results)
    halfway = results.y.copy()
    untouched = slice(int(problem.offsets[1]), int(problem.offsets[2]))
    assert np.isnan(halfway[untouched]).all(), "the decode launch leaves the long sequence alone"
    _launch(problem, prefill, long, results)
    errors = compare(ScanResult(results.y, results.state, "split", "emulator", results.state_scale), problem)
    assert errors.ok, errors
