"""Host memory in the place of a device's, for what lays arrays out and packs arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyharness.problem import DTYPES


class HostMemory:
    """Device memory on the host; its addresses are real."""

    def __init__(self, _: Any, nbytes: int) -> None:
        self.nbytes = nbytes
        # Bases at multiples of 256 bytes, as an allocator of device memory gives.
        whole = np.zeros(nbytes + 256, np.uint8)
        start = -whole.ctypes.data % 256
        self.bytes = whole[start : start + nbytes]
        self.address = self.bytes.ctypes.data

    def fill(self, byte: int, offset: int = 0, nbytes: int | None = None) -> None:
        end = self.nbytes if nbytes is None else offset + nbytes
        assert 0 <= offset <= end <= self.nbytes
        self.bytes[offset:end] = byte

    def write(self, array: Any, offset: int = 0) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes[offset : offset + data.nbytes] = data

    def read(self, offset: int = 0, nbytes: int | None = None) -> Any:
        return self.bytes[offset : self.nbytes if nbytes is None else offset + nbytes].copy()

    def repeat(self, nbytes: int, offset: int) -> None:
        assert offset + nbytes <= self.nbytes
        self.bytes[offset : offset + nbytes] = self.bytes[:nbytes]

    def free(self) -> None:
        pass


def at(address: int, dtype: str, count: int) -> Any:
    """Elements at an address of host memory."""
    item = DTYPES[dtype].itemsize
    words = (np.ctypeslib.ctypes.c_uint8 * (count * item)).from_address(address)
    return np.frombuffer(words, np.uint8).view(DTYPES[dtype])
