"""Placing arrays: addresses, gaps, guard zones and what the checks after a run find. Memory is the host's here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from pyharness.placement import ADDRESS_MODULUS, GUARD_BYTES, GUARD_PATTERN, POISON, bounds, regions, runs, unwritten


@dataclass
class Named:
    name: str
    array: NDArray[Any]
    writable: bool = False
    initialised: bool = True
    must_write: bool = False


def test_bounds_follow_strides_of_either_sign() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    start = base.ctypes.data
    assert bounds(base) == (start, start + 96)
    assert bounds(base[::2, 1:3]) == (start + 4, start + 60)
    assert bounds(base[::-1]) == (start, start + 96)
    low, high = bounds(base[4:])
    assert low == high


def test_views_of_one_row_share_a_region_and_others_do_not() -> None:
    packed = np.zeros((5, 12), np.float32)
    x, B, y = Named("x", packed[:, :8]), Named("B", packed[:, 8:]), Named("y", np.zeros((5, 8), np.float32))
    found = regions([y, x, B])
    assert sorted(sorted(b.name for b in region.buffers) for region in found) == [["B", "x"], ["y"]]


def test_a_region_keeps_address_alignment_and_fills_gaps_with_poison() -> None:
    memory = np.zeros(1024, np.float32)
    rows = np.lib.stride_tricks.as_strided(memory[3:], (4, 5), (32, 4))
    rows[...] = np.arange(20).reshape(4, 5)
    (region,) = regions([Named("x", rows)])
    offset = region.offset(region.buffers[0])
    assert offset % ADDRESS_MODULUS == rows.ctypes.data % ADDRESS_MODULUS
    image = region.image()
    assert (image[: region.lead] == GUARD_PATTERN).all()
    assert (image[-GUARD_BYTES:] == GUARD_PATTERN).all()
    assert image.nbytes == region.lead + 3 * 32 + 20 + GUARD_BYTES
    span = image[offset : offset + region.span]
    assert (span[:20].view(np.float32) == np.arange(5)).all()
    assert (span[20:32] == POISON).all()
    assert (region.view(image, region.buffers[0]).view(np.float32) == rows).all()


@pytest.mark.parametrize(
    ("at", "words"),
    [
        (-1, "y: 1 bytes before its first element"),
        (0, ""),
        (6, "y: byte 6 of its span, between its elements"),
        (18, "y: 0 bytes past its last element"),
    ],
)
def test_a_write_outside_the_elements_is_named(at: int, words: str) -> None:
    # Two rows of three 16-bit elements, 12 bytes apart: 6 bytes used, 6 free, 6 used.
    memory = np.zeros(64, np.float16)
    rows = np.lib.stride_tricks.as_strided(memory, (2, 3), (12, 2))
    (region,) = regions([Named("y", rows, writable=True, initialised=False)])
    before = region.image()
    after = before.copy()
    after[region.offset(region.buffers[0]) + at] ^= 1
    assert region.stray_write(before, after) == words


def test_a_write_to_a_read_only_array_is_named() -> None:
    packed = np.zeros((4, 6), np.float32)
    x, y = Named("x", packed[:, :3]), Named("y", packed[:, 3:], writable=True, initialised=False)
    (region,) = regions([x, y])
    before = region.image()
    after = before.copy()
    region.view(after, y)[...] = 7
    assert region.stray_write(before, after) == ""
    region.view(after, x)[0, 1] = 7
    assert region.stray_write(before, after) == "x: byte 4 of its span, of a read-only array"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_an_output_element_that_still_holds_poison_is_named(dtype: Any) -> None:
    array = np.full((2, 3), np.nan).astype(dtype)
    buffer = Named("y", array, writable=True, initialised=False, must_write=True)
    values = array.view(f"u{array.itemsize}").copy()
    assert unwritten(buffer, values) == ""  # the NaN that arithmetic gives is a result
    values[1, 2] = np.iinfo(values.dtype).max
    assert unwritten(buffer, values) == "y[1, 2] (1 of 6 elements)"
    assert unwritten(Named("y", array, writable=True, initialised=False), values) == ""


def test_runs_cut_an_array_where_its_memory_is_not_contiguous() -> None:
    memory = np.zeros(4096, np.float32)
    pool = np.lib.stride_tricks.as_strided(memory, (3, 2, 4), (4000, 16, 4))
    found = list(runs(pool))
    assert [offset for _, offset in found] == [0, 4000, 8000]
    assert [pool[index].shape for index, _ in found] == [(2, 4)] * 3
    whole = np.zeros((3, 4), np.float32)
    assert [(whole[index].shape, offset) for index, offset in runs(whole)] == [((3, 4), 0)]


def test_only_large_spans_with_few_elements_are_sparse() -> None:
    backing = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (3, 8), (2**28, 4))
    (sparse,) = regions([Named("state", backing)])
    (dense,) = regions([Named("x", np.zeros((3, 8), np.float32))])
    assert sparse.sparse
    assert not dense.sparse


def test_an_empty_array_has_a_region_of_its_own_wherever_it_points() -> None:
    packed = np.zeros((2, 6), np.float32)
    found = regions([Named("x", packed[:, :3]), Named("B", packed[:, 3:]), Named("z", packed[:, 1:1])])
    assert [[buffer.name for buffer in region.buffers] for region in found] == [["x", "B"], ["z"]]
    assert found[1].span == 0
