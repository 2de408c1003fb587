"""The oracle against values worked by hand and against a scalar loop that shares nothing with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyharness import InvalidProblem, ScanProblem, scan
from pyharness.cases import (
    ANCESTOR_D_STATE,
    Options,
    Shape,
    ancestor_cases,
    draw,
    edge_cases,
    huge_slot_stride,
    tiny_steps,
)
from pyharness.compare import compare, f32_bounds, relative_norm, scaled_error, unit_in_last_place
from pyharness.oracle import oracle, quantised

F = np.float32
EDGES = list(edge_cases(6, chunk=4))


def scalar_loop(p: ScanProblem) -> tuple[np.ndarray[Any, Any], dict[int, np.ndarray[Any, Any]]]:
    """The formula as it is written, one element at a time, in Python floats."""
    y = np.zeros(p.x.shape)
    states: dict[int, np.ndarray[Any, Any]] = {}
    offsets = [0, p.tokens] if p.cu_seqlens is None else p.cu_seqlens.tolist()
    for s in range(len(offsets) - 1):
        read = s if p.read_slots is None else int(p.read_slots[s])
        write = read if p.write_slots is None else int(p.write_slots[s])
        resume = p.state is not None and (p.resume is None or p.resume[s] == 1)
        if p.state is not None and read == p.pad_slot:
            continue
        final = np.zeros((p.heads, p.head_dim, p.d_state))
        kept = {
            t: np.zeros_like(final)
            for t in range(offsets[s], offsets[s + 1])
            if p.checkpoint_slots is not None and p.checkpoint_slots[t] != -1
        }
        for h in range(p.heads):
            g = h // (p.heads // p.groups)
            for r in range(p.head_dim):
                S = [0.0] * p.d_state
                if resume:
                    scale = 1.0 if p.state_scale is None else float(p.state_scale[read, h, r])
                    S = [float(v) * scale for v in p.state[read, h, r]]
                for t in range(offsets[s], offsets[s + 1]):
                    d = float(p.dt[t, h]) + (float(p.dt_bias[h]) if p.dt_bias is not None else 0.0)
                    if p.dt_softplus and d <= 20.0:
                        d = math.log1p(math.exp(d))
                    if p.dt_limit is not None:
                        d = min(max(d, float(F(p.dt_limit[0]))), float(F(p.dt_limit[1])))
                    x, total = float(p.x[t, h, r]), 0.0
                    for n in range(p.d_state):
                        a = float(p.A[h]) if p.A.ndim == 1 else float(p.A[h, n])
                        S[n] = math.exp(d * a) * S[n] + d * float(p.B[t, g, n]) * x
                        total += S[n] * float(p.C[t, g, n])
                    if p.D is not None:
                        total += float(p.D[h]) * x
                    if p.z is not None:
                        z = float(p.z[t, h, r])
                        total *= z / (1.0 + math.exp(-z))
                    y[t, h, r] = total
                    if t in kept:
                        kept[t][h, r] = S
                final[h, r] = S
        for t, state in kept.items():
            states[int(p.checkpoint_slots[t])] = state
        if p.state is None:
            states[s] = final
        elif write != -1:
            states[write] = final
    return y, states


def assert_equal_to_scalar_loop(problem: ScanProblem) -> None:
    """Both are float64: only the order of a sum differs, so 1e-12 relative leaves room for cancellation."""
    truth = oracle(problem)
    y, states = scalar_loop(problem)
    np.testing.assert_allclose(truth.y, y, rtol=1e-12, atol=1e-12)
    assert set(truth.states) == set(states) == set(np.flatnonzero(problem.written))
    for slot, state in states.items():
        np.testing.assert_allclose(truth.states[slot], state, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("case", EDGES, ids=[case.name for case in EDGES])
def test_edges_match_a_scalar_loop(case: Any) -> None:
    assert_equal_to_scalar_loop(case.build())


@pytest.mark.parametrize("state", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize("io", ["f32", "f16", "bf16"])
def test_storage_types_match_a_scalar_loop(io: str, state: str) -> None:
    options = Options(io=io, state=state, z=True, fresh="mixed", slots="moved", checkpoints=2)
    assert_equal_to_scalar_loop(draw(3, Shape((3, 2, 4), 4, 2, 3, 2), options))


def one_token(**changes: Any) -> ScanProblem:
    """One token, head, row and column: x 3, dt 0.5, A -2, B 5, C 7, no softplus, from a state of 11."""
    values: dict[str, Any] = {
        "x": np.full((1, 1, 1), 3, F),
        "dt": np.full((1, 1), 0.5, F),
        "A": np.full(1, -2, F),
        "B": np.full((1, 1, 1), 5, F),
        "C": np.full((1, 1, 1), 7, F),
        "dt_softplus": False,
        "state": np.full((1, 1, 1, 1), 11, F),
    }
    return ScanProblem(**(values | changes))


def test_one_token_by_hand() -> None:
    truth = oracle(one_token())
    state = math.exp(-1.0) * 11 + 0.5 * 5 * 3
    assert truth.states[0].item() == pytest.approx(state, rel=1e-15)
    assert truth.y.item() == pytest.approx(7 * state, rel=1e-15)


def test_skip_and_gate_by_hand() -> None:
    state = math.exp(-1.0) * 11 + 7.5
    z = one_token(D=np.full(1, 13, F), z=np.full((1, 1, 1), 2, F))
    assert oracle(z).y.item() == pytest.approx((7 * state + 13 * 3) * 2 / (1 + math.exp(-2.0)), rel=1e-15)


def test_bias_comes_before_softplus_and_the_limit_after() -> None:
    p = one_token(dt_softplus=True, dt_bias=np.full(1, 0.25, F), resume=np.zeros(1, np.uint8))
    d = math.log1p(math.exp(0.75))
    assert oracle(p).states[0].item() == pytest.approx(15 * d, rel=1e-15)
    assert oracle(replace(p, dt_limit=(0.0, 0.125))).states[0].item() == 15 * 0.125
    assert oracle(replace(p, dt_limit=(2.0, 4.0))).states[0].item() == 15 * 2.0


@pytest.mark.parametrize(("dt", "step"), [(20.0, math.log1p(math.exp(20.0))), (20.000002, float(F(20.000002)))])
def test_softplus_stops_above_twenty(dt: float, step: float) -> None:
    p = one_token(dt_softplus=True, dt=np.full((1, 1), dt, F), resume=np.zeros(1, np.uint8))
    assert oracle(p).states[0].item() == pytest.approx(15 * step, rel=1e-15)
    assert math.log1p(math.exp(20.0)) != 20.0


def test_softplus_keeps_its_digits_far_below_zero() -> None:
    p = one_token(dt_softplus=True, dt=np.full((1, 1), -80, F), resume=np.zeros(1, np.uint8))
    assert oracle(p).states[0].item() == pytest.approx(15 * math.exp(-80.0), rel=1e-14, abs=0)


def test_the_gate_is_right_at_both_ends() -> None:
    y = [oracle(one_token(z=np.full((1, 1, 1), z, F))).y.item() for z in (-1000.0, 1000.0)]
    assert y[0] == 0.0
    assert y[1] == pytest.approx(1000 * 7 * (math.exp(-1.0) * 11 + 7.5), rel=1e-15)


def test_i8_states_are_read_by_their_scale() -> None:
    p = one_token(state=np.full((1, 1, 1, 1), 22, np.int8), state_scale=np.full((1, 1, 1), 0.5, F))
    assert oracle(p).states[0].item() == oracle(one_token()).states[0].item()


def test_leaving_the_range_of_float64_is_an_error_that_names_the_token() -> None:
    p = one_token(A=np.full(1, 1e30, F), dt=np.full((1, 1), 1e10, F))
    with pytest.raises(InvalidProblem, match="sequence 0 leaves the range of float64 at token 0"):
        oracle(p)


def test_checkpoints_are_the_states_of_shorter_runs() -> None:
    p = draw(4, Shape((5,), 2, 2, 3), Options(checkpoints=1, slots="moved"))
    truth = oracle(p)
    assert p.checkpoint_slots is not None
    for t in range(5):
        rows = {name: getattr(p, name)[: t + 1] for name in ("x", "dt", "B", "C", "checkpoint_slots")}
        shorter = oracle(replace(p, **rows))
        assert np.array_equal(truth.states[int(p.checkpoint_slots[t])], shorter.states[int(p.write_slots[0])])


def test_a_cut_sequence_gives_the_same_values_as_a_whole_one() -> None:
    p = draw(5, Shape((9,), 2, 2, 3), Options(state="f32", slots="default"))
    whole = oracle(p)
    parts, state = [], p.state
    for rows in (slice(0, 4), slice(4, 4), slice(4, 9)):
        cut = replace(p, **{name: getattr(p, name)[rows] for name in ("x", "dt", "B", "C")}, state=state)
        truth = oracle(cut)
        parts.append(truth.y)
        state = p.state.copy()
        state[0] = truth.states[0]  # rounded to f32 in between: 1e-6 relative
    np.testing.assert_allclose(np.concatenate(parts), whole.y, rtol=1e-5, atol=1e-5)


def test_groups_are_blocks_of_heads() -> None:
    p = draw(6, Shape((3,), 6, 2, 3, 3), Options(state=None, D=False))
    silent = p.C.copy()
    silent[:, 1] = 0
    y = oracle(replace(p, C=silent)).y
    assert [bool(y[:, h].any()) for h in range(6)] == [True, True, False, False, True, True]


def test_inputs_are_not_changed_and_unnamed_slots_keep_their_bits() -> None:
    p = draw(7, Shape((3, 2, 4), 2, 2, 3), Options(padding=3, slots="moved", checkpoints=2, tail=2))
    before = p.state.tobytes()
    result = scan(p, backend="oracle")
    assert p.state.tobytes() == before
    for slot in np.flatnonzero(~p.written):
        assert result.state[slot].tobytes() == p.state[slot].tobytes()
    assert not result.y[~p.live_tokens].any()
    assert np.isfinite(result.y).all()


def test_an_empty_sequence_copies_its_state_and_a_fresh_one_stores_zeros() -> None:
    p = draw(8, Shape((0, 0), 1, 2, 3), Options(slots="moved"))
    result = scan(replace(p, resume=np.array([1, 0], np.uint8)), backend="oracle")
    assert np.array_equal(result.state[p.write_slots[0]], p.state[p.read_slots[0]])
    assert not result.state[p.write_slots[1]].any()


def test_a_huge_slot_stride_is_followed_over_sparse_memory() -> None:
    p = huge_slot_stride(4)
    result = scan(p, backend="oracle")
    assert result.state.strides == p.state.strides
    assert p.state.strides[0] > 2**32
    assert compare(result, p).ok


@pytest.mark.parametrize("d_state", ANCESTOR_D_STATE)
def test_the_oracle_backend_passes_its_own_comparison(d_state: int) -> None:
    for case in ancestor_cases(d_state, reduce=True):
        p = case.build()
        assert compare(scan(p, backend="oracle"), p).ok


def test_softplus_of_every_size_reaches_y() -> None:
    p = tiny_steps(3)
    d = p.dt.astype(np.float64)[:, 0]
    np.testing.assert_allclose(oracle(p).y[:, 0, 0], np.where(d <= 20, np.log1p(np.exp(d)), d), rtol=1e-15)


class TestComparison:
    """compare() finds each kind of wrong result: a comparison that cannot fail proves nothing."""

    problem = draw(9, Shape((3, 2, 4), 2, 2, 3), Options(padding=3, slots="moved", checkpoints=2, tail=2))

    def test_a_wrong_y_is_found(self) -> None:
        result = scan(self.problem, backend="oracle")
        result.y[0, 0, 0] += np.abs(result.y).max()
        assert compare(result, self.problem).y > 1e-3

    def test_a_wrong_state_is_found(self) -> None:
        result = scan(self.problem, backend="oracle")
        result.state[np.flatnonzero(self.problem.written)[0], 0, 0, 0] += 1
        assert not compare(result, self.problem).ok

    def test_nan_is_found(self) -> None:
        result = scan(self.problem, backend="oracle")
        result.y[0, 0, 0] = np.nan
        assert not compare(result, self.problem).ok

    def test_a_touched_slot_is_found(self) -> None:
        result = scan(self.problem, backend="oracle")
        slot = np.flatnonzero(~self.problem.written)[-1]
        result.state[slot, -1, -1, -1] = 0
        assert any(f"slots [{slot}] changed" in fault for fault in compare(result, self.problem).faults)

    def test_a_padding_row_that_is_not_zero_is_found(self) -> None:
        result = scan(self.problem, backend="oracle")
        result.y[-1, 0, 0] = 1e-30
        assert compare(result, self.problem).faults

    def test_sixteen_bits_may_be_one_unit_off_and_not_two(self) -> None:
        p = draw(10, Shape((3,), 2, 2, 3), Options(io="bf16", state=None))
        result = scan(p, backend="oracle")
        bits = result.y.view(np.uint16)
        # The neighbour on the other side of the exact value is less than one unit away from it; the next one is not.
        away = np.where(np.abs(oracle(p).y) > np.abs(result.y.astype(np.float64)), 1, -1)
        bits[...] = bits + away
        assert compare(result, p).ok
        bits[...] = bits + away
        assert not compare(result, p).ok


def test_units_in_the_last_place_by_hand() -> None:
    values = np.array([1.0, 1.9999, 2.0, 0.0, -3.0, 1e-9])
    assert unit_in_last_place(values, "f16").tolist() == [2**-10, 2**-9, 2**-9, 2**-24, 2**-9, 2**-24]
    assert unit_in_last_place(values[:3], "bf16").tolist() == [2**-7, 2**-6, 2**-6]


def test_norms_by_hand() -> None:
    assert relative_norm(np.array([3.0, 4.0]), np.array([0.0, 50.0])) == pytest.approx(0.1)
    assert relative_norm(np.zeros(2), np.zeros(2)) == 0.0
    assert relative_norm(np.ones(2), np.zeros(2)) == math.inf
    assert relative_norm(np.array([np.nan]), np.ones(1)) == math.inf
    assert relative_norm(np.full(2, 1e-200), np.full(2, 1e-198)) == pytest.approx(0.01)
    assert scaled_error(np.array([1.5], F), np.array([1.0]), 0.25, 0.25) == 1.0


def test_the_bound_follows_what_each_head_remembers() -> None:
    """0.5 |A| a token: two tokens, one, half a one; a head without decay remembers the whole sequence."""
    A = np.array([-1, -2, -4, 0], F)
    x, dt = np.full((3, 4, 1), 3, F), np.full((3, 4), 0.5, F)
    four = one_token(A=A, x=x, dt=dt, B=np.ones((3, 1, 1), F), C=np.ones((3, 1, 1), F), state=None)
    assert f32_bounds(four).tolist() == pytest.approx([2e-6 + 2**-22 * n for n in (2.0, 1.0, 0.5, 3.0)])
    assert f32_bounds(one_token()).tolist() == pytest.approx([2e-6 + 2**-22])
    # Steps of its own, and the column that decays most slowly.
    steps = np.array([[0.25, 1, 1, 1], [0.25, 1, 1, 1], [1.0, 1, 1, 1]], F)
    columns = replace(
        four,
        A=-np.array([[4, 1], [4, 8], [9, 8], [0, 1]], F),
        dt=steps,
        B=np.ones((3, 1, 2), F),
        C=np.ones((3, 1, 2), F),
    )
    assert f32_bounds(columns).tolist() == pytest.approx([2e-6 + 2**-22 * n for n in (2.0, 0.25, 0.125, 3.0)])
    nothing = replace(four, cu_seqlens=np.array([0, 0], np.int32))
    assert f32_bounds(nothing).tolist() == [2e-6] * 4


def test_quantised_rows_span_127_steps() -> None:
    q, scale = quantised(np.array([[[1.0, -2.54, 0.0], [0.0, 0.0, 0.0]]]))
    assert q.tolist() == [[[50, -127, 0], [0, 0, 0]]]
    assert scale.tolist() == [[pytest.approx(0.02), 0.0]]
