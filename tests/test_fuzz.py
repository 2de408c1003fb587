"""The fuzzer finds kernels that are broken, makes what it finds small, and runs it again from its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyharness import InvalidProblem, NoKernel, ScanProblem, ToolchainError, fuzz, problem_file, shrink
from pyharness.binding import Outputs
from pyharness.cases import Options, Shape, draw
from pyharness.families import FAMILIES
from pyharness.oracle import oracle
from pyharness.scan import run_emulator
from pyharness.spec import KernelSpec, parse_id

EVERYTHING = Options(
    io="bf16",
    state="f16",
    z=True,
    dt_limit=(0.01, float("inf")),
    tail=2,
    packed=True,
    gap=3,
    shift=1,
    slot_gap=5,
    fresh="mixed",
    slots="moved",
    padding=3,
    checkpoints=2,
    order=True,
    key=True,
)


def everything() -> ScanProblem:
    return draw(1, Shape((5, 9, 2, 7), 6, 4, 16, 3), EVERYTHING)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_run_finds_nothing(family: str, tmp_path: Path) -> None:
    """Sixty problems on a kernel or two: what CI can afford of a run of hours."""
    tally = fuzz.fuzz(5, seed=3, family=family, problems=60, folder=tmp_path)
    assert [f.text for f in tally.failures] == []
    assert tally.problems[family] == 60
    assert tally.repeated > 0


def without_limit(problem: ScanProblem) -> ScanProblem:
    return replace(problem, dt_limit=None)


def heads_modulo_groups(problem: ScanProblem) -> ScanProblem:
    index = np.arange(problem.heads) % problem.groups
    return replace(problem, B=np.ascontiguousarray(problem.B[:, index]), C=np.ascontiguousarray(problem.C[:, index]))


@pytest.mark.parametrize("broken", [without_limit, heads_modulo_groups])
def test_a_fault_is_found_made_small_and_replayed(
    broken: Callable[[ScanProblem], ScanProblem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_broken(problem: ScanProblem, spec: KernelSpec, **options: Any) -> Outputs:
        return run_emulator(broken(problem), spec, **options)

    monkeypatch.setattr(fuzz, "run_emulator", run_broken)
    monkeypatch.setattr(fuzz, "_MOST_FAILURES", 1)
    tally = fuzz.fuzz(5, seed=4, family="update", problems=200, folder=tmp_path)
    (failure,) = tally.failures
    problem, notes = problem_file.load(failure.path)
    assert notes["kernel"] == failure.kernel
    # A fault of groups needs two of them with two heads each.
    assert (problem.sequences, problem.tokens, problem.head_dim) == (1, 1, 1)
    assert problem.heads == (1 if broken is without_limit else 4)
    assert problem.checkpoint_slots is None
    assert fuzz.replay(failure.path)[1]
    monkeypatch.undo()
    assert fuzz.replay(failure.path) == (failure.kernel, "")


def test_a_kernel_that_does_not_compile_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    def refused(problem: ScanProblem, spec: KernelSpec, **options: Any) -> Outputs:
        runs.append(spec.id)
        raise ToolchainError("kernel.cu:7: error: static assertion failed")

    monkeypatch.setattr(fuzz, "run_emulator", refused)
    tally = fuzz.fuzz(5, seed=4, family="ssd", problems=3, folder=tmp_path)
    assert {f.text for f in tally.failures} == {"ToolchainError: kernel.cu:7: error: static assertion failed"}
    # Once to find it and once to say it of the file: a smaller problem would not compile either.
    assert len(runs) == 2 * len(tally.failures)


def test_the_same_seed_draws_the_same(tmp_path: Path) -> None:
    def drawn(seed: int) -> list[tuple[str, bytes]]:
        found = []
        for number in range(5):
            rng = np.random.default_rng((seed, number))
            spec = fuzz.draw_kernel(rng, tuple(FAMILIES))
            problem = fuzz.draw_problem(rng, spec, 2**12)
            found.append((spec.id, problem.dt.tobytes() + problem.x.tobytes()))
        return found

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_draws_are_as_hostile_as_they_claim() -> None:
    """Over some hundred draws: extremes of dt and A, denormals, garbage where it must not matter, every option."""
    rng = np.random.default_rng(5)
    spec = parse_id("recurrent_generic_f32_sf32")
    problems = [fuzz.draw_problem(rng, spec, 2**12) for _ in range(300)]
    filled = [p for p in problems if p.live_tokens.any()]
    dt = np.concatenate([p.dt[p.live_tokens].ravel() for p in filled])
    assert dt.min() < -75
    assert dt.max() > 75
    A = np.concatenate([p.A.ravel() for p in problems])
    assert A.min() < -5e3
    assert np.abs(A[A < 0]).min() < 1e-5
    x = np.concatenate([p.x[p.live_tokens].ravel() for p in filled])
    assert ((x != 0) & (np.abs(x) < 2.0**-126)).any()
    assert np.isfinite(x).all()
    assert any(not np.isfinite(p.x[~p.live_tokens]).all() for p in problems if (~p.live_tokens).any())
    assert {p.pad_slot for p in problems} >= {-1, -7, 2**31 - 1}
    assert any(((p.resolved_read < 0) & ~p.padding & ~p.resumes).any() for p in problems if p.state is not None)
    for field in fields(ScanProblem):
        if field.name not in ("state_scale", "rounding_key"):
            assert any(getattr(p, field.name) is not None for p in problems), field.name


def test_a_problem_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    """Values, strides and alignment of every array; only memory that arrays shared is apart."""
    problem = everything()
    problem_file.save(tmp_path / "deep" / "p.npz", problem, {"kernel": "k", "seed": 3})
    again, notes = problem_file.load(tmp_path / "deep" / "p.npz")
    assert notes == {"kernel": "k", "seed": 3}
    for field in fields(ScanProblem):
        before, after = getattr(problem, field.name), getattr(again, field.name)
        if isinstance(before, np.ndarray):
            assert before.tobytes() == after.tobytes(), field.name
            assert (before.dtype, before.strides) == (after.dtype, after.strides)
            assert before.ctypes.data % 64 == after.ctypes.data % 64
        else:
            assert before == after
    assert oracle(again).y.tobytes() == oracle(problem).y.tobytes()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.npz").write_bytes(b"nothing")
    with pytest.raises(InvalidProblem, match=r"p\.npz: a file of `invoke fuzz` was wanted"):
        problem_file.load(tmp_path / "p.npz")


@pytest.mark.parametrize(
    ("fails", "wanted"),
    [
        (lambda p: p.tokens > 0, {"tokens": 1, "sequences": 1, "heads": 1, "head_dim": 1}),
        (lambda p: p.sequences > 1 and p.lengths.max() > 6, {"tokens": 7, "sequences": 2, "heads": 1}),
        (lambda p: p.groups > 1 and p.z is not None, {"heads": 2, "groups": 2, "tokens": 0}),
        (lambda p: p.checkpoint_slots is not None and (p.checkpoint_slots >= 0).any(), {"sequences": 1, "tokens": 2}),
    ],
)
def test_shrinking_leaves_what_fails_and_no_more(fails: Callable[[ScanProblem], bool], wanted: dict[str, int]) -> None:
    small = shrink.shrink(everything(), fails)
    assert fails(small)
    assert {name: getattr(small, name) for name in wanted} == wanted


def test_what_is_taken_of_a_problem_gives_what_it_gave(tmp_path: Path) -> None:
    """Sequences, groups and rows do not touch each other: each alone has the same y in the oracle."""
    problem = replace(everything(), sequence_order=None)
    whole = oracle(problem).y
    start, end = int(problem.offsets[1]), int(problem.offsets[2])
    assert oracle(shrink.take(problem, [(1, end - start)])).y.tobytes() == whole[start:end].tobytes()
    two = oracle(shrink.take(problem, [(0, 3), (1, end - start)])).y
    assert two.tobytes() == np.concatenate((whole[:3], whole[start:end])).tobytes()
    # Products of other sizes are summed in another order.
    close: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(oracle(shrink.take_heads(problem, range(1, 3), 2)).y, whole[:, 2:], **close)
    np.testing.assert_allclose(oracle(shrink.take_heads(problem, range(3), 1)).y, whole[:, ::2], **close)
    np.testing.assert_allclose(oracle(shrink.take_rows(problem, 1, 3)).y, whole[:, :, 1:3], **close)
    np.testing.assert_allclose(oracle(shrink.plain_strides(problem)).y, whole, **close)


def test_families_and_backends_that_are_not_there_are_refused() -> None:
    with pytest.raises(NoKernel, match="family must be one of"):
        fuzz.fuzz(1, family="nothing")
    with pytest.raises(NoKernel, match="backend must be one of"):
        fuzz.fuzz(1, backend="oracle")
