"""Tensor-core wrappers on the GPU against their host twins and against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pyharness import toolchain
from pyharness.device import Entry, Memory, get
from pyharness.emulator import EmulatorBuffer
from pyharness.toolchain import Job
from tests import fragments
from tests.small_kernels import arguments, launch


@dataclass(frozen=True)
class Run:
    """One launch of a small kernel over x, with y in f32."""

    name: str
    entry: str
    x: np.ndarray
    y_shape: tuple[int, ...]
    grid: int
    block: int
    shared: int = 0

    def on_device(self) -> np.ndarray:
        """y from the GPU."""
        device = get()
        job = Job(self.name, fragments.source(self.name), device.target, toolchain.flags("ssd"))
        image = toolchain.compile_cached(job, toolchain.find_compiler())
        kernel = Entry(device, device.module(image.data), f"ssm_{self.entry}")
        y = np.full(self.y_shape, np.nan, np.float32)
        with device:
            memory = {"x": Memory(device, self.x.nbytes), "y": Memory(device, y.nbytes)}
            memory["x"].write(self.x.view(np.uint8))
            memory["y"].write(y)
            device.synchronize(f"copying the arrays of {self.entry}")
            addresses = {name: held.address for name, held in memory.items()}
            kernel.launch((self.grid, 1, 1), (self.block, 1, 1), arguments(addresses, n=1), self.shared)
            device.synchronize(f"running {self.entry}")
            y = memory["y"].read().view(np.float32).reshape(self.y_shape)
            for held in memory.values():
                held.free()
        return y

    def on_twin(self) -> np.ndarray:
        """y from the emulator."""
        y = np.zeros(self.y_shape, np.float32)
        buffers = [EmulatorBuffer("x", self.x), EmulatorBuffer("y", y, writable=True, initialised=False)]
        source = fragments.source(self.name)
        launch(source, buffers, self.entry, grid=self.grid, block=self.block, shared=self.shared, n=1)
        return y


@pytest.mark.parametrize("name", fragments.TYPES)
def test_products_agree_with_the_twin(name: str) -> None:
    warps = 64
    a, b, d = fragments.draw(name, warps)
    run = Run("mma", f"mma_{name}", fragments.words(a, b, d), (warps, 32, 4), grid=warps // 4, block=128)
    ours, twin = fragments.result(run.on_device()), fragments.result(run.on_twin())
    wide_a, wide_b = fragments.operands(name, a, b)
    bound = fragments.TOLERANCE * (np.abs(d) + np.abs(wide_a) @ np.abs(wide_b))
    worst = float((np.abs(ours.astype(np.float64) - twin) / bound).max())
    assert worst <= 1, f"{worst} of the tolerance"
    assert (np.abs(ours - (d + wide_a @ wide_b)) <= bound).all()


def test_matrices_are_the_twins() -> None:
    x, expected = fragments.matrices()
    run = Run("matrices", "matrices", x, (64, 4), grid=1, block=64, shared=32 * 48)
    assert np.array_equal(run.on_device().view(np.uint32), expected)


def test_two_products_from_shared_memory_and_registers() -> None:
    x, expected = fragments.product()
    assert np.array_equal(Run("product", "product", x, (16, 16), 1, 32, 1024).on_device(), expected)


def test_exp2_agrees_with_the_twin() -> None:
    x = np.concatenate([np.linspace(-150, 0, 4095), [1e-40]]).astype(np.float32)
    run = Run("exp2", "exp2", x, (4096,), grid=32, block=128)
    ours, twin = run.on_device(), run.on_twin()
    # Two units in the last place. Next to 2^-126 an approximate result may or may not be flushed.
    clear = np.abs(x + 126) > 1e-3
    np.testing.assert_allclose(ours[clear], twin[clear], rtol=2.0**-22, atol=0)
