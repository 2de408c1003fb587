"""Occupancy, worked by hand."""

from __future__ import annotations

import pytest

from pyharness.errors import NoKernel
from pyharness.occupancy import Occupancy, occupancy


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared", "found"),
    [
        # 125 registers are rounded to 128: 4096 a warp, 16 warps, 8 blocks of two.
        ("sm_90", 64, 125, 0, Occupancy(8, 16, 0.25, "registers")),
        # 64 registers: 2048 a warp, 32 warps.
        ("sm_90", 64, 64, 0, Occupancy(16, 32, 0.5, "registers")),
        # 168 registers: 5376 a warp, 12.19 warps, rounded down to 12, 3 blocks of four.
        ("sm_90", 128, 168, 0, Occupancy(3, 12, 0.1875, "registers")),
        # 153 are 160: 5120 a warp, 12.8 warps, 12: one block of eight.
        ("sm_90a", 256, 153, 0, Occupancy(1, 8, 0.125, "registers")),
        # 96000 + 1024 bytes twice are 189.5 of 228 KiB.
        ("sm_90", 256, 32, 96000, Occupancy(2, 16, 0.25, "shared memory")),
        # 32 warps of one block are all that sm_75 holds; 48 KiB fit once.
        ("sm_75", 1024, 64, 48 * 1024, Occupancy(1, 32, 1.0, "warps")),
        # 97 KiB and the one that is kept fit once in 100.
        ("sm_86", 128, 32, 97 * 1024, Occupancy(1, 4, 4 / 48, "shared memory")),
        # Blocks of one warp: 32 blocks are the limit.
        ("sm_80", 32, 16, 0, Occupancy(32, 32, 0.5, "blocks")),
        ("sm_120", 32, 16, 0, Occupancy(24, 24, 0.5, "blocks")),
    ],
)
def test_what_fits_a_multiprocessor(target: str, threads: int, registers: int, shared: int, found: Occupancy) -> None:
    assert occupancy(target, threads, registers, shared) == found


def test_ptx_has_none() -> None:
    with pytest.raises(NoKernel, match="occupancy wants one of sm_75, .* found 'compute_80'"):
        occupancy("compute_80", 32, 32, 0)
