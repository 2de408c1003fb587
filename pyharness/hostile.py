"""What values that are hard on arithmetic may do to a result, and which of them say nothing about a kernel.

`pyharness.compare` says what ordinary problems are allowed. Here is what hostile ones add: roundings that grow with
exponents and with what a state remembers, and the range of what tensor cores multiply.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.compare import F32_PER_TOKEN
from pyharness.oracle import OracleResult, initial_state, step_sizes
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult
from pyharness.spec import KernelSpec

Array = NDArray[Any]

#: Values beyond this leave f32's range somewhere in between: such a draw says nothing.
_LARGEST = 1e35
#: Fast exponentials give 0 below f32's least normal number.
_LEAST_DECAY = 2.0**-126
#: exp(-104) is 0 in f32.
_EXP_ENDS = 104.0
#: The rounding of the least numbers of what tensor cores multiply, and the largest, where f32 has more range.
_OPERAND_LEAST = {"f16": 2.0**-25, "bf16": 2.0**-126, "f32": 2.0**-126}
_OPERAND_LARGEST = {"f16": 65504.0}


# Which problems say something.


def in_range(truth: OracleResult, spec: KernelSpec) -> bool:
    """Whether a result is one that f32 can hold, and f16 whatever rounded operands do to it."""
    values = [(truth.y, spec.io), *((state, spec.state) for state in truth.states.values())]
    narrow = 65504.0 / 2 if spec.operand_error else _LARGEST
    return all(
        float(np.abs(array).max(initial=0.0)) < (narrow if dtype == "f16" else _LARGEST) for array, dtype in values
    )


def operands_fit(problem: ScanProblem, spec: KernelSpec) -> bool:
    """Whether what a kernel multiplies on tensor cores stays in the range of its type, by a bound from norms.

    Those are the state at any token, the steps d x, and the scores d (C . B) of two tokens of a sequence.
    """
    largest = _OPERAND_LARGEST.get(getattr(spec, "operand", ""), 0.0)
    live = problem.live_tokens
    if not largest or not live.any():
        return True
    d = np.abs(step_sizes(problem)[live])
    x, B, C = (np.abs(array[live].astype(np.float64)) for array in (problem.x, problem.B, problem.C))
    steps = d.max(axis=1) * x.max(axis=(1, 2))
    scores = d.max() * np.linalg.norm(B, axis=-1).max() * np.linalg.norm(C, axis=-1).max()
    return bool(max(steps.max(), scores, _largest_state(problem)) < largest)


def _largest_state(problem: ScanProblem) -> float:
    """A bound of what a state element may be at any token: what it starts from, and all that is added."""
    live = problem.live_tokens
    d = np.abs(step_sizes(problem)[live])
    x, B = (np.abs(array[live].astype(np.float64)) for array in (problem.x, problem.B))
    added = (d.max(axis=1) * x.max(axis=(1, 2)) * B.max(axis=(1, 2))).sum()
    starts = [np.abs(initial_state(problem, int(s))).max() for s in np.flatnonzero(problem.resumes & ~problem.padding)]
    return float((max(starts, default=0.0) + added) * _growth(problem))


# What is allowed.


def hostile_room(problem: ScanProblem) -> float:
    """What hostile values may add to a relative error in f32, beyond what `compare` allows.

    Two things, both of which ordinary problems have little of, with u = 2^-24:

    - exp turns the rounding of its argument into a relative error: u |d A| in a decay, to which d brings two more units
      of its own, and u |dt + dt_bias| in a small softplus. Arguments reach 104, where an f32 exp is 0.
    - `compare` takes a head's mean decay for what its state remembers; where decays differ much from token to token the
      state may remember longer, and a state that grows remembers all.
    """
    live = problem.live_tokens
    if not live.any():
        return 0.0
    A = problem.A.astype(np.float64).reshape(problem.heads, -1)
    decays = np.abs(step_sizes(problem)[live])[..., None] * np.abs(A)
    # What an f32 exp sends to 0 takes no part, whatever its rounding.
    largest = float(np.where(decays < _EXP_ENDS, decays, 0.0).max(initial=0.0))
    added = 0.0
    if problem.dt_softplus and problem.dt_bias is not None:
        steps = problem.dt[live].astype(np.float64) + problem.dt_bias
        added = float(np.where(steps < 0, np.minimum(-steps, _EXP_ENDS), 0.0).max(initial=0.0))
    slowest = 0.0 if (A > 0).any() else float(decays.mean(axis=0).min())
    longest = float(problem.lengths.max())
    remembered = min(longest, 1.0 / slowest) if slowest > 0 else longest
    return 2.0**-24 * (3 * largest + added) + F32_PER_TOKEN * remembered


def without_underflow(result: ScanResult, problem: ScanProblem, truth: OracleResult, spec: KernelSpec) -> ScanResult:
    """A result without what is lost below the range of a type: such elements become right.

    A decay below f32's least normal number may be 0, and with it so much of the largest state. Rounding of operands of
    tensor cores is relative, and `compare` allows it, down to the least number of their type; below it is absolute, u
    for each of them. Steps d x of a sequence carry it into the state by B, scores into y by x, and the state into y by
    C; roundings are independent, so their squares add up, and four deviations are allowed.
    """
    live = problem.live_tokens
    if not live.any():
        return result
    x, B, C = (array[live].astype(np.float64) for array in (problem.x, problem.B, problem.C))
    passed = 4 * _OPERAND_LEAST.get(getattr(spec, "operand", ""), 0.0) * _growth(problem)
    state_floor = _LEAST_DECAY * _largest_state(problem) + passed * float(np.sqrt((B**2).sum(axis=0)).max())
    gates = 1.0 if problem.z is None else max(1.0, float(np.abs(problem.z[live].astype(np.float64)).max()))
    by_scores = passed * float(np.sqrt((x**2).sum(axis=0)).max())
    y_floor = gates * (by_scores + (state_floor + passed) * float(np.linalg.norm(C, axis=-1).max()))
    y, state = result.y.copy(), result.state.copy()
    _mend(y, truth.y, y_floor)
    for slot, exact in truth.states.items():
        _mend(state[slot], exact, state_floor)
    return replace(result, y=y, state=state)


def _mend(out: Array, exact: Array, floor: float) -> None:
    near = np.abs(out.astype(np.float64) - exact) <= floor
    out[near] = exact[near].astype(out.dtype)


def _growth(problem: ScanProblem) -> float:
    """How much of what a sequence starts with a head may have at its end: 1 unless an A is positive."""
    added = np.zeros((problem.tokens + 1, problem.heads))
    rates = np.maximum(problem.A.astype(np.float64).reshape(problem.heads, -1).max(axis=1), 0.0)
    np.cumsum(np.where(problem.live_tokens[:, None], step_sizes(problem), 0.0) * rates, axis=0, out=added[1:])
    sums = np.abs(added[problem.offsets[1:]] - added[problem.offsets[:-1]])
    return float(np.exp(min(80.0, float(sums.max(initial=0.0)))))
