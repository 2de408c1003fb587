"""Arrays whose tokens lie side by side, turned so that a scan can read them: templates/kernels/transpose.cu.

Scans want the channels of a token side by side. A convolution over tokens leaves them the other way, [batch, channels,
tokens] in memory, and a framework's copy to the other order reads memory with gaps; the kernel here moves tiles.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numpy.typing import NDArray

from pyharness import toolchain
from pyharness.spec import Launch, Plan
from pyharness.strides import merged

SOURCE = toolchain.ROOT / "templates" / "kernels" / "transpose.cu"
#: What the kernel is called where others have an id.
NAME = "transpose"
#: Arrays of one launch.
MOST_ARRAYS = 5
_THREADS = 256
_TOKENS_OF_TILE = 64
_WORD = 4
_ARRAY = struct.Struct("<QQqqq")
_SIZES = struct.Struct("<ii")
ARGUMENT_BYTES = MOST_ARRAYS * _ARRAY.size + _SIZES.size
#: Sequences and tiles of rows that a grid has room for.
_MOST_BLOCKS = 65535


@dataclass(frozen=True)
class Sideways:
    """An array [batch, tokens, ...] whose tokens lie side by side.

    Attributes:
        shape: of the array, and of the contiguous one that takes its place.
        itemsize: 2 or 4 bytes.
        batch_stride, row_stride: between sequences and between the elements of a token, in elements.
    """

    shape: tuple[int, ...]
    itemsize: int
    batch_stride: int
    row_stride: int

    @property
    def rows(self) -> int:
        """Elements of a token."""
        return math.prod(self.shape[2:])

    @property
    def tiles(self) -> int:
        """Of rows; a tile is as wide as a warp stores words."""
        return -(-self.rows * self.itemsize // (32 * _WORD))


def sideways(array: NDArray[Any]) -> Sideways | None:
    """An array [batch, tokens, rows] or [batch, tokens, outer, inner] as one to turn, or None if the kernel does not.

    It does where tokens are contiguous, rows at one distance, and the rows of a token whole words of 32 bits.
    """
    rows = array if array.ndim == 3 else merged(array, 2) if array.ndim == 4 else None
    if rows is None or not rows.size or rows.itemsize not in (2, 4):
        return None
    batch, tokens = rows.shape[:2]
    steps = [stride // rows.itemsize for stride in rows.strides]
    found = Sideways(tuple(array.shape), rows.itemsize, steps[0], steps[2])
    # Rows at one place are one value for all: nothing to turn.
    side_by_side = (steps[1] == 1 or tokens == 1) and steps[2] != 0
    fits = found.rows * found.itemsize % _WORD == 0 and max(batch, found.tiles) <= _MOST_BLOCKS
    return found if side_by_side and fits else None


@dataclass(frozen=True)
class Transposition:
    """One launch over arrays of one batch, number of tokens and itemsize.

    Attributes:
        arrays: by the name of the argument, at most MOST_ARRAYS.
    """

    arrays: Mapping[str, Sideways]

    @cached_property
    def plan(self) -> Plan:
        """How it is launched."""
        first = next(iter(self.arrays.values()))
        batch, tokens = first.shape[:2]
        grid = (-(-tokens // _TOKENS_OF_TILE), sum(array.tiles for array in self.arrays.values()), batch)
        rows, pitch = 32 * _WORD // first.itemsize, _TOKENS_OF_TILE * first.itemsize + _WORD
        return Plan((Launch(f"ssm_transpose_{8 * first.itemsize}", grid, (_THREADS, 1, 1), rows * pitch),))

    def pack(self, sources: Mapping[str, int], results: Mapping[str, int]) -> bytes:
        """TransposeArgs, from the addresses of arrays and of their results, by name."""
        packed = bytearray(ARGUMENT_BYTES)
        for place, (name, array) in enumerate(self.arrays.items()):
            strides = (array.batch_stride, array.row_stride, array.rows)
            _ARRAY.pack_into(packed, place * _ARRAY.size, sources[name], results[name], *strides)
        tokens = next(iter(self.arrays.values())).shape[1]
        _SIZES.pack_into(packed, MOST_ARRAYS * _ARRAY.size, len(self.arrays), tokens)
        return bytes(packed)


def transpositions(arrays: Mapping[str, Sideways]) -> Sequence[Transposition]:
    """The launches that turn the arrays of one call: one for each itemsize, as a rule one in all."""
    found = []
    for itemsize in sorted({array.itemsize for array in arrays.values()}):
        names = [name for name, array in arrays.items() if array.itemsize == itemsize]
        for first in range(0, len(names), MOST_ARRAYS):
            found.append(Transposition({name: arrays[name] for name in names[first : first + MOST_ARRAYS]}))
    return found


def image(target: str) -> toolchain.Image:
    """The kernel's machine code, from the cache or compiled into it.

    Raises:
        ToolchainError: there is no compiler, or it refused the source.
    """
    job = toolchain.Job(NAME, SOURCE.read_text(encoding="utf-8"), target, toolchain.flags("update"))
    return toolchain.compile_cached(job, toolchain.find_compiler())
