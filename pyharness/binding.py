"""A problem as a kernel sees it: named arrays, and the ScanArgs that point at them.

This is the only place that turns a `ScanProblem` into arguments. Backends place the arrays (emulator buffers, device
memory) and hand the addresses back; nothing else about an argument depends on the backend.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.args import Flag, pack
from pyharness.problem import DTYPES, ScanProblem, element_stride
from pyharness.spec import Plan

Array = NDArray[Any]

#: Vector accesses are this many bytes.
VECTOR_BYTES = 16
#: A pool that spans more bytes than this is copied into a sparse mapping, so that gaps between slots cost nothing.
SPARSE_BYTES = 256 * 2**20
#: MAP_NORESERVE of Linux, which `mmap` names from Python 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_POISON = 0xFF

_OPTIONAL_INPUTS = (
    "D",
    "dt_bias",
    "z",
    "cu_seqlens",
    "read_slots",
    "write_slots",
    "resume",
    "checkpoint_slots",
    "sequence_order",
    "rounding_key",
)
_VECTORS = {
    "x": Flag.VECTOR_X,
    "z": Flag.VECTOR_Z,
    "y": Flag.VECTOR_Y,
    "B": Flag.VECTOR_B,
    "C": Flag.VECTOR_C,
    "state": Flag.VECTOR_STATE,
}


@dataclass(frozen=True, eq=False)
class NamedArray:
    """An array that a kernel is given.

    Attributes:
        name: the pointer of ScanArgs that takes its address.
        array: host memory, strides as they are.
        writable: the kernel may store to it; its contents come back.
        initialised: its contents mean something before the launch.
        must_write: the kernel has to store to every element.
    """

    name: str
    array: Array
    writable: bool = False
    initialised: bool = True
    must_write: bool = False


@dataclass(frozen=True, eq=False)
class Binding:
    """Arrays and arguments of one call.

    Attributes:
        buffers: every array that is present, each pointer of ScanArgs at most once.
        pack: from the address of each buffer, in bytes by name, to the bytes of ScanArgs.
    """

    buffers: tuple[NamedArray, ...]
    pack: Callable[[Mapping[str, int]], bytes]


@dataclass(frozen=True, eq=False)
class Outputs:
    """Fresh arrays that a call stores to: y, the state, and the scales of an i8 state."""

    y: Array
    state: Array
    state_scale: Array | None


def outputs(problem: ScanProblem) -> Outputs:
    """Allocate the results of a problem, poisoned where the scan has to store: inputs are never changed.

    y is contiguous io [tokens, heads, head_dim]. The state is a copy of the pool with the same strides and the same
    alignment, so that a kernel meets the layout that the caller has; bytes between slots are not copied. A pool
    that spans more than SPARSE_BYTES is copied into a sparse private mapping. Without a pool the state is f32
    [sequences, heads, head_dim, d_state].
    """
    y = _poisoned((problem.tokens, problem.heads, problem.head_dim), DTYPES[problem.io])
    if problem.state is None:
        shape = (problem.sequences, problem.heads, problem.head_dim, problem.d_state)
        return Outputs(y, _poisoned(shape, DTYPES["f32"]), None)
    scale = None if problem.state_scale is None else copied_pool(problem.state_scale)
    return Outputs(y, copied_pool(problem.state), scale)


def _poisoned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array of NaN: an element that nothing stores to shows."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[...] = _POISON
    return array


def sparse_memory(size: int) -> mmap.mmap:
    """Private zeroed memory that takes room only where it is touched."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def copied_pool(pool: Array) -> Array:
    """A copy of [slots, ...] with the strides and the alignment of the original."""
    slots, stride, item = pool.shape[0], element_stride(pool), pool.itemsize
    inner = math.prod(pool.shape[1:])
    span = ((slots - 1) * stride + inner) * item if slots else 0
    shift = pool.ctypes.data % VECTOR_BYTES
    memory: Any
    if span > SPARSE_BYTES:
        memory = sparse_memory(span + VECTOR_BYTES)
        offset = shift
    else:
        memory = np.full(span + 2 * VECTOR_BYTES, _POISON, np.uint8)
        offset = (shift - memory.ctypes.data) % VECTOR_BYTES
    # The inner strides of a size of 1 are free in the original; here they are plain.
    plain = [item * math.prod(pool.shape[axis + 1 :]) for axis in range(1, pool.ndim)]
    copy: Array = np.ndarray(pool.shape, pool.dtype, memory, offset, (stride * item, *plain))
    for slot in range(slots):
        copy[slot] = pool[slot]
    return copy


def bind(problem: ScanProblem, plan: Plan, results: Outputs) -> Binding:
    """The arrays and arguments with which a plan runs a problem.

    Without a pool the kernel sees the result as a pool of one slot a sequence, and every sequence fresh.
    """
    pooled = problem.state is not None
    buffers = [NamedArray(name, getattr(problem, name)) for name in ("x", "dt", "A", "B", "C")]
    buffers.append(NamedArray("y", results.y, writable=True, initialised=False, must_write=True))
    # A kernel may read the slot of a fresh sequence: what stands there, NaN where there is no pool, does not matter.
    buffers.append(NamedArray("state", results.state, writable=True, must_write=not pooled))
    if results.state_scale is not None:
        buffers.append(NamedArray("state_scale", results.state_scale, writable=True))
    given = {name: getattr(problem, name) for name in _OPTIONAL_INPUTS}
    if not pooled:
        given["resume"] = np.zeros(problem.sequences, np.uint8)
    buffers += [NamedArray(name, array) for name, array in given.items() if array is not None]
    if plan.workspace_bytes:
        workspace = np.zeros(plan.workspace_bytes, np.uint8)
        buffers.append(NamedArray("workspace", workspace, writable=True, initialised=False))
    arrays = {buffer.name: buffer.array for buffer in buffers}
    scalars = _scalars(problem, plan, arrays)
    flags = _option_flags(problem)

    def pack_at(addresses: Mapping[str, int]) -> bytes:
        values: dict[str, int | float] = dict(scalars)
        for name in arrays:
            values[name] = addresses[name]
        values["flags"] = int(flags | vector_flags(arrays, addresses))
        return pack(values)

    return Binding(tuple(buffers), pack_at)


def _scalars(problem: ScanProblem, plan: Plan, arrays: Mapping[str, Array]) -> dict[str, int | float]:
    values: dict[str, int | float] = {
        f"{name}_stride": element_stride(arrays[name])
        for name in ("x", "z", "y", "dt", "B", "C", "state", "state_scale")
        if name in arrays
    }
    low, high = problem.dt_limit if problem.dt_limit is not None else (0.0, 0.0)
    return values | {
        "slots": problem.slots,
        "workspace_bytes": plan.workspace_bytes,
        "tokens": problem.tokens,
        "sequences": problem.sequences,
        "heads": problem.heads,
        "head_dim": problem.head_dim,
        "groups": problem.groups,
        "d_state": problem.d_state,
        # Without a pool there is no padding, whatever number stands for it.
        "pad_slot": -1 if problem.state is None else int(problem.pad_slot),
        "dt_min": float(low),
        "dt_max": float(high),
        "lanes": plan.lanes,
        "rows": plan.rows,
        "chunk": plan.chunk,
    }


def _option_flags(problem: ScanProblem) -> Flag:
    flags = Flag(0)
    if problem.dt_softplus:
        flags |= Flag.SOFTPLUS
    if problem.per_column_a:
        flags |= Flag.PER_COLUMN_A
    if problem.dt_is_f32:
        flags |= Flag.DT_F32
    if problem.dt_limit is not None:
        flags |= Flag.DT_LIMIT
    return flags


def vector_flags(arrays: Mapping[str, Array], addresses: Mapping[str, int]) -> Flag:
    """Which arrays take 16-byte accesses: base, first stride and every inner row are multiples of 16 bytes."""
    flags = Flag(0)
    for name, flag in _VECTORS.items():
        if name not in arrays:
            continue
        array = arrays[name]
        row = array.shape[-1] * array.itemsize
        step = element_stride(array) * array.itemsize
        if addresses[name] % VECTOR_BYTES == row % VECTOR_BYTES == step % VECTOR_BYTES == 0:
            flags |= flag
    return flags
