"""Timing kernels by the protocol of the design, beside the ceilings of the same run.

A call is timed inside a CUDA graph of at least max(20, K) calls over K disjoint slot sets (whole problems for prefill)
that hold at least 3x the L2 cache, so that each call reads from memory. A graph is replayed 20 times between two
events; the figure is the median of 5 such rounds, a call. No kernel is timed before its output was held against the
oracle.

    python -m pyharness.measure bench [--family update] [--points decode_8x1_16_heads_bf16_packed] [--peers]
    python -m pyharness.measure sweep --points prefill_1x4096_f32,decode_16x1_f32 ID [ID ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pyharness import build, gpus, history, toolchain
from pyharness import peers as peer_kernels
from pyharness.catalogue import CATALOGUE
from pyharness.ceilings import RANGE_TILE, Ceilings
from pyharness.compare import Errors
from pyharness.device import Device, Graph, Memory, get, graphs_available, image_target
from pyharness.errors import DeviceError, NoKernel, SsmError, exit_code
from pyharness.families import RecurrentSpec, SelectiveSpec, SsdSpec, UpdateSpec
from pyharness.figures import is_peer, listing, stored_path
from pyharness.spec import KernelSpec, parse_id
from pyharness.workload import DECODE, MAMBA1, POINTS, PREFILL, Norms, Point, Workload, point_named

PROTOCOL = (
    "CUDA graph of at least max(20, K) calls over K disjoint slot sets (prefill: whole problems) that hold at least 3x "
    "L2, 20 replays timed with events, median of 5 rounds with the lowest and the highest; each kernel is held against "
    "the float64 oracle first"
)
#: The families that have a table, and its points.
TABLES: dict[str, tuple[Point, ...]] = {
    RecurrentSpec.family: POINTS,
    UpdateSpec.family: DECODE,
    SelectiveSpec.family: MAMBA1,
    SsdSpec.family: PREFILL,
}
#: So many of a decode point's fastest kernels are timed once more with the sequences in the order of their slots.
_ASCENDING = 3
#: FP32 instructions of a state element and token: d B x, the state's fmaf and y's fmaf; d x and the decay are shared.
FMAS_PER_ELEMENT = 3
#: Of Mamba-1, whose exponent d A is of its own for each element.
FMAS_PER_MAMBA1_ELEMENT = 4
#: FLOP of products a state element and token, whatever the chunk: C . S and x^T . B, a multiplication and an addition
#: each. What the tokens of a chunk have of each other comes on top.
PRODUCT_FLOPS_PER_ELEMENT = 4
#: Matrix operands that an io is multiplied as at the highest rate; f32 with few bits, as `tf32` does.
_PRODUCT_OPERAND = {"f32": "tf32", "bf16": "bf16", "f16": "bf16"}
_FMA_ROUNDS = 256
_NOTHING: dict[str, Any] = {"points": {}, "rows": []}
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
    workload: Workload,
    spec: KernelSpec,
    image: toolchain.Image | None,
    protocol: Protocol,
    ascending: bool = False,
) -> tuple[Timing, Errors, Norms]:
    """Hold a kernel against the oracle, then time it; `ascending` visits the sequences in the order of their slots.

    Raises:
        SsmError: it does not run here, or its output is wrong.
    """
    arguments = workload.arguments(spec, ascending)
    plan = spec.plan(workload.problem.geometry)
    kernel = workload.device.kernel(spec, image)

    def call(index: int) -> None:
        kernel.launch(plan, arguments[index])

    errors, norms = workload.check(call, spec.id)
    return time_calls(workload.device, call, workload.sets, protocol), errors, norms


def time_ceilings(
    workload: Workload, kernels: Ceilings, protocol: Protocol, products: bool = False
) -> dict[str, float]:
    """Microseconds of each ceiling of a point, and "us", the one that binds.

    Decode reads and writes its states: "slots" in the order of the sequences, "ascending" in the order of the slots,
    "contiguous" in one range. Of Mamba-1, whose channels have few columns, what else must move counts: "moved" reads
    and writes one range of as many bytes as inputs, y and states have together. Prefill moves its bytes ("bytes", a
    copy that reads and writes as many) and issues its FMAs ("fma") or, where `products` says so, multiplies matrices on
    tensor cores ("products"); Mamba-1 has an exponential for each state element and token ("exp").
    """
    p, device = workload.point, workload.device
    half = -(-p.moved_bytes // (2 * RANGE_TILE)) * RANGE_TILE
    if p.job == "decode":
        set_bytes = p.sequences * p.slot_bytes

        def slots(k: int, name: str = "read_slots") -> None:
            kernels.slots(workload.pool.address, workload.address(name, k), p.sequences, p.slot_bytes)

        def contiguous(k: int) -> None:
            kernels.contiguous(workload.pool.address + k * set_bytes, set_bytes)

        in_turn = time_calls(device, slots, workload.sets, protocol).median
        ascending = time_calls(device, partial(slots, name="ascending_slots"), workload.sets, protocol).median
        ranged = time_calls(device, contiguous, workload.sets, protocol).median
        found = {"slots": in_turn, "ascending": ascending, "contiguous": ranged}
        if not p.mamba1:
            return found | {"us": in_turn}
        memory = _ranges(device, half, workload.sets)
        moving = partial(_in_place, kernels, memory, half)
        found["moved"] = time_calls(device, moving, workload.sets, protocol).median
        memory.free()
        return found | {"us": max(in_turn, found["moved"])}
    memory = _ranges(device, half, 2 * workload.sets)

    def copy(k: int) -> None:
        kernels.copy(memory.address + 2 * k * half, memory.address + (2 * k + 1) * half, half)

    moved = time_calls(device, copy, workload.sets, protocol).median
    memory.free()
    out = Memory(device, kernels.fma_bytes)
    if products:
        operand = _PRODUCT_OPERAND[p.io]
        issued = time_calls(device, lambda _: kernels.products(out, _FMA_ROUNDS, operand), 1, protocol).median
        out.free()
        flops = PRODUCT_FLOPS_PER_ELEMENT * p.updates
        multiplied = issued * flops / kernels.product_flops(_FMA_ROUNDS, operand)
        return {"bytes": moved, "products": multiplied, "us": max(moved, multiplied)}
    issued = time_calls(device, lambda _: kernels.fma(out, _FMA_ROUNDS), 1, protocol).median
    fmas = (FMAS_PER_MAMBA1_ELEMENT if p.mamba1 else FMAS_PER_ELEMENT) * p.updates
    found = {"bytes": moved, "fma": issued * fmas / kernels.fmas(_FMA_ROUNDS)}
    if p.mamba1:
        issued = time_calls(device, lambda _: kernels.exponentials(out, _FMA_ROUNDS), 1, protocol).median
        found["exp"] = issued * p.updates / kernels.fmas(_FMA_ROUNDS)
    out.free()
    return found | {"us": max(found.values())}


def _ranges(device: Device, nbytes: int, count: int) -> Memory:
    """So many ranges side by side, of the same normal numbers."""
    memory = Memory(device, count * nbytes)
    memory.write(np.random.default_rng(1).standard_normal(nbytes // 4, np.float32))
    for part in range(1, count):
        memory.repeat(nbytes, part * nbytes)
    return memory


def _in_place(kernels: Ceilings, memory: Memory, nbytes: int, k: int) -> None:
    kernels.contiguous(memory.address + k * nbytes, nbytes)


def takes(spec: KernelSpec, point: Point) -> bool:
    """Whether a kernel runs a point."""
    return (spec.io, spec.state) == (point.io, point.state) and not spec.refusal(point.geometry)


def default_kernels(point: Point, family: str = RecurrentSpec.family) -> list[str]:
    """The catalogue's kernels of a family that run a point: of `recurrent` at d_state 128 in f32, every layout.

    Beside those of `ssd` stand the kernels of `recurrent` that are made for prompts.
    """
    own = [spec.id for spec in CATALOGUE if spec.family == family and takes(spec, point)]
    return own + [spec.id for spec in CATALOGUE if family == SsdSpec.family and _is_rival(spec) and takes(spec, point)]


def _is_rival(spec: KernelSpec) -> bool:
    return isinstance(spec, RecurrentSpec) and spec.layout == "tiled" and not spec.few_tokens


def compile_all(ids: Sequence[str], device: Device) -> tuple[dict[str, toolchain.Image], dict[str, str]]:
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
    ascending: int = 0,
    peers: bool = False,
) -> list[dict[str, Any]]:
    """Rows of timings: each point's kernels in turn, beside the ceilings of this run.

    Args:
        kernels: ids by point.
        protocol: how long.
        ordinal: the GPU.
        progress: told before each step.
        ascending: so many of each point's fastest kernels are timed once more with a sequence_order that visits the
            slots in ascending order; "order" of such a row is "ascending".
        peers: time other packages' kernels too; "peer" of such a row is true.

    Returns:
        A row a kernel and point, in order: "kernel", "point", "spec", "image", "us", "ceilings", "ratio", "error"
        (the larger of both over what is allowed), "error_of_y" and "error_of_state" (||out - oracle|| / ||oracle|| over
        all), or "kernel", "point" and "failed" with the reason. A peer's row lacks "spec", "image" and "error".

    Raises:
        DeviceError: there is no GPU, or the ceilings cannot be measured.
    """
    return [row for _, rows in measuring(kernels, protocol, ordinal, progress, ascending, peers) for row in rows]


def measuring(
    kernels: Mapping[Point, Sequence[str]],
    protocol: Protocol = FULL,
    ordinal: int = 0,
    progress: Callable[[str], None] | None = None,
    ascending: int = 0,
    peers: bool = False,
) -> Iterator[tuple[Point, list[dict[str, Any]]]]:
    """The rows of `measure` as they come: a point's own kernels together, then each peer's by itself."""
    tell = progress or (lambda _: None)
    device = get(ordinal)
    tell("compiling")
    images, failures = compile_all(list(dict.fromkeys(kernel for ids in kernels.values() for kernel in ids)), device)
    ceiling_kernels = Ceilings(device)
    for point, ids in kernels.items():
        if device.broken:
            yield point, [{"kernel": kernel, "point": point.name, "failed": device.broken} for kernel in ids]
            continue
        tell(f"{point.name} ceilings")
        workload = Workload(device, point)
        chunked = any(isinstance(parse_id(kernel), SsdSpec) for kernel in ids)
        ceilings = time_ceilings(workload, ceiling_kernels, protocol, chunked)
        own = []
        for kernel in ids:
            tell(f"{point.name} {kernel}")
            own.append(_timed_row(workload, kernel, images.get(kernel) or failures[kernel], protocol, ceilings))
        fastest = sorted((row for row in own if "us" in row), key=lambda row: row["us"]["median"])
        for kernel in (row["kernel"] for row in fastest[:ascending]):
            tell(f"{point.name} {kernel} in ascending order")
            own.append(_timed_row(workload, kernel, images[kernel], protocol, ceilings, order="ascending"))
        yield point, own
        if peers:
            for row in _peer_rows(workload, protocol, ceilings, tell):
                yield point, [row]
        workload.free()


def _timed_row(
    workload: Workload,
    kernel: str,
    image: toolchain.Image | str,
    protocol: Protocol,
    ceilings: Mapping[str, float],
    **order: str,
) -> dict[str, Any]:
    """The row of one kernel, whose image may be the reason why it has none."""
    row: dict[str, Any] = {"kernel": kernel, "point": workload.point.name} | order
    try:
        if isinstance(image, str):
            raise DeviceError(image)
        timing, errors, norms = time_kernel(workload, parse_id(kernel), image, protocol, ascending=bool(order))
    except SsmError as error:
        return row | {"failed": str(error)}
    return row | _row(parse_id(kernel), image, errors) | _figures(timing, ceilings, norms)


def _peer_rows(
    workload: Workload, protocol: Protocol, ceilings: Mapping[str, float], tell: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    calls = graph_calls(workload.sets, protocol.calls)
    for peer in peer_kernels.peers(workload.point):
        tell(f"{workload.point.name} {peer.name}")
        row: dict[str, Any] = {"kernel": peer.name, "point": workload.point.name, "peer": True}
        try:
            times, norms = peer_kernels.time_peer(workload, peer, calls, protocol.replays, protocol.rounds, _WARM_UP_US)
        except Exception as reason:  # whatever another package raises is its reason, shown in its row
            row["failed"] = peer_kernels.reason(reason)
        else:
            row |= _figures(Timing.of(times), ceilings, norms)
        yield row


def _figures(timing: Timing, ceilings: Mapping[str, float], norms: Norms) -> dict[str, Any]:
    return {
        "us": {name: round(value, 3) for name, value in dataclasses.asdict(timing).items()},
        "ceilings": {name: round(value, 3) for name, value in ceilings.items()},
        "ratio": round(timing.median / ceilings["us"], 3),
        "error_of_y": float(f"{norms.y:.2e}"),
        "error_of_state": float(f"{norms.state:.2e}"),
    }


def _row(spec: KernelSpec, image: toolchain.Image, errors: Errors) -> dict[str, Any]:
    return {
        "spec": spec.fields(),
        "image": {"target": image.target, "sha256": image.sha256},
        "registers": toolchain.worst([image], "registers"),
        "error": round(errors.share, 3),
    }


def bench(
    family: str = RecurrentSpec.family,
    points: Sequence[Point] = (),
    kernels: Sequence[str] = (),
    only: Sequence[str] = (),
    path: Path | None = None,
    ordinal: int = 0,
    track: build.Track = build.silent,
    peers: bool = False,
) -> dict[str, Any]:
    """Measure the table of a family by the full protocol and store it; pyharness.history keeps what it replaces.

    Each row holds the ceilings of its own run, so that a table can be measured in parts: `points` and `only` name the
    points and kernels of this part, and the stored rows of others stay as long as device, driver and compiler are the
    same. Rows are stored as they come: a run that is cut short leaves a table of what it measured and, where one table
    may have both, of what was stored before.

    Args:
        family: one of TABLES.
        points: what to measure; by default all points of the family.
        kernels: further ids, beside the catalogue's; each is measured at the points that it runs.
        only: ids to measure instead of all.
        path: where to store; by default generated/bench/<device>/<family>.json.
        ordinal: the GPU.
        track: shows the progress.
        peers: also time other packages' kernels; of one that does not run the reason is stored.

    Returns:
        What was stored.

    Raises:
        NoKernel: the family has no table.
        DeviceError: there is no GPU, a stored table is not of this device, driver and compiler, or a kernel is wrong or
            failed; of its point nothing is stored then.
    """
    if family not in TABLES:
        raise NoKernel(f"family {family!r} has no table of timings; on offer: {', '.join(TABLES)}")
    measured = points or TABLES[family]
    device = get(ordinal)
    about = header(family, device, PROTOCOL)
    target = path or stored_path(device.name, family)
    whole = not points and not only
    document = about | _NOTHING
    stored = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else document
    # Tables that cannot be joined are refused before minutes are spent; a whole one takes the other's place.
    if not whole or not unlike(about, stored):
        document = merged(document, stored)
    chosen: dict[Point, Sequence[str]] = {}
    for point in measured:
        extra = [kernel for kernel in kernels if takes(parse_id(kernel), point)]
        ids = dict.fromkeys([*default_kernels(point, family), *extra])
        chosen[point] = [kernel for kernel in ids if not only or kernel in only]
    ascending = _ASCENDING if family == UpdateSpec.family else 0
    failed: dict[Point, list[str]] = {}
    made: list[dict[str, Any]] = []
    with track(f"bench {family}", steps(chosen, ascending, peers)) as bar:
        for point, rows in measuring(chosen, FULL, ordinal, bar.step, ascending, peers):
            wrong = [f"{r['kernel']} at {r['point']}: {r['failed']}" for r in rows if "failed" in r and not is_peer(r)]
            if wrong:
                failed[point] = wrong
            if point not in failed:
                made += rows
                document = merged(about | {"points": {point.name: point.stored()}, "rows": rows}, document)
                history.store(document, target, before=stored)
    if failed:
        lines = "\n".join(line for wrong in failed.values() for line in wrong)
        raise DeviceError(f"these were not timed, and of their points nothing is stored:\n{lines}")
    if whole:
        # What the table has no more.
        document = merged(about | {"points": {p.name: p.stored() for p in measured}, "rows": made}, about | _NOTHING)
        history.store(document, target, before=stored)
    return document


def header(suite: str, device: Device, protocol: str) -> dict[str, Any]:
    """What a document of figures says of its run: suite, device, target, driver, CUDA, compiler, date, protocol."""
    return {
        "suite": suite,
        "device": device.name,
        "target": device.target,
        "driver": gpus.driver().version,
        "cuda": gpus.driver().cuda,
        "compiler": toolchain.find_compiler().version,
        "date": gpus.today(),
        "protocol": protocol,
    }


def steps(kernels: Mapping[Point, Sequence[str]], ascending: int, peers: bool) -> int:
    """How often `measure` tells its progress."""
    count = 1
    for point, ids in kernels.items():
        count += 1 + len(ids) + min(ascending, len(ids))
        count += sum(1 for _ in peer_kernels.peers(point)) if peers else 0
    return count


def unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """What two runs differ in that makes their figures no one table; empty if nothing."""
    return next((name for name in ("device", "driver", "compiler", "protocol") if one[name] != other[name]), "")


def merged(part: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a table and what the stored table has beside it; points and kernels in the order of a whole table.

    Every row says on which date it was measured.

    Raises:
        DeviceError: the stored table is of another device, driver, compiler or protocol.
    """
    name = unlike(part, stored)
    if name:
        raise DeviceError(f"the stored table has {name} {stored[name]!r}, this run {part[name]!r}: measure it whole")
    family = part["suite"]
    sizes = stored["points"] | part["points"]
    usual = {point.name: n for n, point in enumerate(TABLES[family])}
    # sorted() is stable: what the family does not name comes last, as it was.
    names = sorted(sizes, key=lambda name: usual.get(name, len(usual)))
    kernels = {(n, k): i for n in names for i, k in enumerate(default_kernels(Point(**sizes[n]), family))}
    dated = [{"date": document["date"]} | row for document in (stored, part) for row in document["rows"]]
    rows = {(row["point"], row["kernel"], row.get("order", "")): row for row in dated}

    def place(key: tuple[str, str, str]) -> tuple[int, bool, bool, int]:
        point, kernel, order = key
        return names.index(point), is_peer(rows[key]), bool(order), kernels.get((point, kernel), len(kernels))

    return dict(part) | {
        "points": {name: sizes[name] for name in names},
        "rows": [rows[key] for key in sorted(rows, key=place)],
    }


def sweep(
    ids: Sequence[str],
    points: Sequence[str],
    protocol: Protocol = SHORT,
    progress: Callable[[str], None] | None = None,
    ascending: int = 0,
) -> list[dict[str, Any]]:
    """Rows of timings of candidates, fastest first at each point; what failed comes last with its reason.

    A candidate that does not run a point is left out there. `ascending` is as for `measure`.

    Raises:
        NoKernel: a point is not known.
        DeviceError: there is no GPU.
    """
    chosen = [point_named(name) for name in points]
    wanted = {point: [kernel for kernel in ids if takes(parse_id(kernel), point)] for point in chosen}
    rows = measure(wanted, protocol, progress=progress, ascending=ascending)
    place = {point.name: index for index, point in enumerate(chosen)}
    return sorted(rows, key=lambda row: (place[row["point"]], row["us"]["median"] if "us" in row else math.inf))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `bench` or `sweep` and print the table; 1 if a kernel was not timed."""
    from rich.console import Console

    from pyharness.listing import Progress, table

    parser = argparse.ArgumentParser(prog="python -m pyharness.measure", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("bench", help="the table of a family, stored in generated/bench")
    two = commands.add_parser("sweep", help="candidates, by a short protocol")
    one.add_argument("--family", default=RecurrentSpec.family, help=", ".join(TABLES))
    one.add_argument(
        "--points", default="", help="measure these points, comma-separated, and keep the other stored rows"
    )
    one.add_argument("--peers", action="store_true", help="other packages' kernels too")
    one.add_argument("--only", default="", help="measure these ids, comma-separated, and keep the other stored rows")
    two.add_argument("--points", default=",".join(p.name for p in POINTS if p.io == "f32"))
    two.add_argument("--full", action="store_true", help="the full protocol")
    two.add_argument("--ascending", type=int, default=0, help="so many of the fastest also in the order of the slots")
    for parser_ in (one, two):
        parser_.add_argument("kernels", nargs="*", help="kernel ids")
        parser_.add_argument("--json", type=Path, help="where to store the rows")
    options = parser.parse_args(arguments)
    console, notes = Console(width=200, highlight=False), Console(stderr=True, highlight=False)
    if options.command == "bench":
        only = [name for name in options.only.split(",") if name]
        points = [point_named(name) for name in options.points.split(",") if name]
        rows = bench(options.family, points, options.kernels, only, options.json, track=Progress, peers=options.peers)[
            "rows"
        ]
    else:
        protocol = FULL if options.full else SHORT
        rows = sweep(options.kernels, options.points.split(","), protocol, notes.print, options.ascending)
        if options.json is not None:
            toolchain.publish(options.json, (json.dumps(rows, indent=1) + "\n").encode())
    console.print(table(listing(rows)), markup=False, soft_wrap=True)
    return int(any("failed" in row and not is_peer(row) for row in rows))


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
