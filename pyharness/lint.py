"""Checks of the text: style, types and formatting."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyharness import golden
from pyharness.errors import ToolchainError
from pyharness.toolchain import ROOT

_WIDTH = 120
_PYTHON = ("pyharness", "tests", "tasks.py")
_GO = ("templates/go", "examples/go")


@dataclass(frozen=True)
class Check:
    """One check: what it said, which is empty if it found nothing, and the command that mends what it can."""

    name: str
    found: str
    cure: str


def _beside(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _cuda_sources() -> list[str]:
    folder = ROOT / "templates"
    found = [path for ending in ("*.cuh", "*.cu") for path in folder.rglob(ending)]
    found += [*(folder / "c").glob("*.h"), *(ROOT / "examples").rglob("*.c")]
    return [path.relative_to(ROOT).as_posix() for path in sorted(found)]


def long_lines(paths: Iterable[Path], width: int = _WIDTH) -> str:
    """Lines of emitted sources that are too long to review side by side: file, number and length, a line each."""
    found = []
    for path in sorted(paths):
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [f"{path.name}:{n}: {len(line)} columns" for n, line in enumerate(lines, 1) if len(line) > width]
    return "\n".join(found)


def _said(command: list[str], *, says_when_wrong: bool = False) -> str:
    """Output of a checker that found something; some tell by printing instead of by their exit code."""
    try:
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ToolchainError(f"{command[0]} was wanted, found none: run `uv sync`") from error
    output = (done.stdout + done.stderr).strip()
    if done.returncode or (says_when_wrong and output):
        return output or f"{command[0]} ended with {done.returncode}"
    return ""


def run() -> Iterator[Check]:
    """Run the checks one after the other.

    Raises:
        ToolchainError: a checker is not installed.
    """
    ruff = _beside("ruff")
    yield Check("ruff check", _said([ruff, "check", *_PYTHON]), "ruff check --fix")
    yield Check("ruff format", _said([ruff, "format", "--check", *_PYTHON]), "ruff format")
    yield Check("mypy", _said([_beside("mypy")]), "")
    sources = _cuda_sources()
    yield Check(
        "clang-format",
        _said([_beside("clang-format"), "--dry-run", "-Werror", *sources]) if sources else "",
        "clang-format -i " + " ".join(sources),
    )
    emitted = (ROOT / "generated" / "kernels").glob("*.cu")
    yield Check("emitted lines", long_lines(emitted), "break the line in templates/kernels, then invoke build")
    goroot = golden.run_go(["env", "GOROOT"], golden.SOURCES, cgo=False).strip()
    gofmt = str(Path(goroot) / "bin" / "gofmt")
    yield Check("gofmt", _said([gofmt, "-d", *_GO], says_when_wrong=True), f"{gofmt} -w {' '.join(_GO)}")
    yield Check("go vet", _go_vet(), "")


def _go_vet() -> str:
    try:
        golden.run_go(["vet", "./..."], golden.SOURCES, cgo=False)
        golden.run_go(["vet", "-tags", "cuda", "./..."], golden.SOURCES, cgo=True)
    except ToolchainError as error:
        return str(error)
    return ""
