"""Every kind of fault that users of other scans met, on every family, on the GPU, and sizes past 16 and 32 bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pyharness import cases, toolchain
from pyharness.binding import Outputs, bind
from pyharness.cases import Options, Shape, draw
from pyharness.compare import compare
from pyharness.device import Device, Entry, Memory, get
from pyharness.errors import DeviceError
from pyharness.families import FAMILIES
from pyharness.faults import FAULTS, Place
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult
from pyharness.select import Features, mismatch
from pyharness.spec import Geometry, KernelSpec
from pyharness.toolchain import Job
from pyharness.variants import launches_on, variants
from tests.emulated import assert_right
from tests.stand_ins import stand_ins

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def kernels(family: str) -> Iterator[KernelSpec]:
    """The small kernels of the emulator's tests and the ones of a real size, as far as they do not spill here."""
    yield from launched(*stand_ins(family), *variants(family, 128, head_dim=64), *variants(family, 16))


def launched(*specs: KernelSpec) -> Iterator[KernelSpec]:
    """Those that do not spill here, each once."""
    for spec in dict.fromkeys(specs):
        if launches_on(spec, get().target):
            yield spec


def allocate(nbytes: int) -> Memory:
    try:
        return Memory(get(), nbytes)
    except DeviceError as error:
        pytest.skip(f"needs {nbytes / 2**30:.1f} GiB of device memory: {error}")


def room(problem: ScanProblem) -> int:
    """Bytes of device memory that a problem's arrays span, with some to spare."""
    arrays = (problem.x, problem.dt, problem.B, problem.C, problem.z, problem.state)
    return 2**20 + sum(len(a) * a.strides[0] for a in arrays if a is not None and len(a))


@EACH_FAMILY
@pytest.mark.parametrize("kind", FAULTS)
def test_fault(kind: str, family: str) -> None:
    for spec in kernels(family):
        for case in FAULTS[kind](Place.of(spec)):
            problem = case.build()
            # Slots and tokens that are far apart take as much room on the device.
            allocate(room(problem)).free()
            assert_right(problem, spec, case.name, "gpu")


@EACH_FAMILY
@pytest.mark.parametrize("build", [cases.many_sequences, cases.many_channels])
def test_70000_sequences_or_channels(family: str, build: object) -> None:
    ran = 0
    for spec in launched(*variants(family, 16), *variants(family, 16, head_dim=64)):
        head_dim = getattr(spec, "head_dim", 0) or 1
        problem = (
            cases.many_sequences(16, head_dim=head_dim) if build is cases.many_sequences else cases.many_channels(16)
        )
        if not mismatch(Features.of(problem), spec):
            assert_right(problem, spec, "70000", "gpu")
            ran += 1
    if not ran:
        pytest.skip(f"{family} has no kernel of 16 columns for it")


@EACH_FAMILY
def test_a_pool_of_more_than_2_to_the_31_elements_in_full(family: str) -> None:
    """Slots on both sides of 2^31 bytes, 2^32 bytes and 2^31 elements are updated, all others keep their bits."""
    byte, named, slots = 0x3C, [0, 1023, 1024, 2047, 2048, 4095, 4096, 4099], 4100
    spec = next(launched(*variants(family, 128, head_dim=64), *variants(family, 128)))
    rows = 64 if not spec.refusal(Geometry(1, 1, 1, 64, 1, 128)) else 1
    shape = Shape((1,) * len(named), 64 * 64 // rows, rows, 128, 8)
    plain = draw(31, shape, Options(state=None, per_column_a=rows == 1))
    # Host memory is taken at the named slots only.
    pool = np.zeros((slots, shape.heads, rows, 128), np.float32)
    pool[named] = np.frombuffer(bytes([byte] * 4), np.float32)[0]
    problem = replace(plain, state=pool, read_slots=np.array(named, np.int32))
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

    slot_bytes, states = pool[0].nbytes, []
    for first in range(0, slots, 50):
        block = memory["state"].read(first * slot_bytes, 50 * slot_bytes).reshape(50, slot_bytes)
        for slot in range(first, first + 50):
            if slot in named:
                states.append(block[slot - first].view(np.float32).reshape(pool[0].shape))
            else:
                assert (block[slot - first] == byte).all(), f"slot {slot} was changed"
    # The slots that are named, in a pool of their own, are the same problem.
    found_y = memory["y"].read().view(np.float32).reshape(y.shape)
    small = replace(plain, state=pool[named], read_slots=np.arange(len(named), dtype=np.int32))
    errors = compare(ScanResult(found_y, np.stack(states), spec.id, "gpu"), small)
    assert errors.ok, str(errors)
    for piece in memory.values():
        piece.free()


def shared_kernel(device: Device, static: int) -> Entry:
    """A kernel that fills its dynamic shared memory and returns the sum of its bytes, with some static memory too."""
    source = f"""
extern "C" __global__ void fill_shared(int* out, long long bytes) {{
  __shared__ int taken[{static // 4}];
  extern __shared__ unsigned char dynamic[];
  taken[threadIdx.x] = 1;
  for (long long i = threadIdx.x; i < bytes; i += blockDim.x) dynamic[i] = 1;
  __syncthreads();
  int sum = 0;
  for (long long i = threadIdx.x; i < bytes; i += blockDim.x) sum += dynamic[(i + 7) % bytes];
  atomicAdd(out, sum + taken[threadIdx.x] - 1);
}}
"""
    job = Job("fill_shared", source, device.target, toolchain.flags("recurrent"))
    image = toolchain.compile_cached(job, toolchain.find_compiler())
    return Entry(device, device.module(image.data), "fill_shared")


@pytest.mark.parametrize("over", [-16, 0, 16, None])
def test_shared_memory_around_48_kib_and_at_the_limit_is_opted_in_to(over: int | None) -> None:
    """At exactly 48 KiB, where an opt-in for more than 48 KiB is off by one, and at the device's limit less static."""
    device = get()
    entry = shared_kernel(device, 1024)
    assert entry.static_shared >= 1024
    nbytes = device.shared_limit - entry.static_shared if over is None else 48 * 1024 + over
    out = allocate(4)
    out.write(np.zeros(1, np.int32))
    packed = out.address.to_bytes(8, "little") + nbytes.to_bytes(8, "little")
    entry.launch((1, 1, 1), (256, 1, 1), packed, nbytes)
    device.synchronize("fill_shared")
    assert out.read().view(np.int32)[0] == nbytes
    out.free()
    if over is None:
        with pytest.raises(DeviceError, match="dynamic shared memory"):
            entry.launch((1, 1, 1), (256, 1, 1), packed, nbytes + 16)
