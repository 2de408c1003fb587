"""The C interface of runtime.cpp through ctypes."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char, c_int, c_int32, c_int64, c_uint8, c_uint32, c_uint64
from pathlib import Path

from pyharness.emulator.buffers import Placed, Region, Runs
from pyharness.errors import EmulatorError, ToolchainError

MAX_FINDINGS = 64
SHARED_REGION = -2


class RawFinding(ctypes.Structure):
    """`struct Finding` of runtime.cpp."""

    kind: bytes
    text: bytes
    address: int
    pc: int
    region: int
    offset: int
    bytes: int
    line: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    other_thread: int
    other_block: tuple[int, int, int]

    _fields_ = [
        ("kind", c_char * 32),
        ("text", c_char * 256),
        ("address", c_uint64),
        ("pc", c_uint64),
        ("region", c_int64),
        ("offset", c_int64),
        ("bytes", c_uint32),
        ("line", c_int32),
        ("block", c_uint32 * 3),
        ("thread", c_uint32 * 3),
        ("other_thread", c_int64),
        ("other_block", c_uint32 * 3),
    ]


class Machine:
    """One open run inside a loaded kernel. `close` must be called; a second run in the same library waits for it."""

    def __init__(self, library: Path) -> None:
        try:
            self._dll = ctypes.CDLL(str(library), mode=ctypes.RTLD_LOCAL)
        except OSError as error:
            raise ToolchainError(f"the compiled kernel {library} cannot be loaded: {error}") from error
        self._dll.emu_close.restype = None
        self._dll.emu_elements.restype = c_uint64
        self._dll.emu_findings.restype = c_uint32
        self._dll.emu_counts.restype = None

    def open(self, regions: list[Region]) -> list[int]:
        """Reserves the regions, writable ones first, and returns their addresses."""
        n = len(regions)
        addresses = (c_uint64 * n)()
        status = self._dll.emu_open(
            c_uint32(n),
            (c_uint64 * n)(*(r.span for r in regions)),
            (c_uint64 * n)(*(r.host % 256 for r in regions)),
            (c_uint8 * n)(*(r.writable for r in regions)),
            addresses,
        )
        if status != 0:
            self.close()
            raise EmulatorError(
                f"the arrays span {sum(r.span for r in regions)} bytes and the system refused to reserve the address "
                "space for them and their shadow: use fewer slots or a smaller stride, or raise the limit (ulimit -v)"
            )
        return list(addresses)

    def close(self) -> None:
        """Frees everything of this run."""
        self._dll.emu_close()

    def _elements(self, operation: int, address: int, host: int, runs: Runs, flags: int) -> tuple[int, int]:
        dims = len(runs.shape)
        first = c_uint64(0)
        count = self._dll.emu_elements(
            c_int(operation),
            c_uint64(address),
            c_uint64(host),
            c_uint64(runs.run_bytes),
            c_uint32(dims),
            (c_uint64 * dims)(*runs.shape),
            (c_uint64 * dims)(*runs.strides),
            c_uint32(flags),
            byref(first),
        )
        return int(count), first.value

    def mark(self, address: int, item: Placed) -> None:
        """Makes the elements accessible as their buffer says."""
        flags = (1 if item.buffer.writable else 0) | (0 if item.buffer.initialised else 2)
        self._elements(0, address, 0, item.runs, flags)

    def copy_in(self, address: int, item: Placed) -> None:
        """Copies the elements from the caller's array."""
        self._elements(1, address, item.host, item.runs, 0)

    def copy_out(self, address: int, item: Placed) -> None:
        """Copies the bytes that the run wrote back to the caller's array."""
        self._elements(2, address, item.host, item.runs, 0)

    def unwritten(self, address: int, item: Placed) -> tuple[int, int]:
        """How many bytes of the elements were never written, and the offset of the first from element 0."""
        return self._elements(3, address, item.host, item.runs, 0)

    def launch(
        self,
        entry: str,
        arguments: bytes,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        seed: int,
        resident_blocks: int,
        shuffled: bool,
    ) -> None:
        """Runs one launch; findings accumulate."""
        try:
            function = ctypes.cast(getattr(self._dll, entry), ctypes.c_void_p)
        except AttributeError as error:
            raise ToolchainError(f"the source defines no kernel {entry!r}: check the launch's entry") from error
        status = self._dll.emu_launch(
            function,
            (c_uint8 * len(arguments)).from_buffer_copy(arguments),
            c_uint32(len(arguments)),
            (c_uint32 * 3)(*grid),
            (c_uint32 * 3)(*block),
            c_uint32(shared_bytes),
            c_uint64(seed & (1 << 64) - 1),
            c_uint32(resident_blocks),
            c_int(shuffled),
        )
        if status != 0:
            raise EmulatorError(
                f"launch of {entry!r} refused ({'out of memory' if status == -1 else 'a value is out of range'}): "
                f"grid {grid}, block {block}, {shared_bytes} bytes of shared memory, "
                f"{len(arguments)} bytes of arguments, {resident_blocks} resident blocks; "
                "wanted at most 1024 threads, 232448 bytes of shared memory, 17 to 1024 bytes of arguments"
            )

    def findings(self) -> tuple[list[RawFinding], int]:
        """The findings so far, and how many there were with repeats of one place."""
        raw = (RawFinding * MAX_FINDINGS)()
        total = c_uint64(0)
        n = self._dll.emu_findings(raw, c_uint32(MAX_FINDINGS), byref(total))
        return list(raw[:n]), total.value

    def counts(self) -> tuple[int, int, int]:
        """Threads started, switches, and accesses checked (those to local variables excluded)."""
        values = [c_uint64(0) for _ in range(3)]
        self._dll.emu_counts(*(byref(v) for v in values))
        return values[0].value, values[1].value, values[2].value
