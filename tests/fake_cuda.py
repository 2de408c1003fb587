"""The stand-in driver of templates/go/fakecuda: built with gcc, told what the manifest says of each symbol."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from pyharness import golden
from pyharness.manifest import Row


def build_driver(folder: Path) -> Path:
    """A folder with a libcuda.so.1 that computes on the CPU."""
    command = ["gcc", "-std=c11", "-Wall", "-Werror", "-O2", "-shared", "-fPIC", "-pthread"]
    source = golden.SOURCES / "fakecuda" / "libcuda.c"
    subprocess.run([*command, "-o", str(folder / "libcuda.so.1"), str(source), "-lm"], check=True)
    return folder


def write_facts(path: Path, rows: Iterable[Row], target: str = "sm_90") -> Path:
    """What FAKECUDA_FACTS names: registers, static shared and local bytes, and rows of a block, by symbol."""
    lines = []
    for row in rows:
        for entry, usage in row.targets[target].usage.items():
            rows_of_block = row.grid["rows"] if row.grid["rule"] == "rows" else 0
            numbers = (usage["registers"], usage["static_shared"], usage["local_bytes"], rows_of_block)
            lines.append(f"{entry} {' '.join(map(str, numbers))}\n")
    path.write_text("".join(lines))
    return path
