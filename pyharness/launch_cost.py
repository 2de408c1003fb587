"""What launching costs, by family: a node of a graph, a plan, a call from Python.

The problems are as small as a family takes and stay in the caches, so what is left of the time is launching and the
chain of latencies of one block. An empty kernel with a parameter block of the same size stands beside.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pyharness import build, history, measure, select
from pyharness import peers as peer_kernels
from pyharness.catalogue import CATALOGUE
from pyharness.ceilings import Ceilings
from pyharness.device import Device, get, image_target
from pyharness.errors import DeviceError, NoKernel, SsmError
from pyharness.families import RecurrentSpec, SelectiveSpec, SsdSpec, UpdateSpec
from pyharness.figures import stored_path
from pyharness.measure import Protocol, Timing, time_calls
from pyharness.spec import KernelSpec, parse_id
from pyharness.workload import Point, Workload

SUITE = "launch"
#: One sequence: a token, but for `ssd`, whose shortest job is a chunk.
POINTS: dict[str, Point] = {
    RecurrentSpec.family: Point("decode", 1, 1, True, heads=8, groups=1),
    UpdateSpec.family: Point("decode", 1, 1, True, heads=8, groups=1, io="bf16", packed=True),
    SelectiveSpec.family: Point("decode", 1, 1, True, heads=256, head_dim=1, d_state=16, groups=1, io="bf16"),
    SsdSpec.family: Point("prefill", 1, 64, False, heads=8, groups=1, io="bf16"),
}
#: Calls of a graph, and of a round that queues without waiting: the queue of a stream holds more.
_CALLS = 200
_ANSWERS = 50
PROTOCOL = (
    f"one warm problem; node: CUDA graph of {_CALLS} calls, 20 replays timed with events; plan and launch: host clock "
    f"over {_CALLS} calls from Python, queued without waiting; answer: host clock over {_ANSWERS} calls from Python, "
    "each waited for; microseconds of one call, median of 5 rounds with the lowest and the highest"
)
_PROTOCOL = Protocol(calls=_CALLS)
#: What is measured of a kernel, in the order of tables.
KINDS = ("node", "plan", "launch", "answer")


def chosen(family: str, device: Device) -> list[str]:
    """Of a family's kernels that run its point here one for each number of launches of a plan.

    It is the one that selection takes, else the catalogue's first.
    """
    point = POINTS[family]
    fitting = [s for s in CATALOGUE if s.family == family and measure.takes(s, point) and _serves(s, device)]
    if not fitting:
        return []
    features = select.Features(point.geometry, point.io, point.state)
    first = select.choose(features, select.Device(device.name, device.target), family=family).id
    found: dict[int, str] = {}
    for spec in [parse_id(first), *fitting]:
        found.setdefault(len(spec.plan(point.geometry).launches), spec.id)
    return [found[count] for count in sorted(found)]


def _serves(spec: KernelSpec, device: Device) -> bool:
    try:
        image_target(spec, device.capability, device.name)
    except NoKernel:
        return False
    return True


def host_rounds(call: Callable[[], object], calls: int, wait: Callable[[], None], rounds: int) -> Timing:
    """Microseconds of one call by the host's clock; `wait` follows each round and is not timed."""
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        found.append(1e6 * (time.perf_counter() - begun) / calls)
        wait()
    # The first round pays for what is made once.
    return Timing.of(found[1:])


def _figures(timings: Mapping[str, Timing]) -> dict[str, dict[str, float]]:
    return {
        kind: {name: round(value, 3) for name, value in dataclasses.asdict(timing).items()}
        for kind, timing in timings.items()
    }


def _host(device: Device, call: Callable[[], None], wait: Callable[[], None]) -> dict[str, Timing]:
    """The time of a call that is only queued, and of one that is waited for."""

    def answered() -> None:
        call()
        wait()

    with device:
        launched = host_rounds(call, _CALLS, wait, _PROTOCOL.rounds)
        return {"launch": launched, "answer": host_rounds(answered, _ANSWERS, wait, _PROTOCOL.rounds)}


def _kernel_row(workload: Workload, kernel: str) -> dict[str, Any]:
    device, spec = workload.device, parse_id(kernel)
    image = build.image(spec, image_target(spec, device.capability, device.name))
    geometry = workload.problem.geometry
    plan = spec.plan(geometry)
    (arguments,) = workload.arguments(spec)
    loaded = device.kernel(spec, image)

    def call(_: int = 0) -> None:
        loaded.launch(plan, arguments)

    workload.check(call, kernel)
    timings = {
        "node": time_calls(device, call, 1, _PROTOCOL),
        "plan": host_rounds(lambda: spec.plan(geometry), _CALLS, lambda: None, _PROTOCOL.rounds),
        **_host(device, call, lambda: device.synchronize(kernel)),
    }
    return {"launches": len(plan.launches), "image": {"target": image.target, "sha256": image.sha256}} | _figures(
        timings
    )


def _peer_row(workload: Workload, peer: peer_kernels.Peer) -> dict[str, Any]:
    # Says what is missing before torch is imported here.
    rounds, _ = peer_kernels.time_peer(workload, peer, _CALLS, _PROTOCOL.replays, _PROTOCOL.rounds, 0.0)
    import torch  # type: ignore[import-not-found, unused-ignore]

    with torch.cuda.device(workload.device.ordinal), torch.no_grad():
        call = peer.prepare(workload)
        timings = {
            "node": Timing.of(rounds),
            **_host(workload.device, lambda: call(0), torch.cuda.synchronize),
        }
    return _figures(timings)


def _one_of_each_package(point: Point) -> list[peer_kernels.Peer]:
    """The first kernel that each package is compared by."""
    found: dict[str, peer_kernels.Peer] = {}
    for peer in peer_kernels.peers(point):
        found.setdefault(peer.name.split()[0], peer)
    return list(found.values())


def rows(device: Device, families: Mapping[str, Point], peers: bool, track: build.Track) -> Iterator[dict[str, Any]]:
    """A row a kernel, as they come: "kernel", "family", "point", KINDS, or "failed" with the reason.

    Peers have no "plan".
    """
    kernels = {family: chosen(family, device) for family in families}
    # What decodes beside `recurrent` decodes beside `update`.
    beside = [family for family in families if peers and family != RecurrentSpec.family]
    others = {family: _one_of_each_package(families[family]) if family in beside else [] for family in families}
    with track(f"bench {SUITE}", sum(map(len, kernels.values())) + sum(map(len, others.values()))) as bar:
        for family, point in families.items():
            workload = Workload(device, point, cold=False)
            about = {"family": family, "point": point.name}
            for kernel in kernels[family]:
                bar.step(kernel)
                try:
                    made = _kernel_row(workload, kernel)
                except SsmError as error:
                    made = {"failed": str(error)}
                yield {"kernel": kernel} | about | made
            for peer in others[family]:
                bar.step(peer.name)
                try:
                    made = _peer_row(workload, peer)
                except Exception as reason:  # whatever another package raises is its reason, shown in its row
                    made = {"failed": peer_kernels.reason(reason)}
                yield {"kernel": peer.name, "peer": True} | about | made
            workload.free()


def _empty(device: Device) -> dict[str, dict[str, float]]:
    kernels = Ceilings(device)

    def call(_: int = 0) -> None:
        kernels.empty()

    return _figures(
        {
            "node": time_calls(device, call, 1, _PROTOCOL),
            **_host(device, call, lambda: device.synchronize("an empty kernel")),
        }
    )


def bench(
    path: Path | None = None, ordinal: int = 0, track: build.Track = build.silent, peers: bool = False
) -> dict[str, Any]:
    """Measure the launch cost of each family and store it, by default in generated/bench/<device>/launch.json.

    Rows are stored as they come, beside those that are stored and not measured yet; without `peers` those of other
    packages stay.

    Raises:
        DeviceError: there is no GPU, or a kernel is wrong or failed, which is not stored then.
    """
    device = get(ordinal)
    target = path or stored_path(device.name, SUITE)
    about = measure.header(SUITE, device, PROTOCOL) | {"empty": _empty(device)}
    document = about | {"points": {point.name: point.stored() for point in POINTS.values()}, "rows": []}
    earlier = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else document
    left = [] if measure.unlike(document, earlier) else [{"date": earlier["date"]} | row for row in earlier["rows"]]
    failed = []
    for row in rows(device, POINTS, peers, track):
        if "failed" in row and not row.get("peer"):
            failed.append(f"{row['kernel']}: {row['failed']}")
            continue
        document["rows"].append({"date": document["date"]} | row)
        left = [other for other in left if _place(other) != _place(row)]
        history.store(document | {"rows": sorted([*document["rows"], *left], key=_place)}, target)
    if failed:
        raise DeviceError("these were not timed and are not stored:\n" + "\n".join(failed))
    kept = [] if peers else [row for row in left if row.get("peer")]
    document["rows"] = sorted([*document["rows"], *kept], key=_place)
    history.store(document, target)
    return document


def _place(row: Mapping[str, Any]) -> tuple[int, bool, str]:
    """Of a row in the table."""
    return list(POINTS).index(row["family"]), bool(row.get("peer")), row["kernel"]


def listing(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The figures as `pyharness.listing.table` prints them, the empty kernel first."""
    lines = []
    for row in [{"kernel": "an empty kernel", "family": "-", "launches": 1} | document["empty"], *document["rows"]]:
        us = {kind: f"{row[kind]['median']:.2f}" if kind in row else "-" for kind in KINDS}
        lines.append(
            {"family": row["family"], "kernel": row["kernel"], "launches": row.get("launches", "-")}
            | us
            | {"note": row.get("failed", "")}
        )
    return lines
