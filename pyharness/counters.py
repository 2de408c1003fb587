"""What a launch asks of a GPU, by its hardware counters: bytes, instructions, and what warps wait for.

`ncu` of the CUDA toolkit runs each launch as often as its counters need, each time from empty caches:

    python -m pyharness.counters POINT [POINT:KERNEL ...] [--store]

A launch takes longer under it than in a bench: read bytes, instructions and shares here, and times there.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyharness import figures, gpus, measure, toolchain
from pyharness.device import get
from pyharness.errors import DeviceError, SsmError, exit_code
from pyharness.families import FAMILIES
from pyharness.markdown import between, refresh
from pyharness.spec import parse_id
from pyharness.workload import Point, Workload, point_named

FOLDER = toolchain.ROOT / "generated" / "counters"
PAGE = toolchain.ROOT / "docs" / "counters.md"
#: Where the lines of figures begin in what ncu prints.
_FIRST_COLUMN = '"ID"'
_SYMBOL = "Kernel Name"
_STALL, _A_INSTRUCTION = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"
_STALLS = (
    "barrier",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "short_scoreboard",
    "sleeping",
    "wait",
)
#: What is kept of a launch, by the counter that has it.
_COUNTERS = {
    "ns": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "of_memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "instructions": "smsp__inst_executed.sum",
    "launched_warps": "smsp__warps_launched.sum",
    "issue_active": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_active": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "tensor_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
}
#: Waits below so many cycles an instruction are not shown.
_LEAST_SHOWN = 0.5


@dataclass(frozen=True)
class Run:
    """A kernel at a point."""

    point: Point
    kernel: str

    @classmethod
    def parse(cls, text: str) -> Run:
        """POINT:KERNEL, or POINT alone for the kernel that is fastest there by the stored bench.

        Raises:
            SsmError: there is no such point or kernel, or no kernel of ours was timed there.
        """
        name, _, kernel = text.partition(":")
        point = point_named(name)
        if kernel:
            return cls(point, parse_id(kernel).id)
        documents = [each for family in FAMILIES if figures.has(family) for each in figures.stored(family)]
        rows = [row for document in documents for row in figures.timed_at(document, name)]
        fastest = figures.fastest_of_ours(rows)
        if fastest is None:
            raise SsmError(f"{name}: a stored time of a kernel was wanted, found none: name one, {name}:KERNEL")
        return cls(point, fastest["kernel"])


def launch(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Launch each kernel once, for ncu to look at.

    Returns:
        "kernel", "point", "image" and "entry" of each launch, in order.

    Raises:
        SsmError: one does not run here.
    """
    device = get()
    images, failures = measure.compile_all([run.kernel for run in runs], device)
    launches: list[dict[str, Any]] = []
    for run in runs:
        if run.kernel in failures:
            raise DeviceError(failures[run.kernel])
        spec = parse_id(run.kernel)
        workload = Workload(device, run.point, cold=False)
        plan, (arguments,) = spec.plan(workload.problem.geometry), workload.arguments(spec)
        kernel = device.kernel(spec, images[run.kernel])
        kernel.launch(plan, arguments)
        device.synchronize(run.kernel)
        workload.free()
        about = {"kernel": run.kernel, "point": run.point.name, "image": kernel.sha256}
        launches += [about | {"entry": each.entry} for each in plan.launches]
    return launches


def count(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Rows of counters, one a launch, as `rows_of` has them.

    Raises:
        SsmError: there is no ncu, it cannot read the counters here, or a kernel does not run.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise DeviceError("ncu was wanted, found none: it comes with the CUDA toolkit (Nsight Compute)")
    metrics = [*_COUNTERS.values(), *(f"{_STALL}{name}{_A_INSTRUCTION}" for name in _STALLS)]
    with tempfile.TemporaryDirectory() as folder:
        launched = Path(folder) / "launched.json"
        command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
        command += ["--kernel-name", "regex:^ssm_", "--metrics", ",".join(metrics)]
        command += [sys.executable, "-m", "pyharness.counters", "--launch", str(launched)]
        command += [f"{run.point.name}:{run.kernel}" for run in runs]
        done = subprocess.run(command, cwd=toolchain.ROOT, capture_output=True, text=True, check=False)
        if done.returncode or not launched.is_file():
            raise DeviceError(f"ncu ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-500:]}")
        return rows_of(done.stdout, json.loads(launched.read_text(encoding="utf-8")))


def rows_of(printed: str, launches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a launch: what it is, the counters of _COUNTERS, and "stalls".

    Args:
        printed: by ncu, a line a launch.
        launches: as `launch` returns them.

    Returns:
        Bytes and numbers whole, shares in percent, "ns" by ncu's clock; "stalls" are cycles that a warp waits for each
        instruction, by what it waits for.

    Raises:
        SsmError: other launches were printed, or not the counters.
    """
    _, found, rest = printed.partition(_FIRST_COLUMN)
    lines = list(csv.DictReader((found + rest).splitlines()))[1:]  # the first has the units
    symbols = [line[_SYMBOL] for line in lines]
    wanted = [each["entry"] for each in launches]
    if symbols != wanted:
        raise SsmError(f"counters of {', '.join(wanted)} were wanted, found {', '.join(symbols) or 'none'}")
    return [dict(each) | _counted(line) for each, line in zip(launches, lines, strict=True)]


def _counted(line: Mapping[str, str]) -> dict[str, Any]:
    def number(counter: str) -> float:
        try:
            return float(line[counter].replace(",", ""))
        except (KeyError, ValueError):
            raise SsmError(
                f"{line[_SYMBOL]}: {counter} was wanted, found {line.get(counter, 'no such column')}"
            ) from None

    values = {name: number(counter) for name, counter in _COUNTERS.items()}
    stalls = {name: round(number(f"{_STALL}{name}{_A_INSTRUCTION}"), 3) for name in _STALLS}
    return {name: int(v) if v.is_integer() else round(v, 2) for name, v in values.items()} | {"stalls": stalls}


# What is stored.


def store(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any], folder: Path = FOLDER) -> Path:
    """Store rows beside those of other kernels and points of the same device.

    Args:
        rows: of `count`, each with its "date".
        about: "device" and "driver".
    """
    path = folder / f"{figures.device_slug(about['device'])}.json"
    held = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    new = {(row["kernel"], row["point"]) for row in rows}
    kept = [row for row in held if (row["kernel"], row["point"]) not in new]
    every = sorted([*kept, *rows], key=lambda row: (row["kernel"].partition("_")[0], row["point"], row["kernel"]))
    toolchain.publish_json(path, {"about": about, "rows": every})
    return path


def tables(folder: Path = FOLDER) -> str:
    """The stored counters of each device as Markdown.

    Raises:
        SsmError: none are stored.
    """
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise SsmError(f"counters were wanted in {folder.name}/, found none: run python -m pyharness.counters --store")
    return "\n\n".join(table(json.loads(path.read_text(encoding="utf-8"))) for path in paths)


def table(document: Mapping[str, Any]) -> str:
    """The counters of one device as Markdown, a line a launch."""
    about, rows = document["about"], document["rows"]
    lines = [
        f"{about['device']}, driver {about['driver']}, {figures.days(sorted({row['date'] for row in rows}))}.",
        "",
        "| point | kernel | read, MB | written, MB | memory | issue slots | warps | tensor | instructions a warp "
        "| waits |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        shares = [f"{row[name]:.0f} %" for name in ("of_memory", "issue_active", "warps_active", "tensor_active")]
        each = f"{row['instructions'] / row['launched_warps']:.0f}"
        most = sorted(
            ((cycles, name) for name, cycles in row["stalls"].items() if cycles >= _LEAST_SHOWN), reverse=True
        )
        waits = ", ".join(f"{name} {cycles:.1f}" for cycles, name in most)
        megabytes = [f"{row[name] / 1e6:.2f}" for name in ("read", "written")]
        entry = f"`{row['kernel']}` {row['entry'].partition(row['kernel'])[2].lstrip('_')}".strip()
        lines.append("| " + " | ".join([row["point"], entry, *megabytes, *shares, each, waits]) + " |")
    return "\n".join(lines)


def write_page(path: Path = PAGE, folder: Path = FOLDER) -> bool:
    """Bring docs/counters.md in line with what is stored; whether that changed it.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    return refresh(path, lambda text: between(text, "counters", tables(folder), path.name))


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and, where asked, store."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m pyharness.counters", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="POINT[:KERNEL]", help="without a kernel: the fastest one stored")
    parser.add_argument("--store", action="store_true", help="keep the rows and show them in docs/counters.md")
    parser.add_argument("--page", action="store_true", help="run nothing: bring docs/counters.md in line")
    parser.add_argument("--launch", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    runs = [Run.parse(text) for text in options.runs]
    if options.launch:
        options.launch.write_text(json.dumps(launch(runs)), encoding="utf-8")
        return 0
    if options.page:
        write_page()
        return 0
    if not runs:
        parser.error("a POINT was wanted, found none")
    counted, about = count(runs), gpus.about_run()
    date = about.pop("date")
    rows = [row | {"date": date} for row in counted]
    if options.store:
        store(rows, about)
        write_page()
    Console(width=200, highlight=False).print(table({"about": about, "rows": rows}), markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
