"""How far a result is from the oracle, and how far it may be.

Errors are relative norms, taken for each head of each sequence (y) and of each stored slot (state) on its own, so that
a wrong small slot does not hide behind a large one. The norm is that of the oracle's values. Sums cancel, and a group
may be a single element, so where that norm alone would refuse a group, its scale is the larger of that norm and the
norm of the root of the sum of squares of the terms, which is what independent roundings of the terms add up to:

    state: Q = exp(d A)^2 Q + (d B x)^2, from the square of the initial state
    y:     R = (max(sum_n S^2 C^2, sum_n Q C^2) + (D x)^2) gate(z)^2

The root of a sum of squares is at most the magnitude of the sum where the terms have one sign, and as large as it on
the average where signs are random: only true cancellation is given room. A group that is exactly zero without any
terms has to come out exactly zero.

What is allowed is taken for each head as well (`f32_bounds`), as errors are: heads forget at rates of their own, and a
mean over all of them would ask too much of the slow ones, which carry each rounding of exp the longest, and too little
of the fast ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.oracle import OracleResult, gate, initial_state, oracle, rounded, step_sizes
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult
from pyharness.spec import parse_id

Float64 = NDArray[np.float64]

#: Relative norm of the error that f32 arithmetic is allowed, before what a slowly decaying state accumulates.
F32_BOUND = 2e-6
#: And for each token that the state remembers: the rounding of exp and of the update.
F32_PER_TOKEN = 2.0**-22
_MANTISSA_BITS = {"f32": 23, "bf16": 7, "f16": 10}
_LEAST_EXPONENT = {"f32": -126, "bf16": -126, "f16": -14}
#: Least normal f32: an error this small says nothing of a value that is not exactly zero.
_TINY = 2.0**-126


@dataclass(frozen=True)
class Errors:
    """Errors of a result.

    Attributes:
        y, state: ||out - oracle|| / scale of the head of a sequence (y) or stored slot (state) that has the largest
            share of what it is allowed, after one unit in the last place of the storage type is taken off each element
            where that type has fewer bits than f32; the scale is the module's. 0 where nothing was stored to.
        y_bound, state_bound: what those two heads are allowed.
        faults: everything else that is wrong: rows that must be 0, slots that must keep their bits.
        y_at, state_at: where those errors are: "sequence 3, head 1", "slot 3, head 1".
    """

    y: float
    state: float
    y_bound: float
    state_bound: float
    faults: tuple[str, ...]
    y_at: str = ""
    state_at: str = ""

    @property
    def share(self) -> float:
        """The larger error as a share of what is allowed."""
        return max(self.y / self.y_bound, self.state / self.state_bound)

    @property
    def ok(self) -> bool:
        """Whether the result is as right as it has to be."""
        return not self.faults and self.share <= 1.0

    def __str__(self) -> str:
        y_at, state_at = (f" at {at}" if at else "" for at in (self.y_at, self.state_at))
        text = (
            f"relative error of y {self.y:.2e}{y_at}, allowed {self.y_bound:.2e}, "
            f"of state {self.state:.2e}{state_at}, allowed {self.state_bound:.2e}"
        )
        return "; ".join((text, *self.faults))


def f32_bounds(problem: ScanProblem) -> Float64:
    """What f32 arithmetic is allowed of each head, [heads]: 2e-6 + 2^-22 min(tokens, 1 / (mean d min |A|)).

    A state remembers the roundings of its last 1 / (d |A|) decays. The mean of the step sizes d is over the head's
    tokens of sequences that are not padding, the least |A| over its columns: the column that decays most slowly
    remembers longest, and is the largest part of the state's norm. `tokens` are those of the longest sequence.
    """
    lengths = problem.lengths[~problem.padding]
    longest = int(lengths.max(initial=0))
    if longest == 0:
        return np.full(problem.heads, F32_BOUND)
    d = np.abs(step_sizes(problem)[problem.live_tokens]).mean(axis=0)
    decay = d * np.abs(problem.A.astype(np.float64)).reshape(problem.heads, -1).min(axis=1)
    # Where nothing decays, or a step size is no number, every token counts.
    remembered: Float64 = 1.0 / np.fmax(decay, 1.0 / longest)
    return F32_BOUND + F32_PER_TOKEN * remembered


def _operand_error(result: ScanResult) -> float:
    """What the kernel's operands are allowed beyond f32 arithmetic: of tensor cores alone more than 0."""
    return parse_id(result.kernel).operand_error if "_" in result.kernel else 0.0


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
        bound = float(f32_bounds(problem).max()) + _operand_error(result)
        return Errors(math.inf, math.inf, bound, bound, tuple(faults))
    dead = result.y[~problem.live_tokens]
    if dead.size and (dead.astype(np.float32) != 0).any():
        faults.append("y must be 0 at padding and past the last offset, found other values")
    faults += _kept_faults(result, problem)
    bounds = f32_bounds(problem) + _operand_error(result)
    y, state = _y_errors(result, problem, truth), _state_errors(result, problem, truth)
    loud = {int(s) for s in y.names[y.above(bounds)]}
    if state.above(bounds).any():
        owners = _owners(problem)
        loud |= {owners[int(slot)] for slot in state.names[state.above(bounds)]}
    if loud:
        y_terms, state_terms = _root_sums(problem, sorted(loud))
        y, state = y.widened(y_terms), state.widened(state_terms)
    worst_y, worst_state = y.worst(bounds, "sequence"), state.worst(bounds, "slot")
    return Errors(
        worst_y.error, worst_state.error, worst_y.bound, worst_state.bound, tuple(faults), worst_y.at, worst_state.at
    )


@dataclass(frozen=True)
class _Worst:
    """The head with the largest share of its bound; nowhere ("") if none has an error."""

    error: float
    bound: float
    at: str


@dataclass(frozen=True, eq=False)
class _Groups:
    """Norms of errors and their scales by group: [names, heads], names being sequences or slots."""

    names: NDArray[np.int64]
    errors: Float64
    scales: Float64

    @property
    def ratios(self) -> Float64:
        """Errors over scales: 0 where there is no error, infinite where there is no scale or no number."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            ratios = np.where(self.errors == 0, 0.0, self.errors / self.scales)
        return np.where(np.isnan(ratios), np.inf, ratios)

    def above(self, bounds: Float64) -> NDArray[np.bool_]:
        """Which names have a head above its bound."""
        largest: Float64 = (self.ratios / bounds).max(axis=-1, initial=0.0)
        return largest > 1.0

    def widened(self, terms: dict[int, Float64]) -> _Groups:
        """The same with scales of at least the norms of the terms, [heads] by name; other names keep theirs."""
        scales = self.scales.copy()
        for row, name in enumerate(self.names):
            if int(name) in terms:
                scales[row] = np.maximum(scales[row], terms[int(name)])
        return _Groups(self.names, self.errors, scales)

    def worst(self, bounds: Float64, kind: str) -> _Worst:
        """The group with the largest share of its head's bound."""
        ratios = self.ratios
        if not ratios.any():
            return _Worst(0.0, float(bounds.max()), "")
        row, head = np.unravel_index(int((ratios / bounds).argmax()), ratios.shape)
        return _Worst(float(ratios[row, head]), float(bounds[head]), f"{kind} {int(self.names[row])}, head {int(head)}")


def _audible(error: Float64, truth: Float64) -> Float64:
    """Errors without those below what f32 can hold of a value that is not exactly zero."""
    return np.where((error <= _TINY) & (truth != 0), 0.0, error)


def _y_errors(result: ScanResult, problem: ScanProblem, truth: OracleResult) -> _Groups:
    filled = np.flatnonzero(problem.lengths > 0)
    starts = problem.offsets[filled]
    end = int(problem.offsets[-1])

    def norms(values: Float64) -> Float64:
        if not filled.size:
            return np.zeros((0, problem.heads))
        by_token = np.einsum("thp,thp->th", values[:end], values[:end])
        live: Float64 = np.sqrt(np.add.reduceat(by_token, starts, axis=0))[~problem.padding[filled]]
        return live

    error = _audible(excess(result.y, truth.y, problem.io), truth.y)
    names = filled[~problem.padding[filled]].astype(np.int64)
    return _Groups(names, norms(error), norms(truth.y))


def _state_errors(result: ScanResult, problem: ScanProblem, truth: OracleResult) -> _Groups:
    slots = np.array(list(truth.states), np.int64)
    if not slots.size:
        return _Groups(slots, np.zeros((0, problem.heads)), np.zeros((0, problem.heads)))
    wanted = np.stack([truth.states[int(slot)] for slot in slots])
    found = result.state[slots]
    if result.state_scale is None:
        error = excess(found, wanted, problem.state_dtype)
    else:
        values = found.astype(np.float64) * result.state_scale[slots].astype(np.float64)[..., None]
        step = np.abs(wanted).max(axis=-1, keepdims=True) / 127.0
        error = np.maximum(np.abs(values - wanted) - step, 0.0)
    error = _audible(error, wanted)
    norms = (np.sqrt(np.einsum("shpn,shpn->sh", values, values)) for values in (error, wanted))
    return _Groups(slots, *norms)


def _owners(problem: ScanProblem) -> dict[int, int]:
    """The sequence that stores to each slot."""
    final = np.arange(problem.sequences) if problem.state is None else problem.resolved_write
    owners = {int(slot): s for s, slot in enumerate(final) if not problem.padding[s]}
    if problem.checkpoint_slots is not None:
        sequences = np.repeat(np.arange(problem.sequences), problem.lengths)
        owners |= {int(slot): int(s) for slot, s in zip(problem.checkpoint_slots, sequences, strict=False)}
    return owners


def _root_sums(problem: ScanProblem, sequences: list[int]) -> tuple[dict[int, Float64], dict[int, Float64]]:
    """Norms, [heads], of the root of the sum of squares of the terms: of y by sequence, of states by slot."""
    A = problem.A.astype(np.float64).reshape(problem.heads, 1, -1)
    group = np.arange(problem.heads) // (problem.heads // problem.groups)
    d = step_sizes(problem)
    y: dict[int, Float64] = {}
    states: dict[int, Float64] = {}
    for s in sequences:
        S = initial_state(problem, s)
        Q = S**2
        total = np.zeros(problem.heads)
        for t in range(int(problem.offsets[s]), int(problem.offsets[s + 1])):
            x = problem.x[t].astype(np.float64)
            B, C = (array[t].astype(np.float64)[group] for array in (problem.B, problem.C))
            decay = np.exp(d[t][:, None, None] * A)
            term = (d[t][:, None] * x)[:, :, None] * B[:, None, :]
            S, Q = decay * S + term, decay**2 * Q + term**2
            square = C[:, :, None] ** 2
            R = np.maximum(S**2 @ square, Q @ square)[:, :, 0]
            if problem.D is not None:
                R += (problem.D.astype(np.float64)[:, None] * x) ** 2
            if problem.z is not None:
                R *= gate(problem.z[t].astype(np.float64)) ** 2
            total += R.sum(axis=1)
            if problem.checkpoint_slots is not None and problem.checkpoint_slots[t] != -1:
                states[int(problem.checkpoint_slots[t])] = np.sqrt(Q.sum(axis=(1, 2)))
        y[s] = np.sqrt(total)
        slot = s if problem.state is None else int(problem.resolved_write[s])
        if slot != -1:
            states[slot] = np.sqrt(Q.sum(axis=(1, 2)))
    return y, states


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
