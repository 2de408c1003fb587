"""Every suite of `pyharness.peer_suites` on every family, in the emulator; `invoke peers --backend gpu` is the rest."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path

import numpy as np
import pytest

from pyharness import ScanProblem, replay, scan
from pyharness.families import FAMILIES
from pyharness.oracle import oracle
from pyharness.peer_suites import SUITES, Suite, suite
from pyharness.replay import EMULATOR, Row
from pyharness.scan import ScanResult

#: Kernels of a suite that run here, of families whose kernels take long to compile; `invoke peers` runs all.
MOST_KERNELS = {"selective": 4, "ssd": 2}
STALE = "run `invoke peers` and commit generated/peers and docs/proof.md"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("each", SUITES, ids=lambda each: each.key.replace(" ", "-"))
def test_a_suite_passes_and_is_stored_as_it_comes_out(each: Suite, family: str) -> None:
    most_kernels = MOST_KERNELS.get(family, 0)
    row, failed = replay.replay_suite(each, family, EMULATOR, most_kernels)
    assert failed == []
    assert row.ok
    stored = {(r.suite, r.family): r for r in replay.read(replay.stored_path(EMULATOR))}
    assert (each.key, family) in stored, STALE
    known = stored[each.key, family]
    assert (row.no_kernel, row.too_tight) == (known.no_kernel, known.too_tight), STALE
    # Another libm rounds another bit here and there.
    if most_kernels:
        assert bool(row.passed) == bool(known.passed), STALE
        assert row.worst <= 1.3 * known.worst + 1e-3, STALE
    else:
        assert (row.cases, row.passed) == (known.cases, known.passed), STALE
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

    left = [changed(outcome("recurrent", 0, ""), left=why) for why in (replay.SHAPE, replay.TOLERANCE)]
    rows = replay.tabulate([outcome("recurrent", 0.2), outcome("recurrent", 1.5), *left])
    assert rows == [Row("vllm ssd", "recurrent", 4, 1, 1, 1, 1.5, "case on k", 0.5)]
    assert not rows[0].ok
    replay.store("here", rows, {}, tmp_path)
    replay.store("here", replay.tabulate([outcome("update", 0.1)]), {}, tmp_path)
    replay.store("here", replay.tabulate([outcome("recurrent", 0.3)]), {}, tmp_path)
    found = replay.read(replay.stored_path("here", tmp_path))
    assert [(row.family, row.worst) for row in found] == [("recurrent", 0.3), ("update", 0.1)]


def test_a_kernel_that_rounds_its_operands_takes_what_the_tolerance_has_room_for() -> None:
    """FlashInfer's decode asks bf16 for f32 products; its prefill does not. TF32 is too coarse for vLLM's prefill.

    vLLM's states are read as they are by bf16 operands where they are bf16, and rounded where they are f16.
    """

    def ids(key: str, number: int) -> tuple[list[str], str]:
        case = next(c for i, c in enumerate(suite(key).cases()) if i == number)
        found, left = replay.takers("ssd", case, [case.problem(reduce=True)])
        return [spec.id for spec in found], left

    assert ids("flashinfer selective_state_update", 0) == ([], replay.TOLERANCE)
    assert ids("mamba-ssm selective_scan", 0) == ([], replay.SHAPE)
    found, left = ids("flashinfer ssd", 0)
    assert left == ""
    assert any(name.endswith("sm90a") for name in found)
    split, left = ids("ggml SSM_SCAN", 1)
    assert left == ""
    assert {name.rpartition("_")[2] for name in split} == {"split"}
    coarse, _ = ids("mamba-ssm chunk_state_varlen", 0)
    assert any(name.endswith("tf32") for name in coarse)
    names = [case.name for case in suite("vllm selective_state_update").cases()]
    left = {
        what: ids("vllm selective_state_update", names.index(f"vllm update n64, 64 heads, {what}"))[1]
        for what in ("padding", "stochastic rounding")
    }
    assert left == {"padding": "", "stochastic rounding": replay.TOLERANCE}
