"""What the emulator reports, in words."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyharness.emulator.binding import SHARED_REGION, RawFinding
from pyharness.emulator.buffers import Placed, element_index


@dataclass(frozen=True)
class Finding:
    """One broken rule.

    Attributes:
        kind: "race", "out-of-bounds", "gap" (between the elements of a strided array), "wild-address", "read-only",
            "misaligned", "uninitialised", "async-copy" (destination used before its wait), "async-source" (its source
            changed), "copy-not-awaited", "unwritten", "divergent-barrier", "exit-before-barrier", "warp-mask",
            "warp-source" (a shuffle reads a lane outside its mask), "warp-divergence", "deadlock", "runaway", "assert",
            "trap" or "limit".
        buffer: the buffer's name, "shared_memory", or None where no memory is concerned.
        offset: bytes from the buffer's element 0 (negative: before it) or from the start of shared memory.
        block, thread: who did it, as (x, y, z).
        line: line of the source, or None if it is not known.
        text: the whole report in one line.
    """

    kind: str
    buffer: str | None
    offset: int
    block: tuple[int, int, int]
    thread: tuple[int, int, int]
    line: int | None
    text: str


def _source_lines(library: Path, source: Path, addresses: Sequence[int]) -> dict[int, list[int]]:
    """For each return address (offset in `library`), the lines of `source` that it came through, innermost first."""
    program = shutil.which("addr2line")
    wanted = sorted({a for a in addresses if a})
    if program is None or not wanted:
        return {}
    command = [program, "-a", "-i", "-e", str(library), *(hex(a - 1) for a in wanted)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines: dict[int, list[int]] = {}
    at = 0
    for row in output.splitlines():
        if row.startswith("0x"):
            at = int(row, 16) + 1
            lines[at] = []
        elif (match := re.match(r"(.*):(\d+)", row)) and Path(match[1]).name == source.name:
            lines[at].append(int(match[2]))
    return lines


def _where(raw: RawFinding, placed: Sequence[Placed]) -> tuple[str | None, int, str]:
    """Buffer name, byte offset in it, and the two in words."""
    if raw.region == SHARED_REGION:
        return "shared_memory", raw.offset, f"shared_memory + {raw.offset}"
    if raw.region < 0:
        return None, 0, ""
    here = [p for p in placed if p.region == raw.region]

    def distance(p: Placed) -> tuple[bool, int]:
        offset = raw.offset - p.offset
        outside = -offset if offset < 0 else max(0, offset - p.runs.span + 1)
        return not p.runs.contains(offset), outside

    best = min(here, key=distance)
    offset = raw.offset - best.offset
    array = best.buffer.array
    if best.runs.contains(offset):
        words = f"{best.buffer.name}{list(element_index(array, offset))} (byte {offset})"
    elif offset < 0:
        words = f"{best.buffer.name}, {-offset} bytes before its first element"
    elif offset >= best.runs.span:
        words = f"{best.buffer.name}, {offset - best.runs.span} bytes behind its last element"
    else:
        words = f"{best.buffer.name}, byte {offset}, behind element {list(element_index(array, offset))}"
    return best.buffer.name, offset, words


def _triple(v: Sequence[int]) -> tuple[int, int, int]:
    return int(v[0]), int(v[1]), int(v[2])


def describe(
    raws: Sequence[RawFinding],
    placed: Sequence[Placed],
    library: Path,
    source: Path,
    block_dim: tuple[int, int, int],
) -> list[Finding]:
    """Turns the runtime's records into findings."""
    lines = _source_lines(library, source, [r.pc for r in raws])
    findings = []
    for raw in raws:
        kind = raw.kind.decode()
        buffer, offset, place = _where(raw, placed)
        through = lines.get(raw.pc, [])
        line = raw.line or (through[0] if through else None)
        block, thread = _triple(raw.block), _triple(raw.thread)
        text = f"{kind}: {raw.text.decode(errors='replace')}"
        if place:
            text += f"; {place}, {raw.bytes} bytes" if raw.bytes else f"; {place}"
        text += f"; block {block} thread {thread}"
        if raw.other_thread >= 0:
            t, (x, y, _z) = raw.other_thread, block_dim
            other = (t % x, t // x % y, t // x // y)
            other_block = _triple(raw.other_block)
            text += f", other {'' if other_block == block else f'block {other_block} '}thread {other}"
        if line is not None:
            text += f"; line {line}"
            callers = [n for n in through[1:] if n != line]
            if callers and not raw.line:
                text += " called from line " + ", ".join(map(str, callers))
        findings.append(Finding(kind, buffer, offset, block, thread, line, text))
    return findings


def unwritten(item: Placed, count: int, first: int) -> Finding:
    """The finding that `count` bytes of a buffer that must be written were not, the first at byte `first`."""
    index = list(element_index(item.buffer.array, first))
    name = item.buffer.name
    text = f"unwritten: {count} bytes of {name} were never written, the first in element {index} (byte {first})"
    return Finding("unwritten", item.buffer.name, first, (0, 0, 0), (0, 0, 0), None, text)
