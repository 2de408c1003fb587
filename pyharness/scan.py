"""scan(problem, kernel, backend): one problem through one kernel, or through the oracle."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.binding import Outputs, bind, outputs
from pyharness.errors import DeviceError, NoKernel
from pyharness.oracle import oracle, quantised, rounded
from pyharness.problem import ScanProblem
from pyharness.select import Device, Features, choose, mismatch
from pyharness.spec import KernelSpec, parse_id

BACKENDS = ("auto", "gpu", "emulator", "oracle")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ScanResult:
    """What a scan gives.

    Attributes:
        y: io [tokens, heads, head_dim].
        state: a copy of the pool with its strides and with the stored slots updated; without a pool, f32 [sequences,
            heads, head_dim, d_state].
        kernel: id of the kernel that ran, or "oracle".
        backend: "gpu", "emulator" or "oracle": what ran, also where "auto" was asked for.
        state_scale: the scales of an i8 state, f32 [slots, heads, head_dim]; else None.
    """

    y: NDArray[Any]
    state: NDArray[Any]
    kernel: str
    backend: str
    state_scale: NDArray[np.float32] | None = None


def scan(problem: ScanProblem, kernel: str | None = None, backend: str = "auto") -> ScanResult:
    """Run a problem. Inputs are not changed.

    Args:
        problem: the arrays.
        kernel: None for what selection picks, a family name, or a full id. The oracle takes no kernel and ignores it.
        backend: "gpu", "emulator" (the emitted source on the CPU, strict and slow), "oracle" (float64 NumPy), or
            "auto": the GPU where one is usable, else the oracle, which is logged and shown in the result.

    Raises:
        NoKernel: nothing takes the problem.
        ToolchainError: a compiler is missing or refused the source.
        DeviceError: "gpu" without a usable GPU, or a failed launch; EmulatorError where a kernel breaks a rule.
        ValueError: an unknown backend.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, found {backend!r}")
    if backend == "auto":
        reason = _gpu_missing()
        backend = "oracle" if reason else "gpu"
        if reason:
            _warn_once(reason)
    if backend == "oracle":
        return _run_oracle(problem)
    spec = find_kernel(problem, kernel, _device() if backend == "gpu" else None)
    results = run_emulator(problem, spec) if backend == "emulator" else _run_gpu(problem, spec)
    return ScanResult(results.y, results.state, spec.id, backend, results.state_scale)


@cache
def _warn_once(reason: str) -> None:
    _log.warning("scan runs on the float64 oracle: %s", reason)


def find_kernel(problem: ScanProblem, kernel: str | None = None, device: Device | None = None) -> KernelSpec:
    """The kernel that runs a problem: a full id as it stands, else what selection picks.

    Raises:
        NoKernel: the id is malformed or nothing takes the problem.
    """
    if kernel is not None and "_" in kernel:
        spec = parse_id(kernel)
        require(problem, spec)
        return spec
    return parse_id(choose(Features.of(problem), device, family=kernel).id)


def require(problem: ScanProblem, spec: KernelSpec) -> None:
    """Check that a kernel takes a problem.

    Raises:
        NoKernel: it does not; the message says what differs.
    """
    reason = mismatch(Features.of(problem), spec)
    if reason:
        raise NoKernel(f"{spec.id} cannot run this problem: {reason}")


def _run_oracle(problem: ScanProblem) -> ScanResult:
    results = outputs(problem)
    truth = oracle(problem)
    results.y[...] = rounded(truth.y, problem.io)
    for slot, state in truth.states.items():
        if results.state_scale is None:
            results.state[slot] = rounded(state, problem.state_dtype)
        else:
            results.state[slot], results.state_scale[slot] = quantised(state)
    return ScanResult(results.y, results.state, "oracle", "oracle", results.state_scale)


def run_emulator(
    problem: ScanProblem,
    spec: KernelSpec,
    *,
    source: str | None = None,
    results: Outputs | None = None,
    seed: int = 0,
    resident_blocks: int = 1,
) -> Outputs:
    """Run one kernel on the CPU under the emulator's rules.

    Args:
        problem: the arrays.
        spec: a kernel that takes them.
        source: text to run in place of what the spec renders to: how the tests prove that a broken kernel is caught.
        results: arrays to store to, for a y of another stride or alignment than `outputs` gives.
        seed: order of threads between barriers.
        resident_blocks: blocks that run at once.

    Raises:
        EmulatorError: the kernel broke a rule (a race, an access outside a buffer, an output not stored to, ...).
    """
    from pyharness.emulator import EmulatorBuffer, EmulatorLaunch, run

    plan = spec.plan(problem.geometry)
    results = outputs(problem) if results is None else results
    binding = bind(problem, plan, results)
    buffers = [EmulatorBuffer(b.name, b.array, b.writable, b.initialised, b.must_write) for b in binding.buffers]
    launches = [EmulatorLaunch(step.entry, step.grid, step.block, step.shared_bytes) for step in plan.launches]
    run(
        _source(spec) if source is None else source,
        launches,
        buffers,
        binding.pack,
        seed=seed,
        resident_blocks=resident_blocks,
        include_dirs=_include_dirs(),
    )
    return results


@cache
def _include_dirs() -> tuple[Path, ...]:
    from pyharness.toolchain import cuda_include_dirs

    return tuple(cuda_include_dirs())


@lru_cache(maxsize=64)
def _source(spec: KernelSpec) -> str:
    """What a spec renders to; a kernel that runs many problems is rendered once."""
    from pyharness.render import render

    return render(spec)


def _run_gpu(problem: ScanProblem, spec: KernelSpec) -> Outputs:
    from pyharness import device

    plan = spec.plan(problem.geometry)
    results = outputs(problem)
    binding = bind(problem, plan, results)
    device.run(spec, plan, binding.buffers, binding.pack)
    return results


def _gpu_missing() -> str:
    """Why no GPU can be used, or an empty string."""
    try:
        from pyharness import device
    except ImportError as error:
        return f"no GPU support: {error}"
    return device.available()


def _device() -> Device:
    """The GPU that a call runs on.

    Raises:
        DeviceError: there is none that can be used.
    """
    reason = _gpu_missing()
    if reason:
        raise DeviceError(f'backend "gpu" wants a usable GPU: {reason}')
    from pyharness import device

    return Device(*device.identity())
