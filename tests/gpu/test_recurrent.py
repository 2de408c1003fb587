"""Every recurrent kernel of the catalogue on the GPU. `check_case` raises where a result is not the oracle's."""

from __future__ import annotations

import pytest

from pyharness import build, manifest, vet
from pyharness.catalogue import CATALOGUE
from pyharness.device import get, image_target
from pyharness.spec import KernelSpec

KERNELS = [spec for spec in CATALOGUE if spec.family == "recurrent"]


def names(specs: list[KernelSpec]) -> list[str]:
    return [spec.id for spec in specs]


@pytest.mark.parametrize("spec", KERNELS, ids=names(KERNELS))
def test_every_option_agrees_with_the_oracle(spec: KernelSpec) -> None:
    for d_state in vet.d_states(spec):
        for case in vet.option_cases(d_state, spec.io, spec.state):
            vet.check_case(spec, case)


@pytest.mark.parametrize("spec", KERNELS, ids=names(KERNELS))
def test_edges_and_the_ancestors_cases_agree_with_the_oracle(spec: KernelSpec) -> None:
    for case in vet.plain_cases(spec):
        vet.check_case(spec, case)


@pytest.mark.parametrize("spec", KERNELS, ids=names(KERNELS))
def test_real_geometries_agree_with_the_oracle(spec: KernelSpec) -> None:
    for case in vet.geometry_cases(spec):
        vet.check_case(spec, case)


@pytest.mark.parametrize("spec", KERNELS, ids=names(KERNELS))
def test_4096_tokens_agree_with_the_oracle(spec: KernelSpec) -> None:
    for d_state in vet.d_states(spec):
        vet.check_case(spec, vet.long_case(d_state, spec.io, spec.state))


@pytest.mark.parametrize("spec", KERNELS, ids=names(KERNELS))
def test_the_same_problem_gives_the_same_bits_in_20_runs(spec: KernelSpec) -> None:
    vet.check_repeats(spec, 20)


@pytest.mark.parametrize("spec", KERNELS, ids=names(KERNELS))
def test_a_sequence_has_the_same_bits_in_any_batch(spec: KernelSpec) -> None:
    vet.check_batch(spec)


@pytest.mark.parametrize("spec", KERNELS, ids=names(KERNELS))
def test_the_image_that_is_loaded_is_the_one_that_the_manifest_promises(spec: KernelSpec) -> None:
    device = get()
    target = image_target(spec, device.capability, device.name)
    image = build.image(spec, target)
    row = manifest.read(spec.id)
    manifest.check(row, target, image.data)
    for symbol, entry in device.kernel(spec).entries.items():
        promised = row.targets[target].usage[symbol]
        assert (entry.registers, entry.static_shared, entry.local_bytes) == (
            promised["registers"],
            promised["static_shared"],
            0,
        )
        assert entry.max_threads >= spec.threads
