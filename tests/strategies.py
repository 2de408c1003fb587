"""Hypothesis strategies that draw whole problems: shapes, strides, slots, lengths, options and storage types."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from pyharness.cases import Options, Shape, draw
from pyharness.problem import ScanProblem

#: Draws of the same problems in every run.
SETTINGS = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    # Explaining a failure runs the kernel hundreds of times more and tells nothing about CUDA text.
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def shapes(d_state: int, *, most_tokens: int = 12) -> st.SearchStrategy[Shape]:
    """Small shapes with the columns of a kernel; heads are a multiple of groups, and odd sizes are common."""
    return st.builds(
        lambda lengths, groups, ratio, head_dim: Shape(tuple(lengths), groups * ratio, head_dim, d_state, groups),
        st.lists(st.integers(0, most_tokens), max_size=4),
        st.integers(1, 3),
        st.integers(1, 2),
        st.sampled_from((1, 2, 3, 4, 5, 8, 9, 33)),
    )


def options(io: str, state: str) -> st.SearchStrategy[Options]:
    """Every option of a draw for the storage types of a kernel."""
    switch = st.booleans()
    every = st.sampled_from((0, 0, 1, 2, 3))
    return st.builds(
        Options,
        io=st.just(io),
        state=st.sampled_from((state, state, state, None) if state == "f32" else (state,)),
        dt_f32=switch,
        per_column_a=switch,
        D=switch,
        dt_bias=switch,
        z=switch,
        softplus=st.just(True),
        dt_limit=st.sampled_from((None, None, (0.01, 0.5), (0.0, float("inf")))),
        spread=st.sampled_from(("peer", "peer", "ggml")),
        tail=st.sampled_from((0, 0, 1, 5)),
        packed=switch,
        gap=st.sampled_from((0, 1, 3, 4, 8)),
        shift=st.sampled_from((0, 0, 1, 2, 4)),
        spare=st.integers(0, 2),
        slot_gap=st.sampled_from((0, 0, 1, 4, 5)),
        fresh=st.sampled_from(("none", "all", "mixed", "mixed")),
        slots=st.sampled_from(("default", "in place", "moved")),
        discard=every,
        padding=every,
        checkpoints=every,
        order=switch,
    )


def problems(
    d_state: int, io: str = "f32", state: str = "f32", *, most_tokens: int = 12
) -> st.SearchStrategy[ScanProblem]:
    """Whole problems for a kernel of a d_state, io and state."""
    return st.builds(draw, st.integers(0, 2**32 - 1), shapes(d_state, most_tokens=most_tokens), options(io, state))
