"""The recurrent family on the CPU: every layout against the oracle, and the emulator against broken kernels.

The kernels are the emitted text, unchanged. Where a test breaks one on purpose, it edits that text, the launch or the
arguments, and the emulator has to name the fault: a check that never fires proves nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyharness import EmulatorError, ScanProblem, scan
from pyharness.args import Flag
from pyharness.binding import bind, outputs
from pyharness.cases import (
    ANCESTOR_D_STATE,
    Case,
    Options,
    Shape,
    ancestor_cases,
    draw,
    edge_cases,
    long_case,
    model_cases,
)
from pyharness.catalogue import CATALOGUE
from pyharness.compare import compare
from pyharness.emulator import EmulatorBuffer, EmulatorLaunch, run
from pyharness.families import RecurrentSpec
from pyharness.families.recurrent import LAYOUTS
from pyharness.oracle import oracle
from pyharness.render import render
from pyharness.scan import ScanResult, run_emulator
from pyharness.spec import Geometry, KernelSpec
from pyharness.toolchain import cuda_include_dirs
from tests.emulated import assert_right, assert_same_bits_anywhere, kinds, run_text
from tests.strategies import SETTINGS, problems

EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


def small(layout: str, io: str = "f32", state: str = "f32") -> RecurrentSpec:
    """A kernel of a layout whose last lane is partly empty and whose chunk is a few tokens; two warps a block."""
    if layout == "generic":
        return RecurrentSpec(d_state=0, layout=layout, io=io, state=state)
    if layout == "block":
        return RecurrentSpec(d_state=38, layout=layout, io=io, state=state)
    sizes: dict[str, Any] = {"lanes": 4, "rows": 16, "chunk": 5}
    if layout == "tiled":
        sizes |= {"rows": 32, "warps": 2}
    return RecurrentSpec(d_state=38, layout=layout, io=io, state=state, **sizes)


def default(layout: str, d_state: int, io: str = "f32", state: str = "f32") -> RecurrentSpec:
    """The kernel of a layout with default fields; `generic` takes d_state when it runs."""
    return RecurrentSpec(d_state=0 if layout == "generic" else d_state, layout=layout, io=io, state=state)


# Right answers.


@EVERY_LAYOUT
@SETTINGS
@given(data=st.data())
def test_any_problem_matches_the_oracle(layout: str, data: st.DataObject) -> None:
    io, state = data.draw(st.sampled_from((("f32", "f32"), ("bf16", "f32"), ("f16", "bf16"), ("f32", "f16"))))
    assert_right(data.draw(problems(38, io, state)), small(layout, io, state))


@EVERY_LAYOUT
@SETTINGS
@given(problem=problems(16, most_tokens=20))
def test_any_problem_matches_the_oracle_where_vectors_fit(layout: str, problem: ScanProblem) -> None:
    assert_right(problem, default(layout, 16))


@EVERY_LAYOUT
@pytest.mark.parametrize("io", ["f32", "bf16"])
def test_edges(layout: str, io: str) -> None:
    """Every known fault and edge, with boundaries and lengths around the chunk."""
    spec = small(layout, io)
    for case in edge_cases(38, chunk=spec.chunk or 5, io=io):
        problem = case.build()
        errors = compare(scan(problem, spec.id, "emulator"), problem)
        assert errors.ok, f"{spec.id}, {case.name}: {errors}"


@EVERY_LAYOUT
@pytest.mark.parametrize("d_state", ANCESTOR_D_STATE)
def test_what_the_ancestor_was_tested_on(layout: str, d_state: int) -> None:
    """The ancestor is the Go engine's kernel that `padded` restates (`cases.ancestor_cases`)."""
    for case in ancestor_cases(d_state, reduce=True):
        problem = case.build()
        # The emulator's time goes with rows x columns: fewer rows of the widest state.
        if d_state == 1024:
            problem = cut_rows(problem, 9)
        assert_right(problem, default(layout, d_state))


KERNELS = [spec for spec in CATALOGUE if spec.family == "recurrent"]


def catalogue_problem(spec: KernelSpec, kind: str) -> ScanProblem:
    """A tiny problem: a token more than a chunk where chunks are short, every option, or odd strides."""
    d_state = spec.d_state or 20
    chunk = spec.plan(Geometry(1, 1, 1, 1, 1, d_state)).chunk
    plain = Options(io=spec.io, state=spec.state, dt_f32=True, fresh="mixed")
    if kind == "plain":
        # Long chunks are crossed with fewer rows; a kernel for few tokens crosses several.
        return draw(41, Shape((max(chunk + 1, 4), 2), 1, 2, d_state), plain)
    if kind == "every option":
        every = replace(plain, z=True, dt_limit=(0.01, 0.1), tail=1, checkpoints=2, slots="moved", discard=3)
        return draw(42, Shape((3, 1, 4), 2, 3, d_state, 2), replace(every, order=True, dt_f32=False))
    odd = replace(plain, per_column_a=True, shift=1, gap=3, slot_gap=5, padding=2)
    return draw(43, Shape((3, 2, 1), 2, 3, d_state), odd)


@pytest.mark.parametrize("kind", ["plain", "every option", "odd strides, A for each column, padding"])
@pytest.mark.parametrize("spec", KERNELS, ids=[spec.id for spec in KERNELS])
def test_every_kernel_of_the_catalogue(spec: KernelSpec, kind: str) -> None:
    """The kernels that are shipped, not small ones of their kind."""
    assert_right(catalogue_problem(spec, kind), spec)


@EVERY_LAYOUT
def test_a_launch_visits_only_the_sequences_of_its_list(layout: str) -> None:
    """Several launches may share a batch by sub-lists of sequence_order: an entry out of range has nothing to do."""
    spec = small(layout)
    problem = draw(25, Shape((7, 3, 0, 4, 2), 2, 5, 38), Options(slots="moved", z=True, checkpoints=3))
    whole = scan(problem, spec.id, "emulator")
    assert problem.state is not None
    assert problem.write_slots is not None
    assert problem.checkpoint_slots is not None
    plan = spec.plan(problem.geometry)
    lists = ([3, -1, 0, -1, -1], [-1, 5, 1, 2**31 - 1, 2], [-(2**31), 4, -1, -1, -1])
    results, untouched = outputs(problem), 7.0
    results.y[...] = untouched
    for round_, entries in enumerate(lists):
        # ScanProblem takes permutations only, as the whole of a call; the list is put in at the binding.
        binding = bind(replace(problem, sequence_order=np.arange(5, dtype=np.int32)), plan, results)
        buffers = [
            EmulatorBuffer(b.name, np.array(entries, np.int32) if b.name == "sequence_order" else b.array, b.writable)
            for b in binding.buffers
        ]
        launches = [EmulatorLaunch(step.entry, step.grid, step.block, step.shared_bytes) for step in plan.launches]
        run(render(spec), launches, buffers, binding.pack, include_dirs=cuda_include_dirs())
        visited = {entry for done in lists[: round_ + 1] for entry in done if 0 <= entry < 5}
        stored = set()
        for s in range(5):
            rows = slice(int(problem.offsets[s]), int(problem.offsets[s + 1]))
            if s in visited:
                assert results.y[rows].tobytes() == whole.y[rows].tobytes()
                checkpoints = problem.checkpoint_slots[rows]
                stored |= {int(problem.write_slots[s]), *checkpoints[checkpoints >= 0].tolist()}
            else:
                assert (results.y[rows] == untouched).all()
        for slot in range(problem.slots):
            wanted = whole.state if slot in stored else problem.state
            assert results.state[slot].tobytes() == wanted[slot].tobytes(), f"slot {slot} after {lists[: round_ + 1]}"


def cut_rows(problem: ScanProblem, rows: int) -> ScanProblem:
    """The problem on the first rows of every head and on one head."""

    def cut(array: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
        return None if array is None else np.ascontiguousarray(array[:, :1, :rows])

    def head(array: np.ndarray[Any, Any] | None) -> np.ndarray[Any, Any] | None:
        return None if array is None else np.ascontiguousarray(array[:1])

    return replace(
        problem,
        x=cut(problem.x),
        z=cut(problem.z),
        state=cut(problem.state),
        dt=np.ascontiguousarray(problem.dt[:, :1]),
        A=head(problem.A),
        D=head(problem.D),
        dt_bias=head(problem.dt_bias),
    )


@EVERY_LAYOUT
def test_4096_tokens(layout: str) -> None:
    assert_right(long_case(16, reduce=True), default(layout, 16))


MODELS = [*model_cases((5, 1, 18), reduce=True, io="bf16"), *model_cases((3, 2), reduce=True, io="f32")]


def assert_case(case: Case, layout: str) -> None:
    problem = case.build()
    spec = default(layout, problem.d_state, problem.io, problem.state_dtype)
    result = scan(problem, spec.id, "emulator")
    truth = oracle(problem)
    errors = compare(result, problem, truth)
    assert errors.ok, f"{case.name} on {spec.id}: {errors}"


@EVERY_LAYOUT
def test_real_models(layout: str) -> None:
    """Real models in reduced form, dealt out over the layouts; each layout gets every seventh."""
    for case in MODELS[LAYOUTS.index(layout) :: len(LAYOUTS)]:
        assert_case(case, layout)


@EVERY_LAYOUT
def test_a_sequence_gives_the_same_bits_anywhere_in_a_batch(layout: str) -> None:
    """Alone, among others, in another order, and with another order of threads and blocks."""
    spec = small(layout)
    problem = draw(21, Shape((7, 12, 1, 9), 2, 18, 38), Options(z=True))
    assert_same_bits_anywhere(problem, spec)


def test_all_lane_counts_of_tiled_give_the_same_bits() -> None:
    problem = draw(22, Shape((9, 4), 2, 10, 48), Options())
    specs = [RecurrentSpec(d_state=48, lanes=lanes) for lanes in (1, 2, 4, 8)]
    bits = [scan(problem, spec.id, "emulator").y.tobytes() for spec in specs]
    assert len(set(bits)) == 1


@pytest.mark.parametrize("state", ["bf16", "f16"])
def test_stochastic_rounding_draws_the_same_in_every_layout_and_is_unbiased(state: str) -> None:
    problem = draw(24, Shape((2, 1), 2, 10, 38), Options(state=state))
    truth = oracle(problem)
    errors = []
    for step in range(12):
        keyed = replace(problem, rounding_key=np.array([2**40 + 7, step], np.uint64))
        layouts = LAYOUTS if step == 0 else ("tiled",)
        pools = [scan(keyed, small(layout, state=state).id, "emulator").state for layout in layouts]
        assert len({pool.tobytes() for pool in pools}) == 1
        for slot, exact in truth.states.items():
            stored = pools[0][slot].astype(np.float64)
            # One unit in the last place: 8 bits of significand in bf16; 11 in f16, whose least unit is 2^-24.
            exponent = np.frexp(exact)[1] - (8 if state == "bf16" else 11)
            ulp = np.ldexp(1.0, np.maximum(exponent, -24) if state == "f16" else exponent)
            errors.append((stored - exact) / ulp)
    drawn = np.array(errors)
    assert np.abs(drawn).max() <= 1.001
    assert np.abs(drawn.reshape(12, -1)[0] - drawn.reshape(12, -1)[1]).max() > 0.5, "steps draw alike"
    # Rounding to one of two neighbours has a variance of at most 1/4.
    assert abs(drawn.mean()) < 3 * 0.5 / np.sqrt(drawn.size)
    assert drawn.std() > 0.3, "rounding to nearest would stay below 0.29"


@EVERY_LAYOUT
def test_y_may_start_anywhere_and_have_any_stride(layout: str) -> None:
    problem = draw(23, Shape((7, 4), 2, 8, 38), Options())
    for shift, stride in ((1, 16), (0, 19), (4, 20), (0, 16)):
        results = outputs(problem)
        memory = np.zeros(16 * stride + 64, np.float32)
        base = -memory.ctypes.data // 4 % 16 + shift
        y = np.lib.stride_tricks.as_strided(memory[base:], (11, 2, 8), (4 * stride, 32, 4))
        results = run_emulator(problem, small(layout), results=replace(results, y=y))
        errors = compare(ScanResult(results.y, results.state, "", "emulator"), problem)
        assert errors.ok, f"y at {shift} by {stride}: {errors}"


# Broken kernels.


def exercising(spec: RecurrentSpec) -> list[ScanProblem]:
    """Problems that reach every barrier: several chunks, items and row tiles a block, tiles of state both ways."""
    n = spec.d_state or 38
    lengths = (2 * (spec.chunk or 20) + 3, 3)
    options = Options(io=spec.io, state=spec.state, z=True, checkpoints=4, slots="moved")
    return [
        draw(31, Shape(lengths, 2, 40, n), replace(options, checkpoints=0)),
        draw(32, Shape(lengths, 2, 18, n), options),
        # An item that stores no state ends in reads of the staging buffer, which the next item's state tile reuses.
        draw(36, Shape(lengths, 2, 18, n), replace(options, checkpoints=0, discard=2)),
    ]


BARRIER = "__syncthreads();"


def broken_barriers() -> list[Any]:
    """Layout, io and number of every barrier in the emitted texts."""
    found = []
    for layout in LAYOUTS:
        for io in ("f32", "bf16") if layout == "tiled" else ("f32",):
            count = render(small(layout, io)).count(BARRIER)
            assert count, f"{layout} has no barrier to delete"
            found += [pytest.param(layout, io, i, id=f"{layout}-{io}-{i}") for i in range(count)]
    return found


@EVERY_LAYOUT
def test_unbroken_kernels_pass_where_broken_ones_are_run(layout: str) -> None:
    for io in ("f32", "bf16"):
        spec = small(layout, io)
        for problem in exercising(spec):
            for grid in (0, 1):
                run_text(render(spec), spec, problem, grid=grid)


@pytest.mark.parametrize(("layout", "io", "number"), broken_barriers())
def test_a_deleted_barrier_is_a_race(layout: str, io: str, number: int) -> None:
    spec = small(layout, io)
    parts = render(spec).split(BARRIER)
    source = BARRIER.join(parts[: number + 1]) + BARRIER.join(["", *parts[number + 1 :]])[len(BARRIER) :]
    assert source.count(BARRIER) == len(parts) - 2
    seen: set[str] = set()
    for problem in exercising(spec):
        for grid in (0, 1):
            try:
                run_text(source, spec, problem, grid=grid)
            except EmulatorError as error:
                seen |= kinds(error)
    where = parts[number + 1].splitlines()[0]
    # No barrier needs an exception: what else its loss shows as (uninitialised, async-copy) comes beside the race.
    assert "race" in seen, f"barrier {number} of {spec.id} ({where}): found {seen}"


@pytest.mark.parametrize("io", ["f32", "bf16"])
def test_a_deleted_wait_is_found(io: str) -> None:
    spec = small("tiled", io)
    # 16-byte copies need rows at multiples of 16 bytes.
    spec = replace(spec, d_state=32)
    source = render(spec)
    call = re.compile(r"^ *copy_async_wait_all\(\);$", re.MULTILINE)
    assert len(call.findall(source)) == 1
    problem = draw(33, Shape((13, 3), 2, 32, 32), Options(io=io))
    run_text(source, spec, problem)
    with pytest.raises(EmulatorError) as caught:
        run_text(call.sub("", source), spec, problem)
    assert kinds(caught.value) & {"async-copy", "copy-not-awaited"}


@EVERY_LAYOUT
def test_a_vector_access_off_its_alignment_is_found(layout: str) -> None:
    """The arguments claim 16-byte rows of state where the pool starts one element later."""
    spec = default(layout, 16)
    problem = draw(34, Shape((9,), 1, 16, 16), Options(shift=1))
    run_text(render(spec), spec, problem)
    if layout == "block":
        return  # one element a thread: it has no vector access to misalign
    with pytest.raises(EmulatorError) as caught:
        run_text(render(spec), spec, problem, flags=Flag.VECTOR_STATE)
    assert "misaligned" in kinds(caught.value)


@EVERY_LAYOUT
def test_an_output_that_is_not_stored_is_found(layout: str) -> None:
    spec = small(layout)
    source = render(spec)
    store = re.compile(r"^ *(to\.)?y\[.*\] = from_f32<Io>\((out|v)\);$", re.MULTILINE)
    assert len(store.findall(source)) == 1
    with pytest.raises(EmulatorError) as caught:
        run_text(store.sub(";", source), spec, exercising(spec)[0])
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("unwritten", "y")}


@EVERY_LAYOUT
@pytest.mark.parametrize("name", ["x", "B", "C", "dt", "state", "A", "D"])
def test_a_buffer_that_ends_one_element_early_is_found(layout: str, name: str) -> None:
    spec = small(layout)
    problem = draw(35, Shape((9,), 2, 5, 38), Options(slots="default", spare=0))
    if name == "state":
        problem = replace(problem, state=np.ascontiguousarray(problem.state[:1]))
    whole = getattr(problem, name)
    short = whole.reshape(-1)[:-1].copy()
    with pytest.raises(EmulatorError) as caught:
        run_text(render(spec), spec, problem, arrays={name: short})
    assert {(f.kind, f.buffer) for f in caught.value.findings} == {("out-of-bounds", name)}
