"""Tuning as far as no GPU is needed: what is measured, how a run resumes, and what the selection table gets of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyharness import manifest, measure, select, tune
from pyharness.errors import DeviceError, NoKernel
from pyharness.families import RecurrentSpec, SsdSpec, UpdateSpec
from pyharness.select import Device, Features
from pyharness.spec import Geometry
from pyharness.workload import Point

TILED, PADDED, SLICES, BLOCK = (
    RecurrentSpec(d_state=128, layout=layout) for layout in ("tiled", "padded", "slices", "block")
)
UPDATE, TF32 = UpdateSpec(d_state=128), SsdSpec(d_state=128, precision="tf32")
CATALOGUE = (
    TILED,
    PADDED,
    SLICES,
    BLOCK,
    RecurrentSpec(d_state=64),
    RecurrentSpec(d_state=128, io="bf16"),
    UPDATE,
    TF32,
)
DECODE, PREFILL = Point("decode", 16, 1, True), Point("prefill", 1, 4096, False)
#: Microseconds by kernel: padded is within the margin of tiled, and faster once it is measured well.
#: update, where it fits, is the only one of its family.
SHORT = {TILED.id: 10.0, PADDED.id: 10.9, SLICES.id: 11.1, UPDATE.id: 30.0}
FULL = {TILED.id: 10.5, PADDED.id: 10.4, UPDATE.id: 31.0}


class Clock:
    """Times kernels by a table: what was asked of it, in order."""

    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[tuple[str, bool, tuple[str, ...]]] = []
        self.fails_at = fails_at

    def __call__(
        self, kernels: Mapping[Point, Sequence[str]], protocol: measure.Protocol, ordinal: int
    ) -> list[dict[str, Any]]:
        ((point, ids),) = kernels.items()
        full = protocol == measure.FULL
        if point.name == self.fails_at:
            raise KeyboardInterrupt
        self.calls.append((point.name, full, tuple(ids)))
        return [self.row(point, kernel, FULL if full else SHORT) for kernel in ids]

    def row(self, point: Point, kernel: str, times: Mapping[str, float]) -> dict[str, Any]:
        if kernel not in times:
            return {"kernel": kernel, "point": point.name, "failed": "it is wrong"}
        image = {"target": "sm_90", "sha256": manifest.read(kernel).targets["sm_90"].sha256}
        return {"kernel": kernel, "point": point.name, "us": {"median": times[kernel]}, "ratio": 1.5, "image": image}


def run(clock: Clock, path: Path, driver: str = "580.1", **options: Any) -> dict[str, Any]:
    bench = tune.Bench("A card", "sm_90", driver, "13.0", "13.0.88", clock)
    return tune.tune(bench=bench, grid=(DECODE, PREFILL), catalogue=CATALOGUE, path=path, **options)


def test_what_is_near_the_fastest_and_the_best_of_each_family_is_measured_well(tmp_path: Path) -> None:
    clock = Clock()
    document = run(clock, tmp_path / "tune.json")
    every = (TILED.id, PADDED.id, SLICES.id, BLOCK.id)
    near = (TILED.id, PADDED.id)
    assert clock.calls == [
        (DECODE.name, False, (*every, UPDATE.id)),
        (DECODE.name, True, (*near, UPDATE.id)),
        (PREFILL.name, False, every),
        (PREFILL.name, True, near),
    ]
    assert json.loads((tmp_path / "tune.json").read_text()) == document
    assert [(row["kernel"], row["us"]["median"]) for row in document["rows"] if row["point"] == DECODE.name] == list(
        FULL.items()
    )
    first = tune.winners(document)[0]
    assert (first["point"], first["kernel"], first["us"], first["next"]) == (DECODE.name, PADDED.id, 10.4, TILED.id)


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    with pytest.raises(KeyboardInterrupt):
        run(Clock(fails_at=PREFILL.name), path)
    clock = Clock()
    run(clock, path)
    assert {name for name, _, _ in clock.calls} == {PREFILL.name}
    run(clock, path)
    assert len(clock.calls) == 2, "nothing is left"
    run(clock, path, again=True)
    assert len(clock.calls) == 6
    run(clock, path, points=[DECODE.name], again=True)
    assert [name for name, _, _ in clock.calls[6:]] == [DECODE.name] * 2


def test_a_changed_image_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    document = run(Clock(), path)
    for row in document["short"]:
        if row["point"] == DECODE.name and "image" in row:
            row["image"]["sha256"] = "0" * 64
    path.write_text(json.dumps(document))
    clock = Clock()
    run(clock, path)
    assert {name for name, _, _ in clock.calls} == {DECODE.name}


def test_a_record_of_another_driver_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "tune.json"
    run(Clock(), path)
    before = path.read_bytes()
    with pytest.raises(DeviceError, match=r"driver '590.2' was wanted, found '580.1': measure it anew with --again"):
        run(Clock(), path, driver="590.2")
    assert path.read_bytes() == before


def test_what_cannot_be_tuned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoKernel, match="--points must name some of decode_16x1_f32, .*, found decode_3x1"):
        run(Clock(), tmp_path / "tune.json", points=["decode_3x1"])
    with pytest.raises(NoKernel, match="family 'woven' for the points was wanted, found none; families: recurrent"):
        run(Clock(), tmp_path / "tune.json", family="woven")
    assert not list(tmp_path.iterdir())


def test_the_grid_has_names_of_its_own_and_a_kernel_for_each_point() -> None:
    assert len({point.name for point in tune.GRID}) == len(tune.GRID)
    ids = [manifest.read(kernel).kernel for kernel in manifest.ids()]
    assert all(tune.candidates(point, None, ids) for point in tune.GRID)


# The table.


def test_a_record_and_the_reports_become_the_table(tmp_path: Path) -> None:
    run(Clock(), tmp_path / "benches" / "a-card" / "tune.json")
    path = tmp_path / "selection.json"
    table = tune.write_table(path, tmp_path / "benches")
    assert set(select.parse_table(json.loads(path.read_text())).entries) == set(table.entries)
    found = {(e.tokens, e.family, e.kernel, e.microseconds, e.source) for e in table.entries if e.device == "A card"}
    assert found == {
        (4096, "recurrent", PADDED.id, 10.4, "measured"),
        (16, "recurrent", PADDED.id, 10.4, "measured"),
        (16, "update", UPDATE.id, 31.0, "measured"),
    }
    assert {e for e in table.entries if e.source == "reported"} == set(tune.REPORTED)


def test_the_page_shows_the_winners_of_a_record(tmp_path: Path) -> None:
    run(Clock(), tmp_path / "benches" / "a-card" / "tune.json")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tune -->\n<!-- /tune -->\nafter\n")
    tune.write_page(page, tmp_path / "benches")
    text = page.read_text()
    assert "\nA card, driver 580.1, nvcc 13.0.88, " in text
    row = f"| `{PADDED.id}` | 10.40 | 1.50 | `{TILED.id}` | 10.50 |\n"
    assert f"| {DECODE.name} {row}" in text
    assert f"| {PREFILL.name} {row}" in text
    assert tune.refreshed(text, tmp_path / "benches") == text


def test_the_page_of_the_project_shows_what_is_stored() -> None:
    text = tune.PAGE.read_text(encoding="utf-8")
    assert tune.refreshed(text) == text, "docs/embedding.md is stale: run `invoke tune --table`"


def test_the_committed_table_has_what_was_reported() -> None:
    reported = {entry for entry in select.committed_table().entries if entry.source == "reported"}
    assert reported == set(tune.REPORTED), "run `invoke tune --table`"
    assert all(entry.kernel in manifest.ids() for entry in reported)


def test_a_report_gives_way_to_a_measurement_and_counts_for_its_problem_alone() -> None:
    report = tune.REPORTED[0]
    measured = replace(report, kernel=TILED.id, source="measured")
    assert tune.with_reported(select.Table((measured,))).entries == (measured, tune.REPORTED[1])
    table = tune.with_reported(select.Table())
    exact = Features(Geometry(4096, 1, 64, 64, 8, 128), "f32", "f32")
    near = replace(exact, geometry=replace(exact.geometry, tokens=4095))
    for device in (Device(report.device, report.target), Device("Another card", report.target)):
        assert select.choose(exact, device, table=table, ids=[TILED.id, PADDED.id]).id == PADDED.id
        assert select.choose(near, device, table=table, ids=[TILED.id, PADDED.id]).id == TILED.id
