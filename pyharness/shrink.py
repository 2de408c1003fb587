"""Making a problem that fails smaller while it still fails: parts are taken away, what stays keeps its values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.errors import InvalidProblem
from pyharness.problem import ScanProblem

Array = NDArray[Any]

_TOKEN_ARRAYS = ("x", "dt", "B", "C", "z", "checkpoint_slots")


def shrink(problem: ScanProblem, fails: Callable[[ScanProblem], bool], most_runs: int = 400) -> ScanProblem:
    """The smallest problem found that still fails: fewer sequences, tokens, heads, rows and options, plainer strides.

    Args:
        fails: whether a problem still shows the failure.
        most_runs: calls of `fails` after which the smallest so far is good enough.
    """
    runs, smaller = 0, True
    while smaller and runs < most_runs:
        smaller = False
        for candidate in candidates(problem):
            runs += 1
            if fails(candidate):
                problem, smaller = candidate, True
                break
            if runs == most_runs:
                break
    return problem


def candidates(problem: ScanProblem) -> Iterator[ScanProblem]:
    """Problems that are each a step smaller, largest steps first; those that are not legal are left out."""
    for make in _steps(problem):
        try:
            yield make()
        except InvalidProblem:
            continue


def take(problem: ScanProblem, parts: Sequence[tuple[int, int]]) -> ScanProblem:
    """Some sequences of a problem, in order, each cut to its first tokens; what is past the last offset goes.

    Args:
        parts: (sequence, tokens) of each that stays.

    Raises:
        InvalidProblem: what is left is not legal alone.
    """
    index = [s for s, _ in parts]
    tokens = np.concatenate(
        [np.arange(problem.offsets[s], problem.offsets[s] + n) for s, n in parts] or [np.empty(0)]
    ).astype(np.int64)
    whole = bool(tokens.size) and tokens[-1] - tokens[0] + 1 == tokens.size
    place: Any = slice(int(tokens[0]), int(tokens[-1]) + 1) if whole else tokens
    changes: dict[str, Any] = {"cu_seqlens": np.concatenate(([0], np.cumsum([n for _, n in parts]))).astype(np.int32)}
    for name in _TOKEN_ARRAYS:
        array = getattr(problem, name)
        if array is not None:
            # Views keep strides and alignment; tokens that are not neighbours are copied.
            changes[name] = array[place] if whole else np.ascontiguousarray(array[place])
    if problem.state is not None:
        changes["read_slots"] = problem.resolved_read[index].astype(np.int32)
        if problem.write_slots is not None:
            changes["write_slots"] = problem.write_slots[index]
    if problem.resume is not None:
        changes["resume"] = problem.resume[index]
    if problem.sequence_order is not None:
        order = [index.index(int(s)) for s in problem.sequence_order if int(s) in index]
        changes["sequence_order"] = np.array(order, np.int32)
    return replace(problem, **changes)


def take_heads(problem: ScanProblem, groups: range, count: int) -> ScanProblem:
    """The first `count` heads of each of some groups, copied together."""
    ratio = problem.heads // problem.groups
    heads = [group * ratio + head for group in groups for head in range(count)]
    changes: dict[str, Any] = {name: np.ascontiguousarray(getattr(problem, name)[:, groups]) for name in ("B", "C")}
    for name in ("x", "dt", "z", "state", "state_scale"):
        if getattr(problem, name) is not None:
            changes[name] = np.ascontiguousarray(getattr(problem, name)[:, heads])
    for name in ("A", "D", "dt_bias"):
        if getattr(problem, name) is not None:
            changes[name] = np.ascontiguousarray(getattr(problem, name)[heads])
    return replace(problem, **changes)


def take_rows(problem: ScanProblem, first: int, last: int) -> ScanProblem:
    """Some rows of every head, copied together."""
    changes: dict[str, Any] = {}
    for name in ("x", "z", "state", "state_scale"):
        if getattr(problem, name) is not None:
            changes[name] = np.ascontiguousarray(getattr(problem, name)[:, :, first:last])
    return replace(problem, **changes)


def plain_strides(problem: ScanProblem) -> ScanProblem:
    """The same values in contiguous arrays."""
    names = ("x", "dt", "B", "C", "z", "state", "state_scale")
    found = {name: getattr(problem, name) for name in names}
    return replace(problem, **{n: a.copy() for n, a in found.items() if a is not None})


def _steps(problem: ScanProblem) -> Iterator[Callable[[], ScanProblem]]:
    every = [(s, int(n)) for s, n in enumerate(problem.lengths)]
    half = len(every) // 2
    if half:
        yield partial(take, problem, every[:half])
        yield partial(take, problem, every[half:])
    if problem.tokens > sum(n for _, n in every):
        yield partial(take, problem, every)
    if len(every) > 1:
        for s in range(len(every)):
            yield partial(take, problem, every[:s] + every[s + 1 :])
    for s, n in every:
        for fewer in sorted({n // 2, n - 8, n - 1}):
            if 0 <= fewer < n:
                yield partial(take, problem, [*every[:s], (s, fewer), *every[s + 1 :]])
    groups, rows = problem.groups, problem.head_dim
    ratio = problem.heads // groups
    for kept in (range(groups // 2), range(groups // 2, groups), range(groups - 1)):
        if 0 < len(kept) < groups:
            yield partial(take_heads, problem, kept, ratio)
    for count in sorted({1, ratio - 1} - {0, ratio}):
        yield partial(take_heads, problem, range(groups), count)
    for first, last in sorted({(0, rows // 2), (rows // 2, rows), (0, rows - 1)}):
        if 0 < last - first < rows:
            yield partial(take_rows, problem, first, last)
    for name in ("z", "D", "dt_bias", "dt_limit", "checkpoint_slots", "sequence_order", "rounding_key", "write_slots"):
        if getattr(problem, name) is not None:
            yield partial(_without, problem, name)
    if problem.state is not None and problem.state_dtype == "f32":
        yield partial(_without, problem, "state", "read_slots", "write_slots", "resume", "checkpoint_slots")
    if _spread_out(problem):
        yield partial(plain_strides, problem)


def _without(problem: ScanProblem, *names: str) -> ScanProblem:
    nothing: dict[str, Any] = dict.fromkeys(names)
    return replace(problem, **nothing)


def _spread_out(problem: ScanProblem) -> bool:
    """Whether an array has gaps or an odd base."""
    arrays = (getattr(problem, name) for name in ("x", "dt", "B", "C", "z", "state"))
    return any(a is not None and (not a.flags.c_contiguous or a.ctypes.data % 16) for a in arrays)
