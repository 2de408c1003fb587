"""Occupancy: how many blocks of a launch fit a multiprocessor at once, and what keeps more from fitting.

The limits are those of NVIDIA's CUDA programming guide ("technical specifications per compute capability"), and the
granularities those of its occupancy calculator: registers are handed out to a warp in units of 256, warps that share
them in fours, shared memory in units of 128 bytes (256 on sm_75), of which the system keeps 1 KiB a block from sm_80
on.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyharness.errors import NoKernel

_WARP = 32
_REGISTERS = 64 * 1024
_REGISTER_UNIT = 256
_WARP_UNIT = 4


@dataclass(frozen=True)
class Multiprocessor:
    """What a multiprocessor holds at once: warps, blocks, bytes of shared memory."""

    warps: int
    blocks: int
    shared: int
    shared_unit: int = 128
    shared_reserved: int = 1024


MULTIPROCESSORS = {
    "sm_75": Multiprocessor(32, 16, 64 * 1024, shared_unit=256, shared_reserved=0),
    "sm_80": Multiprocessor(64, 32, 164 * 1024),
    "sm_86": Multiprocessor(48, 16, 100 * 1024),
    "sm_89": Multiprocessor(48, 24, 100 * 1024),
    "sm_90": Multiprocessor(64, 32, 228 * 1024),
    "sm_100": Multiprocessor(64, 32, 228 * 1024),
    "sm_120": Multiprocessor(48, 24, 100 * 1024),
}


@dataclass(frozen=True)
class Occupancy:
    """Blocks and warps of one multiprocessor, the share of its warps, and the limit that was met first."""

    blocks: int
    warps: int
    share: float
    limit: str


def occupancy(target: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The occupancy of blocks of so many threads, registers a thread, and bytes of static and dynamic shared memory.

    Raises:
        NoKernel: the target is not machine code of a known multiprocessor.
    """
    name = target.removesuffix("a")
    if name not in MULTIPROCESSORS:
        raise NoKernel(f"occupancy wants one of {', '.join(MULTIPROCESSORS)}, found {target!r}")
    held = MULTIPROCESSORS[name]
    warps = -(-threads // _WARP)
    of_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // of_warp // _WARP_UNIT * _WARP_UNIT if of_warp else held.warps
    shared = -(-(shared_bytes + held.shared_reserved) // held.shared_unit) * held.shared_unit
    limits = {
        "warps": held.warps // warps,
        "blocks": held.blocks,
        "registers": by_registers // warps,
        "shared memory": held.shared // shared if shared else held.blocks,
    }
    # Of equal limits the first names it.
    limit = min(limits, key=lambda kind: limits[kind])
    blocks = limits[limit]
    return Occupancy(blocks, blocks * warps, blocks * warps / held.warps, limit)
