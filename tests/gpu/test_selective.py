"""Selective kernels on the GPU. `check_case` raises where a result is not the oracle's."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from pyharness import cases, vet
from pyharness.cases import Case, Options, Shape, as_channels, draw
from pyharness.families import SelectiveSpec
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult, scan

#: For prefill with one and with two channels a lane, for decode, in every storage type and with odd columns.
KERNELS = [
    SelectiveSpec(d_state=d_state, io=io, state=state, **fields)
    for d_state, io, state in (
        (16, "f32", "f32"),
        (16, "bf16", "f32"),
        (16, "f16", "f16"),
        (16, "bf16", "bf16"),
        (8, "bf16", "f32"),
        (38, "bf16", "f32"),
        (64, "f32", "f32"),
        (256, "bf16", "f32"),
    )
    for fields in ({}, {"chunk": 1})
] + [SelectiveSpec(d_state=16, io="bf16", lanes=4, rows=64, warps=4, chunk=32)]
EVERY = pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.id)


def option_cases(spec: SelectiveSpec) -> list[Case]:
    """Options of the operation in a kernel's types; lengths cross several chunks, channels fill blocks and do not."""
    types = {"io": spec.io, "state": spec.state}
    plain = Options(**types, per_column_a=True, z=True, dt_f32=True, fresh="mixed")
    found = []
    for name, channels, groups, options in (
        ("whole blocks", 512, 1, plain),
        ("whole blocks, dt in io", 512, 2, replace(plain, dt_f32=False, slots="moved")),
        ("cut blocks", 299, 1, replace(plain, padding=3, discard=2, slots="moved")),
        ("groups", 66, 3, replace(plain, dt_limit=(0.01, 0.1), tail=2, checkpoints=7, slots="moved", order=True)),
        ("odd base and strides", 128, 1, replace(plain, shift=1, gap=3, slot_gap=5)),
        ("one packed row", 256, 1, replace(plain, packed=True, gap=8)),
        (
            "nothing optional",
            128,
            1,
            replace(plain, z=False, D=False, dt_bias=False, softplus=False, dt_limit=(0, 0.2)),
        ),
        ("one A a channel", 128, 1, replace(plain, per_column_a=False)),
    ):
        shape = Shape((67, 1, 0, 130, 9), channels, 1, spec.d_state, groups)
        text = f"Mamba-1 {name} n{spec.d_state} {spec.io} s{spec.state}"
        found.append(Case(text, functools.partial(draw, len(text), shape, options)))
    return found


@EVERY
def test_every_option_agrees_with_the_oracle(spec: SelectiveSpec) -> None:
    for case in option_cases(spec):
        vet.check_case(spec, case)


@EVERY
def test_edges_agree_with_the_oracle(spec: SelectiveSpec) -> None:
    chunk = 8 if spec.decodes else spec.chunk
    for case in cases.edge_cases(spec.d_state, chunk=chunk, io=spec.io, state=spec.state):
        name = f"Mamba-1 {case.name} n{spec.d_state} chunk {chunk} {spec.io} s{spec.state}"
        vet.check_case(spec, Case(name, functools.partial(built_as_channels, case)))


def built_as_channels(case: Case) -> ScanProblem:
    return as_channels(case.build())


@EVERY
def test_real_models_and_the_peers_suites_agree_with_the_oracle(spec: SelectiveSpec) -> None:
    suites = [*cases.model_cases((2, 1, 40), io=spec.io, state=spec.state), *cases.peer_cases()]
    for case in suites:
        if "mamba" not in case.name.lower() and "Jamba" not in case.name:
            continue
        if any(word in case.name for word in ("varlen", "heads", "slots", "mamba2")):
            continue
        problem = case.build()
        sizes = (problem.head_dim, problem.d_state, problem.io, problem.state_dtype)
        if sizes == (1, spec.d_state, spec.io, spec.state):
            vet.check_case(spec, case)


@EVERY
def test_4096_tokens_agree_with_the_oracle(spec: SelectiveSpec) -> None:
    """Slow and fast decays: A from -1 to -16 as models have it, dt from 1e-3 up."""
    name = f"Mamba-1 4096 tokens n{spec.d_state} {spec.io} s{spec.state}"

    def build() -> ScanProblem:
        options = Options(io=spec.io, state=spec.state, per_column_a=True, z=True, dt_f32=True)
        problem = draw(4096, Shape((4096,), 128, 1, spec.d_state), options)
        A = -np.broadcast_to(np.arange(1, spec.d_state + 1, dtype=np.float32), problem.A.shape).copy()
        return replace(problem, A=A, dt_bias=np.linspace(-7, -2, 128, dtype=np.float32))

    vet.check_case(spec, Case(name, build))


def test_70000_sequences_and_70000_channels() -> None:
    for fields in ({}, {"chunk": 1}):
        spec = SelectiveSpec(d_state=16, **fields)
        vet.check_case(spec, Case("70000 sequences", lambda: cases.many_sequences(16)))
        vet.check_case(spec, Case("70000 channels", lambda: cases.many_channels(16)))
        huge = functools.partial(as_channels, cases.huge_slot_stride(16))
        vet.check_case(spec, Case("Mamba-1 huge slot stride", huge))


def same(one: ScanResult, other: ScanResult) -> bool:
    pairs = ((one.y, other.y), (one.state, other.state))
    return all(np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes() for a, b in pairs)


@EVERY
def test_the_same_problem_gives_the_same_bits_in_20_runs_and_alone(spec: SelectiveSpec) -> None:
    problem = as_channels(vet.batch(spec))
    whole = scan(problem, spec.id, "gpu")
    for _ in range(19):
        assert same(scan(problem, spec.id, "gpu"), whole)
    assert problem.read_slots is not None
    for s in range(problem.sequences):
        tokens = slice(int(problem.offsets[s]), int(problem.offsets[s + 1]))
        alone = scan(vet.alone(problem, s), spec.id, "gpu")
        slot = int(problem.read_slots[s])
        assert alone.y.tobytes() == whole.y[tokens].tobytes()
        assert alone.state[slot].tobytes() == whole.state[slot].tobytes()


def test_every_configuration_gives_the_same_bits() -> None:
    problem = draw(
        24, Shape((130, 1, 64), 256, 1, 16), Options(io="bf16", per_column_a=True, z=True, fresh="mixed", slots="moved")
    )
    first, *others = (
        scan(problem, SelectiveSpec(d_state=16, io="bf16", **fields).id, "gpu")
        for fields in (
            {},
            {"lanes": 4, "rows": 64, "warps": 4, "chunk": 32},
            {"lanes": 1, "rows": 128, "warps": 4, "chunk": 32},
            {"lanes": 2, "rows": 128, "warps": 4, "chunk": 32},
            {"chunk": 1},
            {"lanes": 2, "rows": 32, "warps": 1, "chunk": 1},
        )
    )
    for other in others:
        assert same(first, other), f"{first.kernel} and {other.kernel} differ"
