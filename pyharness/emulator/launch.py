"""Runs the launches of a kernel over guarded copies of its arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pyharness.emulator.binding import Machine
from pyharness.emulator.buffers import EmulatorBuffer, place
from pyharness.emulator.build import build
from pyharness.emulator.findings import Finding, describe, unwritten
from pyharness.errors import EmulatorError

_SHOWN = 12  # findings in an error's message; its attribute holds all


@dataclass(frozen=True)
class EmulatorLaunch:
    """One kernel launch: entry symbol, grid and block as (x, y, z), dynamic shared memory in bytes."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int


@dataclass(frozen=True)
class EmulatorReport:
    """What a clean run did: threads started, switches between them, accesses checked, seconds without compiling."""

    threads: int
    switches: int
    accesses: int
    seconds: float


def _raise(findings: list[Finding], total: int, entry: str) -> None:
    shown = "\n".join(f"  {f.text}" for f in findings[:_SHOWN])
    more = f"\n  ... and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
    raise EmulatorError(
        f"{entry} broke the emulator's rules ({total} reports of {len(findings)} kinds or places):\n{shown}{more}",
        findings,
    )


def run(
    source: str,
    launches: Sequence[EmulatorLaunch],
    buffers: Sequence[EmulatorBuffer],
    pack: Callable[[Mapping[str, int]], bytes],
    *,
    seed: int = 0,
    resident_blocks: int = 1,
    block_order: Literal["in_order", "shuffled"] = "in_order",
    include_dirs: Sequence[Path],
    cache_dir: Path | None = None,
) -> EmulatorReport:
    """Runs `launches` of the CUDA text `source`, in order and over the same memory, and writes results into the arrays.

    Args:
        source: an emitted `.cu`; each entry takes one struct by value.
        buffers: every array the kernel may touch. Those whose byte ranges overlap keep their relative places.
        pack: gives the bytes of the struct (17 to 1024) from the address of each buffer's element 0.
        seed: of the order in which threads and resident blocks run; the same seed gives the same order.
        resident_blocks: blocks that take turns, at least as many as hand over to each other.
        block_order: in which blocks start.
        include_dirs: where the CUDA headers are.
        cache_dir: where compiled kernels are kept; None is the user's cache folder.

    Raises:
        EmulatorError: the kernel broke a rule (`findings` says which); the arrays are as before.
        ToolchainError: the source does not compile, or lacks an entry.
        ValueError: a buffer is malformed.
    """
    regions, placed = place(buffers)
    built = build(source, include_dirs, cache_dir)
    machine = Machine(built.library)
    started = time.perf_counter()
    bases = machine.open(regions)
    try:
        address = {p.buffer.name: bases[p.region] + p.offset for p in placed}
        for p in placed:
            machine.mark(address[p.buffer.name], p)
        for p in placed:
            if p.buffer.initialised:
                machine.copy_in(address[p.buffer.name], p)
        arguments = pack(address)
        for number, launch in enumerate(launches):
            machine.launch(
                launch.entry,
                arguments,
                launch.grid,
                launch.block,
                launch.shared_bytes,
                seed * 1_000_003 + number,
                resident_blocks,
                block_order == "shuffled",
            )
            raws, total = machine.findings()
            if total:
                _raise(describe(raws, placed, built.library, built.source, launch.block), total, launch.entry)
        missing = []
        for p in placed:
            if p.buffer.must_write:
                count, first = machine.unwritten(address[p.buffer.name], p)
                if count:
                    missing.append(unwritten(p, count, first))
        if missing:
            _raise(missing, len(missing), launches[-1].entry if launches else "the run")
        for p in placed:
            if p.buffer.writable:
                machine.copy_out(address[p.buffer.name], p)
        threads, switches, accesses = machine.counts()
    finally:
        machine.close()
    return EmulatorReport(threads, switches, accesses, time.perf_counter() - started)
