"""The selective family on the CPU: Mamba-1 in every option against the oracle, its bits, and broken kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyharness import EmulatorError, ScanProblem, scan
from pyharness.cases import (
    Options,
    Shape,
    as_channels,
    draw,
    edge_cases,
    huge_slot_stride,
    many_channels,
    many_sequences,
    tiny_steps,
)
from pyharness.compare import compare
from pyharness.errors import NoKernel
from pyharness.families import SelectiveSpec
from pyharness.oracle import oracle
from pyharness.render import render
from pyharness.spec import Geometry
from tests.emulated import assert_right, assert_same_bits_anywhere, kinds, run_text
from tests.strategies import SETTINGS, problems

EXAMPLES = settings(SETTINGS, max_examples=15)
#: Every type of io and every type of the state; the pair that models have, bf16 and f32, is that of the broken kernels.
TYPES = (("f32", "f32"), ("bf16", "f16"), ("f16", "bf16"))
EVERY_TYPE = pytest.mark.parametrize(("io", "state"), TYPES)
#: A kernel for prefill, whose three warps take turns, and one for decode, whose two serve a sequence each.
PREFILL: dict[str, int] = {"lanes": 4, "rows": 16, "warps": 3, "chunk": 4}
DECODE: dict[str, int] = {"warps": 2, "sequences": 4, "chunk": 1}
BOTH = pytest.mark.parametrize("fields", [PREFILL, DECODE], ids=["prefill", "decode"])


def usual(seed: int, lengths: tuple[int, ...], channels: int, d_state: int, **options: Any) -> ScanProblem:
    """What real models ask for: softplus, D and z, A a column."""
    return draw(seed, Shape(lengths, channels, 1, d_state), Options(per_column_a=True, z=True, **options))


# Right answers.


@EVERY_TYPE
@BOTH
@EXAMPLES
@given(data=st.data())
def test_any_problem_matches_the_oracle(fields: dict[str, int], io: str, state: str, data: st.DataObject) -> None:
    """16 columns take vectors where the problem's strides do; most problems have fewer channels than a block."""
    problem = as_channels(data.draw(problems(16, io, state, most_tokens=20)))
    assert_right(problem, SelectiveSpec(d_state=16, io=io, state=state, **fields))


@BOTH
@EXAMPLES
@given(problem=problems(38, most_tokens=20))
def test_any_problem_with_odd_columns_matches_the_oracle(fields: dict[str, int], problem: ScanProblem) -> None:
    """38 columns: no vector fits a row, and the last lane's quads are partly empty; 8 lanes share turns of 4 tokens."""
    own = fields | ({"lanes": 8, "rows": 8} if fields is PREFILL else {})
    assert_right(as_channels(problem), SelectiveSpec(d_state=38, **own))


@EVERY_TYPE
def test_full_blocks_of_the_usual_problem_match_the_oracle(io: str, state: str) -> None:
    """As many channels as blocks have room for, and lengths around turns and rounds: whole turns take the fast path."""
    spec = SelectiveSpec(d_state=16, io=io, state=state, **PREFILL)
    for dt_f32 in (False, True):
        options = {"io": io, "state": state, "dt_f32": dt_f32, "fresh": "mixed", "slots": "moved"}
        assert_right(usual(3, (47, 0, 32, 1, 16, 8), 32, 16, **options), spec)


@BOTH
@pytest.mark.parametrize(("io", "state"), TYPES[:2])
def test_edges(io: str, state: str, fields: dict[str, int]) -> None:
    """Every known fault and edge, with boundaries and lengths around the chunk, as Mamba-1 problems."""
    spec = SelectiveSpec(d_state=16, io=io, state=state, **fields)
    for case in edge_cases(16, chunk=spec.round if fields is PREFILL else 4, io=io, state=state):
        problem = as_channels(case.build())
        errors = compare(scan(problem, spec.id, "emulator"), problem)
        assert errors.ok, f"{spec.id}, {case.name}: {errors}"


def test_one_a_for_all_columns() -> None:
    for fields in (PREFILL, DECODE):
        problem = draw(4, Shape((19, 2), 16, 1, 16), Options(z=True))
        assert problem.A.ndim == 1
        assert_right(problem, SelectiveSpec(d_state=16, **fields))


@BOTH
def test_small_steps_keep_their_digits(fields: dict[str, int]) -> None:
    """softplus down to dt = -80: log(exp(dt) + 1) would be exactly 0 below -17. 1e-6 relative, element by element."""
    problem = tiny_steps(16)
    y = scan(problem, SelectiveSpec(d_state=16, **fields).id, "emulator").y.astype(np.float64)
    np.testing.assert_allclose(y, oracle(problem).y, rtol=1e-6, atol=0)


def test_small_steps_keep_their_digits_where_blocks_are_full() -> None:
    """The same on the fast path, which computes softplus without branches: dt from -80 to 20 in one sequence."""
    wide = np.linspace(-80.0, 20.0, 16 * 16, dtype=np.float32).reshape(16, 16)
    problem = usual(8, (16,), 16, 16, state=None, dt_bias=False)
    one = np.ones_like(problem.x)
    problem = replace(problem, dt=wide, x=one, z=8 * one, A=np.full_like(problem.A, -1e30), D=np.zeros(16, np.float32))
    spec = SelectiveSpec(d_state=16, **PREFILL)
    truth = oracle(problem).y
    y = scan(problem, spec.id, "emulator").y.astype(np.float64)
    # A = -1e30 forgets all but the last token; y sums 16 terms d B C, whose rounding is relative to their magnitudes.
    terms = np.abs(problem.B.astype(np.float64) * problem.C).sum(axis=-1)[..., None] * np.abs(
        truth / (problem.B * problem.C).sum(-1)[..., None]
    )
    assert (np.abs(y - truth) <= 1.5e-6 * terms).all()
    assert np.abs(truth).min() > 0


def test_slots_beyond_32_bits() -> None:
    for fields in (PREFILL, DECODE):
        assert_right(as_channels(huge_slot_stride(16)), SelectiveSpec(d_state=16, **fields))


@pytest.mark.parametrize("build", [many_sequences, many_channels])
def test_more_sequences_or_channels_than_a_grid_dimension_counts(build: Any) -> None:
    assert_right(build(1), SelectiveSpec(d_state=1, warps=1, chunk=1))


def test_more_channels_than_a_grid_dimension_counts_in_prefill() -> None:
    assert_right(many_channels(1), SelectiveSpec(d_state=1, warps=1, chunk=2, rows=32))


@pytest.mark.parametrize("d_state", [3, 100, 256])
def test_few_odd_and_many_columns(d_state: int) -> None:
    problem = usual(6, (2, 35), 11, d_state, fresh="mixed")
    for fields in ({}, DECODE):
        assert_right(problem, SelectiveSpec(d_state=d_state, **fields))


# What is refused.


def test_heads_of_more_than_one_row_are_refused() -> None:
    spec = SelectiveSpec(d_state=16)
    geometry = Geometry(tokens=4, sequences=1, heads=2, head_dim=1, groups=1, d_state=16)
    assert spec.refusal(geometry) == ""
    assert "head_dim is 1, found 2" in spec.refusal(replace(geometry, head_dim=2))
    assert "d_state 16, found 8" in spec.refusal(replace(geometry, d_state=8))
    with pytest.raises(NoKernel, match="head_dim is 1"):
        scan(draw(1, Shape((4,), 2, 2, 16)), spec.id, "emulator")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"d_state": 257}, "d_state must be 1 to 256"),
        ({"d_state": 16, "state": "i8"}, "state must be one of"),
        ({"d_state": 16, "lanes": 3}, "lanes must be a power of two"),
        ({"d_state": 16, "lanes": 2, "rows": 192}, "a lane must own 1, 2, 4 or 8 channels"),
        ({"d_state": 16, "lanes": 1, "rows": 64, "warps": 1, "chunk": 1}, "at most as many channels as lanes"),
        ({"d_state": 256, "lanes": 8, "rows": 16}, "at most 64 elements"),
        ({"d_state": 16, "chunk": 6}, "chunk must be 1, or 2, 4, 8 or 16 tokens, found 6"),
        ({"d_state": 256, "lanes": 32, "rows": 1, "chunk": 16, "warps": 8}, "bytes of shared memory"),
        ({"d_state": 16, "warps": 17}, "warps must be 1 to 16"),
        ({"d_state": 16, "lanes": 1, "warps": 8}, "wait for 16 quads in all, found 8 warps of 4"),
        ({"d_state": 16, "chunk": 1, "warps": 4, "sequences": 3}, "evenly, found 4 and 3"),
        ({"d_state": 16, "chunk": 32, "sequences": 2}, "where chunk is 1, found chunk 32"),
    ],
)
def test_specs_that_cannot_exist_say_why(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NoKernel, match=reason):
        SelectiveSpec(**fields)


def test_the_grid_has_a_block_a_run_of_channels_of_a_group_and_a_share_of_the_sequences() -> None:
    prefill = SelectiveSpec(d_state=16, lanes=1, rows=64, warps=4, chunk=4)
    assert prefill.grid_rule == {"rule": "channels", "rows": 64, "sequences": 1}
    decode = SelectiveSpec(d_state=16, lanes=4, rows=32, warps=4, chunk=1, sequences=4)
    assert decode.grid_rule == {"rule": "channels", "rows": 32, "sequences": 4}
    for spec, sequences, heads, groups, grid in (
        (prefill, 3, 130, 1, 3 * 3),
        (prefill, 0, 130, 2, 4),
        (decode, 9, 130, 1, 5 * 3),
        (decode, 1, 130, 2, 6),
        # As many shares as keep whole runs.
        (decode, 2**31 - 1, 8192, 1, 256 * (2**23 - 1)),
    ):
        plan = spec.plan(Geometry(9, sequences, heads, 1, groups, 16))
        assert [(launch.grid, launch.block) for launch in plan.launches] == [((grid, 1, 1), (spec.threads, 1, 1))]


# The same bits.

#: Of one to three warps, a channel to one lane, two and four, one channel a lane and two.
CONFIGURATIONS: dict[str, tuple[dict[str, int], ...]] = {
    "f32": (PREFILL, DECODE, {"lanes": 1, "rows": 32, "warps": 1, "chunk": 2}),
    "bf16": (
        PREFILL,
        DECODE,
        {"lanes": 2, "rows": 32, "warps": 2, "chunk": 8},
        {"lanes": 2, "rows": 32, "warps": 2, "chunk": 1, "sequences": 1},
    ),
}


def bits(problem: ScanProblem, kernel: str) -> tuple[bytes, ...]:
    result = scan(problem, kernel, "emulator")
    return tuple(np.ascontiguousarray(a).tobytes() for a in (result.y, result.state))


@pytest.mark.parametrize(("io", "state"), TYPES[:2])
def test_every_configuration_gives_the_same_bits_in_prefill_and_in_decode(io: str, state: str) -> None:
    """Whole blocks of channels and cut ones, stores rounded to nearest and, in 16 bits, stochastically."""
    kernels = [SelectiveSpec(d_state=16, io=io, state=state, **fields).id for fields in CONFIGURATIONS[io]]
    for channels, checkpoints, key in ((32, 0, False), (27, 7, state != "f32")):
        options = Options(
            io=io,
            state=state,
            z=True,
            per_column_a=True,
            checkpoints=checkpoints,
            fresh="mixed",
            slots="moved",
            key=key,
        )
        problem = draw(22, Shape((1, 0, 37, 16), channels, 1, 16), options)
        assert len({bits(problem, kernel) for kernel in kernels}) == 1


@BOTH
def test_a_sequence_gives_the_same_bits_anywhere_in_a_batch(fields: dict[str, int]) -> None:
    spec = SelectiveSpec(d_state=16, io="bf16", state="f16", **fields)
    problem = usual(21, (7, 21, 1, 6), 40, 16, io="bf16", state="f16")
    assert_same_bits_anywhere(problem, spec)


def test_prefill_goes_on_where_it_stopped_and_decode_after_it() -> None:
    """A prompt in one call, and in two with the state stored between, then token by token: the same bits."""
    prefill, decode = (SelectiveSpec(d_state=16, **fields) for fields in (PREFILL, DECODE))
    problem = usual(23, (37,), 16, 16)
    whole = scan(problem, prefill.id, "emulator")
    state, ys = problem.state, []
    for spec, start, end in ((prefill, 0, 19), (prefill, 19, 35), (decode, 35, 36), (decode, 36, 37)):
        rows = {name: getattr(problem, name)[start:end] for name in ("x", "dt", "B", "C", "z")}
        part = scan(replace(problem, **rows, state=state), spec.id, "emulator")
        state = part.state
        ys.append(part.y)
    assert np.concatenate(ys).tobytes() == whole.y.tobytes()
    assert problem.read_slots is not None
    slot = problem.read_slots[0]
    assert state is not None
    assert state[slot].tobytes() == whole.state[slot].tobytes()


# Slots and padding.


@BOTH
@EVERY_TYPE
def test_unnamed_slots_keep_their_bits_and_padding_writes_only_zeros(
    io: str, state: str, fields: dict[str, int]
) -> None:
    """Every other sequence is padding, and there is a slot for each that nothing may touch."""
    problem = usual(42, (1, 2, 9, 3), 16, 16, io=io, state=state, padding=2, spare=5, tail=3, slots="moved")
    result = scan(problem, SelectiveSpec(d_state=16, io=io, state=state, **fields).id, "emulator")
    assert problem.state is not None
    kept = ~problem.written
    assert kept.sum() >= 7
    assert result.state[kept].tobytes() == problem.state[kept].tobytes()
    assert (result.y[~problem.live_tokens].view(np.uint8) == 0).all()
    assert compare(result, problem).ok


# Broken kernels.


BROKEN = SelectiveSpec(d_state=16, io="bf16", lanes=2, rows=32, warps=3, chunk=4)
BROKEN_DECODE = SelectiveSpec(d_state=16, io="bf16", state="f16", **DECODE)


def exercising(spec: SelectiveSpec) -> Iterator[ScanProblem]:
    """Problems that reach every line: the fast path over several rounds and items, and every option."""
    types: dict[str, Any] = {"io": spec.io, "state": spec.state, "fresh": "mixed", "slots": "moved"}
    yield usual(31, (66, 16, 1), 2 * spec.rows, 16, **types)
    options = Options(per_column_a=True, z=True, checkpoints=2, gap=1, tail=3, key=spec.state != "f32", **types)
    yield draw(32, Shape((1, 20, 9, 0, 1), 86, 1, 16, 2), options)
    if spec.decodes:
        # As many tokens as sequences, a few of them longer and as many empty.
        yield usual(36, (1, 2, 0, 1, 1, 0, 3, 0, 1, 2, 0, 2, 0), spec.rows, 16, **types)
        # Rows of no sequence, which are for those to clear that took a usual step.
        yield usual(37, (1, 1, 1, 1, 0, 0, 0, 0), spec.rows, 16, tail=4, **types | {"fresh": "none"})


#: What a line says, and what it says once broken.
BREAKS = (
    ("decay", "d * rates.A[i][r][c]", "d * rates.A[i][r][0]", BROKEN),
    ("group", "static_cast<int64_t>(group) * kDState", "0", BROKEN),
    ("turn's tokens", "Source::fetched_token(i) < n_tokens", "Source::fetched_token(i) < n_tokens - 1", BROKEN),
    ("missing tokens", "k >= n_tokens) break", "k > n_tokens) break", BROKEN),
    ("checkpoint", "if (slot >= 0 && slot < a.slots) {", "if (slot > 1000) {", BROKEN),
    ("slot of the final state", "at, state, write, i,", "at, state, a.write_slots[0], i,", BROKEN),
    ("unused rows", "  clear_unused(a, find_channels", "  (find_channels", BROKEN),
    ("the state's next warp", "left == kTurn ? own.kept :", "left == kTurn ? handed :", BROKEN),
    ("turns of all sequences", "taken += n_turns", "taken += 1", BROKEN),
    ("a turn that nobody takes", "ring.wait_for_turn(a, i);  // a", "ring.wake_next(i);  // a", BROKEN),
    ("owner of a channel", "r * kOwners, kLanes", "0, kLanes", BROKEN_DECODE),
    (
        "slot of a longer sequence's final state",
        "store_channel<kFast>(a, row, s, final,",
        "store_channel<kFast>(a, row, s, 0,",
        BROKEN_DECODE,
    ),
    ("slot of a step's state", "in_slot + read * a.state_stride", "in_slot + 0 * a.state_stride", BROKEN_DECODE),
    ("slot of a step's final state", "in_slot + final * a.", "in_slot + 0 * a.", BROKEN_DECODE),
    ("fresh step", "(e[k].resume != 0) &", "", BROKEN_DECODE),
    ("token of a draw", "a, row, s, slot, t - begin, at", "a, row, s, slot, 0, at", BROKEN_DECODE),
    ("next items", "item += gridDim.x", "item += 2 * gridDim.x", BROKEN_DECODE),
    ("first token of a step", "(e[k].begin == static_cast<int>(t[k])) &", "", BROKEN_DECODE),
    ("tokens of a step", "(e[k].end == static_cast<int>(t[k]) + 1) &", "", BROKEN_DECODE),
    ("D of a step", "fmaf(D, step.x, sum_quads(quads))", "fmaf(step.x, step.x, sum_quads(quads))", BROKEN_DECODE),
    ("what a step leaves", "e[0].last >= a.tokens && last) taken |= kDone", "last) taken |= kDone", BROKEN_DECODE),
    ("steps that are left", "if (taken == (1u << kTogether) - 1 && e[0]", "if (e[0]", BROKEN_DECODE),
    ("channels in turn", "at.channel + r * kShares;\n    const bool", "at.channel;\n    const bool", BROKEN_DECODE),
)


@pytest.mark.parametrize("spec", [BROKEN, BROKEN_DECODE], ids=["prefill", "decode"])
def test_unbroken_kernels_pass_where_broken_ones_are_run(spec: SelectiveSpec) -> None:
    for problem in exercising(spec):
        assert compare(run_text(render(spec), spec, problem), problem).ok


@pytest.mark.parametrize(("what", "line", "broken", "spec"), BREAKS, ids=[b[0] for b in BREAKS])
def test_a_broken_line_is_seen(what: str, line: str, broken: str, spec: SelectiveSpec) -> None:
    source = render(spec)
    assert line in source, what
    for problem in exercising(spec):
        # As few blocks as runs of channels: each serves all sequences. Usual steps are those of a block's first item.
        steps = spec.decodes and problem.geometry.tokens == problem.geometry.sequences
        grid = spec.plan(problem.geometry if steps else replace(problem.geometry, sequences=1)).launches[0].grid[0]
        try:
            result = run_text(source.replace(line, broken), spec, problem, grid=grid)
        except EmulatorError:
            return
        wanted = run_text(source, spec, problem, grid=grid)
        if not compare(result, problem).ok or result.state.tobytes() != wanted.state.tobytes():
            return
    pytest.fail(f"{what}: nothing saw it")


#: What orders the warps of a block, and how its lack shows.
ORDER = (
    ("  __syncwarp();  // the last turn's were read\n", {"race"}),
    ("  __syncwarp();  // this turn's are there\n", {"race", "uninitialised"}),
    ("    ring.wait_for_turn(a, i);\n    float4", {"race", "uninitialised", "deadlock"}),
    ("    if (&to != &own.kept) ring.wake_next(i);\n", {"deadlock"}),
)


@pytest.mark.parametrize(("line", "found"), ORDER, ids=["read", "shared", "wait", "wake"])
def test_a_deleted_barrier_is_found(line: str, found: set[str]) -> None:
    source = render(BROKEN)
    assert source.count(line) == 1
    # One block a run, so that it goes on to another sequence; several rounds of turns.
    problem = usual(33, (50, 33), BROKEN.rows, 16, io="bf16")
    assert BROKEN.plan(problem.geometry).launches[0].grid[0] == 2
    run_text(source, BROKEN, problem, grid=1)
    with pytest.raises(EmulatorError) as caught:
        run_text(source.replace(line, line[line.index("\n") + 1 :]), BROKEN, problem, grid=1)
    assert kinds(caught.value) & found


@pytest.mark.parametrize(
    ("line", "broken", "spec"),
    [
        ("const bool usual =", "const bool usual = true ||", BROKEN),
        ("(a.flags & kVectors) == kVectors && kDState % 4 == 0", "kDState % 4 == 0", BROKEN_DECODE),
    ],
    ids=["prefill", "decode"],
)
def test_a_vector_access_off_its_alignment_is_found(line: str, broken: str, spec: SelectiveSpec) -> None:
    source = render(spec)
    assert line in source
    problem = usual(34, (5,), spec.rows, 16, io=spec.io, state=spec.state, shift=1)
    run_text(source, spec, problem)
    with pytest.raises(EmulatorError) as caught:
        run_text(source.replace(line, broken), spec, problem)
    assert "misaligned" in kinds(caught.value)


@pytest.mark.parametrize("spec", [BROKEN, BROKEN_DECODE], ids=["prefill", "decode"])
def test_an_output_that_is_not_stored_is_found(spec: SelectiveSpec) -> None:
    source = render(spec)
    prefill = r"store_channels\(static_cast<Io\*>\(a\.y\)[^;]*\n[^;]*How::kUsual\)"
    decode = r"if \([^()]*\) (?:static_cast<Io\*>\(a\.y\)\[.*\]|\*step\.y) = from_f32<Io>\(out\)"
    store = re.compile(rf"^ *({prefill}|{decode});$", re.MULTILINE)
    assert len(store.findall(source)) == 1 + spec.decodes
    with pytest.raises(EmulatorError) as caught:
        run_text(store.sub(";", source), spec, next(exercising(spec)))
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("unwritten", "y")}


@BOTH
@pytest.mark.parametrize("name", ["x", "z", "B", "C", "dt", "state", "A", "D", "dt_bias"])
def test_a_buffer_that_ends_one_element_early_is_found(name: str, fields: dict[str, int]) -> None:
    spec = SelectiveSpec(d_state=16, **fields)
    problem = usual(35, (9, 5), 16, 16, slots="default", spare=0)
    if name == "state":
        problem = replace(problem, state=np.ascontiguousarray(problem.state[:2]))
    short = getattr(problem, name).reshape(-1)[:-1].copy()
    with pytest.raises(EmulatorError) as caught:
        run_text(render(spec), spec, problem, arrays={name: short})
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("out-of-bounds", name)}
