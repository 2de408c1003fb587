"""Running the tests, saying what they did not test, and keeping how those on a GPU ended.

    python -m pyharness.suite REPORT.xml ...

stores what pytest reported of tests on a GPU with `--junitxml`, where they were run file by file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyharness import doctor, figures, gpus, toolchain
from pyharness.errors import DeviceError, SsmError, exit_code
from pyharness.markdown import wrapped
from pyharness.toolchain import ROOT

_MOST_WORKERS = 8
_GPU_TESTS = "tests/gpu"
FOLDER = ROOT / "generated" / "tests"


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
    files = _by_file(path).values()
    skipped: Counter[str] = Counter()
    for found in files:
        skipped.update(found["skipped"])
    return sum(found["passed"] for found in files), skipped


def _pytest(name: str, arguments: list[str]) -> tuple[int, int, Counter[str]]:
    report = _report_path(name)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", *arguments]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return code, *_read_report(report)


def _report_path(name: str) -> Path:
    return ROOT / "build" / "tests" / f"{name}.xml"


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


# How the tests on a GPU ended, as it is stored.


def store_gpu(reports: Sequence[Path] = (), folder: Path = FOLDER) -> Path:
    """Store how each file of GPU tests ended on this machine's GPU; files that were not run are kept.

    Args:
        reports: what pytest wrote; none is the report of `run`.

    Raises:
        DeviceError: there is no GPU.
        SsmError: a report is missing or holds no test.
    """
    driver = gpus.driver()
    if not driver.gpus:
        raise DeviceError(f"a GPU was wanted, found none: {driver.problem}")
    about = gpus.about_run()
    path = folder / f"{figures.device_slug(about['device'])}.json"
    held = json.loads(path.read_text(encoding="utf-8"))["files"] if path.is_file() else {}
    for report in reports or [_report_path("gpu")]:
        for file, found in ended(report).items():
            held[file] = found | {"date": about["date"], "driver": about["driver"]}
    toolchain.publish_json(path, {"device": about["device"], "files": held})
    return path


def ended(report: Path) -> dict[str, dict[str, Any]]:
    """How each test file of a report ended: "passed" tests, "failed" names, and "skipped" tests by reason.

    Raises:
        SsmError: it is missing or holds no test.
    """
    files = _by_file(report)
    if not files:
        raise SsmError(f"tests were wanted in {report.name}, found none: run pytest with --junitxml")
    return files


def _by_file(report: Path) -> dict[str, dict[str, Any]]:
    """`ended`, empty where the report is missing."""
    files: dict[str, dict[str, Any]] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        # "tests.gpu.test_update", and where a test is one of a class, its name behind.
        parts = case.get("classname", "").split(".")
        module = next((part for part in parts if part.startswith("test_")), parts[-1])
        found = files.setdefault(module, {"passed": 0, "failed": [], "skipped": {}})
        skips = [skip.get("message", "no reason given") for skip in case.findall("skipped")]
        if any(child.tag in ("failure", "error") for child in case):
            found["failed"].append(case.get("name", ""))
        elif skips:
            found["skipped"][skips[0]] = found["skipped"].get(skips[0], 0) + 1
        else:
            found["passed"] += 1
    return files


def gpu_table(folder: Path = FOLDER) -> str:
    """How the GPU tests ended on each device, as Markdown.

    Raises:
        SsmError: nothing is stored.
    """
    lines = [
        "| GPU | driver | date | file | passed | failed | skipped |",
        "| --- | --- | --- | --- | ---: | ---: | ---: |",
    ]
    notes: dict[str, None] = {}
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for file, found in sorted(document["files"].items()):
            counts = (found["passed"], len(found["failed"]), sum(found["skipped"].values()))
            cells = (document["device"], found["driver"], found["date"], f"`{file}.py`", *counts)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
            notes |= dict.fromkeys(wrapped(f"- failed: `{name}` of `{file}.py`", "  ") for name in found["failed"])
            notes |= dict.fromkeys(wrapped(f"- skipped: {reason}", "  ") for reason in found["skipped"])
    if not lines[2:]:
        raise SsmError(f"how GPU tests ended was wanted in {folder.name}/, found none: run invoke test --gpu --store")
    return "\n".join([*lines, *(["", *notes] if notes else [])])


def main(arguments: Sequence[str] | None = None) -> int:
    """Store what reports say."""
    from pyharness import proof

    store_gpu([Path(each) for each in (sys.argv[1:] if arguments is None else arguments)])
    proof.write_page()
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
