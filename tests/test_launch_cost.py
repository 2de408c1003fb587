"""The launch suite as far as no GPU is needed: what is called how often, what is stored, how a peer's reason shows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pyharness import gpus, launch_cost, measure, workload
from pyharness.args import SCAN_ARGS
from pyharness.errors import DeviceError
from pyharness.measure import Timing
from pyharness.spec import parse_id
from tests.host_memory import HostMemory


class Kernel:
    """A kernel that counts its launches."""

    def __init__(self, spec: Any) -> None:
        self.spec, self.launched = spec, 0

    def launch(self, plan: Any, arguments: bytes) -> None:
        assert len(arguments) == SCAN_ARGS.itemsize
        assert plan == self.spec.plan(launch_cost.POINTS[self.spec.family].geometry)
        self.launched += 1


class HostDevice:
    """A device that launches nothing."""

    name, target, capability, ordinal, l2_bytes = "NVIDIA H200", "sm_90", (9, 0), 0, 2**26

    def __init__(self) -> None:
        self.kernels: dict[str, Kernel] = {}
        self.waited = 0

    def __enter__(self) -> HostDevice:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def kernel(self, spec: Any, image: Any) -> Kernel:
        return self.kernels.setdefault(spec.id, Kernel(spec))

    def synchronize(self, _: str) -> None:
        self.waited += 1


def timed(_: Any, call: Any, sets: int, protocol: measure.Protocol) -> Timing:
    assert (sets, protocol.calls) == (1, 200)
    call(0)
    return Timing(3.0, 2.0, 4.0)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    made = HostDevice()
    monkeypatch.setattr(workload, "Memory", HostMemory)
    monkeypatch.setattr(launch_cost, "get", lambda _: made)
    monkeypatch.setattr(launch_cost, "time_calls", timed)
    monkeypatch.setattr(launch_cost, "Ceilings", lambda _: SimpleNamespace(empty=lambda: None))
    monkeypatch.setattr(launch_cost.build, "image", lambda _, target: SimpleNamespace(target=target, sha256="f" * 64))
    monkeypatch.setattr(workload.Workload, "check", lambda self, call, kernel: call(0))
    monkeypatch.setattr(gpus, "driver", lambda: gpus.Driver("580.1", "13.0", (gpus.Gpu("NVIDIA H200", 9, 0),)))
    return made


def test_every_family_has_a_kernel_for_each_number_of_launches(device: HostDevice) -> None:
    found = {family: launch_cost.chosen(family, device) for family in launch_cost.POINTS}  # type: ignore[arg-type]
    assert set(found) == set(measure.TABLES)
    for family, kernels in found.items():
        plans = [len(parse_id(kernel).plan(launch_cost.POINTS[family].geometry).launches) for kernel in kernels]
        assert plans == sorted(set(plans)), f"{family}: {kernels}"
        assert plans[0] >= 1
    (few,) = found["recurrent"]
    assert parse_id(few).few_tokens, "what selection takes"  # type: ignore[attr-defined]
    device.capability = (7, 5)
    assert launch_cost.chosen("ssd", device) == [], "no image of it serves sm_75"  # type: ignore[arg-type]


def test_figures_of_each_kernel_and_the_reason_of_each_peer_are_stored(
    device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in ("torch", "flashinfer", "mamba_ssm"):
        monkeypatch.setitem(sys.modules, name, None)
    document = launch_cost.bench(tmp_path / "launch.json", peers=True)
    assert json.loads((tmp_path / "launch.json").read_text(encoding="utf-8")) == document
    assert document["empty"].keys() == {"node", "launch", "answer"}
    ours = [row for row in document["rows"] if not row.get("peer")]
    assert {row["family"] for row in ours} == set(measure.TABLES)
    for row in ours:
        assert row["node"] == {"median": 3.0, "low": 2.0, "high": 4.0}
        for kind in ("plan", "launch", "answer"):
            assert 0 < row[kind]["low"] <= row[kind]["median"] <= row[kind]["high"]
        # The check, the graph, and six rounds of each kind, the first of which warms up.
        assert device.kernels[row["kernel"]].launched == 1 + 1 + 6 * 200 + 6 * 50
    # A wait behind each round, and one behind each call that is answered, the empty kernel's too; one a workload.
    assert device.waited == (len(ours) + 1) * (6 + 6 * 50 + 6) + len(launch_cost.POINTS)
    peers = {row["kernel"]: row["failed"] for row in document["rows"] if row.get("peer")}
    assert set(peers) >= {"mamba-ssm triton (4, 4)", "mamba-ssm chunk_scan 128"}
    assert all("torch is not installed" in reason for reason in peers.values()), peers
    again = launch_cost.bench(tmp_path / "launch.json")
    assert {row["kernel"] for row in again["rows"] if row.get("peer")} == set(peers), "they are kept"
    first, *lines = launch_cost.listing(document)
    assert (first["kernel"], first["plan"], first["node"]) == ("an empty kernel", "-", "3.00")
    assert [line["kernel"] for line in lines] == [row["kernel"] for row in document["rows"]]


def test_rows_are_stored_as_they_come_beside_those_of_an_earlier_run(
    device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "launch.json"
    whole = launch_cost.bench(path)["rows"]
    document = json.loads(path.read_text(encoding="utf-8"))
    for row in document["rows"]:
        row["launches"] = 7
    path.write_text(json.dumps(document), encoding="utf-8")
    measured = launch_cost._kernel_row

    def stopped(workload: Any, kernel: str) -> dict[str, Any]:
        if kernel == whole[1]["kernel"]:
            raise KeyboardInterrupt
        return measured(workload, kernel)

    monkeypatch.setattr(launch_cost, "_kernel_row", stopped)
    with pytest.raises(KeyboardInterrupt):
        launch_cost.bench(path)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["kernel"] for row in rows] == [row["kernel"] for row in whole]
    assert [row["launches"] for row in rows] == [whole[0]["launches"], *[7] * (len(whole) - 1)]


def test_a_kernel_that_fails_is_told_and_nothing_is_stored(
    device: HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise DeviceError("its y is wrong")

    monkeypatch.setattr(workload.Workload, "check", wrong)
    with pytest.raises(DeviceError, match="these were not timed and are not stored:\n.*: its y is wrong"):
        launch_cost.bench(tmp_path / "launch.json")
    assert list(tmp_path.iterdir()) == []


def test_the_host_clock_leaves_out_waiting_and_the_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    calls: list[int] = []
    monkeypatch.setattr(launch_cost.time, "perf_counter", lambda: clock[0])

    def call() -> None:
        # The first round is slow, as one that loads and allocates; the others take 2, 3 and 4 us a call.
        clock[0] += 1e-3 if len(calls) < 2 else 1e-6 * (1 + len(calls) // 2)
        calls.append(1)

    def wait() -> None:
        clock[0] += 7.0

    found = launch_cost.host_rounds(call, 2, wait, 3)
    assert len(calls) == 8
    assert (found.low, found.median, found.high) == pytest.approx((2, 3, 4))
