"""Hardware counters of one launch, where ncu can read them."""

from __future__ import annotations

import shutil

import pytest

from pyharness.counters import Run, count

POINT, KERNEL = "decode_128x1_16_heads_bf16_packed", "update_n128_p64_l32_r4_w1_c1_bf16_sf32"


@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not installed")
def test_the_bytes_of_a_decode_step_are_its_states_once_each_way() -> None:
    run = Run.parse(f"{POINT}:{KERNEL}")
    (row,) = count([run])
    states = run.point.sequences * run.point.slot_bytes
    assert states <= row["read"] <= 1.1 * states
    # What is still in the second-level cache when the launch ends has not been written.
    assert 0.5 * states <= row["written"] <= 1.1 * states
    assert row["registers"] > 0
    assert row["stalls"]["long_scoreboard"] > 0
