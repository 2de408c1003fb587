"""The stand-in driver of templates/go/fakecuda: built with gcc, told what the manifest says of each symbol."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from pyharness import golden
from pyharness.manifest import Row

_USAGE = ("registers", "static_shared", "local_bytes")


def build_driver(folder: Path, *options: str) -> Path:
    """A folder with a libcuda.so.1 that computes on the CPU."""
    command = ["gcc", "-std=c11", "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-pthread", *options]
    source = golden.SOURCES / "fakecuda" / "libcuda.c"
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), str(source), "-lm"], check=True)
    return folder


def _rows(row: Row, entry: str) -> int:
    """Rows of a block as the stand-in wants them; where a rule has none, what the launch is."""
    if row.grid["rule"] == "segments" and row.grid["segments"] > 1:
        second = -4 if row.grid.get("overlaps") else -3
        return -2 if entry == row.entries[0] else second
    return {"rows": row.grid.get("rows", 0), "padded_rows": 0}.get(row.grid["rule"], -1)


def write_facts(path: Path, rows: Iterable[Row], target: str = "sm_90") -> Path:
    """What FAKECUDA_FACTS names, by symbol: registers, static shared and local bytes, threads and rows of a block.

    A kernel that is built for the exact target alone has the facts of that.
    """
    lines = []
    for row in rows:
        image = row.targets[row.kernel.image_target(target)]
        for entry, usage in image.usage.items():
            # The launch bounds of an entry are the threads that it is launched with.
            numbers = (*(usage[name] for name in _USAGE), row.block, _rows(row, entry))
            lines.append(f"{entry} {' '.join(map(str, numbers))}\n")
    path.write_text("".join(lines))
    return path
