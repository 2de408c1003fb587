"""What the command line prints: aligned tables, and the progress of long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as aligned text under their keys: numbers to the right, the rest to the left."""
    if not rows:
        return ""
    names = list(rows[0])
    cells = [[f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    right = [all(isinstance(row[name], (int, float)) or row[name] == "-" for row in rows) for name in names]

    def line(words: Sequence[str]) -> str:
        placed = (w.rjust(n) if r else w.ljust(n) for w, n, r in zip(words, widths, right, strict=True))
        return "  ".join(placed).rstrip()

    return "\n".join([line(names), *map(line, cells)])


class Progress:
    """Progress of `total` steps: a bar on a terminal, else a plain line every few seconds.

    It goes to the error stream, so that a listing can be piped.
    """

    _LINE_SECONDS = 5.0

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label, self._total, self._done = label, total, 0
        self._stream = stream or sys.stderr
        self._said = time.monotonic()
        self._bar: Bar | None = None
        if self._stream.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(label, total=total)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, what: str) -> None:
        """One step is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=f"{self._label} {what}")
        elif self._done == self._total or time.monotonic() - self._said >= self._LINE_SECONDS:
            self._said = time.monotonic()
            self._stream.write(f"{self._label} {self._done}/{self._total} {what}\n")
            self._stream.flush()
