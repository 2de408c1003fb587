"""Decode's timings and comparisons as far as no GPU is needed: what is placed where, over memory of the host."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyharness import bitwise, measure, peers, workload
from pyharness.args import SCAN_ARGS, Flag
from pyharness.catalogue import CATALOGUE
from pyharness.errors import DeviceError
from pyharness.families import RecurrentSpec, UpdateSpec
from pyharness.figures import listing
from pyharness.readme_tables import readme_table
from pyharness.select import Device as Target
from pyharness.select import Features, Table, choose, measured_entries
from pyharness.spec import Geometry, parse_id
from pyharness.workload import DECODE, Point, Workload, point_named
from tests.host_memory import HostMemory, at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(workload, "Memory", HostMemory)
    monkeypatch.setattr(bitwise, "Memory", HostMemory)
    return SimpleNamespace(l2_bytes=2**16, synchronize=lambda _: None, name="host", target="sm_90", ordinal=0)


def test_points_have_names_of_their_own_and_are_those_of_the_target() -> None:
    names = [point.name for point in DECODE]
    assert len(set(names)) == len(names) == 19
    assert point_named("decode_32x1_128_heads_80_head_dim_bf16_packed").groups == 8
    megabytes = {point.name: point.sequences * point.slot_bytes / 2**20 for point in DECODE}
    assert megabytes["decode_1x1_16_heads_bf16_packed"] == 0.5
    assert megabytes["decode_128x1_bf16_packed"] == 256
    assert megabytes["decode_128x1_bf16_si8_packed"] == 64


@pytest.mark.parametrize("point", DECODE, ids=lambda point: point.name)
def test_every_point_has_kernels_of_the_catalogue(point: Point) -> None:
    kernels = [parse_id(kernel) for kernel in measure.default_kernels(point, "update")]
    assert kernels
    assert {(k.io, k.state, k.d_state) for k in kernels} == {(point.io, point.state, point.d_state)}
    assert all(getattr(k, "head_dim", 0) in (0, point.head_dim) for k in kernels)


@pytest.mark.parametrize("state", ["f32", "i8"])
def test_a_packed_workload_places_what_its_problem_says(device: Any, state: str) -> None:
    point = Point("decode", 3, 2, True, 4, 8, 16, 2, "bf16", state, packed=True)
    load = Workload(device, point)
    assert load.sets > 1
    spec = UpdateSpec(d_state=16, io="bf16", state=state)
    for ascending in (False, True):
        for k, packed in enumerate(load.arguments(spec, ascending)):
            record = np.frombuffer(packed, SCAN_ARGS)[0]
            assert record["x_stride"] == record["B_stride"] == record["dt_stride"] == load.row_elements("B")
            every = Flag.VECTOR_STATE | Flag.VECTOR_X | Flag.VECTOR_Y
            # 4 x 8 + 2 x 2 x 16 + 4 elements a row: 200 bytes, no multiple of 16.
            assert not record["flags"] & Flag.VECTOR_B
            assert record["flags"] & (every & ~Flag.VECTOR_X) == every & ~Flag.VECTOR_X
            slots = at(int(record["read_slots"]), "f32", 3).view(np.int32)
            if ascending:
                order = at(int(record["sequence_order"]), "f32", 3).view(np.int32)
                assert (np.diff(slots[order]) > 0).all()
            else:
                assert record["sequence_order"] == 0
            ascended = at(load.address("ascending_slots", k), "f32", 3).view(np.int32)
            assert ascended.tolist() == sorted(slots.tolist())
    problem = load.problem
    first = np.frombuffer(load.arguments(spec)[0], SCAN_ARGS)[0]
    for name in ("x", "B", "C", "dt"):
        row = getattr(problem, name)[1].reshape(-1)
        found = at(int(first[name]) + int(first[f"{name}_stride"]) * 2, "bf16", row.size)
        assert found.tobytes() == row.tobytes()
    assert (state == "i8") == (first["state_scale"] != 0)


def test_every_decode_row_of_the_bench_is_aligned_for_vectors(device: Any) -> None:
    """16 heads of 64 rows, one group of 128 columns and dt: 1296 elements of 2 bytes."""
    load = Workload(device, Point("decode", 2, 1, True, 16, 64, 128, 1, "bf16", packed=True))
    record = np.frombuffer(load.arguments(UpdateSpec(d_state=128, io="bf16"))[-1], SCAN_ARGS)[0]
    vectors = Flag.VECTOR_STATE | Flag.VECTOR_X | Flag.VECTOR_Y | Flag.VECTOR_B | Flag.VECTOR_C
    assert record["flags"] & vectors == vectors


# Bits.


def test_kernels_are_compared_with_recurrent_where_it_has_their_type() -> None:
    found = bitwise.classes([spec for spec in CATALOGUE if spec.family == "update"])
    for key, members in found.items():
        assert len(members) >= 2, f"{key}: nothing to compare with"
        assert (members[0].family == "recurrent") == (key.state != "i8")
        assert {(m.d_state, m.io, m.state) for m in members} == {(key.d_state, key.io, key.state)}
        assert {getattr(m, "head_dim", 0) for m in members} <= {0, key.head_dim}
    assert len(bitwise.HEADS) * len(bitwise.BATCHES) == 920


class Recorder:
    """A kernel that writes one value to y and to every written slot, as its arguments say."""

    def __init__(self, spec: Any, value: int = 1) -> None:
        self.spec, self.value = spec, value

    def launch(self, _: Any, arguments: bytes) -> None:
        record = np.frombuffer(arguments, SCAN_ARGS)[0]
        sequences, heads = int(record["sequences"]), int(record["heads"])
        at(int(record["y"]), "bf16", sequences * heads * 64).view(np.uint16)[...] = 1
        stride = int(record["state_stride"])
        write = at(int(record["write_slots"]), "f32", sequences).view(np.int32)
        read = at(int(record["read_slots"]), "f32", sequences).view(np.int32)
        assert sequences - 1 <= read.max() < write.min()
        assert write.max() < record["slots"]
        for slot in write:
            at(int(record["state"]) + int(slot) * stride, "i8", stride)[...] = self.value
            scales = at(int(record["state_scale"]) + 4 * int(slot) * heads * 64, "f32", heads * 64)
            scales[...] = 0.5


class HostEntry:
    """The helper kernels on the host."""

    def __init__(self, _: Any, __: Any, symbol: str) -> None:
        self.symbol = symbol

    def launch(self, _: Any, __: Any, arguments: bytes) -> None:
        import struct

        if self.symbol == "bitwise_fill":
            address, words, _kind, seed = struct.unpack("<QQiI", arguments)
            at(address, "f32", words).view(np.uint32)[...] = np.arange(words) + seed
            return
        a, b, vectors, counter = struct.unpack("<QQQQ", arguments)
        differ = at(a, "f32", 4 * vectors).view(np.uint32) != at(b, "f32", 4 * vectors).view(np.uint32)
        at(counter, "i8", 8).view(np.uint64)[0] += int(differ.sum())


@pytest.mark.parametrize("value", [1, 2])
def test_a_difference_in_a_state_is_counted_and_equal_ones_are_not(
    device: Any, monkeypatch: pytest.MonkeyPatch, value: int
) -> None:
    image = SimpleNamespace(data=b"", usage={"bitwise_fill": None, "bitwise_compare": None})
    monkeypatch.setattr(bitwise, "Entry", HostEntry)
    monkeypatch.setattr(bitwise.toolchain, "compile_cached", lambda *_: image)
    device.module = lambda _: None
    spec = UpdateSpec(d_state=16, io="bf16", state="i8")
    bench = bitwise.Bench(device, bitwise.Arithmetic(16, "bf16", "i8"), heads=(1, 2), batches=(1, 3))
    reference, other = Recorder(spec), Recorder(spec, value)
    if value == 1:
        assert bench.differing(reference, [other]) == {spec.id: 0}  # type: ignore[arg-type, list-item]
        return
    # Batches 1 and 3 of one head: 4 slots of 64 rows x 16 bytes, 4 words a row.
    with pytest.raises(DeviceError, match=r"in 1024 words .* at 1 heads"):
        bench.differing(reference, [other])  # type: ignore[arg-type, list-item]


# Peers, tables, selection.


def test_every_peer_is_named_and_says_what_is_missing(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    point = Point("decode", 2, 1, True, 2, 4, 16, 1, "bf16", packed=True)
    found = list(peers.peers(point))
    assert [peer.name for peer in found][:2] == ["mamba-ssm triton (4, 4)", "mamba-ssm triton (4, 1)"]
    assert [peer.name for peer in found][7:] == ["flashinfer simple", "flashinfer vertical"]
    assert [peer.name for peer in peers.peers(replace(point, tokens=4))] == ["flashinfer simple"]
    for name in ("torch", "mamba_ssm", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    load = Workload(device, point)
    with pytest.raises(DeviceError, match="torch is not installed"):
        peers.time_peer(load, found[0], 1, 1, 1, 0.0)
    assert peers.reason(ValueError("a\nb")) == "ValueError: a b"
    built = RuntimeError(
        "Ninja build failed. Output:\n[1/3] nvcc --generate\n/x/b.cuh(7): error: static assertion failed"
    )
    assert peers.reason(built) == "RuntimeError: b.cuh(7): error: static assertion failed"
    wrong = "expects 16 bytes, got address 140104314131488 (0x7f6c2a3b40)"
    assert peers.reason(RuntimeError(wrong)) == "RuntimeError: expects 16 bytes, got address"
    assert peers.reason(ImportError("no x/y in (/opt/a b/c.so), /x/y.py")) == "ImportError: no x/y in (a b/c.so), y.py"


def test_mamba1_has_peers_of_its_own(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    prefill = Point("prefill", 1, 5, False, heads=8, head_dim=1, d_state=16, groups=1, io="bf16")
    (scan,) = peers.peers(prefill)
    assert scan.name == "mamba-ssm selective_scan"
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", None)
    with pytest.raises(DeviceError, match="selective_scan_cuda is not built"):
        scan.prepare(Workload(device, prefill))
    with pytest.raises(DeviceError, match="sequences start from zero there"):
        scan.prepare(Workload(device, replace(prefill, resume=True)))
    decode = replace(prefill, job="decode", tokens=1, resume=True)
    names = [peer.name for peer in peers.peers(decode)]
    assert names[:2] == ["mamba-ssm triton (32, 4)", "mamba-ssm triton (16, 1)"]
    assert len(names) == len(set(names)) == 5


def test_a_configuration_replaces_the_rows_and_warps_of_a_launcher() -> None:
    seen: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: seen.append(
                (grid({"BLOCK_SIZE_M": arguments[-1]}), arguments, options)
            )

    peers._Configured(Kernel(), 8, 1)[lambda meta: 64 // meta["BLOCK_SIZE_M"]]("state", True, 4, num_warps=4)
    assert seen == [(8, ("state", True, 8), {"num_warps": 1})]


@pytest.fixture
def document() -> dict[str, Any]:
    point = next(p for p in DECODE if p.name == "decode_128x1_bf16_packed")
    kernels = measure.default_kernels(point, "update")[:2]
    ceilings = {"slots": 136.5, "ascending": 129.9, "contiguous": 128.2, "us": 136.5}

    def row(kernel: str, median: float, **more: Any) -> dict[str, Any]:
        us = {"median": median, "low": median, "high": median}
        return {"kernel": kernel, "point": point.name, "us": us, "ceilings": ceilings, "ratio": median / 136.5} | more

    return {
        "suite": "update",
        "device": "NVIDIA H200",
        "target": "sm_90",
        "driver": "580.1",
        "compiler": "13.0.88",
        "date": "2026-01-02",
        "points": {point.name: vars(point)},
        "rows": [
            row(kernels[0], 140.0, error=0.1, registers=64),
            row(kernels[1], 138.0, error=0.1, registers=64),
            row(kernels[1], 131.0, error=0.1, registers=64, order="ascending"),
            row("mamba-ssm triton (16, 1)", 138.9, peer=True, error_of_y=1e-3),
            {"kernel": "flashinfer simple", "point": point.name, "peer": True, "failed": "not installed"},
        ],
        "protocol": measure.PROTOCOL,
    }


def test_the_table_has_a_line_a_point_with_the_best_of_each_kind(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "nvidia-h200" / "update.json"
    path.parent.mkdir()
    path.write_text(json.dumps(document), encoding="utf-8")
    text = readme_table("update", tmp_path)
    best = document["rows"][1]["kernel"]
    line = (
        "| 128 x 1, 64 heads x 64 x 128, bf16 sf32 | 256 | 136.50 | 129.90 | 128.20 | 138.00 (1.01x) | "
        f"`{best}` | 131.00 (1.02x) | 138.90 (1.02x) | mamba-ssm triton (16, 1) |"
    )
    assert line in text.splitlines()
    assert "\n\nNot run at any point: flashinfer simple: not installed\n\nNot measured: `decode_" in text
    goals = " ".join(text.split())
    assert "at 1 of 1 points, 1.01x at the least, reached; at most 2 % above the slots' ceiling" in goals
    assert "from 32 MiB on: at 1 of 1, 1 % at the most, reached; in ascending order" in goals
    notes = [line["note"] for line in listing(document["rows"])]
    assert notes[3:] == ["relative error of y 1.0e-03", "not installed"]


def test_a_part_of_the_table_keeps_other_points_orders_and_peers(document: dict[str, Any]) -> None:
    first = DECODE[0]
    row = {"kernel": measure.default_kernels(first, "update")[0], "point": first.name, "us": {"median": 1.0}}
    again = document["rows"][2] | {"us": {"median": 130.0}}
    part = document | {"points": {first.name: asdict(first)}, "rows": [again, row]}
    joined = measure.merged(part, document)
    assert list(joined["points"]) == [first.name, *document["points"]], "in the order of a whole table"
    dated = [one | {"date": "2026-01-02"} for one in (row, *document["rows"][:2], again, *document["rows"][3:])]
    assert joined["rows"] == dated
    with pytest.raises(DeviceError, match="stored table has driver '580.1', this run '580.2': measure it whole"):
        measure.merged(document | {"driver": "580.2"}, document)


def test_the_best_of_the_catalogue_in_order_of_sequences_is_what_selection_takes(document: dict[str, Any]) -> None:
    other = {"kernel": RecurrentSpec(d_state=128, io="bf16").id, "us": {"median": 137.0}}
    made = {"kernel": UpdateSpec(d_state=128, io="bf16", warps=3, rows=12).id, "us": {"median": 1.0}}
    point = next(iter(document["points"]))
    slower = document | {"rows": [other | {"point": point, "us": {"median": 139.0}}, made | {"point": point}]}
    found = {one.family: one for one in measured_entries([slower, document])}
    best, entry = document["rows"][1]["kernel"], found["update"]
    assert (entry.kernel, entry.batch_heads, entry.tokens) == (best, 8192, 128)
    assert (found["recurrent"].kernel, found["recurrent"].microseconds) == (other["kernel"], 139.0)
    again = measured_entries([slower, document, document | {"rows": [other | {"point": point}]}])
    assert {one.family: one for one in again}["recurrent"].microseconds == 137.0, "of two suites the faster"
    (entry,) = measured_entries([document])
    ids = [spec.id for spec in CATALOGUE]
    geometry = Geometry(128, 128, 64, 64, 8, 128, longest=1)
    device = Target("NVIDIA H200", "sm_90")
    table = Table((entry,))
    assert choose(Features(geometry, "bf16", "f32"), device, table=table, ids=ids).id == best
    # A prompt among the sequences is not for it.
    long = Geometry(1127, 128, 64, 64, 8, 128, longest=1000)
    assert parse_id(choose(Features(long, "bf16", "f32"), device, table=table, ids=ids).id).family == "recurrent"
