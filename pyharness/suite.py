"""Running the tests, and saying what they did not test."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pyharness import doctor, gpus
from pyharness.errors import DeviceError
from pyharness.toolchain import ROOT

_MOST_WORKERS = 8
_GPU_TESTS = "tests/gpu"


@dataclass(frozen=True)
class Outcome:
    """How a run of the tests ended.

    Attributes:
        code: pytest's exit code, 0 if all that ran passed.
        skipped: tests by the reason for which they were skipped.
        notes: what the user should know besides.
    """

    code: int
    passed: int
    skipped: dict[str, int]
    notes: tuple[str, ...]

    def summary(self) -> str:
        """What was skipped and why, a line a reason."""
        lines = [f"skipped {count}: {reason}" for reason, count in self.skipped.items()] or ["nothing was skipped"]
        return "\n".join([*lines, *self.notes])


def gpu_packages_missing() -> tuple[str, ...]:
    """The Python packages that GPU tests need and that are not installed."""
    return tuple(name for name in ("pycuda", "cuda-bindings") if not doctor.version(name))


def _read_report(path: Path) -> tuple[int, Counter[str]]:
    cases = list(ElementTree.parse(path).iter("testcase")) if path.is_file() else []
    reasons = [skip.get("message", "no reason given") for case in cases for skip in case.findall("skipped")]
    passed = sum(all(child.tag not in ("skipped", "failure", "error") for child in case) for case in cases)
    return passed, Counter(reasons)


def _pytest(name: str, arguments: list[str]) -> tuple[int, int, Counter[str]]:
    report = ROOT / "build" / "tests" / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return code, *_read_report(report)


def run(gpu: bool = False) -> Outcome:
    """Run the tests on the CPU and, where there is a GPU and PyCUDA, those on the GPU, one at a time.

    Args:
        gpu: fail if the GPU tests cannot run.

    Raises:
        DeviceError: `gpu` is asked for, and there is no GPU or no PyCUDA.
    """
    driver, missing = gpus.driver(), gpu_packages_missing()
    install = f"{' and '.join(missing)} not installed: run `{doctor.INSTALL_PYCUDA}`"
    if gpu and not driver.gpus:
        raise DeviceError(f"a GPU was wanted for the GPU tests, found none: {driver.problem}; leave --gpu out")
    if gpu and missing:
        raise DeviceError(f"PyCUDA and cuda-bindings were wanted for the GPU tests, found {install}")
    workers = ["-n", str(min(os.cpu_count() or 1, _MOST_WORKERS))]
    if driver.gpus and not missing:
        runs = [_pytest("cpu", [*workers, "tests", f"--ignore={_GPU_TESTS}"]), _pytest("gpu", ["-n", "0", _GPU_TESTS])]
        notes: tuple[str, ...] = ()
    else:
        runs = [_pytest("cpu", [*workers, "tests"])]
        notes = (f"not run on the GPU: {install}" if driver.gpus else f"not run on a GPU: {driver.problem}",)
    code = next((code for code, _, _ in runs if code), 0)
    skipped: Counter[str] = Counter()
    for _, _, reasons in runs:
        skipped += reasons
    return Outcome(code, sum(passed for _, passed, _ in runs), dict(skipped.most_common()), notes)
