"""Barriers by number in the emulator: what they order, and what it finds where one is missing or misused."""

from __future__ import annotations

import numpy as np
import pytest

from pyharness.emulator import EmulatorBuffer
from pyharness.errors import EmulatorError
from pyharness.render import helper
from tests.emulated import kinds
from tests.small_kernels import kernel, launch

TILES = 5
WAIT_READY = "      barrier_wait(kReady + tile % 2, kAll);"
WAIT_TAKEN = "      if (tile >= 2) barrier_wait(kTaken + tile % 2, kAll);"
ARRIVE_READY = "      barrier_arrive(kReady + tile % 2, kAll);"
ARRIVE_TAKEN = "      if (tile + 2 < a.n) barrier_arrive(kTaken + tile % 2, kAll);"


def stages(*defects: tuple[str, str], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(1).integers(-99, 99, 2 * TILES * 64).astype(np.float32)
    y = EmulatorBuffer("y", np.full(x.shape, -1, np.float32), writable=True, initialised=False, must_write=True)
    source = helper("named_barrier") + kernel("stages", *defects)
    launch(source, [EmulatorBuffer("x", x), y], "stages", grid=2, block=128, shared=512, n=TILES, seed=seed)
    return x.reshape(-1, 64), y.array.reshape(-1, 64)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_handed_over_is_seen_and_given_back_in_any_order_of_threads(seed: int) -> None:
    x, y = stages(seed=seed)
    assert np.array_equal(y, x[:, ::-1] + x[:, :1])


@pytest.mark.parametrize(
    ("defect", "expected"),
    [
        ((WAIT_READY, ""), {"uninitialised", "race"}),
        ((WAIT_TAKEN, ""), {"race", "divergent-barrier"}),
        ((WAIT_READY, WAIT_READY.replace("wait", "arrive")), {"uninitialised", "race"}),
        ((ARRIVE_READY, ""), {"deadlock"}),
        ((ARRIVE_TAKEN, ""), {"deadlock"}),
        ((ARRIVE_TAKEN, ARRIVE_TAKEN.replace("if (tile + 2 < a.n) ", "")), {"barrier-not-over"}),
        ((ARRIVE_READY, ARRIVE_READY.replace("kAll", "96")), {"divergent-barrier"}),
        ((ARRIVE_READY, ARRIVE_READY.replace("kAll", "kAll + 1")), {"divergent-barrier"}),
        ((ARRIVE_READY, ARRIVE_READY.replace("kReady + tile % 2", "16")), {"divergent-barrier"}),
        (
            (ARRIVE_READY, "      __syncthreads();\n" + ARRIVE_READY.replace("kReady + tile % 2", "0")),
            {"divergent-barrier", "deadlock"},
        ),
        ((ARRIVE_READY, ARRIVE_READY.replace("tile % 2", "thread % 2")), {"divergent-barrier"}),
        ((ARRIVE_READY, "      if (thread % 32 < 16)" + ARRIVE_READY), {"warp-divergence"}),
    ],
)
def test_a_barrier_that_is_missing_or_misused_is_found(defect: tuple[str, str], expected: set[str]) -> None:
    with pytest.raises(EmulatorError) as caught:
        stages(defect)
    assert kinds(caught.value) & expected, str(caught.value)


def test_a_place_given_back_before_it_is_read_is_a_race() -> None:
    """The first word of a place is read by both warps that take it: all of its readers count."""
    place = "      const float* place"
    with pytest.raises(EmulatorError) as caught:
        stages((ARRIVE_TAKEN, ""), (place, ARRIVE_TAKEN + "\n" + place))
    assert kinds(caught.value) == {"race"}


def test_one_that_only_arrives_has_heard_of_nothing() -> None:
    """Those that bring the tiles write behind a barrier at which they did not wait: a race, though they came to it."""
    with pytest.raises(EmulatorError) as caught:
        stages((WAIT_TAKEN, WAIT_TAKEN.replace("wait", "arrive")))
    assert kinds(caught.value) & {"race", "divergent-barrier"}


def test_a_write_over_what_its_own_warp_and_others_read_needs_their_order_too() -> None:
    """Between two named barriers a warp that takes tiles may not write what both read."""
    broken = "      shared_memory[tile % 2 * 64] = 0;\n"
    with pytest.raises(EmulatorError) as caught:
        stages((ARRIVE_TAKEN, broken + ARRIVE_TAKEN))
    assert "race" in kinds(caught.value)
