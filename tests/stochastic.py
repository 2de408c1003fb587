"""What stochastic rounding has to be, on whatever runs a kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pyharness import ScanProblem, scan
from pyharness.compare import unit_in_last_place
from pyharness.families import UpdateSpec
from pyharness.oracle import oracle
from pyharness.problem import DTYPES


def one_step(state: str) -> ScanProblem:
    """A fresh one-token sequence whose state is d B x = B x with dt = 1, in one head of 4 rows by 32 columns."""
    rng = np.random.default_rng(51)
    shape = (1, 1, 32)
    return ScanProblem(
        x=rng.uniform(0.5, 2, (1, 1, 4)).astype(np.float32),
        dt=np.ones((1, 1), np.float32),
        A=-np.ones(1, np.float32),
        B=rng.standard_normal(shape).astype(np.float32),
        C=rng.standard_normal(shape).astype(np.float32),
        dt_softplus=False,
        state=np.zeros((1, 1, 4, 32), DTYPES[state]),
        resume=np.zeros(1, np.uint8),
    )


def assert_draws_are_fair(state: str, backend: str) -> None:
    """The mean error over 400 steps of 128 elements, in units of the last place, within 3 standard errors of 0. Each
    error is below one unit, and each store is one of the two neighbours.
    """
    spec = UpdateSpec(d_state=32, state=state)
    problem = one_step(state)
    exact = oracle(problem).states[0]
    draws = []
    for step in range(400):
        key = np.array([7, step], np.uint64)
        draws.append(scan(replace(problem, rounding_key=key), spec.id, backend).state[0])
    assert draws[0].tobytes() != draws[1].tobytes()
    again = scan(replace(problem, rounding_key=np.array([7, 1], np.uint64)), spec.id, backend).state[0]
    assert again.tobytes() == draws[1].tobytes()
    units = unit_in_last_place(exact, state)
    errors = (np.stack(draws).astype(np.float64) - exact) / units
    assert np.abs(errors).max() < 1.001
    # Over all elements, and each within what one of 128 means may reach: a draw deviates by half a unit at most.
    assert abs(errors.mean()) <= 3 * errors.std() / np.sqrt(errors.size)
    assert np.abs(errors.mean(axis=0)).max() <= 4.5 * 0.5 / np.sqrt(len(draws))
    nearest = scan(replace(problem, rounding_key=None), spec.id, backend).state[0]
    assert np.abs((nearest.astype(np.float64) - exact) / units).max() <= 0.5001
