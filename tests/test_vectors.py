"""Shared vectors and plans: Python's own verdicts, what they were worked out to by hand, and that rows tell all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pyharness import manifest, plans, select, vectors
from pyharness.errors import ImageError
from pyharness.families import RecurrentSpec
from pyharness.families.ssd import segments_plan
from pyharness.manifest import Row
from pyharness.spec import Geometry, Launchable, Plan

STALE = "templates/go/testdata/vectors.json is stale: run `python -m pyharness.vectors`"
ROWS = {row.id: row for row in manifest.read_all()}


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    # Steps down are logged once a process: those of the vectors are no one else's.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_logged", set())
        yield vectors.document()


def test_the_stored_vectors_are_what_python_makes_of_them(document: dict[str, Any]) -> None:
    assert manifest.dump(document) == vectors.PATH.read_bytes(), STALE


def test_vectors_reach_every_outcome(document: dict[str, Any]) -> None:
    chosen = {case["id"] for case in document["selections"]}
    # Every kernel of the vectors is chosen by one case, but for tf32, which never is; an empty id is a refusal.
    wanted = {spec.id for spec in vectors.SPECS if getattr(spec, "precision", "") != "tf32"}
    assert chosen == wanted | {""}
    assert {case["steps"] for case in document["selections"] if case["id"]} >= {0, 1, 2, 3}
    assert {case["refused"] for case in document["batches"]} == {
        "",
        "cu_seqlens",
        "read_slots",
        "write_slots",
        "resume",
    }
    selected = {json.loads(text)["grid"]["rule"] for name, text in document["rows"].items() if name != manifest.INDEX}
    planned = {row.grid["rule"] for row in vectors.plan_rows()}
    rules = {row.grid["rule"] for row in ROWS.values()}
    assert rules <= selected | planned, "a grid rule of the catalogue has no vector: add a spec to pyharness.vectors"


def test_an_invariant_choice_is_the_same_whatever_the_batch(document: dict[str, Any]) -> None:
    found: dict[str, set[str]] = {}
    for case in document["selections"]:
        problem = dict(case["problem"])
        tokens, sequences, longest = (problem.pop(name) for name in ("tokens", "sequences", "longest"))
        length = longest if longest >= 0 else -(-tokens // sequences)
        if case["invariant"]:
            key = json.dumps([problem, case["device"], length <= 8], sort_keys=True)
            found.setdefault(key, set()).add(case["id"])
    assert max(map(len, found.values())) == 1
    assert len(found) < sum(case["invariant"] for case in document["selections"]), "some keys are met twice"


def test_padded_rows_worked_out_by_hand() -> None:
    # d_state 128: 4 lanes of 32 columns, 128 / 4 = 32 rows. A token: B and C of 128 + 4 * 4 floats, 32 of x, 1 of dt,
    # so 321 floats or 1284 bytes; 32768 / 1284 = 25 tokens, 32100 bytes, 32112 in whole 16 bytes.
    row = ROWS[RecurrentSpec(d_state=0, layout="generic").id]
    plan = plans.plan(row, "sm_90", Geometry(4096, 3, 5, 33, 1, 128))
    (launch,) = plan.launches
    assert (launch.grid, launch.block, launch.shared_bytes) == ((3 * 5 * 2, 1, 1), (128, 1, 1), 32112)
    assert (plan.lanes, plan.rows, plan.chunk) == (4, 32, 25)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_row_alone_gives_the_plan_of_its_spec(row: Row) -> None:
    spec = row.kernel
    for d_state in (spec.d_state,) if spec.d_state else (1, 33, 100, 512, 1024):
        for tokens, sequences, heads in ((1, 1, 1), (16, 16, 64), (8, 1, 7)):
            geometry = Geometry(tokens, sequences, heads, spec.limits.get("head_dim", [65])[0], 1, d_state)
            target = next(iter(row.targets))
            ours, theirs = plans.plan(row, target, geometry), spec.plan(geometry)
            assert (ours.launches, ours.workspace_bytes) == (theirs.launches, theirs.workspace_bytes)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_a_row_takes_what_its_spec_takes(row: Row) -> None:
    spec = row.kernel
    base = Geometry(4, 1, 8, 64, 1, spec.d_state or 128)
    trials = [replace(base, d_state=n) for n in (1, 16, 127, 128, 1024, 1025)]
    trials += [replace(base, head_dim=p) for p in (1, 64, 65, 128)]
    trials += [
        replace(base, tokens=t, sequences=s, longest=n) for t, s, n in ((8, 1, 8), (9, 1, 9), (9, 3, -1), (99, 3, -1))
    ]
    for geometry in trials:
        longest = geometry.longest if geometry.longest >= 0 else -(-geometry.tokens // geometry.sequences)
        sizes = vars(geometry) | {"longest": longest}
        takes = all(
            sizes[name.removesuffix("_multiple")] % low == 0
            if name.endswith("_multiple")
            else low <= sizes[name] <= high
            for name, (low, high) in row.limits.items()
        )
        assert takes == (spec.refusal(geometry) == ""), f"{geometry}: state the reason in the family's `limits` too"


def test_segments_worked_out_by_hand() -> None:
    # 64 heads in 8 groups of 8, 3 heads a block: 3 runs a group, 24 in all; 2 sequences in 8 segments, chunks of 64
    # tokens. 4096 tokens fill at most 64 + 2 segments, more than 2 * 8 = 16, so 16 x 64 heads keep a state.
    rule = {"rule": "segments", "heads": 3, "chunk": 64, "segments": 8, "state_bytes": 1000}
    rule |= {"gather_shared": 3000}
    kernel = Launchable(("ssm_x_gather", "ssm_x_walk"), 256, 5000)
    plan = segments_plan(rule, kernel, Geometry(4096, 2, 64, 64, 8, 128))
    assert [(step.entry, step.grid[0], step.block[0], step.shared_bytes) for step in plan.launches] == [
        ("ssm_x_gather", 2 * 7 * 24, 256, 3000),
        ("ssm_x_walk", 2 * 8 * 24, 256, 5000),
    ]
    assert plan.workspace_bytes == 16 * 64 * 1000
    # Heads of two parts: 16 of them in a group, 6 runs, 48 in all. Three cuts of each of the 7 segments before the
    # last; up to 2 * 8 * 3 = 48 states a head, fewer than those that the tokens can fill.
    plan = segments_plan(rule | {"parts_of_head": 2, "gather_cuts": 3}, kernel, Geometry(4096, 2, 64, 64, 8, 128))
    assert [step.grid[0] for step in plan.launches] == [2 * 7 * 3 * 48, 2 * 8 * 48]
    assert plan.workspace_bytes == 48 * 64 * 1000


@pytest.mark.parametrize(("segments", "wanted"), [(8, [False, True]), (1, [False])])
def test_only_what_follows_a_launch_of_its_plan_overlaps_one(segments: int, wanted: list[bool]) -> None:
    rule = {"rule": "segments", "heads": 8, "chunk": 64, "segments": segments, "state_bytes": 1000, "overlaps": 1}
    kernel = Launchable(("ssm_x_gather", "ssm_x_walk"), 256, 5000)
    geometry = Geometry(4096, 2, 64, 64, 8, 128)
    assert [step.overlaps for step in segments_plan(rule, kernel, geometry).launches] == wanted
    plain = segments_plan(rule | {"overlaps": 0}, kernel, geometry)
    assert not any(step.overlaps for step in plain.launches)


def test_a_rule_that_is_not_known_is_an_error() -> None:
    row = replace(ROWS[RecurrentSpec(d_state=128).id], grid={"rule": "woven"})
    with pytest.raises(ImageError, match="a grid rule of rows, padded_rows.* was wanted, found 'woven'"):
        plans.plan(row, "sm_90", Geometry(1, 1, 1, 1, 1, 128))
    with pytest.raises(ImageError, match="an image for sm_75 was wanted"):
        plans.plan(row, "sm_75", Geometry(1, 1, 1, 1, 1, 128))
    assert isinstance(plans.plan(ROWS[row.id], "sm_90", Geometry(1, 1, 1, 1, 1, 128)), Plan)
