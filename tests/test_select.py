"""Selection: each step of the rule, its ties, and that every step down shows."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyharness import manifest
from pyharness.errors import NoKernel
from pyharness.families import RecurrentSpec, SsdSpec, UpdateSpec
from pyharness.select import (
    Device,
    Entry,
    Features,
    Table,
    bits,
    catalogue_ids,
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
SSD = SsdSpec(d_state=128, io="bf16").id
SPLIT = SsdSpec(d_state=128, precision="split").id
TF32 = SsdSpec(d_state=128, precision="tf32").id
UPDATE = UpdateSpec(d_state=128).id
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


def test_entries_of_the_same_head_dim_are_nearer_than_all_others() -> None:
    table = Table((entry(PADDED, tokens=1024), entry(SLICES, head_dim=80, tokens=2**20)))
    for head_dim, kernel, away in ((64, PADDED, "1 octaves away"), (80, SLICES, "11 octaves away")):
        features = replace(FEATURES, geometry=replace(FEATURES.geometry, head_dim=head_dim))
        chosen = choose(features, H200, table=table, ids=IDS)
        assert chosen.id == kernel
        assert chosen.why.endswith(f"for the nearest problem, {away}")
    other = replace(FEATURES, geometry=replace(FEATURES.geometry, head_dim=96))
    chosen = choose(other, H200, table=table, ids=IDS)
    assert (chosen.id, chosen.why.partition("problem, ")[2]) == (PADDED, "1 octaves away and of head_dim 64")


def test_ties_go_to_the_smallest_id() -> None:
    rows = (entry(TILED, tokens=1024), entry(PADDED, tokens=256), entry(SLICES, batch_heads=512))
    for order in (rows, rows[::-1]):
        assert choose(FEATURES, H200, table=Table(order), ids=IDS).id == min(TILED, PADDED, SLICES)


def test_of_the_families_of_a_problem_the_fastest_that_fits_is_taken() -> None:
    low = replace(FEATURES, io="bf16")
    rows = (
        entry(SSD, family="ssd", io="bf16", microseconds=9.0),
        entry(LOW, io="bf16", microseconds=30.0),
        entry(LOW, io="bf16", microseconds=1.0, tokens=8192),
    )
    ids = (*IDS, SSD)
    for order in (rows, rows[::-1]):
        table = Table(order)
        assert choose(low, H200, table=table, ids=ids).id == SSD
        near = replace(low, geometry=replace(low.geometry, tokens=600))
        assert choose(near, H200, table=table, ids=ids).id == SSD
        # Bound to another family there is no step down: that one's entry is the exact one.
        chosen = choose(low, H200, family="recurrent", table=table, ids=ids)
        assert (chosen.id, chosen.steps) == (LOW, ())
        # Without the kernel there is, and it tells.
        chosen = choose(low, H200, table=table, ids=IDS)
        assert chosen.id == LOW
        passed = f"{SSD}, measured for these sizes, cannot run it: it is not on offer here"
        assert chosen.steps == (f"a faster kernel was passed over ({passed})",)
        (step,) = choose(
            replace(low, geometry=replace(low.geometry, checkpoint_step=3)), H200, table=table, ids=ids
        ).steps
        assert "found checkpoint_slots behind a multiple of 3 tokens" in step
    tied = Table((rows[0], replace(rows[1], microseconds=9.0)))
    assert choose(low, H200, table=tied, ids=ids).id == min(SSD, LOW)


def test_split_operands_are_taken_only_on_the_device_that_measured_them_and_tf32_never() -> None:
    rows = (
        entry(TILED, microseconds=30.0),
        entry(SPLIT, family="ssd", microseconds=9.0),
        entry(TF32, family="ssd", microseconds=1.0, tokens=1024),
        entry(TILED, microseconds=60.0, tokens=1024),
    )
    table, ids = Table(rows), (*IDS, SPLIT, TF32)
    assert choose(FEATURES, H200, table=table, ids=ids).id == SPLIT
    for other in (Device("NVIDIA H100", "sm_90"), Device("", "sm_90"), None):
        assert choose(FEATURES, other, table=table, ids=ids).id == TILED
    doubled = replace(FEATURES, geometry=replace(FEATURES.geometry, tokens=1024))
    assert choose(doubled, H200, table=table, ids=ids).id == TILED
    assert choose(FEATURES, Device("NVIDIA H100", "sm_90"), family="ssd", table=table, ids=ids).id == SPLIT
    with pytest.raises(NoKernel, match=r"_split \(it splits f32 operands and was not measured"):
        choose(FEATURES, Device("NVIDIA H100", "sm_90"), table=table, ids=(SPLIT, TF32))


def test_decode_takes_no_entry_of_prefill() -> None:
    step = replace(FEATURES, geometry=replace(FEATURES.geometry, tokens=32, sequences=4, longest=8))
    near, far = entry(PADDED, tokens=64), entry(UPDATE, family="update", tokens=1, batch_heads=2**30)
    for table in (Table((near, far)), Table((far, near))):
        assert choose(step, H200, table=table, ids=(*IDS, UPDATE)).id == UPDATE
        longer = replace(step, geometry=replace(step.geometry, longest=9))
        assert choose(longer, H200, table=table, ids=(*IDS, UPDATE)).id == PADDED
    chosen = choose(step, H200, table=Table((near,)), ids=IDS)
    assert chosen.id == TILED
    assert "no entry of decode with d_state 128, f32, f32 on NVIDIA H200" in chosen.steps


def test_this_device_comes_before_an_exact_entry_of_its_kin() -> None:
    kin = entry(SLICES, device="NVIDIA H100")
    far = entry(PADDED, tokens=2**30)
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


def test_the_default_of_decode_is_made_for_it() -> None:
    ids = (*IDS, UPDATE, UpdateSpec(d_state=128, rows=4).id)
    step = replace(FEATURES, geometry=replace(FEATURES.geometry, tokens=4, longest=1))
    for device in (None, H200):
        assert choose(step, device, table=Table(), ids=ids).id == UPDATE
        assert choose(step, device, family="recurrent", table=Table(), ids=ids).id == TILED
        longer = replace(step, geometry=replace(step.geometry, tokens=9, longest=9))
        assert choose(longer, device, table=Table(), ids=ids).id == TILED
        # Rows of one element, as in Mamba-1, are not what it is for.
        channels = replace(step, geometry=replace(step.geometry, head_dim=1))
        assert choose(channels, device, table=Table(), ids=ids).id == TILED


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
    assert len(parse_table(table_document(Table((entry(PADDED), entry(SPLIT, family="ssd"))))).entries) == 2
    with pytest.raises(ValueError, match="source must be one of"):
        parse_table(table_document(Table((entry(PADDED, source="guessed"),))))


def test_the_committed_table_is_what_the_stored_benches_say() -> None:
    table = committed_table()
    assert table.entries, "there are stored benches"
    fresh = refreshed_table(table)
    hint = "generated/selection.json is stale: run invoke bench --readme"
    assert table_document(fresh) == table_document(table), hint


def bench(rows: list[tuple[str, float]], **point: Any) -> dict[str, Any]:
    """A stored bench of one point, "p": kernels and their microseconds."""
    sizes = {"sequences": 2, "tokens": 3, "heads": 5, "head_dim": 7, "d_state": 128, "groups": 1}
    return {
        "device": "D",
        "target": "sm_90",
        "rows": [{"point": "p", "kernel": kernel, "us": {"median": us}} for kernel, us in rows],
        "points": {"p": sizes | {"io": "f32", "state": "f32"} | point},
    }


def test_the_fastest_kernel_of_each_family_at_a_stored_point_becomes_an_entry() -> None:
    update = next(kernel for kernel in catalogue_ids() if kernel.startswith("update_n128_l32_r8_w2_c1_f32"))
    document = bench([(PADDED, 2.0), (SLICES, 1.5), (update, 1.75)])
    document["rows"] += [
        {"point": "p", "kernel": TILED, "failed": "why"},
        {"point": "other", "kernel": TILED, "us": {"median": 1.0}},
        {"point": "p", "kernel": TILED, "us": {"median": 1.0}, "order": "ascending"},
    ]
    found, other = measured_entries([document])
    assert (found.kernel, found.microseconds, found.source) == (SLICES, 1.5, "measured")
    assert (found.batch_heads, found.tokens, found.family) == (10, 6, "recurrent")
    assert (other.kernel, other.family) == (update, "update")


def test_timings_of_bytes_that_were_replaced_give_way_to_those_of_today() -> None:
    today = manifest.image_sha256(PADDED, "sm_90")
    assert len(today) == 64
    assert manifest.image_sha256(PADDED, "sm_1") == manifest.image_sha256("recurrent_n1", "sm_90") == ""
    old, new, other = bench([(PADDED, 1.0)]), bench([(PADDED, 2.0)]), bench([(SLICES, 1.5)])
    for document, sha256 in ((old, "0" * 64), (new, today), (other, "0" * 64)):
        document["rows"][0]["image"] = {"target": "sm_90", "sha256": sha256}
    # Only of a kernel that was timed again: another one keeps what there is.
    for documents, wanted in (([old], (PADDED, 1.0)), ([old, new], (PADDED, 2.0)), ([new, old, other], (SLICES, 1.5))):
        (found,) = measured_entries(documents)
        assert (found.kernel, found.microseconds) == wanted


def test_kernels_that_split_have_an_entry_only_where_they_beat_recurrent() -> None:
    split, tf32 = (
        next(kernel for kernel in catalogue_ids() if kernel.endswith(f"f32_{word}")) for word in ("split", "tf32")
    )
    for rows, wanted in (
        ([(TILED, 2.0), (split, 1.0), (tf32, 0.5)], {TILED, split}),
        ([(TILED, 2.0), (split, 2.5)], {TILED}),
        ([(split, 1.0), (tf32, 0.5)], set()),
    ):
        assert {entry.kernel for entry in measured_entries([bench(rows)])} == wanted


def test_a_report_gives_way_to_a_measurement_of_its_family(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "suite.json").write_text(json.dumps(bench([(PADDED, 2.0)])))
    sizes = {"heads": 5, "head_dim": 7, "groups": 1, "batch_heads": 10, "tokens": 6, "device": "D"}
    report, of_another = (entry(TILED, source="reported", family=name, **sizes) for name in ("recurrent", "update"))
    found = refreshed_table(Table((report, of_another)), tmp_path).entries
    assert {(one.family, one.source) for one in found} == {("recurrent", "measured"), ("update", "reported")}
