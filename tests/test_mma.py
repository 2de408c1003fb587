"""The host twins of the tensor-core wrappers: values against float64, and what the emulator finds in broken uses."""

from __future__ import annotations

import numpy as np
import pytest

from pyharness.emulator import EmulatorBuffer
from pyharness.errors import EmulatorError
from tests import fragments
from tests.emulated import kinds
from tests.small_kernels import launch

HALF_UNIT = 2.0**-24  # of f32, relative: one rounding


def outputs(*shape: int) -> EmulatorBuffer:
    return EmulatorBuffer("y", np.zeros(shape, np.float32), writable=True, initialised=False, must_write=True)


@pytest.mark.parametrize("name", fragments.TYPES)
def test_product_is_exact_but_for_one_rounding(name: str) -> None:
    a, b, d = fragments.draw(name, 6)
    y = outputs(6, 32, 4)
    launch(
        fragments.source("mma"),
        [EmulatorBuffer("x", fragments.words(a, b, d)), y],
        f"mma_{name}",
        grid=3,
        block=64,
        n=1,
    )
    wide_a, wide_b = fragments.operands(name, a, b)
    exact = d + wide_a @ wide_b
    # Double precision loses nothing that matters unless terms cancel.
    slack = 2.0**-48 * (np.abs(d) + np.abs(wide_a) @ np.abs(wide_b))
    assert (np.abs(fragments.result(y.array) - exact) <= HALF_UNIT * np.abs(exact) + slack).all()


def test_products_add_up_in_d() -> None:
    a, b, d = fragments.draw("bf16", 1)
    y = outputs(1, 32, 4)
    launch(fragments.source("mma"), [EmulatorBuffer("x", fragments.words(a, b, d)), y], "mma_bf16", n=5)
    exact = d + 5 * (a.astype(np.float64) @ b.astype(np.float64))
    terms = np.abs(d) + 5 * (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    assert (np.abs(fragments.result(y.array) - exact) <= 5 * HALF_UNIT * terms).all()


@pytest.mark.parametrize(("name", "bits"), [("bf16", 0x7F80), ("f16", 0x7C00)])
def test_infinities_and_nan_are_kept(name: str, bits: int) -> None:
    a, b, d = fragments.draw(name, 1)
    a.view(np.uint16)[0, 3, 5] = bits
    a.view(np.uint16)[0, 4, 5] = bits + 1
    y = outputs(1, 32, 4)
    launch(fragments.source("mma"), [EmulatorBuffer("x", fragments.words(a, b, d)), y], f"mma_{name}", n=1)
    got = fragments.result(y.array)[0]
    assert np.array_equal(got[3], np.sign(b[0, 5].astype(np.float32)) * np.float32(np.inf))
    assert np.isnan(got[4]).all()
    assert np.isfinite(np.delete(got, (3, 4), 0)).all()


def load(*defects: tuple[str, str]) -> np.ndarray:
    x, _ = fragments.matrices()
    y = outputs(64, 4)
    launch(fragments.source("matrices", *defects), [EmulatorBuffer("x", x), y], "matrices", block=64, shared=32 * 48)
    return y.array.view(np.uint32)


def test_matrices_come_as_fragments() -> None:
    words = load()
    x, expected = fragments.matrices()
    assert np.array_equal(words, expected)
    # By hand: lane 6 has row 1 at columns 4 and 5; transposed, column 1 at rows 4 and 5.
    assert words[6, 2] == int(x[17, 4]) | int(x[17, 5]) << 16
    assert words[32 + 6, 2] == int(x[16 + 4, 1]) | int(x[16 + 5, 1]) << 16


PLAIN = "load_matrices(r, rows + kPitch * lane)"
TRANSPOSED = "load_matrices_transposed(r, rows + kPitch * lane)"


@pytest.mark.parametrize(
    ("defect", "kind"),
    [
        (("__syncthreads();  // stored", ""), "race"),
        (("__syncthreads();  // loaded", ""), "race"),
        (("kPitch = 24", "kPitch = 20"), "misaligned"),
        ((PLAIN, PLAIN.replace("lane", "(lane + 1)")), "out-of-bounds"),  # behind the last row
        ((PLAIN, "load_matrices(r, x + 8 * lane)"), "out-of-bounds"),  # in global memory
        ((TRANSPOSED, TRANSPOSED.replace("lane", "lane + 8")), "uninitialised"),  # between rows
        ((PLAIN, f"if (lane != 9) {PLAIN}"), "warp-divergence"),  # a lane goes on to the barrier
        ((f"{PLAIN};", f"if (lane & 1) {PLAIN}; else {TRANSPOSED};"), "warp-divergence"),
    ],
)
def test_defect_around_a_load_of_matrices(defect: tuple[str, str], kind: str) -> None:
    with pytest.raises(EmulatorError) as error:
        load(defect)
    assert kind in kinds(error.value)


def test_a_warp_that_is_not_whole_has_no_tensor_core() -> None:
    a, b, d = fragments.draw("f16", 1)
    x = EmulatorBuffer("x", fragments.words(a, b, d))
    with pytest.raises(EmulatorError, match="all 32 lanes") as error:
        launch(fragments.source("mma"), [x, outputs(24, 4)], "mma_f16", block=24, n=1)
    assert kinds(error.value) == {"warp-mask"}


def product(*defects: tuple[str, str]) -> np.ndarray:
    x, _ = fragments.product()
    y = outputs(16, 16)
    launch(fragments.source("product", *defects), [EmulatorBuffer("x", x), y], "product", shared=1024)
    return y.array


def test_two_products_from_shared_memory_and_registers() -> None:
    assert np.array_equal(product(), fragments.product()[1])


@pytest.mark.parametrize(
    ("defect", "kind"),
    [
        (("copy_async_wait_all();\n  __syncwarp", "__syncwarp"), "async-copy"),
        (("__syncwarp();  // landed", ""), "race"),
        (("for (int half = 0; half < 2", "for (int half = 0; half < 2 - (lane == 3)"), "warp-divergence"),
    ],
)
def test_defect_in_a_product(defect: tuple[str, str], kind: str) -> None:
    with pytest.raises(EmulatorError) as error:
        product(defect)
    assert kind in kinds(error.value)


def test_exp2_flushes_what_is_subnormal() -> None:
    x = np.array([0, 1, -3, 0.5, -126, -126.5, -149, -1e30, 127.5, 128, 1e-40, np.nan], np.float32)
    y = outputs(12)
    launch(fragments.source("exp2"), [EmulatorBuffer("x", x), y], "exp2", block=12)
    expected = np.array([1, 2, 0.125, 2**0.5, 2.0**-126, 0, 0, 0, 2**127.5, np.inf, 1, np.nan])
    np.testing.assert_allclose(y.array, expected, rtol=2.0**-23, atol=0)
