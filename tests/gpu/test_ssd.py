"""Every ssd kernel of the catalogue on the GPU. `check_case` raises where a result is not the oracle's."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest

from pyharness import build, cases, manifest, scan, vet
from pyharness.cases import Case, Options, Shape, draw
from pyharness.catalogue import CATALOGUE
from pyharness.compare import compare, relative_norm, scaled_error
from pyharness.device import get, image_target
from pyharness.errors import NoKernel
from pyharness.families import SsdSpec, UpdateSpec
from pyharness.peer_suites import PREFILL_SUITES, suite
from pyharness.scan import run_emulator
from pyharness.spec import parse_id
from tests.handover import assert_decode_goes_on
from tests.stand_ins import SSD_IDS

KERNELS = [spec for spec in CATALOGUE if isinstance(spec, SsdSpec)]
EVERY_KERNEL = pytest.mark.parametrize("spec", KERNELS, ids=[spec.id for spec in KERNELS])
#: Kernels of the geometries of the peers' suites: each is run whole and cut in time.
OF_SUITES = (
    SsdSpec(d_state=128, io="bf16"),
    SsdSpec(d_state=128, io="bf16", warps=8, exact="sm_90a"),
    SsdSpec(d_state=32, head_dim=32),
    SsdSpec(d_state=128, head_dim=128, rows=16),
    SsdSpec(d_state=128, rows=16),
    SsdSpec(d_state=256, rows=16, chunk=32),
    SsdSpec(d_state=32),
)


def runnable(spec: SsdSpec) -> SsdSpec:
    """The kernel, or a skip where this GPU has no image of it."""
    device = get()
    try:
        image_target(spec, device.capability, device.name)
    except NoKernel as error:
        pytest.skip(str(error))
    return spec


@EVERY_KERNEL
def test_every_case_agrees_with_the_oracle(spec: SsdSpec) -> None:
    for case in vet.kernel_cases(runnable(spec)):
        vet.check_case(spec, case)


@EVERY_KERNEL
def test_bits_do_not_depend_on_runs_or_on_the_batch(spec: SsdSpec) -> None:
    vet.check_repeats(runnable(spec))
    vet.check_batch(spec)


@EVERY_KERNEL
def test_the_image_that_is_loaded_is_the_one_that_the_manifest_promises(spec: SsdSpec) -> None:
    device = get()
    target = image_target(runnable(spec), device.capability, device.name)
    manifest.check(manifest.read(spec.id), target, build.image(spec, target).data)


@EVERY_KERNEL
def test_every_length_up_to_three_chunks_from_every_offset(spec: SsdSpec) -> None:
    """Triangular numbers take every value modulo a power of two, so sequences of 0, 1, 2, ... tokens begin at each."""
    shape = Shape(tuple(range(3 * spec.chunk + 1)), 2, spec.head_dim, spec.d_state)
    options = Options(io=spec.io, state=spec.state, fresh="mixed", slots="moved")
    case = Case(f"lengths to {3 * spec.chunk} {spec.id}", lambda: draw(1, shape, options))
    problem = case.build()
    errors = compare(scan(problem, runnable(spec).id, "gpu"), problem)
    assert errors.ok, str(errors)


@EVERY_KERNEL
def test_32768_tokens_agree_with_the_oracle(spec: SsdSpec) -> None:
    shape = Shape((32768,), 2, spec.head_dim, spec.d_state)
    problem = draw(32, shape, Options(io=spec.io, state=spec.state, dt_f32=True))
    # Of a head that forgets slowly and of one that forgets fast.
    problem = replace(problem, A=np.array([-0.05, -8.0], np.float32))
    errors = compare(scan(problem, runnable(spec).id, "gpu"), problem)
    assert errors.ok, str(errors)


@pytest.mark.parametrize("spec", OF_SUITES, ids=[spec.id for spec in OF_SUITES])
@pytest.mark.parametrize("segments", [1, 4])
def test_the_peers_suites_agree_with_the_oracle(spec: SsdSpec, segments: int) -> None:
    """By our bounds and by theirs."""
    ran = 0
    cut = runnable(replace(spec, segments=segments))
    for replay in itertools.chain.from_iterable(each.cases() for each in (*PREFILL_SUITES, suite("ggml SSM_SCAN"))):
        shape, io = replay.shape, replay.options.io
        if (shape.d_state, shape.head_dim, io) != (cut.d_state, cut.head_dim, cut.io):
            continue
        problem, truth = vet.solved(Case(replay.name, functools.partial(replay.problem, reduce=True)))
        result = scan(problem, cut.id, "gpu")
        errors = compare(result, problem, truth)
        assert errors.ok, f"{replay.name}: {errors}"
        # ggml's is a mean square error.
        if not replay.tolerance.nmse:
            scaled = scaled_error(result.y, truth.y, replay.tolerance.rtol, replay.tolerance.atol)
            assert scaled <= 1, f"{replay.name}: {scaled:.2f} of the peer's tolerance"
        ran += 1
    assert ran


@EVERY_KERNEL
def test_256_decode_steps_go_on_from_prefill(spec: SsdSpec) -> None:
    decode = UpdateSpec(d_state=spec.d_state, io=spec.io, state=spec.state)
    assert_decode_goes_on(
        runnable(spec), decode, prompt=9 * spec.chunk + 5, steps=256, heads=spec.heads + 1, backend="gpu"
    )


@pytest.mark.parametrize("kernel", SSD_IDS)
def test_the_emulator_gives_what_the_gpu_gives(kernel: str) -> None:
    """Tensor cores sum in another order and exp2 has its own last digits: now and then an operand rounds the other way,
    which is far below what rounding itself costs. Slots that hold 16 bits may differ by one unit.
    """
    spec = parse_id(kernel)
    assert isinstance(spec, SsdSpec)
    runnable(spec)
    options = Options(io=spec.io, state=spec.state, z=True, fresh="mixed", slots="moved", dt_f32=True)
    problem = draw(71, Shape((3 * spec.chunk + 5, 7, 1), spec.heads + 1, spec.head_dim, spec.d_state), options)
    ours, twin = scan(problem, spec.id, "gpu"), run_emulator(problem, spec)
    slots = problem.written
    for found, expected in ((ours.y, twin.y), (ours.state[slots], twin.state[slots])):
        wide = expected.astype(np.float64)
        error = relative_norm(found.astype(np.float64) - wide, wide)
        assert error <= spec.operand_error / 8, f"{kernel}: {error:.1e}"


def test_more_blocks_than_the_device_holds_and_more_sequences_than_a_grid_dimension_counts() -> None:
    for segments in (1, 2):
        problem = cases.many_sequences(16, head_dim=16)
        spec = SsdSpec(d_state=16, head_dim=16, segments=segments)
        assert spec.plan(problem.geometry).launches[-1].grid[0] == 70_000 * segments
        vet.check_case(spec, Case("70000 sequences p16", lambda p=problem: p))  # type: ignore[misc]


def test_slots_further_apart_than_2_to_the_31_elements() -> None:
    problem = cases.huge_slot_stride(32, head_dim=32)
    vet.check_case(SsdSpec(d_state=32, head_dim=32), Case("huge slot stride p32", lambda: problem))


@EVERY_KERNEL
@pytest.mark.parametrize("A", [-256.0, -16.0])
def test_strong_decay_beside_weak(spec: SsdSpec, A: float) -> None:
    tokens = spec.segments * spec.chunk + 3
    problem = cases.strong_decay(spec.d_state, spec.io, spec.state, head_dim=spec.head_dim, tokens=tokens)
    problem = replace(problem, A=np.full(2, A, np.float32))
    errors = compare(scan(problem, runnable(spec).id, "gpu"), problem)
    assert errors.ok, str(errors)
