"""What hostile values are allowed, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyharness import ScanProblem
from pyharness.cases import Options, Shape, draw
from pyharness.hostile import hostile_room, in_range, operands_fit, without_underflow
from pyharness.oracle import OracleResult, oracle, step_sizes
from pyharness.scan import ScanResult
from pyharness.spec import KernelSpec, parse_id

F = np.float32
F16 = parse_id("ssd_n16_p16_r16_w1_c32_t1_f16_sf32")
SPLIT = parse_id("ssd_n16_p16_r16_w1_c32_t1_f32_sf32_split")
FMA = parse_id("recurrent_n16_block_f16_sf32")


def test_hostile_values_get_the_room_that_they_need_and_no_more() -> None:
    """Worked by hand: three units of the largest |d A| below 104, and a quarter unit for each token remembered."""
    problem = draw(2, Shape((3,), 1, 2, 4), Options(dt_bias=False, softplus=False))
    problem = replace(problem, A=np.array([-2.0], np.float32), dt=np.array([[1], [5], [60]], np.float32))
    assert step_sizes(problem).max() == 60
    assert hostile_room(problem) == pytest.approx(2.0**-24 * 3 * 10 + 2.0**-22 / 44)
    grows = replace(problem, A=np.array([0.5], np.float32))
    assert hostile_room(grows) == pytest.approx(2.0**-24 * 3 * 30 + 2.0**-22 * 3)
    biased = replace(problem, dt_softplus=True, dt_bias=np.array([-8.0], np.float32))
    d = np.log1p(np.exp(np.array([-7.0, -3.0, 0.0]))) + np.array([0, 0, 52 - np.log(2)])
    room = 2.0**-24 * (3 * 2 * d[1] + 7) + 2.0**-22 / (2 * d.mean())
    assert hostile_room(replace(biased, A=np.array([-2.0], np.float32))) == pytest.approx(room, rel=1e-6)


def ones(x: float, B: float, C: float, dt: float = 1.0, tokens: int = 4) -> ScanProblem:
    """Every element of an array is the same; no decay to speak of, no state before."""
    shape = Shape((tokens,), 1, 16, 16)
    problem = draw(1, shape, Options(io="f16", state=None, D=False, dt_bias=False, softplus=False, dt_f32=True))
    problem.x[...], problem.B[...], problem.C[...], problem.dt[...] = x, B, C, dt
    return replace(problem, A=np.full(1, -1e-6, F))


def wrong_by(problem: ScanProblem, y: float, state: float, spec: KernelSpec) -> tuple[float, float]:
    """What is left of an error of y and of the state."""
    truth = oracle(problem)
    # y in f32, or its own rounding would be all there is.
    result = ScanResult((truth.y + y).astype(F), np.stack([truth.states[0] + state]).astype(F), spec.id, "emulator")
    mended = without_underflow(result, problem, truth, spec)
    return float(np.abs(mended.y - truth.y).max()), float(np.abs(mended.state[0] - truth.states[0]).max())


def test_what_f16_operands_lose_below_their_range_is_allowed_and_no_more() -> None:
    """4 deviations of 2^-25 a step: by B over 4 tokens 4 x 2^-25 x 2 in a state, by C over 16 columns 4 times in y."""
    problem = ones(2.0**-10, 1.0, 1.0)
    floor = 4 * 2.0**-25 * 2
    y_floor = 4 * 2.0**-25 * 2 * 2.0**-10 + (floor + 4 * 2.0**-25) * 4
    near = wrong_by(problem, 0.9 * y_floor, 0.9 * floor, F16)
    assert near[0] < 1e-2 * y_floor
    assert near[1] < 1e-2 * floor
    far = wrong_by(problem, 1.1 * y_floor, 1.1 * floor, F16)
    assert far[0] > y_floor
    assert far[1] > floor
    # bf16 has f32's range, and FMA kernels round nothing.
    for spec in (SPLIT, FMA):
        assert wrong_by(problem, 0.9 * y_floor, 0.9 * floor, spec)[1] > 0.8 * floor


def test_a_decay_below_the_range_of_f32_may_be_0() -> None:
    """A state of at most 4 x 2 x 8 then, of which 2^-126 may be lost."""
    problem = ones(2.0, 8.0, 1.0)
    lost = 2.0**-126 * 64
    truth = OracleResult(np.zeros((4, 1, 16)), {0: np.zeros((1, 16, 16))})
    for share, left in ((0.9, 0.0), (1.5, 1.5 * lost)):
        state = np.full((1, 1, 16, 16), share * lost, F)
        found = without_underflow(ScanResult(truth.y.astype(F), state, FMA.id, "emulator"), problem, truth, FMA)
        assert np.abs(found.state).max() == pytest.approx(left)


@pytest.mark.parametrize(
    ("x", "B", "C", "dt", "fits"),
    [
        (1.0, 1.0, 1.0, 1.0, True),
        # A step d x of 80000; scores of d (C . B) = 16 x 4 x 64 x 64 = 262144; a state of 4 x 100 x 200.
        (1000.0, 1e-3, 1e-3, 80.0, False),
        (1e-3, 64.0, 64.0, 4.0, False),
        (100.0, 200.0, 1e-3, 1.0, False),
    ],
)
def test_what_f16_operands_cannot_hold_is_no_problem_for_them(
    x: float, B: float, C: float, dt: float, fits: bool
) -> None:
    problem = ones(x, B, C, dt)
    assert operands_fit(problem, F16) == fits
    assert operands_fit(problem, SPLIT)
    assert operands_fit(problem, FMA)


def test_results_beyond_a_type_say_nothing() -> None:
    def result(value: float) -> OracleResult:
        return OracleResult(np.full((1, 1, 1), value), {})

    assert in_range(result(6e4), FMA)
    assert not in_range(result(4e4), F16)
    assert in_range(result(3e4), F16)
    assert in_range(result(1e34), SPLIT)
    assert not in_range(result(1e36), SPLIT)
