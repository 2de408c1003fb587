"""What the device layer notices on the GPU, each shown with a kernel or a call that is wrong on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from pyharness import toolchain
from pyharness.args import SCAN_ARGS
from pyharness.cases import Options, Shape, draw
from pyharness.device import Entry, Graph, Kernel, Memory, get
from pyharness.errors import DeviceError, ImageError
from pyharness.families import RecurrentSpec, SsdSpec
from pyharness.scan import scan
from pyharness.spec import Launch, Plan
from pyharness.toolchain import Image, Job

ARGS = "struct Args { unsigned long long pointers[19]; long long rest[17]; };"


def compiled(source: str) -> Image:
    device = get()
    job = Job("test", f"{ARGS}\n{source}", device.target, toolchain.flags("recurrent"))
    return toolchain.compile_cached(job, toolchain.find_compiler())


def broken_kernel(chunk: int, body: str) -> str:
    """The id of a kernel that the catalogue has not, loaded with another body."""
    spec = RecurrentSpec(d_state=16, chunk=chunk)
    get().kernel(spec, compiled(f'extern "C" __global__ void {spec.symbol()}(Args a) {{ {body} }}'))
    return spec.id


def fill_y(extra: str) -> str:
    return (
        "if (blockIdx.x || threadIdx.x) return; float* y = (float*)a.pointers[2]; float* x = (float*)a.pointers[0];"
        f"for (int i = 0; i < 24; ++i) y[i] = 0.0f; {extra}"
    )


@pytest.mark.parametrize(
    ("chunk", "extra", "message"),
    [
        (3, "y[24] = 1.0f;", r"y: 0 bytes past its last element"),
        (5, "y[-3] = 1.0f;", r"y: 12 bytes before its first element"),
        (6, "x[1] = 1.0f;", r"x: byte 4 of its span, of a read-only array"),
        (7, "y[7] = __int_as_float(-1);", r"left output unwritten: y\[1, 0, 1\]"),
    ],
)
def test_a_wrong_store_is_found(chunk: int, extra: str, message: str) -> None:
    # A problem of 4 tokens, 1 head and 6 rows: y has 24 elements.
    problem = draw(1, Shape((4,), 1, 6, 16), Options(fresh="all"))
    with pytest.raises(DeviceError, match=message):
        scan(problem, broken_kernel(chunk, fill_y(extra)), "gpu")


def test_a_kernel_that_uses_local_memory_is_refused() -> None:
    spec = RecurrentSpec(d_state=16, chunk=9)
    # Stores at places that only the data know: registers cannot hold the array.
    body = (
        "float t[512]; float* x = (float*)a.pointers[0]; for (int i = 0; i < 512; ++i) t[i] = x[i];"
        "for (int i = 0; i < 512; ++i) t[(int)t[i] & 511] += 1.0f; ((float*)a.pointers[2])[0] = t[a.rest[0] & 511];"
    )
    with pytest.raises(ImageError, match="local memory"):
        get().kernel(spec, compiled(f'extern "C" __global__ void {spec.symbol()}(Args a) {{ {body} }}'))


def test_an_image_with_other_numbers_than_the_toolchain_says_is_refused() -> None:
    spec = RecurrentSpec(d_state=16, chunk=10)
    image = compiled(f'extern "C" __global__ void {spec.symbol()}(Args a) {{ *(float*)a.pointers[2] = 1.0f; }}')
    usage = {symbol: dataclasses.replace(numbers, registers=200) for symbol, numbers in image.usage.items()}
    with pytest.raises(ImageError, match="registers"):
        get().kernel(spec, dataclasses.replace(image, usage=usage))


def test_bytes_that_are_no_image_are_refused_where_they_are_loaded() -> None:
    with pytest.raises(DeviceError, match="loading an image of 7 bytes"):
        get().module(b"nothing")


def test_launches_that_do_not_fit_are_refused_where_they_are_made() -> None:
    device, spec = get(), RecurrentSpec(d_state=16)
    kernel = device.kernel(spec)
    with pytest.raises(DeviceError, match="288 bytes of arguments, found 280"):
        kernel.launch(spec.plan(draw(1, Shape((1,), 1, 1, 16)).geometry), bytes(280))
    entry = next(iter(kernel.entries.values()))
    with pytest.raises(DeviceError, match="dynamic shared memory"):
        entry.launch((1, 1, 1), (32, 1, 1), bytes(288), device.shared_limit + 4)
    with pytest.raises(DeviceError, match="blocks of at most"):
        entry.launch((1, 1, 1), (2048, 1, 1), bytes(288))


def test_a_graph_replays_its_launches() -> None:
    device = get()
    image = compiled('extern "C" __global__ void add_one(int* at) { at[threadIdx.x] += 1; }')
    entry = Entry(device, device.module(image.data), "add_one")
    memory = Memory(device, 32 * 4)
    memory.write(np.zeros(32, np.int32))

    def call() -> None:
        entry.launch((1, 1, 1), (32, 1, 1), memory.address.to_bytes(8, "little"))

    with device:
        graph = Graph(device, [call, call, call])
        assert device.time(graph, 5) > 0
        graph.destroy()
    assert (memory.read().view(np.int32) == 15).all()
    memory.free()


#: The first of two launches lets the second start at once and ends 500 us later; both note what %globaltimer says.
PAIR = """
__device__ volatile long long* at(Args& a) { return (volatile long long*)a.pointers[18]; }
__device__ long long now() {
  long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
extern "C" __global__ void FIRST(Args a) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const long long begun = now();
  while (now() < begun + 500000) {}
  at(a)[0] = at(a)[4];
  at(a)[1] = now();
}
extern "C" __global__ void SECOND(Args a) {
  at(a)[2] = now();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  at(a)[3] = at(a)[0];
}
"""


@pytest.mark.parametrize("captured", [False, True], ids=["queued", "captured"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["in_turn", "overlapping"])
def test_a_launch_starts_before_the_one_before_it_has_ended_where_the_plan_says_so(
    overlaps: bool, captured: bool
) -> None:
    device = get()
    if device.capability < (9, 0):
        pytest.skip(f"no launch of {device.target} can start before the one before it has ended")
    spec = SsdSpec(d_state=16, head_dim=48, segments=2, io="bf16")
    first, second = spec.launchable.entries
    kernel = Kernel(device, spec, compiled(PAIR.replace("FIRST", first).replace("SECOND", second)))
    shape = ((1, 1, 1), (1, 1, 1), 0)
    plan = Plan((Launch(first, *shape), Launch(second, *shape, overlaps=overlaps)))
    memory = Memory(device, 5 * 8)
    arguments = np.zeros((), SCAN_ARGS)
    arguments["workspace"] = memory.address
    call = partial(kernel.launch, plan, arguments.tobytes())
    with device:
        run: Callable[[], None] = Graph(device, [call]).replay if captured else call
        for value in (11, 12):
            memory.write(np.array([0, 0, 0, 0, value]))
            run()
            device.synchronize("the pair")
            _, first_ended, second_began, seen, _ = memory.read().view(np.int64)
            assert seen == value
            assert (second_began < first_ended) == overlaps
    memory.free()
