"""Selective kernels on the GPU. `check_case` raises where a result is not the oracle's."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pyharness import cases, mamba1_cases, vet
from pyharness.cases import Case, Options, Shape, as_channels, draw
from pyharness.families import SelectiveSpec
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
] + [
    SelectiveSpec(d_state=16, io="bf16", lanes=2, rows=32, warps=6),
    SelectiveSpec(d_state=16, io="bf16", lanes=4, rows=16, warps=16),
    SelectiveSpec(d_state=16, io="bf16", lanes=4, rows=8, warps=1, chunk=1, sequences=1),
]
EVERY = pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.id)


@EVERY
def test_every_case_agrees_with_the_oracle(spec: SelectiveSpec) -> None:
    for case in mamba1_cases.kernel_cases(spec):
        vet.check_case(spec, case)


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
def test_a_sequence_gives_the_same_bits_in_20_runs_alone_and_anywhere(spec: SelectiveSpec) -> None:
    vet.check_repeats(spec)
    vet.check_batch(spec)


def test_every_configuration_gives_the_same_bits() -> None:
    problem = draw(
        24, Shape((130, 1, 64), 256, 1, 16), Options(io="bf16", per_column_a=True, z=True, fresh="mixed", slots="moved")
    )
    first, *others = (
        scan(problem, SelectiveSpec(d_state=16, io="bf16", **fields).id, "gpu")
        for fields in (
            {},
            {"lanes": 4, "rows": 16, "warps": 16},
            {"lanes": 1, "rows": 64, "warps": 3, "chunk": 2},
            {"lanes": 2, "rows": 32, "warps": 6},
            {"chunk": 1},
            {"lanes": 2, "rows": 32, "warps": 1, "chunk": 1},
        )
    )
    for other in others:
        assert same(first, other), f"{first.kernel} and {other.kernel} differ"
