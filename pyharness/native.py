"""The native paths on a GPU machine that has no Go and no compiler: binaries made here, and their figures.

`python -m pyharness.native build FOLDER` packs the catalogue for a target and builds from that package the Go launch
test with its golden vectors, the example and its tests, ssmvet, and the C example. On the GPU machine
`python -m pyharness.native prove FOLDER OUT` runs what needs no idle GPU, `python -m pyharness.native time FOLDER OUT`
the rest: launches, opening, the stack of layers, and kernels timed from Go and by PyCUDA in turn, call after call on a
stream. Each leaves OUT/native.json with what it found, and what the binaries printed. `python -m pyharness.native store
OUT` puts that into generated/bench/<device>/native.json and brings docs/embedding.md in line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from pyharness import c_package, figures, golden, gpus, manifest, package, toolchain
from pyharness.errors import SsmError, ToolchainError
from pyharness.families import RecurrentSpec, SsdSpec, UpdateSpec
from pyharness.markdown import between, refresh, wrapped
from pyharness.select import Device, Features, choose
from pyharness.spec import KernelSpec, parse_id
from pyharness.workload import Point, Workload

SUITE = "native"
#: ssmvet's points by name: sequences and tokens.
POINTS = {"prefill_1x4096": (1, 4096), "decode_16x1": (16, 1)}
#: Calls of a round as ssmvet has them, by kind: what starts a round is to be little of it.
_CALLS, _ROUNDS = {"prefill": 40, "decode": 200}, 5
_IO = ("f32", "bf16")
#: Seconds that a binary may take.
LIMIT = 80
_FAMILIES = ("recurrent", "update", "ssd", "selective")
_LANES = "catalogue/lanes.json"


def timed(device: Device) -> dict[str, tuple[KernelSpec, ...]]:
    """What is timed from Go and by PyCUDA, by point: what selection takes there, of all families and of recurrent."""
    found = {}
    for name in POINTS:
        ids = []
        for io in _IO:
            features = Features(_point(name, io).geometry, io, "f32")
            ids += [choose(features, device, family=family).id for family in (None, RecurrentSpec.family)]
        found[name] = tuple(parse_id(chosen) for chosen in dict.fromkeys(ids))
    return found


def _point(name: str, io: str) -> Point:
    (sequences, tokens), job = POINTS[name], name.split("_")[0]
    return Point(job, sequences, tokens, job == "decode", io=io)


#: Kernels that the C example also runs by the launcher beside their source: one and two launches, decode, Hopper's own.
LAUNCHED = tuple(
    spec.id
    for spec in (
        RecurrentSpec(d_state=16),
        UpdateSpec(d_state=16),
        SsdSpec(d_state=128, rows=16, warps=4, segments=8, precision="split"),
        SsdSpec(d_state=128, warps=16, segments=4, io="bf16", exact="sm_90a"),
    )
)

# Building.


def launched(tree: Path, kernel: str, target: str = "sm_90") -> bytes:
    """The C example of a package's tree that runs one kernel by its launcher and the CUDA runtime.

    Raises:
        ToolchainError: nvcc or cc refused it.
    """
    folder, flags = tree / "examples" / "c", toolchain.flags(parse_id(kernel).family)
    host, source = [flag for flag in flags if "ptxas" not in flag], f"../../kernels/{kernel}.launch.cu"
    nvcc, define = str(toolchain.find_compiler().nvcc), f"-DSSM_LAUNCHER=ssm_launch_{kernel}"
    system = ("-lstdc++", "-ldl", "-lpthread", "-lrt", "-lm")
    libraries = (f"-L{toolchain.cuda_library_dir()}", "-lcudart_static", *system)
    commands = (
        [nvcc, *host, c_package.machine_code_option(parse_id(kernel), target), "-c", "-o", "launch.o", source],
        ["cc", "-O2", "-I../../include", define, "-o", "launched", "scan.c", "launch.o", *libraries],
    )
    for command in commands:
        done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
        if done.returncode:
            raise ToolchainError(f"{' '.join(command)} was to succeed, ended with {done.returncode}:\n{done.stderr}")
    return (folder / "launched").read_bytes()


def build(folder: Path, arch: str = "sm_90,sm_90a", nvcc: str = "") -> list[Path]:
    """Make the folder that a GPU machine is given; what was in it is replaced.

    Args:
        arch: targets.
        nvcc: of another CUDA major version: ssmvet then also has the lane that it makes, unproven images among them.

    Raises:
        SsmError: a tool is missing, or generated/ is stale.
    """
    made = package.package(arch, dist=folder.with_name(folder.name + "-dist"))
    lacking = [kernel for kernel in LAUNCHED if f"kernels/{kernel}.launch.cu" not in made.files]
    if lacking:
        raise SsmError(f"{', '.join(lacking)} was wanted in the package, found unproven: run `invoke vet --emulator`")
    tree = package.write_tree(made.files, folder.with_name(folder.name + "-tree"))
    stage = golden.stage_go(arch.split(",")[0], folder=folder.with_name(folder.name + "-stage"))
    lanes = made
    if nvcc:
        dist = folder.with_name(folder.name + "-lanes-dist")
        lanes = package.package(arch, nvcc=nvcc, include_unproven=True, dist=dist)
    binaries = {
        "ssmvet": next(path for path in lanes.paths if path.name == "ssmvet").read_bytes(),
        "ssmscan.test": golden.build_go_test(stage).read_bytes(),
    }
    example = tree / "examples" / "go"
    golden.run_go(["build", *package.VET_FLAGS, "-tags", "cuda", "-o", "stack", "."], example, cgo=True)
    golden.run_go(["test", "-c", *package.VET_FLAGS, "-tags", "cuda", "-o", "example.test", "."], example, cgo=True)
    for name in ("stack", "example.test"):
        binaries[name] = (example / name).read_bytes()
    command = ["cc", "-O2", "-I../../include", "-o", "scan", "scan.c", "-ldl", "-lm"]
    subprocess.run(command, cwd=tree / "examples" / "c", check=True)
    binaries["scan"] = (tree / "examples" / "c" / "scan").read_bytes()
    binaries |= {f"launched-{kernel}": launched(tree, kernel) for kernel in LAUNCHED}
    # The C example reads images and vectors as a package has them.
    kept = {name: data for name, data in made.files.items() if name.startswith(("images/", "examples/c/vectors/"))}
    staged = stage / "testdata"
    kept |= {f"testdata/{p.relative_to(staged)}": p.read_bytes() for p in staged.rglob("*") if p.is_file()}
    kept[_LANES] = lanes.files[_LANES]
    package.write_tree(kept | binaries, folder)
    for name in binaries:
        (folder / name).chmod(0o755)
    return [folder / name for name in binaries]


# Running.


def run(
    command: Sequence[str], folder: Path, out: Path, name: str, environment: Mapping[str, str] | None = None
) -> str:
    """Run a binary, in another environment if one is given, keep what it prints in OUT/name.txt, and give it.

    Raises:
        SsmError: it failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.txt"
    with path.open("w", encoding="utf-8") as file:
        try:
            code = subprocess.run(
                list(command),
                cwd=folder,
                stdout=file,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=LIMIT,
                env=environment,
            ).returncode
            ended = f"ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            ended = f"did not end in {LIMIT} seconds"
    text = path.read_text(encoding="utf-8")
    if ended:
        raise SsmError(f"{' '.join(command)} was to succeed, {ended}:\n{text[-2000:]}")
    return text


def _tests(folder: Path, out: Path, name: str) -> dict[str, Any]:
    text = run([f"./{name}", "-test.v"], folder, out, name)
    return {"passed": len(re.findall(r"--- PASS", text)), "skipped": len(re.findall(r"--- SKIP", text))}


def _devices(folder: Path, out: Path) -> dict[str, Any]:
    """Two devices of the machine at once, from Go and from C, also such that this process was not given."""
    every = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    text = run(["./example.test", "-test.v", "-test.run", "OnTwoDevicesAtOnce$"], folder, out, "devices", every)
    few = re.search(r"want two devices, have (\d+)", text)
    if few:
        return {"devices": int(few[1])}
    kernels = re.findall(r"--- PASS: TestEveryKernelOnTwoDevicesAtOnce/", text)
    goroutines = re.findall(r"--- PASS: TestGoroutinesOnTwoDevicesAtOnce/", text)
    if not kernels or not goroutines or "--- SKIP" in text:
        raise SsmError(f"goroutines and kernels were to run on two devices, found:\n{text[-2000:]}")
    checked = _c_example(folder, out, "scan-devices", ("-devices", "2"), every)
    return {"devices": 2, "kernels": len(kernels), "goroutines": len(goroutines), "c": checked["passed"]}


def _c_example(
    folder: Path,
    out: Path,
    name: str = "scan",
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    program: str = "scan",
) -> dict[str, Any]:
    vectors = sorted(str(path.relative_to(folder)) for path in (folder / "examples/c/vectors").glob("*.flat"))
    text = run([f"./{program}", *options, ".", *vectors], folder, out, name, environment)
    return {"passed": len(re.findall(r"^ok ", text, re.MULTILINE))}


def _launchers(folder: Path, out: Path) -> dict[str, Any]:
    """The C example by launchers; each runs one vector at least."""
    passed = [_c_example(folder, out, name, program=name)["passed"] for name in (f"launched-{k}" for k in LAUNCHED)]
    if not all(passed):
        raise SsmError(f"{', '.join(LAUNCHED)} were to run a golden vector each by their launchers, found {passed}")
    return {"passed": sum(passed), "kernels": len(passed)}


def _vet(folder: Path, out: Path, option: str, value: str) -> dict[str, Any]:
    target = out.resolve() / f"ssmvet-{value}.json"
    run(["./ssmvet", "-quick", option, value, "-out", str(target)], folder, out, f"ssmvet-{value}")
    images = json.loads(target.read_text(encoding="utf-8"))["images"]
    return {"passed": len(images), "cases": sum(image["cases"] for image in images.values())}


def _older_lanes(folder: Path) -> dict[str, str]:
    """The lanes beside the first one by name, with the version of their compiler."""
    lanes = json.loads((folder / _LANES).read_text(encoding="utf-8"))
    return {name: lane["compiler"] for name, lane in lanes.items() if name != package.first_lane()}


def prove(folder: Path, out: Path) -> dict[str, Any]:
    """Run the launch test, the example's tests, the C example and ssmvet, at the same time.

    Returns:
        "checks": what passed by name, or "failed" with the reason; "lanes": the same of lanes for older drivers, with
        the version of their compiler. It is stored.
    """
    jobs: dict[str, Callable[[], dict[str, Any]]] = {
        "golden": partial(_tests, folder, out, "ssmscan.test"),
        "engine": partial(_tests, folder, out, "example.test"),
        "c": partial(_c_example, folder, out),
        "launchers": partial(_launchers, folder, out),
    }
    jobs |= {f"ssmvet {family}": partial(_vet, folder, out, "-family", family) for family in _FAMILIES}
    lanes = _older_lanes(folder)
    jobs |= {lane: partial(_vet, folder, out, "-lane", lane) for lane in lanes}

    def attempt(job: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return job()
        except (SsmError, OSError) as error:
            return {"failed": str(error)}

    with ThreadPoolExecutor(len(jobs)) as pool:
        ended = dict(zip(jobs, pool.map(attempt, jobs.values()), strict=True))
    found: dict[str, Any] = {"checks": {name: one for name, one in ended.items() if name not in lanes}}
    if lanes:
        today = gpus.today()
        found["lanes"] = {lane: {"compiler": version, "date": today} | ended[lane] for lane, version in lanes.items()}
    store(out, found)
    return found


_BENCHMARK = re.compile(r"^Benchmark(\S+?)(?:-\d+)?\s+\d+\s+(.*)$", re.MULTILINE)


def benchmarks(text: str) -> dict[str, dict[str, float]]:
    """What `go test -bench` printed: by name, figures by unit.

    Raises:
        SsmError: there is no figure of a launch.
    """
    found = {}
    for name, rest in _BENCHMARK.findall(text):
        words = rest.split()
        found[name] = {unit: float(value) for value, unit in zip(words[::2], words[1::2], strict=True)}
    if "CUDASSMScanLaunch" not in found:
        raise SsmError(f"benchmarks were wanted, that of a launch among them, found:\n{text[-2000:]}")
    return found


def stack_figures(text: str) -> dict[str, Any]:
    """What examples/go printed: tokens per second, the CPU's time of a launch, and the share of each kernel."""
    rates = {phase: float(rate) for phase, rate in re.findall(r"^(prefill|decode): .*?: (\d+) tokens/s", text, re.M)}
    launch = re.search(r"([\d.]+) us of CPU a launch", text)
    shares = re.findall(r"^\s*([\d.]+) % (prefill|decode) (\S+) ", text, re.M)
    if set(rates) != {"prefill", "decode"} or launch is None or not shares:
        raise SsmError(f"the example was to print rates, a launch's time and shares, found:\n{text[-2000:]}")
    return {
        "tokens_per_second": rates,
        "launch_us": float(launch[1]),
        "shares": [{"percent": float(share), "phase": phase, "kernel": kernel} for share, phase, kernel in shares],
        "error": (re.search(r"relative error (\S+ of \S+)", text) or ["", ""])[1],
    }


def shipped(folder: Path, spec: KernelSpec, target: str) -> toolchain.Image:
    """The image that a folder of `build` has, which is the one of the manifest.

    Raises:
        ImageError: it is another.
    """
    row = manifest.read(spec.id)
    data = (folder / package.image_path(package.first_lane(), row, target)).read_bytes()
    manifest.check(row, target, data)
    image = row.targets[target]
    usage = {entry: toolchain.Usage(**values, spill_stores=0, spill_loads=0) for entry, values in image.usage.items()}
    return toolchain.Image(spec.id, target, image.kind, data, usage, "", 0.0)


def pycuda_times(
    folder: Path, kernels: Mapping[str, Sequence[KernelSpec]], ordinal: int = 0
) -> dict[tuple[str, str], float]:
    """Microseconds of a call by kernel and point: the median of rounds of calls in turn on a stream, data cold.

    Raises:
        SsmError: there is no GPU, or a kernel failed.
    """
    from pyharness.device import get, image_target

    device, found = get(ordinal), {}
    for name, specs in kernels.items():
        for io in _IO:
            point = _point(name, io)
            workload = Workload(device, point)
            for spec in (each for each in specs if each.io == io):
                arguments, plan = workload.arguments(spec), spec.plan(point.geometry)
                kernel = device.kernel(spec, shipped(folder, spec, image_target(spec, device.capability, device.name)))
                calls = [partial(kernel.launch, plan, each) for each in arguments]
                found[spec.id, name] = _stream_time(device, calls, _CALLS[point.job])
            workload.free()
    return found


def _stream_time(device: Any, calls: Sequence[Callable[[], None]], count: int) -> float:
    """Microseconds of a call, of calls that take turns."""
    rounds: list[float] = []
    turns = cycle(calls)
    with device:
        for _ in range(_ROUNDS + 1):
            start, end = device.driver.Event(), device.driver.Event()
            start.record(device.stream)
            for _ in range(count):
                next(turns)()
            end.record(device.stream)
            end.synchronize()
            rounds.append(1e3 * float(end.time_since(start)) / count)
    device.synchronize("timed calls")
    return statistics.median(rounds[1:])


def beside_pycuda(folder: Path, out: Path, turns: int = 2) -> list[dict[str, Any]]:
    """What `timed` names, from Go and by PyCUDA in turn: a row a kernel and point with both and their ratio."""
    from pyharness.device import identity

    kernels = timed(Device(*identity()))
    go: dict[tuple[str, str], list[float]] = {}
    theirs: dict[tuple[str, str], list[float]] = {}
    images: dict[str, dict[str, str]] = {}
    for turn in range(turns):
        target = out.resolve() / f"ssmvet-timed-{turn}.json"
        names = ",".join(dict.fromkeys(spec.id for specs in kernels.values() for spec in specs))
        run(["./ssmvet", "-kernels", names, "-out", str(target)], folder, out, f"ssmvet-timed-{turn}")
        for sha256, image in json.loads(target.read_text(encoding="utf-8"))["images"].items():
            images[image["kernel"]] = {"target": image["target"], "sha256": sha256}
            for point, us in image["microseconds"].items():
                go.setdefault((image["kernel"], point), []).append(us)
        for key, us in pycuda_times(folder, kernels).items():
            theirs.setdefault(key, []).append(us)
    return [
        {
            "kernel": kernel,
            "image": images[kernel],
            "point": point,
            "go_us": round(min(us), 3),
            "pycuda_us": round(min(theirs[kernel, point]), 3),
            "ratio": round(min(us) / min(theirs[kernel, point]), 4),
        }
        for (kernel, point), us in go.items()
        if (kernel, point) in theirs
    ]


def time(folder: Path, out: Path) -> dict[str, Any]:
    """Launches, opening, benchmarks and the stack from Go, then kernels beside PyCUDA; the GPU has to be idle.

    Returns:
        What was found, each part stored as soon as it is there; "failed" has the reasons of those that are not.
    """
    found: dict[str, Any] = {}

    def part(name: str, job: Callable[[], Any]) -> None:
        try:
            found[name] = job()
        except (SsmError, OSError) as error:
            found.setdefault("failed", {})[name] = str(error)
        store(out, found)

    bench = ["./example.test", "-test.run", "^$", "-test.bench", ".", "-test.benchtime", "200ms"]
    part("benchmarks", lambda: benchmarks(run(bench, folder, out, "bench")))
    part("stack", lambda: stack_figures(run(["./stack"], folder, out, "stack")))
    part("goroutines", lambda: _devices(folder, out))
    part("beside", lambda: beside_pycuda(folder, out))
    return found


def document(parts: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored: the device and what was found."""
    from pyharness.device import get

    gpu, driver = get(0), gpus.driver()
    return {
        "suite": SUITE,
        "device": gpu.name,
        "target": gpu.target,
        "driver": driver.version,
        "cuda": driver.cuda,
        "compiler": toolchain.PINNED_VERSION,
        "date": gpus.today(),
        **parts,
    }


def store(out: Path, parts: Mapping[str, Any]) -> Path:
    """Put parts into OUT/native.json beside those that are there."""
    path = out / f"{SUITE}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    toolchain.publish(path, manifest.dump(before | document(parts)))
    return path


# What is shown.

PAGE = toolchain.ROOT / "docs" / "embedding.md"
#: Microseconds of CPU that a launch may add, milliseconds that opening a family may take, and Go's time over PyCUDA's.
MOST_ADDED_US, MOST_OPENING_MS, MOST_RATIO = 3.0, 200.0, 1.02


def page_table(found: Mapping[str, Any]) -> str:
    """The stored figures of a device as Markdown."""
    title = f"{found['device']}, driver {found['driver']}, nvcc {found['compiler']}, {found['date']}."
    parts = [title]
    for name, table in (("benchmarks", _launch_table), ("beside", _beside_table), ("stack", _stack_table)):
        if name in found:
            parts.append(table(found[name]))
    if "checks" in found:
        parts.append(_checks_line(found["checks"]))
    if found.get("goroutines", {}).get("devices", 1) > 1:
        parts.append(_devices_line(found["goroutines"]))
    parts += [_lane_line(lane, one) for lane, one in found.get("lanes", {}).items()]
    return "\n\n".join(parts)


def _launch_table(found: Mapping[str, Mapping[str, float]]) -> str:
    launch = found["CUDASSMScanLaunch"]
    lines = [
        "| | found | wanted |",
        "| --- | ---: | ---: |",
        f"| CPU of a launch, all of it | {launch['ns/launch'] / 1e3:.2f} us | |",
        f"| CPU of a launch beyond cuLaunchKernel itself | {launch['ns-added/launch'] / 1e3:.2f} us | "
        f"{MOST_ADDED_US:.0f} us |",
    ]
    for name, row in sorted(found.items()):
        family = name.partition("CUDASSMScanOpen/")[2]
        if family:
            lines.append(
                f"| opening the {row['kernels']:.0f} kernels of `{family}`, hashes checked, for the first time | "
                f"{row['first-ms']:.0f} ms | {MOST_OPENING_MS:.0f} ms |"
            )
    return "\n".join(lines)


def _beside_table(rows: Sequence[Mapping[str, Any]]) -> str:
    reached = "reached" if max(row["ratio"] for row in rows) <= MOST_RATIO else "not reached"
    lines = [
        "Microseconds of a call on a stream, call after call, data cold; wanted at most "
        f"{MOST_RATIO:.2f} of PyCUDA's, {reached}:",
        "",
        "| kernel | problem | Go | PyCUDA | Go / PyCUDA |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {figures.kernel_cell(row)} | {row['point']} | {row['go_us']:.2f} | {row['pycuda_us']:.2f} | "
        f"{row['ratio']:.3f} |"
        for row in sorted(rows, key=lambda row: (row["point"], row["kernel"]))
    ]
    return "\n".join(lines)


def _stack_table(found: Mapping[str, Any]) -> str:
    rates = found["tokens_per_second"]
    shares = "; ".join(f"{one['percent']:.1f} % {one['phase']} `{one['kernel']}`" for one in found["shares"])
    return wrapped(
        f"`examples/go`, a stack of 23 layers at the Nano geometry: prefill {rates['prefill']:.0f} tokens/s, decode "
        f"{rates['decode']:.0f} tokens/s of scan alone, rows against float64 {found['error']} allowed. Of its time: "
        f"{shares}."
    )


def _devices_line(found: Mapping[str, int]) -> str:
    return wrapped(
        f"On {found['devices']} of these cards at once, in one process: {found['goroutines']} goroutines that each had "
        f"a launch in flight on both, {found['kernels']} kernels by their own cases with the same bits on both, and "
        f"{found['c']} runs of the C example; all right."
    )


def _lane_line(lane: str, found: Mapping[str, Any]) -> str:
    return wrapped(
        f"Lane `{lane}`, made by nvcc {found['compiler']}: {found['passed']} images passed {found['cases']} cases of "
        f"ssmvet there on {found['date']}."
    )


def _failed(found: Mapping[str, Any]) -> dict[str, str]:
    """The parts that failed, with the reason."""
    named = {**found.get("checks", {}), **found.get("lanes", {})}
    return dict(found.get("failed", {})) | {name: one["failed"] for name, one in named.items() if "failed" in one}


def _checks_line(checks: Mapping[str, Mapping[str, Any]]) -> str:
    names = {
        "golden": "launch tests with golden vectors",
        "engine": "tests of an engine",
        "c": "runs of the C example",
        "launchers": "runs of it by `ssm_launch_<id>` and the CUDA runtime",
    }
    told = [f"{checks[name]['passed']} {text}" for name, text in names.items() if "passed" in checks.get(name, {})]
    vetted = {name.removeprefix("ssmvet "): one for name, one in checks.items() if name.startswith("ssmvet ")}
    told += [f"{one['passed']} images of `{name}` by ssmvet" for name, one in vetted.items() if "passed" in one]
    return wrapped(f"Passed there: {', '.join(told)}.")


def refreshed(text: str, folder: Path = figures.BENCH) -> str:
    """The page with what is stored between its markers.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    tables = "\n\n".join(page_table(found) for found in figures.stored(SUITE, folder))
    return between(text, SUITE, tables, PAGE.name)


#: Lines of what the binaries print that are kept: of tests their verdicts.
_KEPT = re.compile(r"^\s*(--- |ok |PASS|FAIL|WRONG|Benchmark|cpu:|[\d.]+ % |prefill:|decode:|rows of |\S+ \(sm_\d+\):)")


def _printed(out: Path) -> dict[str, str]:
    """What the test binaries, the example and the C example printed, by name."""
    names = {
        "tests": ("ssmscan.test", "example.test"),
        "devices": ("devices", "scan-devices"),
        "bench": ("bench",),
        "stack": ("stack",),
        "c": ("scan", *(f"launched-{kernel}" for kernel in LAUNCHED)),
    }
    found = {}
    for name, files in names.items():
        paths = [out / f"{file}.txt" for file in files if (out / f"{file}.txt").is_file()]
        lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines() if _KEPT.match(line)]
        if lines:
            found[name] = "\n".join(lines) + "\n"
    return found


def keep(out: Path, folder: Path = figures.BENCH, page: Path = PAGE) -> Path:
    """Put OUT/native.json into the stored figures, part by part, what was printed beside it; bring the page in line.

    Raises:
        SsmError: there is no such file, or a part of it failed.
    """
    source = out / f"{SUITE}.json"
    if not source.is_file():
        raise SsmError(f"{source} was wanted, found no such file: run `python -m pyharness.native time` on a GPU")
    found = json.loads(source.read_text(encoding="utf-8"))
    if failed := _failed(found):
        raise SsmError(f"figures of which no part failed were wanted, found {failed}")
    path = folder / figures.device_slug(found["device"]) / f"{SUITE}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    toolchain.publish(path, manifest.dump(before | found))
    for name, printed in _printed(out).items():
        toolchain.publish(path.with_name(f"{SUITE}-{name}.txt"), printed.encode())
    refresh(page, lambda text: refreshed(text, folder))
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, prove or time; see the module."""
    parser = argparse.ArgumentParser(prog="python -m pyharness.native", description=__doc__)
    parser.add_argument("action", choices=("build", "prove", "time", "store"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--nvcc", default="", help="build: of another CUDA major version, for a second lane")
    options = parser.parse_args(arguments)
    if options.action in ("prove", "time") and options.out is None:
        parser.error(f"{options.action} wants a folder for what it finds")
    try:
        if options.action == "build":
            sys.stdout.write("".join(f"{path}\n" for path in build(options.folder, nvcc=options.nvcc)))
            return 0
        if options.action == "store":
            sys.stdout.write(f"{keep(options.folder)}\n")
            return 0
        folder, out = options.folder.resolve(), options.out
        if not (folder / _LANES).is_file():
            raise SsmError(f"a folder that `native build FOLDER` made was wanted, found none at {folder}")
        parts = prove(folder, out) if options.action == "prove" else time(folder, out)
    except SsmError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(json.dumps(parts, indent=1) + "\n")
    return 1 if _failed(parts) else 0


if __name__ == "__main__":
    sys.exit(main())
