"""ggml's SSM_SCAN in its own terms: operands and result laid out as that op has them, computed by our kernels.

An engine built on ggml hands over its tensors as they are, memory with `ne` and `nb`, and compares the result word
for word in place. The op differs from a `ScanProblem` in these points:

- Every sequence has as many tokens as the others; `ids` names the slot that each starts from, and the pool `s` itself
  is only read. dt always goes through softplus, with the threshold of 20; there is no D, no z and no bias.
- The result is one row of f32: y in the order of x, then K planes of states, each [d_state, head_dim, heads,
  sequences]. Plane 0 is the state after the last token and plane k that of k tokens before, to which a rejected draft
  rolls back. Planes for which there are too few tokens are not written there; here they are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.errors import InvalidProblem
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult, scan

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor as ggml describes it.

    Attributes:
        memory: the bytes or elements that it lies in, one axis, f32 or i32.
        ne: elements along each axis, the fastest first.
        nb: bytes from one element to the next along each axis; None is contiguous.
        offset: bytes from the start of the memory to the first element.
    """

    memory: Array
    ne: Sequence[int]
    nb: Sequence[int] | None = None
    offset: int = 0

    @property
    def array(self) -> Array:
        """The same elements as a NumPy view, whose axes run the other way: the slowest first.

        Raises:
            InvalidProblem: an element would lie outside of the memory.
        """
        item = self.memory.itemsize
        nb = self.nb if self.nb is not None else [item * int(np.prod(self.ne[:axis])) for axis in range(len(self.ne))]
        last = self.offset + sum((n - 1) * b for n, b in zip(self.ne, nb, strict=True)) + item
        if not self.memory.flags.c_contiguous or self.offset < 0 or last > self.memory.nbytes:
            raise InvalidProblem(
                f"a tensor of ne {list(self.ne)}, nb {list(nb)} at {self.offset} must lie within its "
                f"{self.memory.nbytes} contiguous bytes: its last byte is {last}"
            )
        view: Array = np.ndarray(
            tuple(reversed(self.ne)), self.memory.dtype, self.memory.data, self.offset, tuple(reversed(nb))
        )
        return view


def tensor(array: Array) -> Tensor:
    """A NumPy array as the tensor whose axes run the other way, copied if it is not contiguous."""
    plain = np.ascontiguousarray(array)
    return Tensor(plain.reshape(-1), tuple(reversed(plain.shape)))


def problem_of(
    s: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, ids: Tensor, K: int = 1
) -> ScanProblem:
    """The `ScanProblem` of an SSM_SCAN, over a pool of the slots of s and, behind them, K planes of new states.

    Args:
        s: f32 [d_state, head_dim, heads, slots].
        x: f32 [head_dim, heads, tokens, sequences].
        dt: f32 [heads, tokens, sequences].
        A: f32 [1, heads] (Mamba-2) or [d_state, heads] (Mamba-1).
        B, C: f32 [d_state, groups, tokens, sequences].
        ids: i32 [sequences], the slot of s that each sequence starts from.
        K: planes of states in the result.

    Raises:
        InvalidProblem: an operand does not fit the others.
    """
    state, xs, dts, Bs, Cs = (t.array for t in (s, x, dt, B, C))
    for name, array, axes in (("s", state, 4), ("x", xs, 4), ("dt", dts, 3), ("A", A.array, 2), ("B", Bs, 4)):
        if array.ndim != axes:
            raise InvalidProblem(f"{name}: wanted {axes} axes, found ne {list(reversed(array.shape))}")
    if K < 1:
        raise InvalidProblem(f"K: wanted at least 1 plane of states, found {K}")
    sequences, tokens, heads, head_dim = xs.shape
    slots, d_state = state.shape[0], state.shape[3]
    if dts.shape != (sequences, tokens, heads):
        raise InvalidProblem(f"dt: wanted ne {[heads, tokens, sequences]}, found {list(reversed(dts.shape))}")
    if Cs.shape != Bs.shape or Bs.shape[:2] != (sequences, tokens):
        raise InvalidProblem(
            f"B, C: wanted one shape of {tokens} tokens and {sequences} sequences, found ne "
            f"{list(reversed(Bs.shape))} and {list(reversed(Cs.shape))}"
        )
    if A.ne[1] != heads or A.ne[0] not in (1, d_state):
        raise InvalidProblem(f"A: wanted ne [1 or {d_state}, {heads}], found {list(A.ne)}")
    packed: dict[str, Any] = {name: _packed(array) for name, array in (("x", xs), ("dt", dts), ("B", Bs), ("C", Cs))}
    pool = np.zeros((slots + K * sequences, heads, head_dim, d_state), np.float32)
    pool[:slots] = state
    checkpoints = np.full((sequences, tokens), -1, np.int32)
    for plane in range(1, min(K, tokens)):
        checkpoints[:, tokens - 1 - plane] = slots + plane * sequences + np.arange(sequences)
    return ScanProblem(
        **packed,
        A=np.ascontiguousarray(A.array[:, 0] if A.ne[0] == 1 and d_state != 1 else A.array),
        cu_seqlens=np.arange(0, (sequences + 1) * tokens, tokens, dtype=np.int32),
        state=pool,
        read_slots=np.ascontiguousarray(ids.array),
        write_slots=slots + np.arange(sequences, dtype=np.int32),
        checkpoint_slots=checkpoints.reshape(-1) if K > 1 else None,
    )


def ssm_scan(
    s: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    ids: Tensor,
    K: int = 1,
    *,
    kernel: str | None = None,
    backend: str = "auto",
) -> NDArray[np.float32]:
    """Run an SSM_SCAN. Operands are those of `problem_of`, `kernel` and `backend` those of `scan`.

    Returns:
        f32 [head_dim * heads * tokens * sequences + K * d_state * head_dim * heads * sequences]: y, then the planes.

    Raises:
        InvalidProblem: an operand does not fit the others.
        NoKernel: nothing takes the problem.
    """
    problem = problem_of(s, x, dt, A, B, C, ids, K)
    return result_of(scan(problem, kernel, backend), s.ne[3])


def result_of(result: ScanResult, slots: int) -> NDArray[np.float32]:
    """The op's one row of f32 from the result of `problem_of`, of which the first `slots` slots are those of s."""
    return np.concatenate((result.y.reshape(-1), result.state[slots:].reshape(-1)))


def _packed(array: Array) -> Array:
    """[sequences, tokens, ...] as [sequences * tokens, ...], without a copy where the strides allow."""
    rows = array.reshape(-1, *array.shape[2:])
    inner = rows[0] if rows.shape[0] else rows
    return rows if inner.flags.c_contiguous else np.ascontiguousarray(rows)
