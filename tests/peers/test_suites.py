"""Every suite of `pyharness.peer_suites` on every family, in the emulator; `invoke peers --backend gpu` is the rest."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path

import numpy as np
import pytest

from pyharness import ScanProblem, replay, scan
from pyharness.families import FAMILIES
from pyharness.oracle import oracle
from pyharness.peer_suites import SUITES, Suite
from pyharness.replay import EMULATOR, Row
from pyharness.scan import ScanResult

STALE = "run `invoke peers` and commit generated/peers and docs/proof.md"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("each", SUITES, ids=lambda each: each.key.replace(" ", "-"))
def test_a_suite_passes_and_is_stored_as_it_comes_out(each: Suite, family: str) -> None:
    row, failed = replay.replay_suite(each, family, EMULATOR)
    assert failed == []
    assert row.ok
    stored = {(r.suite, r.family): r for r in replay.read(replay.stored_path(EMULATOR))}
    assert (each.key, family) in stored, STALE
    known = stored[each.key, family]
    assert (row.cases, row.passed, row.no_kernel) == (known.cases, known.passed, known.no_kernel), STALE
    # Another libm rounds another bit here and there.
    assert row.worst == pytest.approx(known.worst, rel=0.3, abs=1e-3), STALE


def test_every_suite_runs_on_some_family() -> None:
    rows = replay.read(replay.stored_path(EMULATOR))
    best = {each.key: max(r.passed for r in rows if r.suite == each.key) for each in SUITES}
    counts = {each.key: sum(1 for _ in each.cases()) for each in SUITES}
    # The case of FlashInfer's integer states is one of `update` alone, the prompts are not.
    assert {key: counts[key] - best[key] for key in counts} == dict.fromkeys(counts, 0)


@pytest.mark.parametrize("each", SUITES, ids=lambda each: each.key.replace(" ", "-"))
def test_reduced_form_cuts_heads_and_batch_only(each: Suite) -> None:
    for case in each.cases():
        whole, cut = case.shape, case.problem(reduce=True)
        kept = (cut.d_state, cut.head_dim, cut.groups, cut.io)
        assert kept == (whole.d_state, whole.head_dim, whole.groups, case.options.io), case.name
        assert tuple(cut.lengths) == whole.lengths[: cut.sequences]
        assert cut.sequences >= min(3, len(whole.lengths))
        assert cut.heads <= whole.heads


@pytest.mark.parametrize("path", sorted(replay.FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_a_stored_table_has_no_failure_and_every_suite(path: Path) -> None:
    rows = replay.read(path)
    assert all(row.ok and row.worst <= 1 and row.ours <= 1 for row in rows)
    families = {row.family for row in rows}
    assert {(row.suite, row.family) for row in rows} == {(each.key, family) for each in SUITES for family in families}
    assert {row.suite: row.cases for row in rows} == {each.key: sum(1 for _ in each.cases()) for each in SUITES}, STALE


def test_a_wrong_state_or_y_fails_a_case_by_the_peers_measure() -> None:
    """Each output alone, broken by a little more than the peer allows."""
    case = next(iter(SUITES[0].cases()))
    problem = case.problem(reduce=True)
    truth = oracle(problem)
    result = scan(problem, backend="oracle")
    assert replay.peer_share(result, problem, truth, case.tolerance) < 1e-3
    for array in (result.y, result.state[int(problem.resolved_write[0])]):
        kept = array.copy()
        # NMSE 1e-7 is a relative error of 3.2e-4.
        array *= np.float32(1 + 3.3e-4)
        assert replay.peer_share(result, problem, truth, case.tolerance) > 1
        array[...] = kept


def test_calls_that_lose_the_state_fail() -> None:
    """What a kernel gives that ignores the states it is handed between the calls of a continued prompt."""
    case = next(c for c in SUITES[6].cases() if c.calls)
    problem = case.problem()
    truth = oracle(problem)

    def right(call: ScanProblem) -> ScanResult:
        return scan(call, backend="oracle")

    def fresh(call: ScanProblem) -> ScanResult:
        return right(changed(call, resume=np.zeros(call.sequences, np.uint8)))

    start = replay.Outcome("", "", case.name, "oracle")
    assert replay.judge(start, case, problem, right, truth).passed
    assert not replay.judge(start, case, problem, fresh, truth).passed


def test_a_table_adds_up_and_keeps_other_families(tmp_path: Path) -> None:
    def outcome(family: str, peer: float, kernel: str = "k") -> replay.Outcome:
        return replay.Outcome("vllm ssd", family, "case", kernel, peer, 0.5)

    rows = replay.tabulate([outcome("recurrent", 0.2), outcome("recurrent", 1.5), outcome("recurrent", 0, "")])
    assert rows == [Row("vllm ssd", "recurrent", 3, 1, 1, 1.5, "case on k", 0.5)]
    assert not rows[0].ok
    replay.store("here", rows, {}, tmp_path)
    replay.store("here", replay.tabulate([outcome("update", 0.1)]), {}, tmp_path)
    replay.store("here", replay.tabulate([outcome("recurrent", 0.3)]), {}, tmp_path)
    found = replay.read(replay.stored_path("here", tmp_path))
    assert [(row.family, row.worst) for row in found] == [("recurrent", 0.3), ("update", 0.1)]
