"""Every update kernel of the catalogue on the GPU. `check_case` raises where a result is not the oracle's."""

from __future__ import annotations

import functools

import pytest

from pyharness import bitwise, build, drift, manifest, replay, scan, vet
from pyharness.cases import Options, Shape, draw
from pyharness.catalogue import CATALOGUE
from pyharness.device import get, image_target
from pyharness.families import UpdateSpec
from pyharness.oracle import oracle
from pyharness.peer_suites import DECODE_SUITES, Suite
from pyharness.spec import KernelSpec
from tests.stochastic import assert_draws_are_fair

KERNELS = [spec for spec in CATALOGUE if spec.family == "update"]
EVERY_KERNEL = pytest.mark.parametrize("spec", KERNELS, ids=[spec.id for spec in KERNELS])


@EVERY_KERNEL
def test_every_case_agrees_with_the_oracle(spec: KernelSpec) -> None:
    for case in vet.kernel_cases(spec):
        vet.check_case(spec, case)


@EVERY_KERNEL
def test_bits_do_not_depend_on_runs_or_on_the_batch(spec: KernelSpec) -> None:
    vet.check_repeats(spec)
    vet.check_batch(spec)


@EVERY_KERNEL
def test_the_image_that_is_loaded_is_the_one_that_the_manifest_promises(spec: KernelSpec) -> None:
    device = get()
    target = image_target(spec, device.capability, device.name)
    manifest.check(manifest.read(spec.id), target, build.image(spec, target).data)


def test_configurations_have_the_same_bits_at_a_few_points() -> None:
    """All 920 points are compared by `invoke vet --family update --bitwise`."""
    found = bitwise.check(get(), KERNELS, heads=(8, 128), batches=(1, 2, 63, 72))
    assert found["points"] == 8


@pytest.mark.parametrize("suite", DECODE_SUITES, ids=[suite.key for suite in DECODE_SUITES])
def test_the_peers_decode_suites_agree_with_the_oracle(suite: Suite) -> None:
    """In their own types, most of which the catalogue does not hold; by our bounds and by theirs."""
    for case in suite.cases():
        problem = case.problem(reduce=True)
        spec = UpdateSpec(d_state=problem.d_state, io=problem.io, state=problem.state_dtype)
        run = functools.partial(scan, kernel=spec.id, backend="gpu")
        start = replay.Outcome(suite.key, spec.family, case.name, spec.id)
        outcome = replay.judge(start, case, problem, run, oracle(problem))
        assert outcome.passed, outcome


@pytest.mark.parametrize("state", ["bf16", "f16"])
def test_stochastic_rounding_is_fresh_each_step_and_its_mean_error_is_none(state: str) -> None:
    assert_draws_are_fair(state, "gpu")


@pytest.mark.parametrize("state", ["bf16", "f16", "i8"])
def test_stochastic_rounding_draws_the_same_in_every_configuration(state: str) -> None:
    problem = draw(61, Shape((1, 3, 2), 4, 64, 128, 2), Options(state=state, key=True, checkpoints=2, slots="moved"))
    small = UpdateSpec(d_state=128, head_dim=64, state=state, lanes=8, rows=8, warps=2)
    specs = [UpdateSpec(d_state=128, state=state), small]
    first, second = (scan(problem, spec.id, "gpu") for spec in specs)
    assert first.state.tobytes() == second.state.tobytes()
    assert first.y.tobytes() == second.y.tobytes()


@pytest.mark.parametrize("storage", ["f32", "bf16 + stochastic", "f16", "i8"])
def test_100_steps_drift_as_the_format_alone_would(storage: str) -> None:
    steps = drift.draw_steps(100, d_state=128)
    (emulated,) = drift.study(storage=[storage], drawn=steps)
    (found,) = drift.study(storage=[storage], drawn=steps, run=drift.decode)
    assert found.state <= 1.2 * emulated.state + 1e-5
