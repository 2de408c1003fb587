"""The ssd family on the CPU: chunked products in every precision against the oracle, their bits, and broken kernels.

The bounds of 16-bit operands are wide next to those of f32 arithmetic, so a small mistake could hide there. The kernel
that splits its operands is the same text with a bound 256 times as narrow: it goes through every test too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyharness import EmulatorError, ScanProblem, scan
from pyharness.args import Flag
from pyharness.cases import Options, Shape, draw, huge_slot_stride, strong_decay
from pyharness.compare import compare, scaled_error
from pyharness.errors import NoKernel
from pyharness.families import SsdSpec, UpdateSpec
from pyharness.oracle import oracle
from pyharness.peer_suites import suite
from pyharness.render import render
from pyharness.scan import run_emulator
from pyharness.spec import TARGETS, Geometry, parse_id
from tests.emulated import assert_right, assert_same_bits_anywhere, kinds, run_text
from tests.handover import assert_decode_goes_on
from tests.stand_ins import SSD_IDS

#: A block has one of the two parts of a head, and each of the two warp groups that write y a place for tokens.
HALF_HEADS = SsdSpec(d_state=256, head_dim=128, io="bf16", warps=12, segments=2, exact="sm_90a")
KERNELS: dict[str, SsdSpec] = {kernel: parse_id(kernel) for kernel in SSD_IDS}  # type: ignore[misc]
EVERY_KERNEL = pytest.mark.parametrize("spec", KERNELS.values(), ids=list(KERNELS))
PLAIN, SIXTEEN_BIT_STATE, _, SPLIT, _, HOPPER = KERNELS.values()


def shape_of(spec: SsdSpec, lengths: tuple[int, ...], heads: int = 0, groups: int = 1) -> Shape:
    """A shape that the kernel takes, by default with one head more in each group than blocks hold: one is not full."""
    return Shape(lengths, heads or groups * (spec.heads + 1), spec.head_dim, spec.d_state, groups)


def options_of(spec: SsdSpec, **options: Any) -> Options:
    return Options(**({"io": spec.io, "state": spec.state} | options))


# Right answers.


@EVERY_KERNEL
def test_every_length_up_to_three_chunks_from_every_offset(spec: SsdSpec) -> None:
    """Triangular numbers take every value modulo a power of two, so sequences of 0, 1, 2, ... tokens begin at each."""
    lengths = tuple(range(3 * spec.chunk + 1))
    starts = np.cumsum(lengths) - lengths
    assert set(starts % spec.chunk) == set(range(spec.chunk))
    assert_right(draw(1, shape_of(spec, lengths, heads=1), options_of(spec, fresh="mixed", slots="moved")), spec)


def option_sets(spec: SsdSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    c = spec.chunk
    yield "plain", {"fresh": "mixed"}
    yield (
        "every option",
        {
            "z": True,
            "dt_limit": (0.01, 0.1),
            "tail": 3,
            "slots": "moved",
            "discard": 3,
            "order": True,
            "dt_f32": True,
            "checkpoints": c,
            "by_sequence": True,
            "fresh": "mixed",
        },
    )
    yield "padding", {"padding": 2, "slots": "moved", "spare": 5, "tail": 1}
    yield "one packed row", {"packed": True, "z": True, "gap": 8}
    yield "one packed row, unaligned", {"packed": True, "z": True, "gap": 1, "slot_gap": 4}
    yield "odd base and strides", {"shift": 1, "gap": 3, "slot_gap": 5, "z": True, "dt_f32": True}
    yield "no option", {"D": False, "dt_bias": False, "softplus": False, "dt_limit": (0.0, 0.2)}
    if spec.state == "f32":
        yield "no state", {"state": None, "tail": 2}


@EVERY_KERNEL
def test_options(spec: SsdSpec) -> None:
    """Groups none of whose heads fill their blocks evenly; sequences of one, several and no chunks."""
    c = spec.chunk
    # Blocks of sm_90a are too large for more.
    lengths, groups = ((2 * c + 2, 1, 0, 7), 1) if spec.exact else ((c + 7, 1, 0, 3 * c + 2, 2 * c), 3)
    for number, (name, options) in enumerate(option_sets(spec)):
        shape = shape_of(spec, lengths, groups=groups)
        problem = draw(10 + number, shape, options_of(spec, **options))
        errors = compare(scan(problem, spec.id, "emulator"), problem)
        assert errors.ok, f"{name}, {spec.id}: {errors}"


@EVERY_KERNEL
def test_strong_decay_beside_weak(spec: SsdSpec) -> None:
    problem = strong_decay(spec.d_state, spec.io, spec.state, head_dim=spec.head_dim, tokens=3 * spec.chunk)
    for A in (-1e4, -16.0):
        assert_right(replace(problem, A=np.full(problem.heads, A, np.float32)), spec)


@pytest.mark.parametrize(
    "spec",
    [
        HOPPER,
        replace(HOPPER, warps=8),  # one warp group that carries a state, and one that writes y
        SsdSpec(d_state=64, head_dim=128, io="f16", warps=16, segments=2, exact="sm_90a"),  # both parts of a head
        SsdSpec(d_state=64, head_dim=80, io="bf16", segments=2, exact="sm_90a"),  # a head of five warps, three idle
        SsdSpec(d_state=64, head_dim=32, io="bf16", exact="sm_90a"),  # heads of half a warp group
        SsdSpec(d_state=64, head_dim=96, io="bf16", exact="sm_90a"),  # and of one and a half
        SsdSpec(d_state=256, io="bf16", warps=8, exact="sm_90a"),  # two stages
        HALF_HEADS,
    ],
    ids=lambda spec: spec.id,
)
def test_a_segment_of_many_chunks_takes_its_places_in_turn(spec: SsdSpec) -> None:
    """Stages, states and decays are each taken several times; an odd number of chunks a segment."""
    lengths = (5 * spec.segments * spec.chunk - 3, 4 * spec.chunk)
    assert_right(draw(14, shape_of(spec, lengths), options_of(spec, fresh="mixed")), spec)


def test_the_longest_chunk() -> None:
    for io in ("bf16", "f16"):
        spec = SsdSpec(d_state=32, head_dim=32, io=io, chunk=256)
        assert_right(draw(15, shape_of(spec, (2 * 256 + 5, 256, 31)), options_of(spec, fresh="mixed")), spec)


def test_no_sequence_and_an_order_of_none() -> None:
    """Nothing is read of a list without entries, whatever the padding slot is; y of tokens that belong to none is 0."""
    for spec in (SPLIT, HOPPER):
        for pad_slot in (-1, 3):
            problem = draw(15, shape_of(spec, (), heads=1), options_of(spec, tail=2, order=True))
            assert problem.sequence_order is not None
            assert problem.sequence_order.size == 0
            result = scan(replace(problem, pad_slot=pad_slot), spec.id, "emulator")
            assert not result.y.astype(np.float32).any()


def long_sum() -> ScanProblem:
    """A step of 20 in each chunk and A = -1e4: sums in f32 would lose the small steps around it."""
    problem = draw(9, shape_of(SPLIT, (4 * SPLIT.chunk,)), Options(dt_bias=False, D=False, softplus=False))
    steps = np.full(problem.dt.shape, 1e-5, np.float32)
    steps[5 :: SPLIT.chunk] = 20.0
    return replace(problem, dt=steps, A=np.full(problem.heads, -1e4, np.float32))


def test_a_long_sum_of_exponents_keeps_its_digits() -> None:
    assert_right(long_sum(), SPLIT)


@EVERY_KERNEL
def test_positive_a(spec: SsdSpec) -> None:
    """States that grow; to no more than f16 holds, where that is what is multiplied."""
    problem = draw(13, shape_of(spec, (3 * spec.chunk + 2, 3)), options_of(spec, spread="ggml", fresh="mixed"))
    assert_right(replace(problem, A=np.abs(problem.A) * np.float32(2.0 / spec.chunk)), spec)


@EVERY_KERNEL
def test_a_chunk_that_no_step_size_belongs_to_changes_nothing(spec: SsdSpec) -> None:
    """d = 0 in every token: y is C . S of the state that the sequence began with, and the state's bits stay."""
    problem = draw(12, shape_of(spec, (2 * spec.chunk + 3,)), options_of(spec, dt_bias=False, softplus=False, D=False))
    result = assert_right(replace(problem, dt=np.zeros_like(problem.dt)), spec)
    assert problem.state is not None
    slots = np.flatnonzero(problem.written)
    assert result.state[slots].tobytes() == problem.state[slots].tobytes()


@pytest.mark.parametrize("width", [32, 128])
def test_a_peers_suite(width: int) -> None:
    """vLLM's f32 cases of a head_dim that the family has, by our bound and theirs; all the others run on a GPU."""
    ran = 0
    for replay in suite("vllm ssd").cases():
        shape = replay.shape
        if (shape.head_dim, shape.d_state, shape.heads) != (width, width, 3):
            continue
        problem = replay.problem(reduce=True)
        spec = SsdSpec(d_state=width, head_dim=width, chunk=32, segments=2, rows=16)
        truth = oracle(problem)
        result = scan(problem, spec.id, "emulator")
        assert compare(result, problem, truth).ok, replay.name
        assert scaled_error(result.y, truth.y, replay.tolerance.rtol, replay.tolerance.atol) <= 1, replay.name
        ran += 1
    assert ran == 2


# What is refused.


def test_checkpoints_inside_a_chunk_are_refused() -> None:
    for every, by_sequence, fits in ((PLAIN.chunk, True, True), (PLAIN.chunk // 2, True, False), (7, False, False)):
        options = options_of(PLAIN, checkpoints=every, by_sequence=by_sequence, slots="moved")
        problem = draw(3, shape_of(PLAIN, (2 * PLAIN.chunk + 5,)), options)
        if fits:
            assert_right(problem, PLAIN)
            continue
        with pytest.raises(NoKernel, match=r"behind every 32 tokens of a sequence and at its end.*`recurrent`"):
            scan(problem, PLAIN.id, "emulator")
        assert scan(problem, None, "emulator").kernel.startswith("recurrent")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", 48, "head_dim 32, found 48"),
        ("d_state", 48, "d_state 32, found 48"),
        ("per_column_a", True, "one A a head"),
    ],
)
def test_other_geometries_are_refused(field: str, value: Any, message: str) -> None:
    geometry = Geometry(tokens=9, sequences=1, heads=2, head_dim=32, groups=1, d_state=32)
    assert PLAIN.refusal(geometry) == ""
    with pytest.raises(NoKernel, match=message):
        PLAIN.plan(replace(geometry, **{field: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_state": 24}, "d_state must be a multiple of 16"),
        ({"d_state": 272}, "d_state must be a multiple of 16 from 16 to 256"),
        ({"d_state": 32, "head_dim": 40}, "head_dim must be a multiple of 16"),
        ({"d_state": 32, "rows": 48}, "rows must be a multiple of 16 that divides head_dim 64"),
        ({"d_state": 256, "rows": 32}, "at most 4096 state elements"),
        ({"d_state": 32, "warps": 3}, "a multiple of the 2 of a head"),
        ({"d_state": 32, "chunk": 48}, "chunk must be one of 32, 64, 128, 256"),
        ({"d_state": 32, "segments": 65}, "segments must be 1 to 64"),
        ({"d_state": 32, "io": "bf16", "precision": "tf32"}, "left out for 16-bit io"),
        ({"d_state": 32, "state": "i8"}, "state must be one of"),
        ({"d_state": 256, "head_dim": 256, "chunk": 256, "warps": 16}, "bytes of shared memory"),
        ({"d_state": 64, "exact": "sm_90a"}, "16-bit io"),
        ({"d_state": 64, "io": "bf16", "exact": "sm_100a"}, "only exact target is sm_90a"),
        ({"d_state": 32, "io": "bf16", "exact": "sm_90a"}, "a multiple of 64"),
        ({"d_state": 64, "head_dim": 112, "io": "bf16", "exact": "sm_90a"}, "up to 96 or a multiple of 64, 96, 80"),
        ({"d_state": 64, "head_dim": 80, "warps": 8, "io": "bf16", "exact": "sm_90a"}, "16 warps or more"),
        ({"d_state": 256, "warps": 16, "io": "bf16", "exact": "sm_90a"}, "the registers of 12 warps"),
    ],
)
def test_kernels_that_cannot_exist_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(NoKernel, match=message):
        SsdSpec(**fields)


def test_targets() -> None:
    assert PLAIN.targets() == tuple(t for t in TARGETS if t not in ("sm_75", "sm_90a"))
    assert HOPPER.targets() == ("sm_90a",)


# Launches and workspace.


def test_plans_are_hand_worked() -> None:
    """3 sequences, 100 tokens, 6 heads in 2 groups; SPLIT has blocks of 2 heads, chunks of 32 and 3 segments."""
    geometry = Geometry(tokens=100, sequences=3, heads=6, head_dim=32, groups=2, d_state=32)
    gather, walk = SPLIT.plan(geometry).launches
    # Two runs of heads (2 and 1) in each of 2 groups.
    assert (gather.grid, gather.block) == ((3 * 2 * 4, 1, 1), (128, 1, 1))
    assert (walk.grid, walk.block) == ((3 * 3 * 4, 1, 1), (128, 1, 1))
    # At most 100 // 32 + 3 states, fewer than 3 x 3, of 6 heads: 32 x 32 floats and an exponent of two floats.
    assert SPLIT.plan(geometry).workspace_bytes == 6 * 6 * (4 * 32 * 32 + 8)
    assert SPLIT.plan(replace(geometry, tokens=1000)).workspace_bytes == 9 * 6 * (4 * 32 * 32 + 8)
    one = replace(SPLIT, segments=1).plan(geometry)
    assert (len(one.launches), one.workspace_bytes) == (1, 0)
    # No sequence: y still has to be cleared.
    assert [step.grid[0] for step in SPLIT.plan(replace(geometry, sequences=0)).launches] == [8, 12]


@pytest.mark.parametrize("spec", [SPLIT, HOPPER], ids=lambda spec: spec.precision or spec.exact)
@pytest.mark.parametrize("many", [False, True])
def test_the_workspace_is_as_large_as_planned_and_no_larger(spec: SsdSpec, many: bool) -> None:
    """Guard zones lie around the planned bytes; a workspace that lacks the last sequence's states is overrun."""
    c = spec.chunk
    # By sequences where they are few and long, by chunks where they are many and short.
    lengths = (1, 2, 1, 1, 1, (spec.segments - 1) * c + 1) if many else (spec.segments * c,) * 2
    problem = draw(20, shape_of(spec, lengths, heads=2), options_of(spec, slots="moved"))
    plan = spec.plan(problem.geometry)
    planned = plan.workspace_bytes
    assert compare(run_text(render(spec), spec, problem), problem).ok
    one = 4 * spec.head_dim * spec.d_state + 8
    assert planned % one == 0
    # The exponents come last, heads of them behind each segment; that of a sequence's last segment is not kept.
    too_few = planned - 2 * problem.heads * 8
    with pytest.raises(EmulatorError) as caught:
        run_text(render(spec), spec, problem, plan=replace(plan, workspace_bytes=too_few))
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("out-of-bounds", "workspace")}


@EVERY_KERNEL
def test_any_grid_runs_all_items(spec: SsdSpec) -> None:
    """Blocks stride over the items, and none waits for another: one block, three, and three at once give one result."""
    problem = draw(21, shape_of(spec, (spec.chunk + 1, 3, 3 * spec.chunk)), options_of(spec, z=True, tail=2))
    whole = assert_right(problem, spec)
    for grid in (1, 3):
        result = run_text(render(spec), spec, problem, grid=grid)
        assert (result.y.tobytes(), result.state.tobytes()) == (whole.y.tobytes(), whole.state.tobytes())
    for resident in (2, 7):
        again = run_emulator(problem, spec, seed=resident, resident_blocks=resident)
        assert (again.y.tobytes(), again.state.tobytes()) == (whole.y.tobytes(), whole.state.tobytes())


# The same bits.


@EVERY_KERNEL
def test_a_sequence_gives_the_same_bits_anywhere_in_a_batch(spec: SsdSpec) -> None:
    lengths = (7, 3 * spec.chunk + 5, 1, 6)
    problem = draw(22, shape_of(spec, lengths, groups=2), options_of(spec, z=True, dt_f32=True))
    assert_same_bits_anywhere(problem, spec)


@EVERY_KERNEL
def test_copies_by_vectors_and_by_elements_give_the_same_bits(spec: SsdSpec) -> None:
    problem = draw(23, shape_of(spec, (2 * spec.chunk + 9, 4)), options_of(spec, z=True))
    spread = draw(23, shape_of(spec, (2 * spec.chunk + 9, 4)), options_of(spec, z=True, shift=1, gap=1, slot_gap=1))
    whole, apart = (scan(p, spec.id, "emulator") for p in (problem, spread))
    assert whole.y.tobytes() == apart.y.tobytes()
    slots = np.flatnonzero(problem.written)
    assert whole.state[slots].tobytes() == apart.state[slots].tobytes()


def test_stochastic_rounding_of_the_stored_state() -> None:
    """One token with d = 1 makes the state B x, which is exact in f32: 400 sequences of it are stored in 400 slots.
    Each store is a neighbour of the exact value, the mean error is none within three standard errors, and a step later
    the draws are others.
    """
    spec = SIXTEEN_BIT_STATE
    problem = draw(
        24, shape_of(spec, (1,) * 400, heads=1), options_of(spec, fresh="all", key=True, dt_f32=True, D=False)
    )
    same: dict[str, Any] = {
        name: np.ascontiguousarray(np.broadcast_to(a[:1], a.shape))
        for name in ("x", "B")
        for a in [getattr(problem, name)]
    }
    problem = replace(problem, **same, dt=np.ones((400, 1), np.float32), dt_softplus=False, dt_bias=None)
    exact = problem.x[0, 0].astype(np.float64)[:, None] * problem.B[0, 0].astype(np.float64)
    assert problem.rounding_key is not None
    slots = problem.resolved_write
    results = []
    for step in (1, 1, 2):
        key = np.array([7, step], np.uint64)
        result = scan(replace(problem, rounding_key=key), spec.id, "emulator")
        results.append(result.state[slots][:, 0])
    first, again, later = results
    assert first.tobytes() == again.tobytes() != later.tobytes()
    mantissa = 2.0**-7  # of bf16: the spacing at |exact|
    units = 2.0 ** np.floor(np.log2(np.abs(exact))) * mantissa
    errors = (first.astype(np.float64) - exact) / units
    assert np.abs(errors).max() < 1.001
    assert abs(errors.mean()) <= 3 * errors.std() / np.sqrt(errors.size)
    assert np.abs(errors.mean(axis=0)).max() <= 4.5 * 0.5 / np.sqrt(len(errors))
    nearest = scan(replace(problem, rounding_key=None), spec.id, "emulator").state[slots][:, 0]
    assert np.abs((nearest.astype(np.float64) - exact) / units).max() <= 0.5001


# Hand-over to decode.


@pytest.mark.parametrize("spec", [PLAIN, SPLIT], ids=lambda spec: spec.precision or spec.io)
def test_prefill_then_decode_is_prefill_of_the_whole(spec: SsdSpec) -> None:
    decode = UpdateSpec(d_state=spec.d_state, io=spec.io)
    assert_decode_goes_on(spec, decode, prompt=2 * spec.chunk + 5, steps=6, heads=3, backend="emulator")


# Slots.


@EVERY_KERNEL
def test_unnamed_slots_keep_their_bits_and_padding_writes_only_zeros(spec: SsdSpec) -> None:
    options = options_of(spec, padding=2, spare=5, tail=3, slots="moved")
    problem = draw(25, shape_of(spec, (spec.chunk + 1, 2, 1, 3)), options)
    result = assert_right(problem, spec)
    assert problem.state is not None
    kept = ~problem.written
    assert kept.sum() >= 7
    assert result.state[kept].tobytes() == problem.state[kept].tobytes()
    assert (result.y[~problem.live_tokens].view(np.uint8) == 0).all()


@EVERY_KERNEL
def test_a_slot_out_of_range_on_the_device_is_padding(spec: SsdSpec) -> None:
    """The host refuses such a list, so it is put in behind its back: nothing outside the pool is touched."""
    problem = draw(26, shape_of(spec, (spec.chunk + 1, 3)), options_of(spec))
    assert problem.read_slots is not None
    for bad in (problem.slots, -7, 2**31 - 1):
        slots = problem.read_slots.copy()
        slots[0] = bad
        result = run_text(render(spec), spec, problem, arrays={"read_slots": slots})
        assert (result.y[: spec.chunk + 1].astype(np.float32) == 0).all()
        assert (result.y[spec.chunk + 1 :].astype(np.float32) != 0).any()


def test_slots_beyond_32_bits() -> None:
    assert_right(huge_slot_stride(32, head_dim=32), SPLIT)


# Broken kernels.

BARRIER = re.compile(r" +(?:if \([^;]*\) )?(?:__syncthreads\(\)|barrier_(?:wait|arrive)\(k[^;]*\));")
WAIT = re.compile(r" +copy_async_wait<[^;]*;")
WATCHED = (PLAIN, SPLIT, HOPPER, HALF_HEADS)


def exercising(spec: SsdSpec) -> ScanProblem:
    """Several chunks and segments, and heads that fill several blocks."""
    options = options_of(spec, z=True, slots="moved", checkpoints=spec.chunk, by_sequence=True)
    # On sm_90a a place is taken again by the third chunk of a segment.
    chunks = 2 * spec.segments + 1 if spec.exact else 3
    return draw(31, shape_of(spec, (3, 2 * spec.chunk, chunks * spec.chunk + 1)), options)


def switched(source: str, spec: SsdSpec) -> tuple[str, list[str]]:
    """A text whose barriers and waits can be left out one at a time, and the line of each: the one that ScanArgs.rows
    counts to, an argument that this family does not read. One compiled text serves for all of them.
    """
    lines = source.splitlines()
    found: list[str] = []
    for number, line in enumerate(lines):
        # Operands that are split are not copied asynchronously: there is nothing to wait for.
        if not (BARRIER.match(line) or (WAIT.match(line) and spec.parts == 1)):
            continue
        # A kernel of two stages never reaches this one.
        if "the chunk before has been read" in line and spec.stages > 1:
            continue
        found.append(line.strip())
        statement, _, comment = line.partition(";")
        lines[number] = f"{{ if (a.rows != {len(found)}) {statement.strip()}; }}  {comment}"
    return "\n".join(lines) + "\n", found


def found_in(source: str, spec: SsdSpec, left_out: int) -> set[str]:
    """What the emulator finds in a text, whose blocks take an item each or all of them in turn."""
    seen: set[str] = set()
    for grid in (0, 1):
        problem = exercising(spec)
        try:
            result = run_text(source, spec, problem, grid=grid, rows=left_out)
        except EmulatorError as error:
            seen |= kinds(error)
            continue
        errors = compare(result, problem)
        if not errors.ok:
            seen.add(str(errors))
    return seen


@pytest.mark.parametrize("spec", WATCHED, ids=lambda spec: spec.id)
def test_each_barrier_and_each_wait_is_missed(spec: SsdSpec) -> None:
    source, lines = switched(render(spec), spec)
    assert found_in(source, spec, left_out=0) == set()
    assert len(lines) >= 4
    for number, line in enumerate(lines, 1):
        seen = found_in(source, spec, left_out=number)
        # Where warps have loops of their own, a barrier that only some of them reach is found at once.
        waits = {"async-copy", "copy-not-awaited"}
        barriers = {"race", "divergent-barrier", "exit-before-barrier", "barrier-not-over", "deadlock"}
        expected = waits if WAIT.match(f" {line}") else waits | barriers
        assert seen & expected, f"{line} of {spec.id}: found {seen}"


#: What a line says, and what it says once broken: the oracle, or the emulator, has to see each.
BREAKS = (
    ("last chunk", "const int tokens = max(b.end - b.begin, 0)", "const int tokens = max(b.end - b.begin - 1, 0)"),
    ("group of a head", "b.head = b.group * of_group + before", "b.head = place"),
    ("tokens behind the end", "t < count ? from[t * stride + c]", "true ? from[t * stride + c]"),
    ("causality", "part[i / 4][i % 4] = key <= query ?", "part[i / 4][i % 4] = true ?"),
    ("decay between tiles", "exp2_fast(w.between(earlier + 1, later))", "exp2_fast(w.between(earlier, later))"),
    (
        "what a chunk's end has of a token",
        "exp2_fast(w.between(tile + 1, kTiles))",
        "exp2_fast(w.between(tile, kTiles))",
    ),
    ("segment's decay", "exp2_fast(sum.high + sum.low));", "1.f);"),
    ("low part of a sum", "sum = add(left, sum);", "sum = Sum{left.high + sum.high, 0.f};"),
    ("small parts of operands", "mma(near, large, b.r[kSmall], b.r[kSmall + 1], Operand());", ""),
)


@pytest.mark.parametrize(("what", "line", "broken"), BREAKS, ids=[b[0] for b in BREAKS])
def test_a_broken_line_is_seen(what: str, line: str, broken: str) -> None:
    """On the kernel that splits its operands: vectors, then arrays that take none, then a long sum of exponents."""
    source = render(SPLIT)
    assert line in source, what
    seen = []
    shape = shape_of(SPLIT, (3, 2 * SPLIT.chunk, 5 * SPLIT.chunk + 1), groups=2)
    options = Options(z=True, slots="moved", fresh="mixed")
    problems = (draw(32, shape, options), draw(32, shape, replace(options, shift=1)), long_sum())
    for problem in problems:
        try:
            result = run_text(source.replace(line, broken), SPLIT, problem)
        except EmulatorError as error:
            seen.append(str(kinds(error)))
            continue
        errors = compare(result, problem)
        if not errors.ok:
            seen.append(str(errors))
    assert seen, f"{what}: nothing saw it"


@EVERY_KERNEL
def test_a_vector_access_off_its_alignment_is_found(spec: SsdSpec) -> None:
    """The arguments claim 16-byte rows where an array starts one element later."""
    problem = draw(34, shape_of(spec, (spec.chunk,)), options_of(spec, shift=1, z=True))
    run_text(render(spec), spec, problem)
    for flag in (Flag.VECTOR_STATE, Flag.VECTOR_X, Flag.VECTOR_B, Flag.VECTOR_C, Flag.VECTOR_Z):
        # x, B and C are copied by vectors only together where a chunk is whole.
        with pytest.raises(EmulatorError) as caught:
            run_text(render(spec), spec, problem, flags=flag)
        assert "misaligned" in kinds(caught.value), flag


@EVERY_KERNEL
@pytest.mark.parametrize("name", ["x", "B", "C", "dt", "state", "A", "D"])
def test_a_buffer_that_ends_one_element_early_is_found(spec: SsdSpec, name: str) -> None:
    """Copies of 16 bytes count as one access of the whole piece."""
    problem = draw(35, shape_of(spec, (spec.chunk,)), options_of(spec, slots="default", spare=0))
    if name == "state":
        problem = replace(problem, state=np.ascontiguousarray(problem.state[:1]))
    whole = getattr(problem, name)
    short = whole.reshape(-1)[:-1].copy()
    with pytest.raises(EmulatorError) as caught:
        run_text(render(spec), spec, problem, arrays={name: short})
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("out-of-bounds", name)}
