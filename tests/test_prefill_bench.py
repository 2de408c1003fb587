"""Timings of chunked prefill as far as no GPU is needed: points, what is compared, tables, and what selection takes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyharness import figures, measure, peers, readme_tables, select, workload
from pyharness.args import SCAN_ARGS
from pyharness.catalogue import CATALOGUE
from pyharness.errors import DeviceError, NoKernel
from pyharness.families import RecurrentSpec, SsdSpec
from pyharness.figures import listing
from pyharness.oracle import oracle
from pyharness.readme_tables import readme_table
from pyharness.select import Device as Target
from pyharness.select import Features, Table, choose, measured_entries
from pyharness.spec import Geometry, parse_id
from pyharness.workload import PREFILL, Norms, Point, Workload, point_named
from tests.host_memory import HostMemory, at

KERNELS = [spec for spec in CATALOGUE if isinstance(spec, SsdSpec)]
H200 = Target("NVIDIA H200", "sm_90")
IDS = [spec.id for spec in CATALOGUE]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(workload, "Memory", HostMemory)
    return SimpleNamespace(l2_bytes=2**16, synchronize=lambda _: None, name="host", target="sm_90", ordinal=0)


# Points.


def test_points_have_names_of_their_own_and_are_those_of_the_target() -> None:
    names = [point.name for point in PREFILL]
    assert len(set(names)) == len(names)
    assert {"prefill_1x512_bf16", "prefill_8x1024_64_d_state_bf16", "prefill_1x4096_f16"} <= set(names)
    mixed = point_named("prefill_32x1to2000_bf16")
    assert (len(mixed.lengths), min(mixed.lengths), max(mixed.lengths)) == (32, 1, 2000)
    assert mixed.all_tokens == sum(mixed.lengths) == mixed.offsets[-1]
    assert Point(**json.loads(json.dumps(asdict(mixed)))) == mixed, "as a stored table has it"
    with pytest.raises(NoKernel, match="3 sequences of at most 9 tokens"):
        Point("prefill", 3, 9, False, lengths=(9, 8))


@pytest.mark.parametrize("point", PREFILL, ids=lambda point: point.name)
def test_every_point_has_kernels_of_both_families(point: Point) -> None:
    families = [parse_id(kernel).family for kernel in measure.default_kernels(point, "ssd")]
    assert "ssd" in families
    assert families.count("recurrent") == 1


def test_a_workload_of_mixed_lengths_is_what_its_problem_says(device: Any) -> None:
    load = Workload(device, Point("prefill", 3, 7, False, 2, 32, 32, 1, "bf16", lengths=(3, 7, 1)))
    assert load.problem.lengths.tolist() == [3, 7, 1]
    spec = SsdSpec(d_state=32, head_dim=32, io="bf16", segments=2, chunk=32)
    record = np.frombuffer(load.arguments(spec)[-1], SCAN_ARGS)[0]
    assert (record["tokens"], record["sequences"]) == (11, 3)
    assert at(int(record["cu_seqlens"]), "f32", 4).view(np.int32).tolist() == [0, 3, 10, 11]
    assert record["workspace_bytes"] == spec.plan(load.problem.geometry).workspace_bytes > 0


def test_norms_are_over_all_of_y_and_of_the_states(device: Any) -> None:
    """What a call stores is the oracle's own but for one value of each, twice as large: worked by hand."""
    load = Workload(device, Point("prefill", 2, 3, False, 2, 8, 16, 1))
    truth = oracle(load.problem)
    slots = load.problem.resolved_write
    y = truth.y.astype(np.float32)
    state = np.stack([truth.states[int(s)] for s in slots]).astype(np.float32)

    def call(_: int) -> None:
        at(load.address("y", 0), "f32", y.size)[...] = y.reshape(-1)
        for row, slot in enumerate(slots):
            at(load.pool.address + int(slot) * load.point.slot_bytes, "f32", state[row].size)[...] = state[row].reshape(
                -1
            )

    errors, norms = load.check(call, KERNELS[-1].id)
    assert errors.ok
    assert max(norms.y, norms.state) < 1e-7
    y[1, 1, 3] *= 2
    state[1, 0, 2, 5] *= 2
    expected = (abs(truth.y[1, 1, 3]), abs(truth.states[int(slots[1])][0, 2, 5]))
    whole = (np.linalg.norm(truth.y), np.linalg.norm([truth.states[int(s)] for s in slots]))
    norms = load.norms(call, "a peer")
    assert norms.y == pytest.approx(expected[0] / whole[0], rel=1e-5)
    assert norms.state == pytest.approx(expected[1] / whole[1], rel=1e-5)


def test_prompts_are_compared_with_the_packages_chunks(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    point = PREFILL[0]
    assert [peer.name for peer in peers.peers(point)] == ["mamba-ssm chunk_scan 128", "mamba-ssm chunk_scan 256"]
    resumed = Workload(device, Point("prefill", 1, 4, True, 2, 32, 32, 1))
    with pytest.raises(DeviceError, match="begin at zero"):
        next(peers.peers(point)).prepare(resumed)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match="torch is not installed"):
        next(peers.peers(point)).prepare(Workload(device, Point("prefill", 1, 4, False, 2, 32, 32, 1)))


# Tables.


def row(kernel: str, point: Point, median: float, norms: Norms, **more: Any) -> dict[str, Any]:
    us = {"median": median, "low": median, "high": median}
    ceilings = {"bytes": 20.0, "products": 16.0, "us": 20.0}
    errors = {"error_of_y": norms.y, "error_of_state": norms.state}
    return {"kernel": kernel, "point": point.name, "us": us, "ceilings": ceilings, "ratio": median / 20} | errors | more


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(select, "catalogue_ids", lambda: tuple(IDS))
    bf16, f32 = point_named("prefill_1x4096_bf16"), point_named("prefill_1x512_f32")
    split, tf32 = (next(spec.id for spec in KERNELS if spec.precision == name) for name in ("split", "tf32"))
    best = next(spec.id for spec in KERNELS if spec.exact)
    slow = next(spec.id for spec in KERNELS if spec.io == "bf16" and not spec.exact)
    recurrent = measure.default_kernels(bf16, "ssd")[-1]
    return {
        "suite": "ssd",
        "device": H200.name,
        "target": H200.target,
        "driver": "580.1",
        "compiler": "13.0.88",
        "date": "2026-01-02",
        "points": {point.name: asdict(point) for point in (bf16, f32)},
        "rows": [
            row(best, bf16, 50.0, Norms(3e-3, 2e-3), error=0.4),
            row(slow, bf16, 60.0, Norms(3e-3, 2e-3), error=0.4),
            row(recurrent, bf16, 560.0, Norms(1e-3, 1e-7), error=0.4),
            row("mamba-ssm chunk_scan 128", bf16, 167.5, Norms(3.1e-3, 2.2e-3), peer=True),
            row("mamba-ssm chunk_scan 256", bf16, 175.0, Norms(3.3e-3, 2.2e-3), peer=True),
            row(split, f32, 40.0, Norms(5e-6, 4e-6), error=0.1),
            row(tf32, f32, 30.0, Norms(4e-4, 3e-4), error=0.1),
        ],
        "protocol": measure.PROTOCOL,
    }


def test_the_table_has_a_line_a_point_and_precision(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "nvidia-h200" / "ssd.json"
    path.parent.mkdir()
    path.write_text(json.dumps(document), encoding="utf-8")
    lines = readme_table("ssd", tmp_path).splitlines()
    best, _, _, _, _, split, tf32 = (r["kernel"] for r in document["rows"])
    assert (
        f"| 1 x 4096, 64 heads x 64 x 128, 8 groups, bf16 | 20.0 | 16.0 | 50.0 (2.50x) | `{best}` | 560.0 | "
        "167.5 (mamba-ssm chunk_scan 128) | 3.35 | 3.0e-03 / 3.1e-03 | 2.0e-03 / 2.2e-03 |"
    ) in lines
    f32 = [line for line in lines if line.startswith("| 1 x 512")]
    assert [line.split("`")[1] for line in f32] == [split, tf32]
    assert f32[0].endswith("| - | - | - | 5.0e-06 | 4.0e-06 |")
    notes = [line["note"] for line in listing(document["rows"])]
    assert notes[0] == "error 0.40 of what is allowed, relative error of y 3.0e-03, relative error of state 2.0e-03"


# Selection.


def geometry(**fields: Any) -> Geometry:
    return Geometry(
        **({"tokens": 4096, "sequences": 1, "heads": 64, "head_dim": 64, "groups": 8, "d_state": 128} | fields)
    )


def test_what_is_measured_is_selected_and_a_refusal_is_a_step_down(document: dict[str, Any]) -> None:
    table = Table(measured_entries([document]))
    best = document["rows"][0]["kernel"]
    features = Features(geometry(longest=4096), "bf16", "f32")
    assert choose(features, H200, table=table, ids=IDS).id == best, "code for the exact target serves the device"
    # States behind 100 tokens, or inside a chunk.
    selection = choose(Features(geometry(longest=4096, checkpoint_step=100), "bf16", "f32"), H200, table=table, ids=IDS)
    assert parse_id(selection.id).family == "recurrent"
    assert any(best in step and "behind a multiple of 100 tokens" in step for step in selection.steps)
    for refused in (geometry(per_column_a=True), geometry(head_dim=48)):
        assert parse_id(choose(Features(refused, "bf16", "f32"), H200, table=table, ids=IDS).id).family == "recurrent"


def test_f32_is_split_only_where_that_was_measured_faster_and_never_rounded_to_tf32(document: dict[str, Any]) -> None:
    split = document["rows"][5]["kernel"]
    assert not [one for one in measured_entries([document]) if one.io == "f32"], "there is no recurrent beside it"
    exact = RecurrentSpec(d_state=128).id
    for us, wanted in ((1.0, [exact]), (1e6, [split, exact])):
        beside = {"kernel": exact, "point": document["rows"][5]["point"], "us": {"median": us}}
        entries = measured_entries([document | {"rows": [*document["rows"], beside]}])
        found = [entry.kernel for entry in entries if entry.io == "f32"]
        assert found == wanted, "tf32 is faster than both and does not count"
    features = Features(geometry(tokens=512, longest=512), "f32", "f32")
    assert choose(features, H200, table=Table(entries), ids=IDS).id == split
    # On another device, even of the same target, and without one.
    for other in (Target("NVIDIA H100 PCIe", "sm_90"), Target("", "sm_90"), None):
        assert parse_id(choose(features, other, table=Table(entries), ids=IDS).id).family == "recurrent"
    # Asked for by its family, it is taken without having been measured; tf32 is not.
    asked = parse_id(choose(features, None, family="ssd", table=Table(), ids=IDS).id)
    assert (asked.family, getattr(asked, "precision", "")) == ("ssd", "split")
    # Where `recurrent` has no kernel for a d_state, the generic one runs f32.
    only = ["recurrent_generic_f32_sf32", "ssd_n32_p64_r32_w2_c64_t1_f32_sf32_split"]
    few = Features(geometry(d_state=32, longest=4096), "f32", "f32")
    assert choose(few, H200, table=Table(), ids=only).id == only[0]


def test_goals_of_prompts_are_beside_what_is_reached() -> None:
    def row(point: str, kernel: str, us: float) -> dict[str, Any]:
        return {"point": point, "kernel": kernel, "us": {"median": us}} | ({} if "ssd" in kernel else {"peer": True})

    ours, split = SsdSpec(d_state=128, io="bf16").id, SsdSpec(d_state=128, precision="split").id
    rows = [
        *(row("prefill_1x4096_bf16", kernel, us) for kernel, us in ((ours, 50.0), ("a peer", 150.0))),
        *(row("prefill_1x512_bf16", kernel, us) for kernel, us in ((ours, 20.0), ("a peer", 39.0), ("another", 41.0))),
        row("prefill_1x131072_bf16", ours, 1800.0),
        row("prefill_1x4096_f32", split, 267.0),
    ]
    found = readme_tables.prefill_goals({"points": {one["point"]: {} for one in rows}, "rows": rows})
    assert found == (
        "Goals: 2x as fast as the best peer at `prefill_1x512_bf16`: 1.95x, not reached; "
        "3x as fast as the best peer at `prefill_1x4096_bf16`: 3.00x, reached; "
        "at most 267 us at `prefill_1x4096_f32`: 267.0, reached; "
        "131072 tokens in at most 35x the time of 4096: 36.0x, not reached."
    )
    assert readme_tables.prefill_goals({"points": {}, "rows": []}) == ""


def test_stored_errors_are_those_of_the_reference_and_split_is_as_f32() -> None:
    document = json.loads((select.BENCHES / "nvidia-h200" / "ssd.json").read_text(encoding="utf-8"))
    compared = 0
    for name, point in document["points"].items():
        rows = figures.timed_at(document, name)
        peer = figures.best_peer(rows)
        for found in figures.ours_of(rows):
            spec = parse_id(found["kernel"])
            for kind in ("error_of_y", "error_of_state"):
                if peer and spec.family == "ssd" and point["io"] == "bf16":
                    assert found[kind] <= 1.05 * peer[kind], (name, found["kernel"], kind)
                    compared += 1
                if getattr(spec, "precision", "") == "split":
                    assert found[kind] <= 1e-5, (name, found["kernel"], kind)
                    compared += 1
    assert compared
