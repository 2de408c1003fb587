"""Vetting as far as no GPU is needed: which cases a kernel gets, and what compute-sanitizer's output means."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyharness import mamba1_cases, vet
from pyharness.catalogue import CATALOGUE
from pyharness.errors import NoKernel
from pyharness.families import RecurrentSpec, SelectiveSpec, UpdateSpec
from pyharness.oracle import oracle
from pyharness.select import Features, mismatch


def test_a_kernel_gets_cases_of_its_own_d_state_and_types() -> None:
    spec = RecurrentSpec(d_state=64, io="bf16")
    problems = [case.build() for case in vet.option_cases(64, "bf16", "f32")]
    assert {(p.d_state, p.io, p.state_dtype) for p in problems} == {(64, "bf16", "f32")}
    assert [case.name for case in vet.geometry_cases(spec)] == ["Falcon-H1 tiny 90M bf16 f32", "Plamo 2 8B bf16 f32"]
    edges = [case.build() for case in vet.plain_cases(spec)]
    assert {(p.d_state, p.io, p.state_dtype) for p in edges} == {(64, "bf16", "f32")}
    assert max(p.heads for p in edges if p.head_dim == 96 and p.tokens == 252) == 24, (
        "the ancestor's tests keep their heads on a GPU"
    )


@pytest.mark.parametrize("io", ["f32", "bf16", "f16"])
def test_case_names_are_unique(io: str) -> None:
    """Problems are worked out once a name, so two cases of one name would be one."""
    spec = RecurrentSpec(d_state=0, layout="generic", io=io)
    names = [case.name for case in vet.kernel_cases(spec)]
    assert len(set(names)) == len(names)
    other = {case.name for case in vet.kernel_cases(replace(spec, io="f32" if io != "f32" else "bf16"))}
    assert not other & set(names)


@pytest.mark.parametrize(
    ("head_dim", "state", "edges", "peers"), [(0, "f32", 29, 0), (64, "f32", 23, 0), (64, "bf16", 21, 34)]
)
def test_a_decode_kernel_gets_short_sequences_of_its_head_dim_and_the_peers_decode_suites(
    head_dim: int, state: str, edges: int, peers: int
) -> None:
    spec = UpdateSpec(d_state=64, head_dim=head_dim, io="bf16", state=state)
    found = list(vet.kernel_cases(spec))
    assert len({case.name for case in found}) == len(found)
    problems = [case.build() for case in found]
    assert not any(mismatch(Features.of(problem), spec) for problem in problems)
    assert sum(" update n" in case.name for case in found) == peers
    options = [
        p for case, p in zip(found, problems, strict=True) if case.name.startswith(("mixed", "padding and discard"))
    ]
    assert {(p.head_dim, int(p.lengths.max())) for p in options} == {(head_dim or 33, 8), (head_dim or 40, 1)}
    assert len(list(vet.plain_cases(spec))) == edges, "those that have no sequence of more than 8 tokens"
    assert any(p.rounding_key is not None for p in problems) == (state != "f32")
    for case in vet.sanitizer_cases(spec):
        assert mismatch(Features.of(case.build()), spec) == ""


@pytest.mark.parametrize(
    "spec", [SelectiveSpec(d_state=8, io="bf16"), SelectiveSpec(d_state=8, state="bf16", chunk=1)], ids=lambda s: s.id
)
def test_a_kernel_for_mamba1_gets_channels_with_an_a_for_each_column(spec: SelectiveSpec) -> None:
    found = list(vet.kernel_cases(spec))
    assert len({case.name for case in found}) == len(found)
    problems = [*(case.build() for case in found), vet.batch(spec)]
    assert not any(mismatch(Features.of(problem), spec) for problem in problems)
    assert {problem.A.ndim for problem in problems} == {1, 2}
    assert max(problem.tokens for problem in problems) == 4096
    assert any(problem.rounding_key is not None for problem in problems) == (spec.state != "f32")
    watched = [case.build() for case in vet.sanitizer_cases(spec)]
    assert [(problem.heads, problem.head_dim) for problem in watched] == [(70, 1)] * 3
    assert not any(mismatch(Features.of(problem), spec) for problem in watched)


def test_real_models_of_mamba1_are_whole() -> None:
    found = [case.build() for case in mamba1_cases.model_cases(SelectiveSpec(d_state=16))]
    assert {problem.heads for problem in found} >= {2048, 8192}
    assert {(problem.head_dim, problem.d_state) for problem in found} == {(1, 16)}


def test_bits_are_compared_of_decode_kernels_only() -> None:
    with pytest.raises(NoKernel, match="between kernels of 'update', found family 'recurrent'"):
        vet.vet("recurrent", bits=True)


def test_generic_is_proven_at_the_smallest_odd_and_the_largest_d_state() -> None:
    assert {5, 1024} <= set(vet.d_states(RecurrentSpec(d_state=0, layout="generic")))


def test_every_kernel_gets_the_edges_at_its_own_d_state() -> None:
    counts = []
    for d_state, io in ((16, "f32"), (20, "f32"), (20, "f16")):
        problems = [case.build() for case in vet.plain_cases(RecurrentSpec(d_state=d_state, io=io))]
        assert {(problem.d_state, problem.io) for problem in problems} == {(d_state, io)}
        counts.append(len(problems))
    assert len(set(counts)) == 1
    assert counts[0] > 40


def test_the_sanitizer_watches_each_kind_of_code_once() -> None:
    specs = vet.sanitizer_specs(CATALOGUE)
    kinds = [(s.layout, s.io, s.few_tokens) for s in specs if isinstance(s, RecurrentSpec)]
    assert kinds[:3] == [("tiled", "f32", False), ("tiled", "f32", True), ("tiled", "bf16", False)]
    assert [layout for layout, _, _ in kinds[3:]] == ["padded", "swizzled", "generic"]
    decode = [(s.state, s.chunk) for s in specs if isinstance(s, UpdateSpec)]
    assert sorted(decode) == [("bf16", 1), ("f16", 1), ("f32", 1), ("f32", 4), ("i8", 1)]
    for spec in specs:
        problems = [case.build() for case in vet.sanitizer_cases(spec)]
        assert len(problems) == 3
        assert {(p.io, p.state_dtype) for p in problems} == {(spec.io, spec.state)}
        assert max(p.tokens for p in problems) <= 140


def test_verdicts_are_kept_only_while_every_image_they_cover_is_the_same() -> None:
    verdicts = dict.fromkeys(vet.SANITIZERS, "clean")
    kept = {"sanitizers": verdicts, "sanitized": {"date": "2026-01-01", "images": {"a": "11", "b": "22"}}}
    assert vet.kept_verdicts(kept, {"11", "22", "33"}) == kept
    for old, images in ((kept, {"11", "23"}), ({"sanitizers": verdicts}, {"11"}), ({}, {"11"})):
        dropped = vet.kept_verdicts(old, images)
        assert set(dropped["sanitizers"]) == set(vet.SANITIZERS)
        assert all(text.startswith("not run: ") for text in dropped["sanitizers"].values())
        assert dropped["sanitized"]["images"] == {}


def test_one_sequence_and_another_order_are_the_same_problem_to_the_oracle() -> None:
    problem = vet.batch(RecurrentSpec(d_state=16))
    whole = oracle(problem)
    order = [3, 0, 4, 2, 1]
    moved = vet.rearranged(problem, order)
    other = oracle(moved)
    assert problem.read_slots is not None
    for s in range(problem.sequences):
        rows = slice(problem.offsets[s], problem.offsets[s + 1])
        place = order.index(s)
        assert np.array_equal(other.y[moved.offsets[place] : moved.offsets[place + 1]], whole.y[rows])
        lone = oracle(vet.alone(problem, s))
        slot = int(problem.read_slots[s])
        assert np.array_equal(lone.y, whole.y[rows])
        assert np.array_equal(lone.states[slot], whole.states[slot])


def test_verdicts_are_stored_with_the_images_they_cover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vet, "GENERATED", tmp_path)
    gpu: Any = SimpleNamespace(name="A GPU", target="sm_90")

    def store(shas: dict[str, str], found: dict[str, str]) -> dict[str, Any]:
        proofs = [vet.Proof(f"recurrent_{name}", "sm_90", sha, 1, 0.1, "plain", 32, 0) for name, sha in shas.items()]
        return vet._store(gpu, proofs, found, ["recurrent_a", "recurrent_b"])

    clean = dict.fromkeys(vet.SANITIZERS, "clean")
    first = store({"a": "1", "b": "2", "c": "3"}, clean)
    assert first["sanitized"]["images"] == {"recurrent_a": "1", "recurrent_b": "2"}
    assert first["sanitized"]["date"]
    assert store({"a": "1", "b": "2", "c": "4"}, {})["sanitizers"] == clean, "c was not watched"
    assert set(store({"a": "1", "b": "5", "c": "4"}, {})["sanitizers"].values()) == {vet.NOT_ASKED}
    assert store({"a": "1", "b": "2"}, {})["sanitized"]["images"] == {}, "what is dropped does not come back"
    same = {"points": 920, "images": {"1": "recurrent_a"}}
    stored = vet._store(gpu, [vet.Proof("recurrent_a", "sm_90", "1", 1, 0.1, "plain", 32, 0)], {}, [], same)
    assert (stored["bitwise"]["points"], stored["bitwise"]["images"]) == (920, same["images"])
    assert store({"a": "1", "b": "2"}, {})["bitwise"] == stored["bitwise"]
    assert "bitwise" not in store({"a": "6", "b": "2"}, {}), "the image that was compared is gone"
    absent = dict.fromkeys(vet.SANITIZERS, "not run: no compute-sanitizer")
    stored = store({"a": "1", "b": "2"}, absent)
    assert (stored["sanitizers"], stored["sanitized"]["images"]) == (absent, {})


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (0, "========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n", "found: "),
        (99, "========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors\n", "found: "),
        (255, "========= Error: Device not supported\n", "not run: exit code 255: Error: Device not supported"),
        (1, "Traceback\nDeviceError: wrong\n========= ERROR SUMMARY: 0 errors\n", "found: "),
    ],
)
def test_what_compute_sanitizer_says(code: int, output: str, verdict: str) -> None:
    assert vet.sanitizer_verdict(code, output).startswith(verdict)
