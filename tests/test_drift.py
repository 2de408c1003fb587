"""How stored states drift: the emulation of stores against hand-worked roundings and against the kernels."""

from __future__ import annotations

import numpy as np
import pytest

from pyharness.drift import STORAGE, decode, draw_steps, emulate, stored, study, truth


def test_more_bits_drift_less_over_1000_steps() -> None:
    steps = draw_steps(1000, heads=2, head_dim=4, d_state=32)
    errors = {drift.storage: drift for drift in study(drawn=steps)}
    assert tuple(errors) == STORAGE
    for name in ("y", "state"):
        of = {storage: getattr(drift, name) for storage, drift in errors.items()}
        assert of["f32"] < 1e-5 < of["f16"] < of["bf16"]
        assert of["f16"] < of["i8"]
        assert all(0 < value < 1 for value in of.values())


def test_what_is_stored_is_what_the_formats_hold() -> None:
    rng = np.random.default_rng(0)
    values = np.array([[[1.0, 1.0 + 2**-9, -254.0, 127.0]]])
    assert stored(values, "bf16", rng).tolist() == [[[1.0, 1.0, -254.0, 127.0]]]
    # The scale is 2: 1 and 1 + 2^-9 are half a step and a little more.
    assert stored(values, "i8", rng).tolist() == [[[0.0, 2.0, -254.0, 128.0]]]
    draws = np.stack([stored(values, "bf16 + stochastic", rng) for _ in range(2000)])
    assert set(draws[:, 0, 0, 1]) == {1.0, 1.0 + 2**-7}
    assert abs((draws[:, 0, 0, 1] > 1).mean() - 0.25) < 3 * np.sqrt(0.25 * 0.75 / 2000)


@pytest.mark.parametrize("storage", ["f32", "bf16", "f16", "i8"])
def test_the_emulation_is_what_a_kernel_does(storage: str) -> None:
    """Twenty steps through a kernel: f32 arithmetic moves a stored value by at most a rounding now and then."""
    steps = draw_steps(20, heads=1, head_dim=4, d_state=16)
    y, state = emulate(steps, storage)
    got_y, got_state = decode(steps, storage, "emulator")
    exact_y, exact_state = truth(steps)
    drifted = np.linalg.norm(state - exact_state)
    assert np.linalg.norm(got_state - state) <= 0.2 * drifted + 1e-5 * np.linalg.norm(exact_state)
    assert np.linalg.norm(got_y - y) <= 0.2 * np.linalg.norm(y - exact_y) + 1e-5 * np.linalg.norm(exact_y)
