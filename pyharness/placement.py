"""Placing host arrays in device memory so that every access outside them shows.

Arrays keep their address modulo 256 and their strides, and lie between guard zones. What no array fills is poison.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

#: Bytes before and after each region that nothing may change, and what they hold.
GUARD_BYTES = 4096
GUARD_PATTERN = 0xA5
#: What memory holds that no array filled: NaN in every float type.
POISON = 0xFF
#: Device addresses equal host addresses modulo this many bytes.
ADDRESS_MODULUS = 256
#: A span at least this large of which less than a quarter is elements is copied run by run instead of whole.
SPARSE_SPAN = 256 * 2**20

Bytes = NDArray[np.uint8]
Array = NDArray[Any]


class Buffer(Protocol):
    """A named host array of a launch.

    Attributes:
        name: the field of ScanArgs that will hold its address.
        array: any dtype, shape and strides; arrays may overlap.
        writable: the kernel may write it, and it is copied back.
        initialised: its contents go to the device; otherwise the kernel meets poison.
        must_write: every element must have been written when the kernel ends.
    """

    @property
    def name(self) -> str: ...

    @property
    def array(self) -> Array: ...

    @property
    def writable(self) -> bool: ...

    @property
    def initialised(self) -> bool: ...

    @property
    def must_write(self) -> bool: ...


def bounds(array: Array) -> tuple[int, int]:
    """First byte of an array and the byte after its last, as host addresses."""
    start = int(array.__array_interface__["data"][0])
    if array.size == 0:
        return start, start
    reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    return start + sum(min(step, 0) for step in reach), start + sum(max(step, 0) for step in reach) + array.itemsize


def bits(array: Array) -> Array:
    """The same elements as unsigned integers: comparable, NaN and bf16 included."""
    return array.view(f"u{array.itemsize}")


@dataclass(frozen=True, eq=False)
class Region:
    """Buffers whose spans overlap, placed in one device allocation between two guard zones.

    Attributes:
        low: host address of the first byte.
        span: bytes from the first byte of the first buffer to the last byte of the last.
        buffers: in order of address.
    """

    low: int
    span: int
    buffers: tuple[Buffer, ...]

    @property
    def lead(self) -> int:
        """Bytes of the allocation before the span: the guard zone, then the host address modulo 256."""
        return GUARD_BYTES + self.low % ADDRESS_MODULUS

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation."""
        return self.lead + self.span + GUARD_BYTES

    @property
    def sparse(self) -> bool:
        """Whether most of a large span is gaps, so that it is not copied whole."""
        used = sum(buffer.array.nbytes for buffer in self.buffers)
        return self.span >= SPARSE_SPAN and 4 * used < self.span

    def offset(self, buffer: Buffer) -> int:
        """Byte of the allocation at which element [0, 0, ...] of a buffer lies."""
        return self.lead + int(buffer.array.__array_interface__["data"][0]) - self.low

    def view(self, image: Bytes, buffer: Buffer) -> Array:
        """The elements of a buffer within the allocation's bytes, as unsigned integers."""
        array = buffer.array
        kind = np.dtype(f"u{array.itemsize}")
        return np.ndarray(array.shape, kind, image.data, self.offset(buffer), array.strides)

    def image(self) -> Bytes:
        """What the allocation holds before the run."""
        image = np.full(self.nbytes, POISON, np.uint8)
        image[: self.lead] = GUARD_PATTERN
        image[self.lead + self.span :] = GUARD_PATTERN
        for buffer in self.buffers:
            if buffer.initialised and buffer.array.size:
                self.view(image, buffer)[...] = bits(buffer.array)
        return image

    def stray_write(self, before: Bytes, after: Bytes) -> str:
        """Where a byte changed that no writable buffer owns, or an empty string."""
        changed = before != after
        for buffer in self.buffers:
            if buffer.writable and buffer.array.size:
                shape, strides = (*buffer.array.shape, buffer.array.itemsize), (*buffer.array.strides, 1)
                owned: Array = np.ndarray(shape, np.bool_, changed.data, self.offset(buffer), strides)
                owned[...] = False
        return self.describe(int(np.flatnonzero(changed)[0])) if changed.any() else ""

    def describe(self, byte: int) -> str:
        """A byte of the allocation in terms of the nearest buffer."""

        def distance(buffer: Buffer) -> int:
            low, high = bounds(buffer.array)
            position = self.low + byte - self.lead
            return max(low - position, position - high + 1, 0)

        nearest = min(self.buffers, key=distance)
        low, high = bounds(nearest.array)
        position = self.low + byte - self.lead
        if position < low:
            return f"{nearest.name}: {low - position} bytes before its first element"
        if position >= high:
            return f"{nearest.name}: {position - high} bytes past its last element"
        kind = "between its elements" if nearest.writable else "of a read-only array"
        return f"{nearest.name}: byte {position - low} of its span, {kind}"


def regions(buffers: Iterable[Buffer]) -> list[Region]:
    """Group buffers so that those whose spans overlap share a region."""
    found: list[tuple[int, int, list[Buffer]]] = []
    # Empty arrays come last: they overlap nothing, and have a place of their own.
    for buffer in sorted(buffers, key=lambda item: (item.array.size == 0, bounds(item.array))):
        low, high = bounds(buffer.array)
        if found and low < found[-1][1] and high > low:
            first, last, members = found.pop()
            found.append((first, max(last, high), [*members, buffer]))
        else:
            found.append((low, high, [buffer]))
    return [Region(low, high - low, tuple(members)) for low, high, members in found]


def unwritten(buffer: Buffer, values: Array) -> str:
    """The first element of a `must_write` buffer that still holds poison, or an empty string.

    A kernel cannot write that NaN: arithmetic gives another one. Integers may equal the poison and are not looked at.
    """
    if not buffer.must_write or buffer.initialised or np.issubdtype(buffer.array.dtype, np.integer):
        return ""
    poison = values == np.iinfo(values.dtype).max
    if not poison.any():
        return ""
    index = [int(axis) for axis in np.argwhere(poison)[0]]
    return f"{buffer.name}{index} ({int(poison.sum())} of {poison.size} elements)"


def runs(array: Array) -> Iterator[tuple[Any, int]]:
    """Index of each contiguous run of an array, and its byte offset from element [0, 0, ...]."""
    axis, expected = array.ndim, array.itemsize
    while axis > 0 and (array.shape[axis - 1] == 1 or array.strides[axis - 1] == expected):
        axis -= 1
        expected *= array.shape[axis]
    for index in np.ndindex(array.shape[:axis]):
        yield (*index, ...), sum(position * stride for position, stride in zip(index, array.strides, strict=False))
