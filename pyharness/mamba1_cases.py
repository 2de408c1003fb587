"""Problems of Mamba-1 that its kernels are proven on: channels with an A for each column, in every option and edge."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pyharness import cases
from pyharness.cases import Case, Options, Shape, as_channels, draw
from pyharness.families import SelectiveSpec
from pyharness.problem import ScanProblem

#: Of a kernel for decode, the tokens that boundaries and lengths are put around.
_DECODED = 8


def kernel_cases(spec: SelectiveSpec) -> Iterator[Case]:
    """The cases of a kernel: options in its types, the edges, the real models of its d_state, a long prompt."""
    yield from option_cases(spec)
    yield from edge_cases(spec)
    yield from model_cases(spec)
    yield long_case(spec)


def option_cases(spec: SelectiveSpec) -> Iterator[Case]:
    """Options of the operation in a kernel's types; lengths cross several rounds, channels fill blocks and do not."""
    plain = Options(io=spec.io, state=spec.state, per_column_a=True, z=True, dt_f32=True, fresh="mixed")
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
        ("stochastic rounding", 128, 1, replace(plain, key=True, checkpoints=7, slots="moved")),
    ):
        if options.key and spec.state == "f32":
            continue
        shape = Shape((67, 1, 0, 130, 9), channels, 1, spec.d_state, groups)
        text = f"Mamba-1 {name} {_sizes(spec)}"
        yield Case(text, functools.partial(draw, len(text), shape, options))


def edge_cases(spec: SelectiveSpec) -> Iterator[Case]:
    """The edges of what is legal (`cases.edge_cases`) around a round of turns, each row of a head as a channel."""
    chunk = _DECODED if spec.decodes else spec.round
    for case in cases.edge_cases(spec.d_state, chunk=chunk, io=spec.io, state=spec.state):
        yield Case(f"Mamba-1 {case.name} chunk {chunk} {_sizes(spec)}", functools.partial(_of_channels, case))


def model_cases(spec: SelectiveSpec) -> Iterator[Case]:
    """The real models whose heads are channels and whose d_state is a kernel's, whole."""
    drawn = cases.model_cases((2, 1, 40), io=spec.io, state=spec.state)
    for model, case in zip(cases.MODELS, drawn, strict=True):
        if (model.head_dim, model.d_state) == (1, spec.d_state):
            yield case


def long_case(spec: SelectiveSpec) -> Case:
    """4096 tokens of one sequence, slow and fast decays: A from -1 to -d_state as models have it, dt from 1e-3 up."""

    def build() -> ScanProblem:
        options = Options(io=spec.io, state=spec.state, per_column_a=True, z=True, dt_f32=True)
        problem = draw(4096, Shape((4096,), 128, 1, spec.d_state), options)
        A = -np.broadcast_to(np.arange(1, spec.d_state + 1, dtype=np.float32), problem.A.shape).copy()
        return replace(problem, A=A, dt_bias=np.linspace(-7, -2, 128, dtype=np.float32))

    return Case(f"Mamba-1 4096 tokens {_sizes(spec)}", build)


def _of_channels(case: Case) -> ScanProblem:
    return as_channels(case.build())


def _sizes(spec: SelectiveSpec) -> str:
    return f"n{spec.d_state} {spec.io} s{spec.state}"
