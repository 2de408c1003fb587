"""How far a result is from the oracle, and how far it may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.oracle import OracleResult, oracle, rounded, step_sizes
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult

Float64 = NDArray[np.float64]

#: Relative norm of the error that f32 arithmetic is allowed, before what a slowly decaying state accumulates.
F32_BOUND = 2e-6
#: And for each token that the state remembers: the rounding of exp and of the update.
F32_PER_TOKEN = 2.0**-22
_MANTISSA_BITS = {"f32": 23, "bf16": 7, "f16": 10}
_LEAST_EXPONENT = {"f32": -126, "bf16": -126, "f16": -14}


@dataclass(frozen=True)
class Errors:
    """Errors of a result.

    Attributes:
        y, state: ||out - oracle|| / ||oracle||, after one unit in the last place of the storage type is taken off each
            element where that type has fewer bits than f32; 0 where nothing was stored to. The state counts stored
            slots only.
        bound: what both may be at most.
        faults: everything else that is wrong: rows that must be 0, slots that must keep their bits.
    """

    y: float
    state: float
    bound: float
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the result is as right as it has to be."""
        return not self.faults and self.y <= self.bound and self.state <= self.bound

    def __str__(self) -> str:
        text = f"relative error of y {self.y:.2e}, of state {self.state:.2e}, allowed {self.bound:.2e}"
        return "; ".join((text, *self.faults))


def f32_bound(problem: ScanProblem) -> float:
    """2e-6 + 2^-22 min(tokens, 1 / mean |dt A|), tokens being those of the longest sequence that is not padding."""
    lengths = problem.lengths[~problem.padding]
    longest = int(lengths.max(initial=0))
    if longest == 0:
        return F32_BOUND
    d = np.abs(step_sizes(problem)[problem.live_tokens])
    A = np.abs(problem.A.astype(np.float64)).reshape(problem.heads, -1).mean(axis=1)
    decay = float((d * A).mean())
    return F32_BOUND + F32_PER_TOKEN * min(longest, 1.0 / decay if decay > 0 else math.inf)


def unit_in_last_place(values: Float64, dtype: str) -> Float64:
    """Spacing of a float type at values, each rounded to that type first."""
    nearest = rounded(values, dtype).astype(np.float64)
    exponents = np.where(nearest == 0, _LEAST_EXPONENT[dtype], np.frexp(nearest)[1] - 1)
    spacing: Float64 = np.ldexp(1.0, np.maximum(exponents, _LEAST_EXPONENT[dtype]) - _MANTISSA_BITS[dtype])
    return spacing


def relative_norm(error: Float64, truth: Float64) -> float:
    """||error|| / ||truth||: 0 where both are 0, infinite where only truth is or where error is not finite."""
    if not np.isfinite(error).all():
        return math.inf
    scale = float(np.abs(truth).max(initial=0.0))
    worst = float(np.abs(error).max(initial=0.0))
    if worst == 0.0:
        return 0.0
    if scale == 0.0:
        return math.inf
    # Divided first, so that squares of tiny or huge values stay in range.
    return float(np.linalg.norm(error / scale) / np.linalg.norm(truth / scale))


def scaled_error(out: NDArray[Any], truth: Float64, rtol: float, atol: float) -> float:
    """The largest |out - truth| / (atol + rtol |truth|): at most 1 passes a peer's tolerance."""
    difference = np.abs(out.astype(np.float64) - truth) / (atol + rtol * np.abs(truth))
    return float(difference.max(initial=0.0)) if np.isfinite(difference).all() else math.inf


def excess(out: NDArray[Any], truth: Float64, dtype: str) -> Float64:
    """|out - truth|, less one unit in the last place of a 16-bit type. Equal infinities after rounding agree."""
    widened = out.astype(np.float64)
    if dtype == "f32":
        return np.abs(widened - truth)
    infinite = np.isinf(rounded(truth, dtype).astype(np.float64)) & np.isinf(widened)
    agree = infinite & (np.sign(widened) == np.sign(truth))
    finite = np.where(agree, truth, widened)
    # Rounding to infinity starts half a unit above the largest finite value, so the unit is taken at a finite place.
    largest = {"bf16": 3.38e38, "f16": 65504.0}[dtype]
    allowed = unit_in_last_place(np.clip(truth, -largest, largest), dtype)
    return np.maximum(np.abs(finite - truth) - allowed, 0.0)


def compare(result: ScanResult, problem: ScanProblem, truth: OracleResult | None = None) -> Errors:
    """Hold a result against the oracle.

    Args:
        result: what a backend gave.
        problem: what it was given.
        truth: the oracle's result where the caller has it already.
    """
    truth = oracle(problem) if truth is None else truth
    faults = _shape_faults(result, problem)
    if faults:
        return Errors(math.inf, math.inf, f32_bound(problem), tuple(faults))
    dead = result.y[~problem.live_tokens]
    if dead.size and (dead.astype(np.float32) != 0).any():
        faults.append("y must be 0 at padding and past the last offset, found other values")
    faults += _kept_faults(result, problem)
    y = relative_norm(excess(result.y, truth.y, problem.io), truth.y)
    return Errors(y, _state_error(result, problem, truth), f32_bound(problem), tuple(faults))


def _shape_faults(result: ScanResult, problem: ScanProblem) -> list[str]:
    faults = []
    sizes = (problem.heads, problem.head_dim)
    if result.y.shape != (problem.tokens, *sizes) or result.y.dtype != problem.x.dtype:
        faults.append(f"y: found {result.y.dtype} {list(result.y.shape)}")
    dtype = np.dtype(np.float32) if problem.state is None else problem.state.dtype
    if result.state.shape != (problem.slots, *sizes, problem.d_state) or result.state.dtype != dtype:
        faults.append(f"state: found {result.state.dtype} {list(result.state.shape)}")
    return faults


def _kept_faults(result: ScanResult, problem: ScanProblem) -> list[str]:
    """Slots that the scan does not store to but whose bits changed."""
    faults = []
    for name, before, after in (
        ("state", problem.state, result.state),
        ("state_scale", problem.state_scale, result.state_scale),
    ):
        if before is None or after is None:
            continue
        changed = [
            int(slot)
            for slot in np.flatnonzero(~problem.written)
            if np.ascontiguousarray(before[slot]).tobytes() != np.ascontiguousarray(after[slot]).tobytes()
        ]
        if changed:
            faults.append(f"{name}: slots that nothing stores to must keep their bits, slots {changed[:8]} changed")
    return faults


def _state_error(result: ScanResult, problem: ScanProblem, truth: OracleResult) -> float:
    if not truth.states:
        return 0.0
    slots = list(truth.states)
    wanted = np.stack([truth.states[slot] for slot in slots])
    found = result.state[slots]
    if result.state_scale is None:
        return relative_norm(excess(found, wanted, problem.state_dtype), wanted)
    values = found.astype(np.float64) * result.state_scale[slots].astype(np.float64)[..., None]
    step = np.abs(wanted).max(axis=-1, keepdims=True) / 127.0
    return relative_norm(np.maximum(np.abs(values - wanted) - step, 0.0), wanted)
