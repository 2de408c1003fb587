"""compare() by sequence, slot and head: what a norm over everything would not show, and what cancels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyharness import ScanProblem, scan
from pyharness.cases import Options, Shape, draw
from pyharness.compare import compare

F = np.float32


def scaled_slots() -> ScanProblem:
    """Two sequences whose states stand near 1e6 and 1e-4, and whose tokens add nothing to them."""
    problem = draw(1, Shape((2, 2), 2, 3, 16), Options(slots="default", spare=0, D=False))
    assert problem.state is not None
    problem.state[0] *= F(1e6)
    problem.state[1] *= F(1e-4)
    return replace(problem, x=np.zeros_like(problem.x))


def test_a_small_state_that_is_lost_does_not_hide_behind_a_large_one() -> None:
    problem = scaled_slots()
    result = scan(problem, backend="oracle")
    assert compare(result, problem).ok
    result.state[1] = 0
    errors = compare(result, problem)
    assert errors.state == pytest.approx(1.0)
    assert errors.state_at.startswith("slot 1, ")
    assert not errors.ok


def test_small_rows_of_y_that_are_lost_do_not_hide_behind_large_ones() -> None:
    problem = scaled_slots()
    result = scan(problem, backend="oracle")
    result.y[2:] = 0
    errors = compare(result, problem)
    assert errors.y == pytest.approx(1.0)
    assert errors.y_at.startswith("sequence 1, ")
    assert not errors.ok


def test_a_small_head_does_not_hide_behind_a_large_one() -> None:
    problem = scaled_slots()
    assert problem.state is not None
    problem.state[0, 1] *= F(1e-9)
    for name in ("state", "y"):
        result = scan(problem, backend="oracle")
        if name == "state":
            result.state[0, 1, 2] *= F(1 + 1e-3)
        else:
            result.y[0, 1] *= F(1 + 1e-3)
        errors = compare(result, problem)
        assert not errors.ok
        assert (errors.state_at if name == "state" else errors.y_at).endswith("head 1")


def test_a_checkpoint_and_a_discarded_state_have_their_own_norms() -> None:
    problem = draw(2, Shape((6, 4), 2, 3, 16), Options(slots="moved", checkpoints=3, discard=2))
    for slot in np.flatnonzero(problem.written):
        result = scan(problem, backend="oracle")
        result.state[slot, 1] *= F(1 + 1e-4)
        errors = compare(result, problem)
        assert errors.state_at == f"slot {slot}, head 1"
        assert not errors.ok


def test_what_is_exactly_zero_has_to_come_out_exactly_zero() -> None:
    problem = draw(3, Shape((0, 2), 1, 2, 4), Options(state=None))
    result = scan(problem, backend="oracle")
    assert compare(result, problem).ok
    result.state[0, 0, 0, 0] = 1e-30
    assert compare(result, problem).state == math.inf
    # Nothing normal is that small: what f32 loses below its least normal value is no error of the kernel.
    problem = replace(problem, x=(problem.x * F(1e-37)).astype(F), D=None)
    result = scan(problem, backend="oracle")
    result.state[np.abs(result.state) < 2.0**-126] = 0
    assert compare(result, problem).ok


def cancelling(**changes: Any) -> ScanProblem:
    """One token, one row: y = 1 * 1 - 1 * (1 - 2^-20) is small, the terms are not."""
    values: dict[str, Any] = {
        "x": np.ones((1, 1, 1), F),
        "dt": np.ones((1, 1), F),
        "A": np.full(1, -1, F),
        "B": np.ones((1, 1, 2), F),
        "C": np.array([[[1, -1 + 2.0**-20]]], F),
        "dt_softplus": False,
    }
    return ScanProblem(**(values | changes))


def test_a_sum_that_cancels_is_held_to_its_terms() -> None:
    problem = cancelling()
    result = scan(problem, backend="oracle")
    exact = float(result.y[0, 0, 0])
    assert exact == 2.0**-20
    result.y[0, 0, 0] = exact + 2.0**-24
    errors = compare(result, problem)
    assert errors.y == pytest.approx(2.0**-24 / math.sqrt(2), rel=1e-5)
    assert errors.ok
    result.y[0, 0, 0] = exact + 2.0**-17
    assert not compare(result, problem).ok
    # The state cancels as well: exp(-1) S + 1.
    state = np.full((1, 1, 1, 2), -math.e * (1 - 2.0**-20), F)
    problem = cancelling(state=state)
    result = scan(problem, backend="oracle")
    result.state[...] += F(2.0**-23)
    errors = compare(result, problem)
    assert 1e-8 < errors.state < 1e-6
    assert errors.ok


def test_terms_of_one_sign_get_no_room() -> None:
    problem = cancelling(C=np.ones((1, 1, 2), F), D=np.ones(1, F), z=np.ones((1, 1, 1), F))
    result = scan(problem, backend="oracle")
    result.y[...] *= F(1 + 2.0**-15)
    assert compare(result, problem).y == pytest.approx(2.0**-15, rel=1e-2)
    assert not compare(result, problem).ok


def test_a_head_is_held_to_what_it_remembers_itself() -> None:
    """1000 tokens of a slow head and a fast one: what the slow one is allowed is too much for the fast one."""
    problem = draw(7, Shape((1000,), 2, 3, 16), Options(slots="default", spare=0))
    problem = replace(problem, A=np.array([-1e-2, -100], F), dt=np.full((1000, 2), 0.1, F), dt_softplus=False)
    for head, relative, ok in ((0, 1e-4, True), (0, 3e-4, False), (1, 1e-6, True), (1, 1e-4, False)):
        result = scan(replace(problem, dt_bias=None), backend="oracle")
        result.state[0, head] *= F(1 + relative)
        errors = compare(result, replace(problem, dt_bias=None))
        assert errors.state_at.endswith(f"head {head}")
        assert errors.state == pytest.approx(relative, rel=0.2)
        assert (errors.ok, errors.share <= 1) == (ok, ok)
    assert errors.state_bound == pytest.approx(2e-6 + 2**-22 * 0.1)
