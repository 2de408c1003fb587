"""Sizes past 16 and 32 bits on the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pyharness import cases, vet
from pyharness.binding import Outputs, bind
from pyharness.cases import Case, Options, Shape, draw
from pyharness.compare import f32_bounds, relative_norm
from pyharness.device import Memory, get
from pyharness.errors import DeviceError
from pyharness.families import RecurrentSpec
from pyharness.oracle import oracle
from pyharness.spec import KernelSpec

SMALL = RecurrentSpec(d_state=16)
GENERIC = RecurrentSpec(d_state=0, layout="generic")
BOTH = pytest.mark.parametrize("spec", [SMALL, GENERIC], ids=[SMALL.id, GENERIC.id])


@BOTH
def test_70000_sequences(spec: KernelSpec) -> None:
    vet.check_case(spec, Case("70000 sequences", lambda: cases.many_sequences(16)))


@BOTH
def test_70000_channels(spec: KernelSpec) -> None:
    vet.check_case(spec, Case("70000 channels", lambda: cases.many_channels(16)))


def allocate(nbytes: int) -> Memory:
    try:
        return Memory(get(), nbytes)
    except DeviceError as error:
        pytest.skip(f"needs {nbytes / 2**30:.1f} GiB of device memory: {error}")


@BOTH
def test_slots_further_apart_than_2_to_the_31_elements(spec: KernelSpec) -> None:
    problem = cases.huge_slot_stride(16)
    assert problem.state is not None
    allocate(2 * problem.state.strides[0] + 2**20).free()
    vet.check_case(spec, Case("huge slot stride", lambda: problem))


def test_a_pool_of_more_than_2_to_the_31_elements_in_full() -> None:
    """Slots on both sides of 2^31 bytes, 2^32 bytes and 2^31 elements are updated, all others keep their bits."""
    byte, named, slots = 0x3C, [0, 1023, 1024, 2047, 2048, 4095, 4096, 4099], 4100
    shape = Shape((1,) * len(named), 64, 64, 128, 8)
    # Host memory is taken at the named slots only.
    pool = np.zeros((slots, 64, 64, 128), np.float32)
    pool[named] = np.frombuffer(bytes([byte] * 4), np.float32)[0]
    plain = draw(31, shape, Options(state=None))
    problem = replace(plain, state=pool, read_slots=np.array(named, np.int32))
    spec = RecurrentSpec(d_state=128)
    plan = spec.plan(problem.geometry)
    y = np.empty_like(problem.x)
    binding = bind(problem, plan, Outputs(y, pool, None))

    device = get()
    memory = {b.name: allocate(b.array.nbytes) for b in binding.buffers}
    for buffer in binding.buffers:
        if buffer.name == "state":
            memory["state"].fill(byte)
        elif buffer.name != "y":
            memory[buffer.name].write(buffer.array)
    memory["y"].fill(0xFF)
    device.kernel(spec).launch(plan, binding.pack({name: block.address for name, block in memory.items()}))
    device.synchronize("the large pool")

    truth, bound = oracle(problem), float(f32_bounds(problem).max())
    found = memory["y"].read().view(np.float32).reshape(y.shape)
    for head in range(problem.heads):
        for token in range(problem.tokens):
            exact = truth.y[token, head]
            assert relative_norm(found[token, head] - exact, exact) <= bound
    slot_bytes = pool[0].nbytes
    for first in range(0, slots, 50):
        block = memory["state"].read(first * slot_bytes, 50 * slot_bytes).reshape(50, slot_bytes)
        for slot in range(first, first + 50):
            if slot in named:
                state = block[slot - first].view(np.float32).reshape(pool[0].shape)
                for out, exact in zip(state, truth.states[slot], strict=True):
                    assert relative_norm(out - exact, exact) <= bound
            else:
                assert (block[slot - first] == byte).all(), f"slot {slot} was changed"
    for piece in memory.values():
        piece.free()
