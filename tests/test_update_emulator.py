"""The update family on the CPU: decode in every option against the oracle, its bits, and broken kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyharness import EmulatorError, ScanProblem, scan
from pyharness.args import Flag
from pyharness.cases import (
    Options,
    Shape,
    draw,
    edge_cases,
    model_cases,
)
from pyharness.catalogue import CATALOGUE
from pyharness.compare import compare
from pyharness.errors import NoKernel
from pyharness.families import RecurrentSpec, UpdateSpec
from pyharness.families.update import MAX_TOKENS
from pyharness.oracle import initial_state, oracle
from pyharness.render import render
from pyharness.scan import ScanResult
from pyharness.spec import Geometry
from tests.emulated import assert_right, assert_same_bits_anywhere, kinds, run_text
from tests.stochastic import assert_draws_are_fair
from tests.strategies import SETTINGS, problems

TYPES = (("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("bf16", "f16"), ("f32", "i8"))
EVERY_TYPE = pytest.mark.parametrize(("io", "state"), TYPES)


KERNELS = [spec for spec in CATALOGUE if isinstance(spec, UpdateSpec)]


def small(io: str = "f32", state: str = "f32", **fields: int) -> UpdateSpec:
    """38 columns: no piece is whole in every row, and the last lane's are partly empty; two warps a block."""
    return UpdateSpec(d_state=38, io=io, state=state, **fields)


# Right answers.


@EVERY_TYPE
@SETTINGS
@given(data=st.data())
def test_any_problem_matches_the_oracle(io: str, state: str, data: st.DataObject) -> None:
    assert_right(data.draw(problems(38, io, state, most_tokens=MAX_TOKENS)), small(io, state))


@EVERY_TYPE
@SETTINGS
@given(data=st.data())
def test_any_problem_matches_the_oracle_where_vectors_fit(io: str, state: str, data: st.DataObject) -> None:
    """48 columns take 16-byte accesses in every type; a lane asks for four tokens at once."""
    assert_right(
        data.draw(problems(48, io, state, most_tokens=MAX_TOKENS)), UpdateSpec(d_state=48, io=io, state=state, chunk=4)
    )


@pytest.mark.parametrize("fields", [{}, {"chunk": 2}])
def test_edges(fields: dict[str, int]) -> None:
    """Every known fault and edge; the kernel is right for sequences that no launch is planned for, too."""
    spec = small(**fields)
    for case in edge_cases(38, chunk=4):
        problem = case.build()
        if problem.io == "f32":
            results = run_unplanned(problem, spec)
            errors = compare(results, problem)
            assert errors.ok, f"{spec.id}, {case.name}: {errors}"


def run_unplanned(problem: ScanProblem, spec: UpdateSpec) -> ScanResult:
    """Run a problem whatever the length of its sequences, by the plan of a geometry that does not tell."""
    return run_text(render(spec), spec, problem, plan=spec.plan(replace(problem.geometry, longest=0)))


def test_longer_sequences_are_refused_where_they_are_known() -> None:
    spec = UpdateSpec(d_state=16)
    geometry = Geometry(tokens=16, sequences=2, heads=1, head_dim=1, groups=1, d_state=16)
    assert spec.refusal(geometry) == ""
    assert "9" in spec.refusal(replace(geometry, longest=9))
    assert "17 tokens in 2 sequences" in spec.refusal(replace(geometry, tokens=17))
    with pytest.raises(NoKernel, match="at most 8 tokens"):
        scan(draw(1, Shape((9, 1), 1, 1, 16)), spec.id, "emulator")
    # Tokens past the last offset belong to no sequence.
    assert_right(draw(1, Shape((8, 1), 1, 1, 16), Options(tail=20)), spec)


@pytest.mark.parametrize("spec", KERNELS, ids=[spec.id for spec in KERNELS])
def test_every_kernel_of_the_catalogue(spec: UpdateSpec) -> None:
    """The kernels that are shipped, not small ones of their kind: plain, every option, and odd strides."""
    plain = Options(io=spec.io, state=spec.state, dt_f32=True, fresh="mixed")
    every = replace(plain, z=True, dt_limit=(0.01, 0.1), tail=1, checkpoints=2, slots="moved", discard=3)
    odd = replace(plain, per_column_a=True, shift=1, gap=3, slot_gap=5, padding=2)
    head_dim = spec.head_dim or 3
    assert_right(draw(41, Shape((4, 2), 1, head_dim, spec.d_state), plain), spec)
    assert_right(draw(42, Shape((3, 1), 2, head_dim, spec.d_state, 2), replace(every, order=True, dt_f32=False)), spec)
    assert_right(draw(43, Shape((2, 1), 1, head_dim, spec.d_state), odd), spec)
    usual = replace(plain, z=True, packed=True, gap=8, dt_f32=False, slots="moved", order=True)
    assert_right(draw(44, Shape((1, 1, 1), 1, spec.head_dim or 8, spec.d_state), usual), spec)


#: Heads and batch are cut, nothing else.
MODELS = [*model_cases((1, 1, 4), reduce=True, io="bf16"), *model_cases((1, 3), reduce=True, io="f32")]
#: The emulator's time goes with the state elements that are updated: larger cases are run on a GPU.
ELEMENTS = 2**20


def elements(problem: ScanProblem) -> int:
    """State elements that a problem updates, counted once a token."""
    return problem.tokens * problem.heads * problem.head_dim * problem.d_state


@pytest.mark.parametrize("part", range(4))
def test_real_models(part: int) -> None:
    for case in MODELS[part::4]:
        problem = case.build()
        if elements(problem) > ELEMENTS:
            continue
        spec = UpdateSpec(d_state=problem.d_state, io=problem.io, state=problem.state_dtype)
        assert_right(problem, spec)


def test_one_reciprocal_divides_exactly_below_its_limit() -> None:
    """`divide_short` with every error that the instruction may have: 2^-22 of the quotient, either way."""
    rng = np.random.default_rng(7)
    limit = 2**21
    divisors = np.concatenate([np.arange(1, 600), rng.integers(1, limit, 2000), [limit - 1]])
    multiples = (limit - 1) // divisors * divisors  # the largest, where the error is too
    for numbers in (multiples, multiples - 1, rng.integers(0, limit, len(divisors)), np.full(len(divisors), limit - 1)):
        quotients = (numbers.astype(np.float32) + np.float32(0.5)).astype(np.float64) / divisors
        for error in (-(2.0**-22), 0.0, 2.0**-22):
            assert ((quotients * (1 + error)).astype(np.int64) == numbers // divisors).all()


def test_a_kernel_of_one_head_dim_refuses_others_and_masks_cut_runs() -> None:
    for rows, warps in ((16, 2), (64, 8)):  # 40 rows of a head: the last run of 64 is cut
        spec = UpdateSpec(d_state=64, head_dim=40, lanes=16, rows=rows, warps=warps)
        problem = draw(5, Shape((1, 3), 2, 40, 64), Options(z=True))
        assert_right(problem, spec)
        with pytest.raises(NoKernel, match="head_dim 40, found 41"):
            scan(draw(5, Shape((1,), 2, 41, 64)), spec.id, "emulator")


@pytest.mark.parametrize("d_state", [1, 3, 16, 20, 96, 100, 192, 256, 1024])
def test_every_number_of_columns(d_state: int) -> None:
    problem = draw(6, Shape((1, 2), 2, 5, d_state))
    assert_right(problem, UpdateSpec(d_state=d_state))


# The same bits.

CONFIGURATIONS: tuple[dict[str, int], ...] = (
    {},
    {"lanes": 4, "rows": 16, "warps": 1},
    {"lanes": 8, "rows": 32, "warps": 2},
    {"lanes": 16, "rows": 32, "warps": 2, "head_dim": 24},
    {"lanes": 16, "rows": 2, "warps": 1, "chunk": 2},
)
CONFIGURATIONS_8_BIT: tuple[dict[str, int], ...] = (
    {},
    {"lanes": 2, "rows": 16, "warps": 1},
    {"lanes": 4, "rows": 16, "warps": 1, "chunk": 2},
    {"lanes": 8, "rows": 32, "warps": 2, "head_dim": 24},
)


def bits(problem: ScanProblem, kernel: str) -> tuple[bytes, ...]:
    return bits_of(scan(problem, kernel, "emulator"))


def bits_of(result: ScanResult) -> tuple[bytes, ...]:
    arrays = (result.y, result.state, result.state_scale)
    return tuple(np.ascontiguousarray(a).tobytes() for a in arrays if a is not None)


@pytest.mark.parametrize(
    ("io", "state", "d_state"), [("f32", "f32", 48), ("bf16", "f16", 52), ("bf16", "bf16", 48), ("f32", "i8", 52)]
)
def test_every_configuration_gives_the_same_bits_and_those_of_recurrent(io: str, state: str, d_state: int) -> None:
    """Rows that vectors fit and rows that they do not; stores rounded to nearest and, in 16 bits, stochastically."""
    fields = CONFIGURATIONS_8_BIT if state == "i8" else CONFIGURATIONS
    kernels = [UpdateSpec(d_state=d_state, io=io, state=state, **f).id for f in fields]
    if state != "i8":
        kernels.append(RecurrentSpec(d_state=d_state, io=io, state=state).id)
    for key in (False, True):
        options = Options(io=io, state=state, z=True, checkpoints=2, fresh="mixed", slots="moved", key=key)
        problem = draw(22, Shape((1, 0, 4, 8), 4, 24, d_state, 2), options)
        assert len({bits(problem, kernel) for kernel in kernels}) == 1


def test_a_sequence_gives_the_same_bits_anywhere_in_a_batch() -> None:
    spec = small("bf16", "bf16")
    problem = draw(21, Shape((7, 8, 1, 6), 2, 18, 38), Options(io="bf16", state="bf16", z=True))
    assert_same_bits_anywhere(problem, spec)


# Slots, padding, drafts.


def test_a_rejected_draft_resumes_from_its_checkpoint() -> None:
    """Four draft tokens with a checkpoint each; two are accepted: going on from the second checkpoint is as if only
    two had been computed, to the bit.
    """
    spec = UpdateSpec(d_state=32)
    drafted = draw(41, Shape((4,), 2, 8, 32), Options(checkpoints=1, slots="moved"))
    whole = scan(drafted, spec.id, "emulator")
    assert drafted.checkpoint_slots is not None
    assert drafted.write_slots is not None
    rows = {name: getattr(drafted, name)[:2] for name in ("x", "dt", "B", "C")}
    accepted = scan(replace(drafted, **rows, checkpoint_slots=None), spec.id, "emulator")
    kept = whole.state[drafted.checkpoint_slots[1]]
    assert kept.tobytes() == accepted.state[drafted.write_slots[0]].tobytes()
    assert whole.state[drafted.checkpoint_slots[3]].tobytes() == whole.state[drafted.write_slots[0]].tobytes()


@EVERY_TYPE
def test_unnamed_slots_keep_their_bits_and_padding_writes_only_zeros(io: str, state: str) -> None:
    """Every other sequence is padding, and there is a slot for each that nothing may touch."""
    options = Options(io=io, state=state, padding=2, spare=5, tail=3, slots="moved")
    problem = draw(42, Shape((1, 2, 1, 3), 2, 8, 38), options)
    result = scan(problem, small(io, state).id, "emulator")
    assert problem.state is not None
    kept = ~problem.written
    assert kept.sum() >= 7
    assert result.state[kept].tobytes() == problem.state[kept].tobytes()
    if result.state_scale is not None and problem.state_scale is not None:
        assert result.state_scale[kept].tobytes() == problem.state_scale[kept].tobytes()
    assert (result.y[~problem.live_tokens].view(np.uint8) == 0).all()
    assert compare(result, problem).ok


# Storage.


@pytest.mark.parametrize("state", ["bf16", "f16"])
def test_stochastic_rounding_is_fresh_each_step_and_its_mean_error_is_none(state: str) -> None:
    assert_draws_are_fair(state, "emulator")


def test_8_bit_states_round_trip() -> None:
    """A state of whole steps with its largest at 127 comes back as it was; a row of zeros has scale 0, and tiny rows
    keep seven bits.
    """
    rng = np.random.default_rng(52)
    stored = rng.integers(-127, 128, (2, 1, 4, 48)).astype(np.int8)
    stored[..., 0] = 127
    stored[0, 0, 1] = 0
    scale = rng.uniform(0.01, 1, (2, 1, 4)).astype(np.float32)
    scale[0, 0, 1] = 0
    scale[0, 0, 2] = 2e-38
    plain = draw(53, Shape((1,), 1, 4, 48), Options(state=None, dt_bias=False, softplus=False))
    spec = UpdateSpec(d_state=48, state="i8")
    problem = replace(plain, dt=np.zeros((1, 1), np.float32), state=stored, state_scale=scale, dt_softplus=False)
    result = scan(problem, spec.id, "emulator")
    assert result.state.tobytes() == stored.tobytes()
    assert result.state_scale is not None
    np.testing.assert_allclose(result.state_scale, scale, rtol=3e-7)
    assert result.state_scale[0, 0, 1] == 0


def test_8_bit_states_keep_nan_and_infinity() -> None:
    for bad in (np.nan, np.inf):
        problem = draw(54, Shape((1,), 1, 2, 16), Options(state="i8"))
        assert problem.read_slots is not None
        assert problem.state_scale is not None
        scale = problem.state_scale.copy()
        slot = problem.read_slots[0]
        scale[slot, 0, 0] = bad
        result = scan(replace(problem, state_scale=scale), UpdateSpec(d_state=16, state="i8").id, "emulator")
        assert result.state_scale is not None
        assert not np.isfinite(result.state_scale[slot, 0, 0])
        assert np.isfinite(result.state_scale[slot, 0, 1])


def test_8_bit_states_round_stochastically_with_a_key() -> None:
    """The mean of many draws is nearer to the exact state than a step can be, and the largest element is exact."""
    spec = UpdateSpec(d_state=32, state="i8")
    base = draw(55, Shape((1,), 1, 4, 32), Options(state="i8", spare=0))
    assert base.read_slots is not None
    assert base.state is not None
    slot = int(base.read_slots[0])
    truth = oracle(base).states[slot]
    total = np.zeros(truth.shape)
    draws = 200
    for step in range(draws):
        result = scan(replace(base, rounding_key=np.array([3, step], np.uint64)), spec.id, "emulator")
        assert result.state_scale is not None
        total += result.state[slot].astype(np.float64) * result.state_scale[slot].astype(np.float64)[..., None]
    steps = np.abs(truth).max(axis=-1, keepdims=True) / 127
    errors = (total / draws - truth) / steps
    # A draw's error has a deviation of at most half a step.
    assert np.abs(errors).max() < 4.5 * 0.5 / np.sqrt(draws)
    assert abs(errors.mean()) < 3 * 0.5 / np.sqrt(draws * errors.size)
    largest = np.abs(truth).argmax(axis=-1)
    assert np.abs(np.take_along_axis(errors, largest[..., None], -1)).max() < 1e-3


# Broken kernels.


#: What a line says, and what it says once broken: each must be seen by `exercising`.
BREAKS = (
    ("carry of the state", "s[r] + i * kPiece + 4 * q, decay", "s[r] + i * kPiece, decay", "i8"),
    ("group of a head", "group = group_of(a, w.head)", "group = w.head % a.groups", "f32"),
    ("half of a division", "static_cast<float>(a) + 0.5f", "static_cast<float>(a) - 0.5f", "f32"),
    ("slot of the final state", "int64_t slot = final;", "int64_t slot = a.write_slots[0];", "f32"),
    ("fresh state", "return e.resume && e.read", "return e.read", "f32"),
    ("empty sequence", "e.end <= e.begin && initial == write", "e.end <= e.begin", "f32"),
    ("checkpoint", "slot = a.checkpoint_slots[t + i];", "slot = -1;", "f32"),
    ("last checkpoint", "? a.checkpoint_slots[end - 1] : -1", "? -1 : -1", "f32"),
    ("row that is stored", "row0 + at.own + t * a.y_stride : -1", "row0 + at.row + t * a.y_stride : -1", "f32"),
    ("D", "token.x.at(folded_index<kLanes, kCount>(at.lane))", "token.x.at(0)", "f32"),
    ("tokens of a chunk", "group, at, min(t + i, end - 1))", "group, at, t)", "f32"),
    ("sum over lanes", "sum_lanes(sums[q][0], kLanes / kCount)", "sums[q][0]", "f32"),
    ("lane of a step", "__shfl_sync(kWholeWarp, d_of_lane, turn + i)", "d_of_lane", "f32"),
    ("row scale", "largest = larger_magnitude(largest, __shfl_xor_sync(kWholeWarp, largest, bit));", "", "i8"),
    ("scale read", "decay * decays[r] : decay", "decay : decay", "i8"),
    ("scale read once", "decays[r] = 1.f;\n        //", "decays[r] *= 1.f;\n        //", "i8"),
    ("state of an empty sequence", "s[r][n] *= decays[r];", ";", "i8"),
    ("rows that are not there", "kWholeRuns || r < valid_rows", "true", "f32"),
    ("token of a draw", "a, s, slot, t + i - begin, row0", "a, s, slot, 0, row0", "bf16"),
    ("token that is stored", "t + own / kTogether", "t", "f32"),
    ("row that is stored of several tokens", "at.row + own % kTogether;", "at.row;", "f32"),
    ("tokens that are not there", "own_token < end && ", "", "f32"),
    ("usual step: first token", "(e.begin == static_cast<int>(t)) &", "", "f32"),
    ("usual step: tokens", "(e.end == static_cast<int>(t) + 1) &", "", "f32"),
    ("usual step: pool", "const bool has_state = e.read >= 0 &&", "const bool has_state = true ||", "f32"),
    ("usual step: slots", "in_slot + initial * a.state_stride", "in_slot + 0 * a.state_stride", "f32"),
    ("usual step: fresh state", "(e.resume != 0) &", "", "f32"),
    ("usual step: padding", "(e.read != a.pad_slot) &", "", "f32"),
    ("usual step: checkpoints", "!a.checkpoint_slots &", "", "f32"),
    ("usual step: draws", "!(kRounds && a.rounding_key)", "true", "bf16"),
    ("usual step: slot of the final state", "in_slot + final * a.", "in_slot + initial * a.", "f32"),
    ("usual step: group", "row0, short_group_of(a, w.head), at, t)", "row0, w.head % a.groups, at, t)", "f32"),
    ("usual step: scale read", "decay * scales[r] : decay", "decay * scales[0] : decay", "i8"),
    ("usual step: scale written", "final * a.state_scale_stride + row0", "initial * a.state_scale_stride + row0", "i8"),
    ("usual step: columns", "round_nearest(stored[r][i], q, s + i", "round_nearest(stored[r][i], q, s + 0 * i", "f32"),
)


def exercising(state: str) -> Iterator[tuple[ScanProblem, UpdateSpec]]:
    """Problems that reach every line: with and without vectors, of one token a sequence and of several."""
    one = Options(state=state, z=True, slots="moved")
    several = replace(one, checkpoints=2, key=state == "bf16")
    for head_dim, d_state in ((12, 48), (13, 38)):
        spec = UpdateSpec(d_state=d_state, state=state, warps=1)
        mixed = draw(31, Shape((1, 1, 4, 0, 8, 0), 6, head_dim, d_state, 2), several)
        yield replace(mixed, resume=np.array([0, 1, 0, 1, 1, 0], np.uint8)), spec
        singles = draw(32, Shape((1,) * 5, 6, head_dim, d_state, 2), one)
        assert singles.read_slots is not None
        yield replace(singles, resume=np.array([1, 0, 1, 1, 0], np.uint8)), spec
        yield replace(singles, pad_slot=int(singles.read_slots[1])), spec
        yield replace(singles, read_slots=np.where(np.arange(5) == 3, -1, singles.read_slots).astype(np.int32)), spec
        # As many tokens as sequences, but not one each.
        for options in (several, replace(one, key=state == "bf16")):
            yield draw(36, Shape((1, 2, 0, 1, 0, 2), 6, head_dim, d_state, 2), options), spec
    # Several pieces a lane; sequences of several tokens that nothing but the offsets tells.
    spec = UpdateSpec(d_state=48, state=state, warps=1, lanes=2, rows=32, chunk=2)
    yield draw(33, Shape((1, 3, 1), 2, 8, 48), replace(one, key=state == "bf16")), spec
    yield draw(37, Shape((1, 1), 2, 8, 48), one), spec


@pytest.mark.parametrize("state", ["f32", "bf16", "i8"])
def test_unbroken_kernels_pass_where_broken_ones_are_run(state: str) -> None:
    for problem, spec in exercising(state):
        assert compare(run_text(render(spec), spec, problem), problem).ok


@pytest.mark.parametrize(("what", "line", "broken", "state"), BREAKS, ids=[b[0] for b in BREAKS])
def test_a_broken_line_is_seen(what: str, line: str, broken: str, state: str) -> None:
    assert any(sees(line, broken, problem, spec) for problem, spec in exercising(state)), f"{what}: nothing saw it"


def sees(line: str, broken: str, problem: ScanProblem, spec: UpdateSpec) -> bool:
    """Whether a run of a broken kernel fails, is wrong, or gives other bits than the whole one."""
    source = render(spec)
    assert line in source, line
    try:
        result = run_text(source.replace(line, broken), spec, problem)
    except EmulatorError:
        return True
    return not compare(result, problem).ok or bits(problem, spec.id) != bits_of(result)


def test_a_vector_access_off_its_alignment_is_found() -> None:
    """The arguments claim 16-byte rows where an array starts one element later."""
    spec = UpdateSpec(d_state=16)
    every = Flag.VECTOR_STATE | Flag.VECTOR_X | Flag.VECTOR_B | Flag.VECTOR_C
    problem = draw(34, Shape((3,), 1, 16, 16), Options(shift=1))
    run_text(render(spec), spec, problem)
    with pytest.raises(EmulatorError) as caught:
        run_text(render(spec), spec, problem, flags=every)
    assert "misaligned" in kinds(caught.value)


@pytest.mark.parametrize("state", ["f32", "i8"])
def test_an_output_that_is_not_stored_is_found(state: str) -> None:
    problem, spec = next(exercising(state))
    source = render(spec)
    store = re.compile(r"^ *if \((?:to\.at >= 0|stores)\) .* = from_f32<Io>\(out\);$", re.MULTILINE)
    assert len(store.findall(source)) == 2
    with pytest.raises(EmulatorError) as caught:
        run_text(store.sub(";", source), spec, problem)
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("unwritten", "y")}


@pytest.mark.parametrize("name", ["x", "B", "C", "dt", "state", "A", "D"])
@pytest.mark.parametrize("d_state", [48, 38])
def test_a_buffer_that_ends_one_element_early_is_found(d_state: int, name: str) -> None:
    spec = UpdateSpec(d_state=d_state, warps=1)
    problem = draw(35, Shape((3, 5), 2, 8, d_state), Options(slots="default", spare=0))
    if name == "state":
        problem = replace(problem, state=np.ascontiguousarray(problem.state[:2]))
    whole = getattr(problem, name)
    short = whole.reshape(-1)[:-1].copy()
    with pytest.raises(EmulatorError) as caught:
        run_text(render(spec), spec, problem, arrays={name: short})
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("out-of-bounds", name)}


def test_the_initial_state_of_an_8_bit_pool_is_scaled_by_row() -> None:
    """The oracle's own view of such a pool, worked by hand: 3 steps of 0.5."""
    stored = np.full((1, 1, 1, 4), 3, np.int8)
    problem = draw(1, Shape((1,), 1, 1, 4), Options(state=None))
    pooled = replace(problem, state=stored, state_scale=np.full((1, 1, 1), 0.5, np.float32))
    assert (initial_state(pooled, 0) == 1.5).all()
