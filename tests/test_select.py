"""Selection: each step of the rule, its ties, and that every step down shows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest

from pyharness.errors import NoKernel
from pyharness.families import RecurrentSpec
from pyharness.select import (
    Device,
    Entry,
    Features,
    Table,
    bits,
    checked,
    choose,
    committed_table,
    distance,
    measured_entries,
    mismatch,
    named_device,
    parse_table,
    refreshed_table,
    table_document,
)
from pyharness.spec import Geometry

TILED = RecurrentSpec(d_state=128).id
PADDED = RecurrentSpec(d_state=128, layout="padded").id
SLICES = RecurrentSpec(d_state=128, layout="slices").id
OTHER = RecurrentSpec(d_state=64, layout="padded").id
GENERIC = RecurrentSpec(d_state=0, layout="generic").id
LOW = RecurrentSpec(d_state=128, io="bf16").id
IDS = (TILED, PADDED, SLICES, OTHER, GENERIC, LOW)

FEATURES = Features(Geometry(tokens=512, sequences=4, heads=64, head_dim=64, groups=8, d_state=128), "f32", "f32")
H200 = Device("NVIDIA H200", "sm_90")


def entry(kernel: str, **changes: Any) -> Entry:
    """An entry for exactly FEATURES on the H200."""
    base = Entry(
        device="NVIDIA H200",
        target="sm_90",
        family="recurrent",
        heads=64,
        head_dim=64,
        d_state=128,
        groups=8,
        io="f32",
        state="f32",
        batch_heads=256,
        tokens=512,
        kernel=kernel,
        microseconds=10.0,
        source="measured",
    )
    return replace(base, **changes)


def test_bits_counts_binary_digits() -> None:
    assert [bits(v) for v in (0, 1, 2, 3, 4, 255, 256, 2**40)] == [0, 1, 2, 2, 3, 8, 9, 41]


def test_distance_adds_octaves_of_both_sizes() -> None:
    assert distance(FEATURES, entry(TILED)) == 0
    assert distance(FEATURES, entry(TILED, batch_heads=511, tokens=1023)) == 0
    assert distance(FEATURES, entry(TILED, batch_heads=32, tokens=1024)) == 3 + 1


def test_an_exact_entry_wins_over_everything() -> None:
    table = Table((entry(PADDED), entry(SLICES, tokens=511)))
    chosen = choose(FEATURES, H200, table=table, ids=IDS)
    assert (chosen.id, chosen.steps) == (PADDED, ())
    assert "measured for this problem" in chosen.why


def test_the_nearest_entry_is_next_and_the_step_shows() -> None:
    table = Table((entry(SLICES, tokens=4096), entry(PADDED, tokens=1024), entry(TILED, batch_heads=8)))
    chosen = choose(FEATURES, H200, table=table, ids=IDS)
    assert chosen.id == PADDED
    assert chosen.steps == ("no entry for this problem on NVIDIA H200",)
    assert "1 octaves away" in chosen.why


def test_ties_go_to_the_smallest_id() -> None:
    rows = (entry(TILED, tokens=1024), entry(PADDED, tokens=256), entry(SLICES, batch_heads=512))
    for order in (rows, rows[::-1]):
        assert choose(FEATURES, H200, table=Table(order), ids=IDS).id == min(TILED, PADDED, SLICES)


def test_this_device_comes_before_an_exact_entry_of_its_kin() -> None:
    kin = entry(SLICES, device="NVIDIA H100")
    far = entry(PADDED, tokens=1)
    assert choose(FEATURES, H200, table=Table((kin, far)), ids=IDS).id == PADDED
    chosen = choose(FEATURES, H200, table=Table((kin,)), ids=IDS)
    assert chosen.id == SLICES
    assert len(chosen.steps) == 2


def test_a_device_of_another_target_does_not_count() -> None:
    table = Table((entry(SLICES, device="NVIDIA A100", target="sm_80"),))
    assert choose(FEATURES, H200, table=table, ids=IDS).id == TILED


def test_entries_of_other_types_or_of_kernels_not_on_offer_do_not_count() -> None:
    rows = (entry(LOW, io="bf16"), entry(OTHER, d_state=64), entry(RecurrentSpec(d_state=128, chunk=3).id))
    assert choose(FEATURES, H200, table=Table(rows), ids=IDS).id == TILED


def test_without_a_device_the_default_is_taken_without_steps() -> None:
    assert choose(FEATURES, table=Table((entry(PADDED),)), ids=IDS) == choose(FEATURES, table=Table(), ids=IDS)
    chosen = choose(FEATURES, table=Table(), ids=IDS)
    assert (chosen.id, chosen.steps) == (TILED, ())
    named = Table(defaults=(("recurrent", 128, "f32", "f32", SLICES),))
    assert choose(FEATURES, table=named, ids=IDS).id == SLICES


def test_without_the_default_kernel_the_first_recurrent_is_taken() -> None:
    assert choose(FEATURES, table=Table(), ids=(SLICES, PADDED, GENERIC)).id == min(SLICES, PADDED)


def test_generic_catches_the_rest_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    odd = replace(FEATURES, geometry=replace(FEATURES.geometry, d_state=77))
    with caplog.at_level(logging.WARNING, "pyharness.select"):
        chosen = choose(odd, table=Table(), ids=IDS)
        choose(odd, table=Table(), ids=IDS)
    assert chosen.id == GENERIC
    assert "slower: `invoke generate --dstate 77` makes a specialised one" in chosen.steps[-1]
    assert f"name it by its full id, {RecurrentSpec(d_state=77).id}" in chosen.steps[-1]
    assert len(caplog.records) == 1, "a step down is logged once"


def test_nothing_that_fits_is_an_error_that_names_the_problem_and_the_cure() -> None:
    low = replace(FEATURES, io="f16")
    with pytest.raises(NoKernel, match=r"io f16.*its io is f32.*`invoke generate --dstate 128 --io f16`"):
        choose(low, table=Table(), ids=IDS)
    with pytest.raises(NoKernel, match=r"on NVIDIA T4 .sm_75.*sm_75 has no bf16"):
        choose(replace(FEATURES, io="bf16"), Device("NVIDIA T4", "sm_75"), table=Table(), ids=IDS)
    with pytest.raises(NoKernel, match="no ssd kernel"):
        choose(FEATURES, family="ssd", table=Table(), ids=IDS)


def test_a_hint_names_no_command_that_refuses() -> None:
    sized = replace(FEATURES, geometry=replace(FEATURES.geometry, d_state=1025))
    for features, device, family, reason in (
        (sized, None, None, "d_state must be 1 to 1024, found 1025"),
        (replace(FEATURES, state="i8"), None, None, "state must be one of f32, bf16, f16, found 'i8'"),
        (replace(FEATURES, io="bf16"), Device("", "sm_75"), None, "sm_75 has no bf16"),
        (FEATURES, None, "other", "There is no family 'other': families are recurrent"),
    ):
        with pytest.raises(NoKernel, match=reason) as refused:
            choose(features, device, family=family, table=Table(), ids=IDS)
        assert "invoke generate" not in str(refused.value)


def test_what_was_typed_in_is_checked() -> None:
    assert checked(FEATURES) == FEATURES
    assert checked(replace(FEATURES, geometry=replace(FEATURES.geometry, tokens=0))).geometry.tokens == 0
    for name, value, message in (
        ("tokens", -1, "tokens must be at least 0, found -1"),
        ("sequences", 0, "sequences must be at least 1, found 0"),
        ("heads", 0, "heads must be at least 1, found 0"),
        ("head_dim", -2, "head_dim must be at least 1, found -2"),
        ("groups", 0, "groups must be at least 1, found 0"),
        ("d_state", 0, "d_state must be at least 1, found 0"),
        ("groups", 3, "groups must divide heads, found 3 groups and 64 heads"),
    ):
        with pytest.raises(NoKernel, match=message):
            checked(replace(FEATURES, geometry=replace(FEATURES.geometry, **{name: value})))
    with pytest.raises(NoKernel, match="io must be one of f32, bf16, f16, found 'f64'"):
        checked(replace(FEATURES, io="f64"))


def test_a_device_that_is_not_here_is_found_by_name_or_target() -> None:
    table = Table((entry(PADDED), entry(SLICES, device="NVIDIA H200 NVL"), entry(TILED, device="B", target="sm_100")))
    assert named_device(table=table) is None
    assert named_device("nvidia h200", table=table) == H200
    assert named_device("nvl", table=table) == Device("NVIDIA H200 NVL", "sm_90")
    assert named_device("T4", "sm_75", table) == Device("T4", "sm_75")
    assert named_device(target="sm_86", table=table) == Device("", "sm_86")
    with pytest.raises(NoKernel, match="one that was measured, of NVIDIA H200, NVIDIA H200 NVL, or .*found 'h200'"):
        named_device("h200", table=table)
    with pytest.raises(NoKernel, match="of B, NVIDIA H200, NVIDIA H200 NVL, or have its target told, found 'T4'"):
        named_device("T4", table=table)
    with pytest.raises(NoKernel, match="the target must be one of sm_75, .*found 'sm_1'"):
        named_device("T4", "sm_1", table)


def test_a_target_alone_takes_entries_of_any_of_its_devices() -> None:
    chosen = choose(FEATURES, Device("", "sm_90"), table=Table((entry(SLICES),)), ids=IDS)
    assert (chosen.id, chosen.steps) == (SLICES, ())
    none = choose(FEATURES, Device("", "sm_90"), table=Table(), ids=IDS)
    assert none.steps[0] == "no entry for this problem on a sm_90 device"


def test_shared_memory_of_the_real_device_filters() -> None:
    small = replace(H200, shared_limit=RecurrentSpec(d_state=128).shared_bytes - 1)
    ids = (TILED, RecurrentSpec(d_state=128, layout="block").id)
    assert choose(FEATURES, small, table=Table(), ids=ids).id == ids[1]


def test_mismatch_says_what_differs() -> None:
    spec = RecurrentSpec(d_state=128)
    assert mismatch(FEATURES, spec) == ""
    assert "state is f32" in mismatch(replace(FEATURES, state="bf16"), spec)
    assert "d_state 128, found 96" in mismatch(replace(FEATURES, geometry=replace(FEATURES.geometry, d_state=96)), spec)


def test_the_document_survives_a_round_trip_in_any_order() -> None:
    table = Table((entry(PADDED), entry(SLICES, tokens=7)), (("recurrent", 128, "f32", "f32", SLICES),))
    text = json.dumps(table_document(table), sort_keys=True)
    again = parse_table(json.loads(text))
    assert set(again.entries) == set(table.entries)
    assert again.defaults == table.defaults
    assert json.dumps(table_document(replace(table, entries=table.entries[::-1])), sort_keys=True) == text


def test_a_malformed_document_is_refused() -> None:
    with pytest.raises(ValueError, match="version must be 1, found 2"):
        parse_table({"version": 2, "entries": [], "defaults": []})
    with pytest.raises(ValueError, match="two entries"):
        parse_table(table_document(Table((entry(PADDED), entry(SLICES)))))
    with pytest.raises(ValueError, match="source must be one of"):
        parse_table(table_document(Table((entry(PADDED, source="guessed"),))))


def test_the_committed_table_is_what_the_stored_benches_say() -> None:
    table = committed_table()
    assert table.entries, "there are stored benches"
    fresh = refreshed_table(table)
    hint = "generated/selection.json is stale: run invoke bench --readme"
    assert table_document(fresh) == table_document(table), hint


def test_the_fastest_kernel_of_a_stored_point_becomes_its_entry() -> None:
    point = {"sequences": 2, "tokens": 3, "heads": 5, "head_dim": 7, "d_state": 128, "groups": 1}
    rows = [
        {"point": "p", "kernel": PADDED, "us": {"median": 2.0}},
        {"point": "p", "kernel": SLICES, "us": {"median": 1.5}},
        {"point": "p", "kernel": TILED, "failed": "why"},
        {"point": "other", "kernel": TILED, "us": {"median": 1.0}},
    ]
    document = {"device": "D", "target": "sm_90", "rows": rows, "points": {"p": point | {"io": "f32", "state": "f32"}}}
    (found,) = measured_entries([document])
    assert (found.kernel, found.microseconds, found.source) == (SLICES, 1.5, "measured")
    assert (found.batch_heads, found.tokens, found.family) == (10, 6, "recurrent")
