"""The small kernels of emulator_kernels/: their text, their argument, and a launch in the emulator."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness.emulator import EmulatorBuffer, EmulatorLaunch, EmulatorReport, run
from pyharness.toolchain import cuda_include_dirs

KERNELS = Path(__file__).parent / "emulator_kernels"


INCLUDE_DIRS = cuda_include_dirs()
PROLOGUE = (KERNELS / "prologue.cuh").read_text()


def kernel(name: str, *defects: tuple[str, str]) -> str:
    """A kernel's text with each (old, new) replaced; old must occur."""
    text = (KERNELS / f"{name}.cu").read_text()
    for old, new in defects:
        assert old in text, old
        text = text.replace(old, new)
    return PROLOGUE + text


def arguments(address: Mapping[str, int], *, n: int = 0, stride: int = 0) -> bytes:
    """The struct of prologue.cuh."""
    pointers = [address.get(name, 0) for name in ("x", "y", "flags", "workspace")]
    return struct.pack("<4Qqi", *pointers, stride, n) + bytes(244)


def launch(
    source: str,
    buffers: Sequence[EmulatorBuffer],
    entry: str | Sequence[str],
    *,
    grid: int | tuple[int, int, int] = 1,
    block: int | tuple[int, int, int] = 32,
    shared: int = 0,
    n: int = 0,
    stride: int = 0,
    **options: Any,
) -> EmulatorReport:
    """Runs the entries ssm_<entry> in the emulator."""

    def pack(address: Mapping[str, int]) -> bytes:
        return arguments(address, n=n, stride=stride)

    grid3 = (grid, 1, 1) if isinstance(grid, int) else grid
    block3 = (block, 1, 1) if isinstance(block, int) else block
    entries = [entry] if isinstance(entry, str) else entry
    launches = [EmulatorLaunch(f"ssm_{e}", grid3, block3, shared) for e in entries]
    return run(source, launches, buffers, pack, include_dirs=INCLUDE_DIRS, **options)
