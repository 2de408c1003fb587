"""Timing as far as no GPU is needed: the protocol's arithmetic and the points."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pyharness.catalogue import CATALOGUE
from pyharness.errors import DeviceError, NoKernel
from pyharness.families.recurrent import LAYOUTS
from pyharness.measure import Timing, bench, default_kernels, graph_calls, merged
from pyharness.spec import parse_id
from pyharness.workload import POINTS, Point, point_named, slot_sets

MIB = 2**20


def test_a_timing_is_the_median_of_its_rounds_with_the_extremes() -> None:
    assert Timing.of([5.0, 1.0, 3.0, 9.0, 2.0]) == Timing(3.0, 1.0, 9.0)


@pytest.mark.parametrize(("set_mib", "sets"), [(32, 5), (150, 1), (149, 2), (2, 75), (1000, 1)])
def test_sets_hold_three_times_the_cache(set_mib: int, sets: int) -> None:
    assert slot_sets(set_mib * MIB, 50 * MIB) == sets
    assert sets * set_mib >= 150


@pytest.mark.parametrize(("sets", "calls"), [(1, 20), (5, 20), (6, 24), (20, 20), (75, 75)])
def test_a_graph_has_at_least_20_calls_and_whole_turns_through_the_sets(sets: int, calls: int) -> None:
    assert graph_calls(sets, 20) == calls


def test_the_points_are_the_ancestors() -> None:
    assert [point.name for point in POINTS if point.io == "f32"] == ["prefill_1x4096_f32", "decode_16x1_f32"]
    prefill, decode = POINTS[0], POINTS[1]
    # Worked by hand: 16 states of 64 x 64 x 128 f32 are 32 MiB, read and written.
    assert decode.sequences * decode.slot_bytes == 32 * MIB
    assert decode.moved_bytes - decode.input_bytes - decode.y_bytes == 64 * MIB
    # x and y are 64 MiB each, B and C 16 MiB each, dt 1 MiB, and one state of 2 MiB is written.
    assert prefill.moved_bytes == (64 + 64 + 16 + 16 + 1 + 2) * MIB
    assert prefill.updates == 4096 * 64 * 64 * 128


def test_a_point_that_nobody_measures_is_refused_with_those_on_offer() -> None:
    with pytest.raises(NoKernel, match="decode_16x1_f32"):
        point_named("decode_17x1_f32")
    with pytest.raises(NoKernel, match="'other' has no table"):
        bench("other")


def test_the_table_has_every_layout_and_they_are_in_the_catalogue() -> None:
    kernels = default_kernels(Point("decode", 16, 1, True))
    assert {parse_id(kernel).fields()["layout"] for kernel in kernels} == set(LAYOUTS)
    assert set(kernels) <= {spec.id for spec in CATALOGUE}
    assert all(parse_id(kernel).d_state in (0, 128) and parse_id(kernel).io == "f32" for kernel in kernels)


def test_a_part_of_a_table_replaces_its_rows_and_keeps_the_others() -> None:
    point = Point("decode", 16, 1, True)
    first, second, third = default_kernels(point)[:3]
    stored = {"device": "D", "driver": "1", "compiler": "c", "protocol": "p", "points": {point.name: asdict(point)}}
    stored |= {"suite": "recurrent", "date": "2026-01-02"}
    stored["rows"] = [{"point": point.name, "kernel": kernel, "us": 1} for kernel in (first, third)]
    part = stored | {"rows": [{"point": point.name, "kernel": kernel, "us": 2} for kernel in (third, second)]}
    rows = merged(part | {"date": "2026-01-03"}, stored)["rows"]
    found = [(row["kernel"], row["us"], row["date"]) for row in rows]
    assert found == [(first, 1, "2026-01-02"), (second, 2, "2026-01-03"), (third, 2, "2026-01-03")]
    with pytest.raises(DeviceError, match="stored table has driver '1', this run '2'"):
        merged(part | {"driver": "2"}, stored)
