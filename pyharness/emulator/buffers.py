"""The arrays of a run: what a kernel may do with each, and how they are laid out in guarded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class EmulatorBuffer:
    """One array that a kernel may touch; the bytes between the elements of a strided view are not accessible.

    Attributes:
        name: as in ScanArgs: "x", "B", "state", ...
        array: any shape and dtype (ml_dtypes included), any strides that are not negative; a stride may exceed 2^31
            elements over a sparse mapping. Its address modulo 256 bytes is kept.
        writable: False makes a write an error.
        initialised: False poisons the contents (0xff bytes) and makes a read of what the run has not written an error.
        must_write: every element must be written by the run.
    """

    name: str
    array: npt.NDArray[np.generic]
    writable: bool = False
    initialised: bool = True
    must_write: bool = False


@dataclass(frozen=True)
class Runs:
    """The elements of a strided array as `count` runs of `run_bytes` contiguous bytes (outer dimensions only)."""

    run_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes

    @property
    def span(self) -> int:
        """Bytes from the first to behind the last element; 0 if there is none."""
        if 0 in self.shape:
            return 0
        return self.run_bytes + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def contains(self, offset: int) -> bool:
        """Whether the byte at `offset` from element 0 belongs to an element (dimensions must nest)."""
        if not 0 <= offset < self.span:
            return False
        for n, s in zip(self.shape, self.strides, strict=True):
            offset -= min(offset // s, n - 1) * s
        return offset < self.run_bytes


def runs_of(array: npt.NDArray[np.generic]) -> Runs:
    """Describes the elements of `array` as runs.

    Raises:
        ValueError: a stride is negative.
    """
    if any(s < 0 and n > 1 for n, s in zip(array.shape, array.strides, strict=True)):
        raise ValueError(f"strides must not be negative, found {array.strides}")
    if array.size == 0:
        return Runs(array.itemsize, (0,), (array.itemsize,))
    # Broadcast dimensions repeat the same bytes; the order of dimensions does not matter here.
    dims = sorted(((s, n) for n, s in zip(array.shape, array.strides, strict=True) if n > 1 and s > 0), reverse=True)
    run = array.itemsize
    while dims and dims[-1][0] == run:
        run *= dims.pop()[1]
    return Runs(run, tuple(n for _, n in dims), tuple(s for s, _ in dims))


@dataclass(frozen=True)
class Placed:
    """A buffer with its runs, the region it lies in and its element 0's offset there (bytes)."""

    buffer: EmulatorBuffer
    runs: Runs
    region: int
    offset: int
    host: int


@dataclass(frozen=True)
class Region:
    """One guarded block: a buffer, or several whose byte ranges overlap, at their original relative places."""

    host: int
    span: int
    writable: bool


def place(buffers: Sequence[EmulatorBuffer]) -> tuple[list[Region], list[Placed]]:
    """Groups buffers into regions, the writable regions first.

    Raises:
        ValueError: two buffers have one name, a stride is negative, or a writable buffer's array is read-only.
    """
    names = [b.name for b in buffers]
    if len(set(names)) != len(names):
        raise ValueError(f"buffer names must differ, found {names}")
    items: list[tuple[int, Runs, EmulatorBuffer]] = []
    for b in buffers:
        if b.writable and not b.array.flags.writeable:
            raise ValueError(f"buffer {b.name!r} is writable but its array is read-only: pass a copy")
        if b.must_write and not b.writable:
            raise ValueError(f"buffer {b.name!r} must be written but is not writable")
        items.append((int(b.array.__array_interface__["data"][0]), runs_of(b.array), b))
    items.sort(key=lambda item: (item[0], item[1].span))
    groups: list[list[tuple[int, Runs, EmulatorBuffer]]] = []
    end = 0
    for item in items:
        if groups and item[0] < end:
            groups[-1].append(item)
        else:
            groups.append([item])
            end = 0
        end = max(end, item[0] + item[1].span)
    groups.sort(key=lambda group: not any(b.writable for _, _, b in group))
    regions: list[Region] = []
    placed: list[Placed] = []
    for group in groups:
        low = group[0][0]
        span = max(host + runs.span for host, runs, _ in group) - low
        for host, runs, b in group:
            placed.append(Placed(b, runs, len(regions), host - low, host))
        regions.append(Region(low, span, any(b.writable for _, _, b in group)))
    return regions, placed


def element_index(array: npt.NDArray[np.generic], offset: int) -> tuple[int, ...]:
    """The index of the element that holds the byte at `offset` from element 0, or of the one before that byte."""
    index = [0] * array.ndim
    for d in sorted(range(array.ndim), key=lambda d: -array.strides[d]):
        if array.shape[d] > 1 and array.strides[d] > 0:
            index[d] = min(offset // array.strides[d], array.shape[d] - 1)
            offset -= index[d] * array.strides[d]
    return tuple(index)
