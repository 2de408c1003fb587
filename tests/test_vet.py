"""Vetting as far as no GPU is needed: which cases a kernel gets, and what compute-sanitizer's output means."""

from __future__ import annotations

import numpy as np
import pytest

from pyharness import vet
from pyharness.families import RecurrentSpec
from pyharness.oracle import oracle


def test_a_kernel_gets_cases_of_its_own_d_state_and_types() -> None:
    spec = RecurrentSpec(d_state=64, io="bf16")
    problems = [case.build() for case in vet.option_cases(64, "bf16", "f32")]
    assert {(p.d_state, p.io, p.state_dtype) for p in problems} == {(64, "bf16", "f32")}
    assert [case.name for case in vet.geometry_cases(spec)] == ["Falcon-H1 tiny 90M bf16 f32", "Plamo 2 8B bf16 f32"]
    assert list(vet.plain_cases(spec)) == []


def test_case_names_are_unique() -> None:
    """Problems are worked out once a name, so two cases of one name would be one."""
    spec = RecurrentSpec(d_state=0, layout="generic")
    names = [case.name for d_state in vet.d_states(spec) for case in vet.option_cases(d_state, "f32", "f32")]
    names += [case.name for case in vet.geometry_cases(spec)]
    names += [case.name for case in vet.plain_cases(spec)]
    assert len(set(names)) == len(names)


def test_every_f32_kernel_gets_the_edges_at_its_own_d_state() -> None:
    counts = []
    for d_state in (16, 20):
        problems = [vet.solved(case)[0] for case in vet.plain_cases(RecurrentSpec(d_state=d_state))]
        assert {problem.d_state for problem in problems} == {d_state}
        counts.append(len(problems))
    assert counts[0] == counts[1] > 40


def test_one_sequence_and_another_order_are_the_same_problem_to_the_oracle() -> None:
    problem = vet.batch(RecurrentSpec(d_state=16))
    whole = oracle(problem)
    order = [3, 0, 4, 2, 1]
    moved = vet.rearranged(problem, order)
    other = oracle(moved)
    assert problem.read_slots is not None
    for s in range(problem.sequences):
        rows = slice(problem.offsets[s], problem.offsets[s + 1])
        place = order.index(s)
        assert np.array_equal(other.y[moved.offsets[place] : moved.offsets[place + 1]], whole.y[rows])
        lone = oracle(vet.alone(problem, s))
        slot = int(problem.read_slots[s])
        assert np.array_equal(lone.y, whole.y[rows])
        assert np.array_equal(lone.states[slot], whole.states[slot])


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (0, "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", "found: "),
        (99, "========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", "found: "),
        (255, "========= Error: Device not supported\n", "not run: exit code 255: Error: Device not supported"),
        (1, "Traceback\nDeviceError: wrong\n========= ERROR SUMMARY: 0 errors\n", "found: "),
    ],
)
def test_what_compute_sanitizer_says(code: int, output: str, verdict: str) -> None:
    assert vet.sanitizer_verdict(code, output).startswith(verdict)
