"""The recurrence in float64, token by token: the only truth that kernels are held to.

Nothing is rounded here. States come back as float64, one array for each slot that the scan stores to; how a store
rounds is the business of `rounded` and `quantised` (what a plain backend stores) and of `pyharness.compare`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.errors import InvalidProblem
from pyharness.problem import DTYPES, ScanProblem

Float64 = NDArray[np.float64]
SOFTPLUS_THRESHOLD = 20.0


@dataclass(frozen=True, eq=False)
class OracleResult:
    """What a scan gives before any rounding.

    Attributes:
        y: f64 [tokens, heads, head_dim]; 0 at padding and at tokens past the last offset.
        states: slot -> f64 [heads, head_dim, d_state], for every slot that is stored to, finals and checkpoints;
            without a pool the slot is the sequence. All other slots keep their bits.
    """

    y: Float64
    states: dict[int, Float64]


def step_sizes(problem: ScanProblem) -> Float64:
    """Step sizes: dt after bias, softplus and limits, f64 [tokens, heads]."""
    d = problem.dt.astype(np.float64)
    if problem.dt_bias is not None:
        d = d + problem.dt_bias.astype(np.float64)
    if problem.dt_softplus:
        d = np.where(d <= SOFTPLUS_THRESHOLD, np.log1p(np.exp(np.minimum(d, SOFTPLUS_THRESHOLD))), d)
    if problem.dt_limit is not None:
        low, high = (np.float64(np.float32(value)) for value in problem.dt_limit)
        d = np.clip(d, low, high)
    return d


def gate(z: Float64) -> Float64:
    """The gate z * sigmoid(z), without overflow at either end."""
    small = np.exp(-np.abs(z))
    return z * np.where(z >= 0, 1.0, small) / (1.0 + small)


def initial_state(problem: ScanProblem, sequence: int) -> Float64:
    """The state that a live sequence starts from, f64 [heads, head_dim, d_state]."""
    if problem.state is None or not problem.resumes[sequence]:
        return np.zeros((problem.heads, problem.head_dim, problem.d_state))
    slot = int(problem.resolved_read[sequence])
    state: Float64 = problem.state[slot].astype(np.float64)
    if problem.state_scale is not None:
        state *= problem.state_scale[slot].astype(np.float64)[..., None]
    return state


def oracle(problem: ScanProblem) -> OracleResult:
    """Run the recurrence in float64.

    Raises:
        InvalidProblem: the recurrence leaves the range of float64; the message names sequence and token.
    """
    y = np.zeros((problem.tokens, problem.heads, problem.head_dim))
    states: dict[int, Float64] = {}
    with np.errstate(over="raise", invalid="raise", under="ignore"):
        d = step_sizes(problem)
        for sequence in np.flatnonzero(~problem.padding):
            _run_sequence(problem, int(sequence), d, y, states)
    return OracleResult(y, states)


def _run_sequence(problem: ScanProblem, sequence: int, d: Float64, y: Float64, states: dict[int, Float64]) -> None:
    A = problem.A.astype(np.float64).reshape(problem.heads, 1, -1)
    D = None if problem.D is None else problem.D.astype(np.float64)[:, None]
    group = np.arange(problem.heads) // (problem.heads // problem.groups)
    S = initial_state(problem, sequence)
    t = start = int(problem.offsets[sequence])
    try:
        for t in range(start, int(problem.offsets[sequence + 1])):
            x = problem.x[t].astype(np.float64)
            B = problem.B[t].astype(np.float64)[group]
            C = problem.C[t].astype(np.float64)[group]
            dt = d[t][:, None, None]
            S = np.exp(dt * A) * S + (dt * x[:, :, None]) * B[:, None, :]
            row = (S @ C[:, :, None])[:, :, 0]
            if D is not None:
                row += D * x
            if problem.z is not None:
                row *= gate(problem.z[t].astype(np.float64))
            y[t] = row
            if problem.checkpoint_slots is not None and problem.checkpoint_slots[t] != -1:
                states[int(problem.checkpoint_slots[t])] = S.copy()
    except FloatingPointError as error:
        raise InvalidProblem(
            f"the recurrence of sequence {sequence} leaves the range of float64 at token {t} ({error}): "
            "use inputs that stay finite"
        ) from error
    slot = sequence if problem.state is None else int(problem.resolved_write[sequence])
    if slot != -1:
        states[slot] = S


def rounded(values: Float64, dtype: str) -> NDArray[Any]:
    """Values rounded to nearest in a storage type; what is too large for it becomes infinite."""
    with np.errstate(over="ignore"):
        return values.astype(DTYPES[dtype])


def quantised(state: Float64) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """A state as i8 with one scale a row: the scale takes the row's largest magnitude to 127.

    Args:
        state: f64 [heads, head_dim, d_state].

    Returns:
        i8 of the same shape, and f32 [heads, head_dim]; a row of zeros has scale 0.
    """
    scale = (np.abs(state).max(axis=-1) / 127.0).astype(np.float32)
    divisor = np.where(scale > 0, scale.astype(np.float64), 1.0)[..., None]
    return np.clip(np.rint(state / divisor), -127, 127).astype(np.int8), scale
