"""Timing kernels by the protocol of the design, beside the ceilings of the same run.

A call is timed inside a CUDA graph of at least max(20, K) calls over K disjoint slot sets (whole problems for prefill)
that hold at least 3x the L2 cache, so that each call reads from memory. A graph is replayed 20 times between two
events; the figure is the median of 5 such rounds, a call. No kernel is timed before its output was held against the
oracle.

    python -m pyharness.measure bench
    python -m pyharness.measure sweep --points prefill_1x4096_f32,decode_16x1_f32 ID [ID ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyharness import build, gpus, toolchain
from pyharness.catalogue import CATALOGUE
from pyharness.ceilings import RANGE_TILE, Ceilings
from pyharness.compare import Errors
from pyharness.device import Device, Graph, Memory, get, graphs_available, image_target
from pyharness.errors import DeviceError, NoKernel, SsmError
from pyharness.families.recurrent import RecurrentSpec
from pyharness.report import listing, stored_path
from pyharness.spec import Geometry, KernelSpec, parse_id
from pyharness.workload import POINTS, Point, Workload, point_named

PROTOCOL = (
    "CUDA graph of at least max(20, K) calls over K disjoint slot sets (prefill: whole problems) that hold at least 3x "
    "L2, 20 replays timed with events, median of 5 rounds with the lowest and the highest; each kernel is held against "
    "the float64 oracle first"
)
#: FP32 instructions of a state element and token: d B x, the state's fmaf and y's fmaf; d x and the decay are shared.
FMAS_PER_ELEMENT = 3
_FMA_ROUNDS = 256
#: Replays before the first round go on for this long: an idle GPU takes a while to raise its clocks.
_WARM_UP_US = 20_000.0


@dataclass(frozen=True)
class Protocol:
    """How long a figure is measured: calls of a graph at least, replays of a round, rounds."""

    calls: int = 20
    replays: int = 20
    rounds: int = 5


FULL = Protocol()
#: For tuning: some 5 % of the time, to tell which candidates deserve the full protocol.
SHORT = Protocol(calls=6, replays=5, rounds=3)


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median, lowest and highest of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, rounds: Sequence[float]) -> Timing:
        """Summarise the rounds."""
        return cls(statistics.median(rounds), min(rounds), max(rounds))


def graph_calls(sets: int, calls: int) -> int:
    """Calls of a graph: at least so many, and whole turns through the sets, so that no set follows itself too soon."""
    return sets * -(-max(calls, sets) // sets)


def time_calls(device: Device, call: Callable[[int], None], sets: int, protocol: Protocol) -> Timing:
    """Time a call that takes the number of its set.

    Raises:
        DeviceError: a launch failed, or graphs cannot be captured here.
    """
    missing = graphs_available()
    if missing:
        raise DeviceError(f"timing wants CUDA graphs: {missing}")
    # A function is loaded by its first launch, which a capture does not allow.
    call(0)
    device.synchronize("the first call")
    count = graph_calls(sets, protocol.calls)
    with device:
        graph = Graph(device, [partial(call, index % sets) for index in range(count)])
        warm = 0.0
        while warm < _WARM_UP_US:
            warm += device.time(graph, 1)
        rounds = [device.time(graph, protocol.replays) / (protocol.replays * count) for _ in range(protocol.rounds)]
        graph.destroy()
    device.synchronize("timed calls")
    return Timing.of(rounds)


def time_kernel(
    workload: Workload, spec: KernelSpec, image: toolchain.Image | None, protocol: Protocol
) -> tuple[Timing, Errors]:
    """Hold a kernel against the oracle, then time it.

    Raises:
        SsmError: it does not run here, or its output is wrong.
    """
    arguments = workload.arguments(spec)
    plan = spec.plan(workload.problem.geometry)
    kernel = workload.device.kernel(spec, image)

    def call(index: int) -> None:
        kernel.launch(plan, arguments[index])

    errors = workload.check(call, spec.id)
    return time_calls(workload.device, call, workload.sets, protocol), errors


def time_ceilings(workload: Workload, kernels: Ceilings, protocol: Protocol) -> dict[str, float]:
    """Microseconds of each ceiling of a point, and "us", the one that binds.

    Decode reads and writes its states: "slots" in the order of the sequences, "contiguous" in one range. Prefill moves
    its bytes ("bytes", a copy that reads and writes as many) and issues its FMAs ("fma"); Mamba-1 has an exponential
    for each state element and token ("exp").
    """
    p, device = workload.point, workload.device
    if p.job == "decode":
        set_bytes = p.sequences * p.slot_bytes

        def slots(k: int) -> None:
            kernels.slots(workload.pool.address, workload.address("read_slots", k), p.sequences, p.slot_bytes)

        def contiguous(k: int) -> None:
            kernels.contiguous(workload.pool.address + k * set_bytes, set_bytes)

        ordered = time_calls(device, slots, workload.sets, protocol).median
        ranged = time_calls(device, contiguous, workload.sets, protocol).median
        return {"slots": ordered, "contiguous": ranged, "us": ordered}
    half = -(-p.moved_bytes // (2 * RANGE_TILE)) * RANGE_TILE
    memory = Memory(device, 2 * workload.sets * half)
    memory.write(np.random.default_rng(1).standard_normal(half // 4, np.float32))
    for part in range(1, 2 * workload.sets):
        memory.repeat(half, part * half)

    def copy(k: int) -> None:
        kernels.copy(memory.address + 2 * k * half, memory.address + (2 * k + 1) * half, half)

    moved = time_calls(device, copy, workload.sets, protocol).median
    memory.free()
    out = Memory(device, kernels.fma_bytes)
    issued = time_calls(device, lambda _: kernels.fma(out, _FMA_ROUNDS), 1, protocol).median
    found = {"bytes": moved, "fma": issued * FMAS_PER_ELEMENT * p.updates / kernels.fmas(_FMA_ROUNDS)}
    if p.mamba1:
        issued = time_calls(device, lambda _: kernels.exponentials(out, _FMA_ROUNDS), 1, protocol).median
        found["exp"] = issued * p.updates / kernels.fmas(_FMA_ROUNDS)
    out.free()
    return found | {"us": max(found.values())}


def default_kernels(point: Point) -> list[str]:
    """The catalogue's kernels that take a point: at d_state 128 in f32, one of each layout at least."""
    geometry = Geometry(point.all_tokens, point.sequences, point.heads, point.head_dim, point.groups, point.d_state)
    return [
        spec.id for spec in CATALOGUE if (spec.io, spec.state) == (point.io, point.state) and not spec.refusal(geometry)
    ]


def _compile(ids: Sequence[str], device: Device) -> tuple[dict[str, toolchain.Image], dict[str, str]]:
    """Images of kernels, compiled in parallel, and why those that have none have none."""

    def attempt(kernel: str) -> toolchain.Image | str:
        try:
            spec = parse_id(kernel)
            return build.image(spec, image_target(spec, device.capability, device.name))
        except SsmError as error:
            return str(error)

    with ThreadPoolExecutor() as pool:
        found = dict(zip(ids, pool.map(attempt, ids), strict=True))
    images = {kernel: image for kernel, image in found.items() if isinstance(image, toolchain.Image)}
    return images, {kernel: text for kernel, text in found.items() if isinstance(text, str)}


def measure(
    kernels: Mapping[Point, Sequence[str]],
    protocol: Protocol = FULL,
    ordinal: int = 0,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of timings: each point's kernels in turn, beside the ceilings of this run.

    Args:
        kernels: ids by point.
        protocol: how long.
        ordinal: the GPU.
        progress: told before each step.

    Returns:
        A row a kernel and point, in order: "kernel", "point", "spec", "image", "us", "ceilings", "ratio", "error"
        (the larger of both over what is allowed), or "kernel", "point" and "failed" with the reason.

    Raises:
        DeviceError: there is no GPU, or the ceilings cannot be measured.
    """
    tell = progress or (lambda _: None)
    device = get(ordinal)
    tell("compiling")
    images, failures = _compile(list(dict.fromkeys(kernel for ids in kernels.values() for kernel in ids)), device)
    ceiling_kernels = Ceilings(device)
    rows: list[dict[str, Any]] = []
    for point, ids in kernels.items():
        if device.broken:
            rows += [{"kernel": kernel, "point": point.name, "failed": device.broken} for kernel in ids]
            continue
        tell(f"{point.name} ceilings")
        workload = Workload(device, point)
        ceilings = time_ceilings(workload, ceiling_kernels, protocol)
        for kernel in ids:
            tell(f"{point.name} {kernel}")
            row: dict[str, Any] = {"kernel": kernel, "point": point.name}
            try:
                if kernel in failures:
                    raise DeviceError(failures[kernel])
                timing, errors = time_kernel(workload, parse_id(kernel), images[kernel], protocol)
                row |= _row(parse_id(kernel), images[kernel], timing, errors, ceilings)
            except SsmError as error:
                row["failed"] = str(error)
            rows.append(row)
        workload.free()
    return rows


def _row(
    spec: KernelSpec, image: toolchain.Image, timing: Timing, errors: Errors, ceilings: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "spec": spec.fields(),
        "image": {"target": image.target, "sha256": image.sha256},
        "registers": toolchain.worst([image], "registers"),
        "us": {name: round(value, 3) for name, value in dataclasses.asdict(timing).items()},
        "ceilings": {name: round(value, 3) for name, value in ceilings.items()},
        "ratio": round(timing.median / ceilings["us"], 3),
        "error": round(max(errors.y, errors.state) / errors.bound, 3),
    }


def bench(
    family: str = "recurrent",
    points: Sequence[Point] = POINTS,
    kernels: Sequence[str] = (),
    only: Sequence[str] = (),
    path: Path | None = None,
    ordinal: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure the table of a family by the full protocol and store it.

    Each row holds the ceilings of its own run, so that a table can be measured in parts: `only` names the kernels of
    this part, and the stored rows of others stay as long as device, driver and compiler are the same.

    Args:
        family: "recurrent".
        points: what to measure.
        kernels: further ids, beside the catalogue's; each is measured at the points of its io and state.
        only: ids to measure instead of all; the rest of the stored table stays.
        path: where to store; by default generated/bench/<device>/<family>.json.
        ordinal: the GPU.
        progress: told before each step.

    Returns:
        What was stored.

    Raises:
        NoKernel: the family has no table.
        DeviceError: there is no GPU, or a kernel is wrong or failed; nothing is stored then.
    """
    if family != RecurrentSpec.family:
        raise NoKernel(f"family {family!r} has no table of timings; on offer: {RecurrentSpec.family}")
    chosen: dict[Point, Sequence[str]] = {}
    for point in points:
        extra = [k for k in kernels if (parse_id(k).io, parse_id(k).state) == (point.io, point.state)]
        chosen[point] = [k for k in dict.fromkeys([*default_kernels(point), *extra]) if not only or k in only]
    rows = measure(chosen, FULL, ordinal, progress)
    failed = [f"{row['kernel']} at {row['point']}: {row['failed']}" for row in rows if "failed" in row]
    if failed:
        raise DeviceError("nothing is stored, these were not timed:\n" + "\n".join(failed))
    device = get(ordinal)
    target = path or stored_path(device.name, family)
    document: dict[str, Any] = {
        "suite": family,
        "device": device.name,
        "target": device.target,
        "driver": gpus.driver().version,
        "cuda": gpus.driver().cuda,
        "compiler": toolchain.find_compiler().version,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "protocol": PROTOCOL,
        "points": {point.name: dataclasses.asdict(point) for point in points},
        "rows": rows,
    }
    if only:
        document["rows"] = merged_rows(document, json.loads(target.read_text(encoding="utf-8")))
    toolchain.publish(target, (json.dumps(document, indent=1, sort_keys=True) + "\n").encode())
    return document


def merged_rows(part: Mapping[str, Any], stored: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a part and those of the stored table that it does not measure again, in the catalogue's order.

    Raises:
        DeviceError: the stored table is of another device, driver or compiler.
    """
    for name in ("device", "driver", "compiler", "protocol"):
        if part[name] != stored[name]:
            raise DeviceError(
                f"the stored table has {name} {stored[name]!r}, this run {part[name]!r}: measure it whole"
            )
    rows = {(row["point"], row["kernel"]): row for row in [*stored["rows"], *part["rows"]]}
    order = {name: default_kernels(Point(**sizes)) for name, sizes in part["points"].items()}
    places = {(name, kernel): (n, k) for n, name in enumerate(order) for k, kernel in enumerate(order[name])}
    return [rows[key] for key in sorted(rows, key=lambda key: places.get(key, (len(places), 0)))]


def sweep(
    ids: Sequence[str],
    points: Sequence[str],
    protocol: Protocol = SHORT,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Rows of timings of candidates, fastest first at each point; what failed comes last with its reason.

    Raises:
        NoKernel: a point is not known.
        DeviceError: there is no GPU.
    """
    chosen = [point_named(name) for name in points]
    rows = measure(dict.fromkeys(chosen, ids), protocol, progress=progress)
    place = {point.name: index for index, point in enumerate(chosen)}
    return sorted(rows, key=lambda row: (place[row["point"]], row["us"]["median"] if "us" in row else math.inf))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `bench` or `sweep` and print the table; 1 if a kernel was not timed."""
    from rich.console import Console

    from pyharness.listing import table

    parser = argparse.ArgumentParser(prog="python -m pyharness.measure", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("bench", help="the table of the recurrent family, stored in generated/bench")
    two = commands.add_parser("sweep", help="candidates, by a short protocol")
    one.add_argument("--only", default="", help="measure these ids, comma-separated, and keep the other stored rows")
    two.add_argument("--points", default=",".join(p.name for p in POINTS if p.io == "f32"))
    two.add_argument("--full", action="store_true", help="the full protocol")
    for parser_ in (one, two):
        parser_.add_argument("kernels", nargs="*", help="kernel ids")
        parser_.add_argument("--json", type=Path, help="where to store the rows")
    options = parser.parse_args(arguments)
    console, notes = Console(width=200, highlight=False), Console(stderr=True, highlight=False)
    if options.command == "bench":
        only = [name for name in options.only.split(",") if name]
        rows = bench(kernels=options.kernels, only=only, path=options.json, progress=notes.print)["rows"]
    else:
        rows = sweep(options.kernels, options.points.split(","), FULL if options.full else SHORT, notes.print)
        if options.json is not None:
            toolchain.publish(options.json, (json.dumps(rows, indent=1) + "\n").encode())
    console.print(table(listing(rows)), markup=False, soft_wrap=True)
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
