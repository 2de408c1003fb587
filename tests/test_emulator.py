"""Each rule of the emulator, proven by a kernel that keeps it and the same kernel with one defect."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pyharness.emulator import EmulatorBuffer
from pyharness.emulator.buffers import element_index, runs_of
from pyharness.emulator.build import build
from pyharness.errors import EmulatorError, ToolchainError
from tests.emulated import kinds
from tests.small_kernels import INCLUDE_DIRS, PROLOGUE, kernel, launch


def line_of(source: str, text: str) -> int:
    """The line of the first occurrence of `text`."""
    return source[: source.index(text)].count("\n") + 1


def output(n: int, **options: bool) -> EmulatorBuffer:
    settings = {"writable": True, "initialised": False, "must_write": True} | options
    return EmulatorBuffer("y", np.full(n, -1, np.float32), **settings)


def floats(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(-99, 99, n).astype(np.float32)


# ---------------------------------------------------------------------------------------------- shared memory, barriers


def reverse(*defects: tuple[str, str], shared: int = 256, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = floats(384), output(384)
    launch(
        kernel("reverse", *defects),
        [EmulatorBuffer("x", x), y],
        "reverse",
        grid=3,
        block=64,
        shared=shared,
        n=2,
        **options,
    )
    return x, y.array


@pytest.mark.parametrize("resident_blocks", [1, 3])
def test_right_kernel_gives_the_same_bits_whatever_the_order(resident_blocks: int) -> None:
    for seed in range(3):
        x, y = reverse(seed=seed, resident_blocks=resident_blocks)
        assert np.array_equal(y.reshape(6, 64), x.reshape(6, 64)[:, ::-1])


def test_deleted_barrier_before_the_read_is_a_race() -> None:
    with pytest.raises(EmulatorError, match="shared_memory") as error:
        reverse(("__syncthreads();  // stored", ""))
    assert "race" in kinds(error.value)


def test_deleted_barrier_before_the_write_is_a_race_with_line_and_both_threads() -> None:
    defect = ("__syncthreads();  // loaded", "")
    with pytest.raises(EmulatorError) as error:
        reverse(defect)
    assert kinds(error.value) == {"race"}
    source = kernel("reverse", defect)
    lines = {line_of(source, "shared_memory[threadIdx.x] ="), line_of(source, "a.y[base + threadIdx.x] =")}
    finding = error.value.findings[0]
    assert finding.line in lines
    assert finding.buffer == "shared_memory"
    assert "other thread" in finding.text


def test_read_of_shared_memory_that_nothing_wrote() -> None:
    with pytest.raises(EmulatorError) as error:
        reverse(("shared_memory[63 - threadIdx.x]", "shared_memory[64 + threadIdx.x]"), shared=512)
    assert kinds(error.value) == {"uninitialised"}


def test_shared_memory_does_not_survive_its_block() -> None:
    with pytest.raises(EmulatorError) as error:
        reverse(("shared_memory[threadIdx.x] =", "if (blockIdx.x == 0) shared_memory[threadIdx.x] ="))
    assert kinds(error.value) == {"uninitialised"}


def test_access_behind_shared_memory() -> None:
    with pytest.raises(EmulatorError) as error:
        reverse(("shared_memory[63 - threadIdx.x]", "shared_memory[64 - threadIdx.x]"))
    assert "out-of-bounds" in kinds(error.value)


def test_threads_at_different_barriers() -> None:
    both = "if (threadIdx.x < 32) __syncthreads();\n else __syncthreads();"
    with pytest.raises(EmulatorError, match=r"line \d+ ?.*") as error:
        reverse(("__syncthreads();  // loaded", both))
    assert kinds(error.value) == {"divergent-barrier"}


def test_thread_exits_before_a_barrier() -> None:
    with pytest.raises(EmulatorError, match="exit") as error:
        reverse(("__syncthreads();  // loaded", "if (threadIdx.x == 7) return;\n __syncthreads();"))
    assert kinds(error.value) == {"exit-before-barrier"}


def test_bytes_and_halves_of_one_word_may_have_different_writers() -> None:
    source = (
        PROLOGUE
        + """
extern __shared__ unsigned char shared_memory[];
extern "C" __global__ void ssm_bytes(const __grid_constant__ ScanArgs a) {
  __nv_bfloat16* h = reinterpret_cast<__nv_bfloat16*>(shared_memory + 64);
  shared_memory[threadIdx.x] = threadIdx.x;
  h[threadIdx.x] = __float2bfloat16(a.x[threadIdx.x]);
  __syncthreads();
  unsigned four = reinterpret_cast<unsigned*>(shared_memory)[threadIdx.x / 4];
  a.y[threadIdx.x] = __bfloat162float(h[OTHER]) + (float)(four >> 24);
  __syncthreads();
  reinterpret_cast<unsigned*>(shared_memory)[threadIdx.x] = 0;
}"""
    )
    x, y = floats(64), output(64)
    for other in ("63 - threadIdx.x", "threadIdx.x"):
        launch(source.replace("OTHER", other), [EmulatorBuffer("x", x), y], "bytes", block=64, shared=256)
    assert np.array_equal(y.array, x + np.arange(64) // 4 * 4 + 3)
    overlapping = source.replace("OTHER", "threadIdx.x").replace("shared_memory + 64", "shared_memory + 62")
    with pytest.raises(EmulatorError) as error:
        launch(overlapping, [EmulatorBuffer("x", x), y], "bytes", block=64, shared=256)
    assert "race" in kinds(error.value)


def test_static_shared_memory_does_not_compile() -> None:
    source = PROLOGUE + 'extern "C" __global__ void ssm_k(ScanArgs a) { __shared__ float tile[4]; tile[a.n] = 1.0f; }'
    with pytest.raises(ToolchainError, match="section attribute"):
        launch(source, [], "k")


# ---------------------------------------------------------------------------------------------- asynchronous copies


def copy(*defects: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    x, y = floats(512), output(512)
    launch(kernel("copy", *defects), [EmulatorBuffer("x", x), y], "copy", shared=1024, n=4)
    return x, y.array


def test_asynchronous_copies_land_and_fill_with_zero() -> None:
    x, y = copy()
    expected = x.reshape(4, 16, 2, 4).copy()
    expected[:, 15, 1] = 0
    assert np.array_equal(y.reshape(4, 16, 2, 4), expected[:, :, ::-1])


@pytest.mark.parametrize(
    ("defect", "kind"),
    [
        (("emu_cp_async_wait_group(1);", ""), "async-copy"),
        (("emu_cp_async_wait_group(1);", "emu_cp_async_wait_group(2);"), "async-copy"),
        (("emu_cp_async_wait_group(0);", ""), "copy-not-awaited"),
        (("__syncthreads();  // landed", ""), "race"),
        (("__syncthreads();  // read", ""), "race"),
        (("a.x[tile * 128 + 4 * t], 16);", "a.x[tile * 128 + 4 * t + 1], 16);"), "misaligned"),
        (("a.x[tile * 128 + 4 * t], 16);", "a.x[tile * 128 + 4 * t + 8], 16);"), "out-of-bounds"),
        (("&tiles[tile % 2 * 32 + t], &a.x", "&tiles[tile % 2 * 33 + t], &a.x"), "out-of-bounds"),
    ],
)
def test_defect_around_an_asynchronous_copy(defect: tuple[str, str], kind: str) -> None:
    with pytest.raises(EmulatorError) as error:
        copy(defect)
    assert kind in kinds(error.value)


def test_source_of_a_copy_changes_before_its_wait() -> None:
    source = (
        PROLOGUE
        + """
extern __shared__ float shared_memory[];
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  emu_cp_async(shared_memory + threadIdx.x, a.workspace + threadIdx.x, 4);
  a.workspace[threadIdx.x] = 5.0f;
  emu_cp_async_wait_all();
}"""
    )
    work = EmulatorBuffer("workspace", floats(32), writable=True)
    with pytest.raises(EmulatorError) as error:
        launch(source, [work], "k", shared=128)
    assert kinds(error.value) == {"async-source"}


# ---------------------------------------------------------------------------------------------- global memory


def rows(*defects: tuple[str, str], x: np.ndarray | None = None, y: np.ndarray | None = None, **options: bool) -> None:
    x = floats(80).reshape(4, 20) if x is None else x
    y = np.zeros((4, 20), np.float32) if y is None else y
    settings = {"writable": True, "initialised": False, "must_write": True} | options
    buffers = [EmulatorBuffer("x", x[:, :16]), EmulatorBuffer("y", y[:, :16], **settings)]
    launch(kernel("rows", *defects), buffers, "rows", grid=4, block=4, stride=20)


def test_strided_views() -> None:
    x, y = floats(80).reshape(4, 20), np.full((4, 20), 7, np.float32)
    rows(x=x, y=y)
    assert np.array_equal(y[:, :16], 2 * x[:, :16])
    assert (y[:, 16:] == 7).all()


@pytest.mark.parametrize(
    ("defect", "kind", "buffer"),
    [
        (("*>(&x[i])", "*>(&x[i + 4 * (blockIdx.x == 3)])"), "out-of-bounds", "x"),
        (("*>(&x[i])", "*>(&x[i - 4 * (blockIdx.x == 0)])"), "out-of-bounds", "x"),
        (("*>(&x[i])", "*>(&x[i + 4 * (blockIdx.x == 1)])"), "gap", "x"),
        (("*>(&y[i])", "*>(&y[i + 4 * (blockIdx.x == 1)])"), "gap", "y"),
        (("*>(&x[i])", "*>(&x[i - (i > 0)])"), "misaligned", "x"),
        (("float* y = a.y", "float* y = (float*)a.x"), "read-only", "x"),
        (
            ("= *reinterpret_cast<const float4*>(&x[i])", "= *reinterpret_cast<const float4*>(&y[i])"),
            "uninitialised",
            "y",
        ),
        (("__stcs(", "if (blockIdx.x != 2 || i != 8) __stcs("), "unwritten", "y"),
        (("const float* x = a.x", "const float* x = (const float*)a.workspace"), "wild-address", None),
    ],
)
def test_defect_in_global_memory(defect: tuple[str, str], kind: str, buffer: str | None) -> None:
    with pytest.raises(EmulatorError) as error:
        rows(defect)
    assert (kind, buffer) in {(f.kind, f.buffer) for f in error.value.findings}


def test_unwritten_elements_are_named_and_arrays_are_left_alone() -> None:
    y = np.full((4, 20), 7, np.float32)
    with pytest.raises(EmulatorError, match=r"16 bytes of y .* element \[2, 8\]"):
        rows(("__stcs(", "if (blockIdx.x != 2 || i != 8) __stcs("), y=y)
    assert (y == 7).all()


def test_read_of_a_float_that_is_misaligned_for_its_vector_type_only() -> None:
    x = floats(96)[1:81].reshape(4, 20)  # rows 4 bytes off a multiple of 16
    with pytest.raises(EmulatorError, match="float4") as error:
        rows(x=x)
    assert kinds(error.value) == {"misaligned"}


def test_views_of_one_packed_row_keep_their_places() -> None:
    packed = floats(4 * 24).reshape(4, 24)
    x, y = packed[:, :16], packed[:, 16:]
    source = (
        PROLOGUE
        + """
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  a.y[blockIdx.x * a.stride + threadIdx.x] = a.x[blockIdx.x * a.stride + threadIdx.x] + (float)(a.y - a.x) + BEYOND;
}"""
    )
    expected = packed[:, :8] + 16
    buffers = [EmulatorBuffer("x", x), EmulatorBuffer("y", y, writable=True)]
    launch(source.replace("BEYOND", "0"), buffers, "k", grid=4, block=8, stride=24)
    assert np.array_equal(packed[:, 16:], expected)
    with pytest.raises(EmulatorError) as error:
        launch(source.replace("a.y[", "a.y[-8 +").replace("BEYOND", "0"), buffers, "k", grid=4, block=8, stride=24)
    assert {(f.kind, f.buffer) for f in error.value.findings} == {("read-only", "x")}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.int8, np.int64])
def test_addresses_keep_their_alignment_whatever_the_dtype(dtype: Any) -> None:
    source = (
        PROLOGUE
        + """
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) { *(long*)a.y = (long)a.x & 255; }"""
    )
    base = np.zeros(300, dtype)
    for first in (0, 1, 5):
        y = np.zeros(1, np.int64)
        launch(source, [EmulatorBuffer("x", base[first:]), EmulatorBuffer("y", y, writable=True)], "k", block=1)
        assert y[0] == base[first:].__array_interface__["data"][0] % 256


def test_stride_beyond_two_to_the_31_elements(tmp_path: Path) -> None:
    stride = 2**31 + 12
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(4 * (2 * stride + 16))
    flat = np.memmap(tmp_path / "sparse", np.float32, "r+")
    y = np.lib.stride_tricks.as_strided(flat, (3, 16), (4 * stride, 4))
    x = np.lib.stride_tricks.as_strided(flat[100:], (3, 16), (4 * stride, 4))[:2]
    y[:] = x[:] = np.arange(16)
    source = (
        PROLOGUE
        + """
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  a.y[blockIdx.x * a.stride + threadIdx.x] += 1.0f;
}"""
    )
    buffers = [EmulatorBuffer("y", y, writable=True, must_write=True)]
    launch(source, buffers, "k", grid=3, block=16, stride=stride)
    assert np.array_equal(y, np.broadcast_to(np.arange(16) + 1, (3, 16)))
    with pytest.raises(EmulatorError) as error:
        launch(source, buffers, "k", grid=3, block=17, stride=stride)
    assert kinds(error.value) <= {"gap", "out-of-bounds"}


def test_workspace_of_the_first_launch_is_there_in_the_second() -> None:
    source = (
        PROLOGUE
        + """
extern "C" __global__ void ssm_one(const __grid_constant__ ScanArgs a) { a.workspace[threadIdx.x] = a.x[threadIdx.x]; }
extern "C" __global__ void ssm_two(const __grid_constant__ ScanArgs a) {
  a.y[threadIdx.x] = a.workspace[31 - threadIdx.x];
}"""
    )
    work = EmulatorBuffer("workspace", np.zeros(32, np.float32), writable=True, initialised=False)
    x, y = floats(32), output(32)
    launch(source, [EmulatorBuffer("x", x), y, work], ["one", "two"])
    assert np.array_equal(y.array, x[::-1])
    with pytest.raises(EmulatorError) as error:
        launch(source, [EmulatorBuffer("x", x), y, work], "two")
    assert kinds(error.value) == {"uninitialised"}


def test_block_copies_and_local_arrays() -> None:
    source = (
        PROLOGUE
        + """
struct Row { float v[24]; };
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  Row r = reinterpret_cast<const Row*>(a.x)[threadIdx.x];
  float sum[24];
  for (int i = 0; i < 24; ++i) sum[i] = r.v[(i * 5 + a.n) % 24];
  memcpy(a.y + threadIdx.x * 24, sum, sizeof sum);
}"""
    )
    x, y = floats(96), output(96)
    launch(source, [EmulatorBuffer("x", x), y], "k", block=4)
    assert np.array_equal(y.array.reshape(4, 24), x.reshape(4, 24)[:, np.arange(24) * 5 % 24])
    with pytest.raises(EmulatorError) as error:
        launch(source, [EmulatorBuffer("x", x), y], "k", block=5)
    assert kinds(error.value) == {"out-of-bounds"}


# ---------------------------------------------------------------------------------------------- warps


def test_syncwarp_orders_memory_within_a_warp() -> None:
    x, y = floats(64), output(64)
    launch(kernel("warp"), [EmulatorBuffer("x", x), y], "warp", block=64, shared=256)
    assert np.array_equal(y.array, np.repeat(x.reshape(2, 32).sum(1), 32))


HALVES = "__syncwarp(lane < 16 ? 0xffffu : 0xffff0000u);"


@pytest.mark.parametrize(
    ("which", "instead"),
    [
        (which, instead)
        for which in ("stored", "summed", "broadcast")
        for instead in ("", "__shfl_xor_sync(~0u, lane, 1);")
    ]
    + [("stored", HALVES), ("broadcast", HALVES)],
)
def test_missing_or_weaker_order_within_a_warp_is_a_race(which: str, instead: str) -> None:
    defect = (f"__syncwarp();  // {which}", instead)
    with pytest.raises(EmulatorError) as error:
        launch(kernel("warp", defect), [EmulatorBuffer("x", floats(64)), output(64)], "warp", block=64, shared=256)
    assert "race" in kinds(error.value)


def lanes(*defects: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    x, y = floats(64), output(64)
    launch(kernel("lanes", *defects), [EmulatorBuffer("x", x), y], "lanes", block=64)
    return x, y.array


def test_shuffles_and_votes() -> None:
    x, y = lanes()
    t = np.arange(64)
    lane = t % 32
    total = np.repeat(x.reshape(2, 32).sum(1), 32)
    down = lane + np.where(lane % 8 < 7, lane + 1, lane)
    up = lane + np.where(lane % 8 > 0, lane - 1, lane)
    part = np.where(lane < 8, down, up)
    assert np.array_equal(y, total + part + t // 16 * 16 + 0.5 + 22 + 100 + 1000)


@pytest.mark.parametrize(
    ("defect", "kind"),
    [
        (("for (int bit = 1", "if (lane != 9) for (int bit = 1"), "warp-divergence"),  # a lane never comes
        (("a.x[t];", "a.x[t];\n if (lane == 3) return;"), "warp-divergence"),  # a lane has exited
        (("0x000000ffu, part, 1, 8", "0x0000007fu, part, 1, 8"), "warp-mask"),  # lane 7 is not in its own mask
        (("0xffffff00u, part, 1, 8", "0xffffff00u, part, 1, 16"), "warp-source"),  # lane 8 reads lane 7
        (("0x000000ffu, part", "0xffffffffu, part"), "warp-divergence"),
    ],
)
def test_defect_in_a_warp_operation(defect: tuple[str, str], kind: str) -> None:
    with pytest.raises(EmulatorError, match=r"line \d+") as error:
        lanes(defect)
    assert kinds(error.value) == {kind}


def test_indices_of_three_dimensions() -> None:
    source = (
        PROLOGUE
        + """
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  a.y[b * 24 + t] = (float)(b * 24 + t);
}"""
    )
    y = output(24 * 30)
    launch(source, [y], "k", grid=(2, 3, 5), block=(4, 3, 2), block_order="shuffled")
    assert np.array_equal(y.array, np.arange(720))


def test_integer_built_ins() -> None:
    source = (
        PROLOGUE
        + """
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  unsigned r = 0;
  r |= (__umulhi(0x80000000u, 6u) == 3u) << 0 | (__brev(1u) == 0x80000000u) << 1 | (__popc(0xf0f0u) == 8) << 2;
  r |= (__ffs(8) == 4) << 3 | (__clz(1) == 31) << 4 | (__float_as_uint(1.0f) == 0x3f800000u) << 5;
  r |= (min(3, -2) == -2) << 6 | (max(2.5f, 1.0f) == 2.5f) << 7;
  r |= (__byte_perm(0x03020100u, 0x07060504u, 0x7531u) == 0x07050301u) << 8;
  r |= (atomicMax(&a.flags[0], 7u) == 0u) << 9 | (atomicCAS(&a.flags[0], 7u, 9u) == 7u) << 10;
  r |= (atomicExch(&a.flags[0], r) == 9u) << 11;
  a.y[0] = (float)r;
}"""
    )
    y = output(1)
    launch(source, [y, EmulatorBuffer("flags", np.zeros(1, np.uint32), writable=True)], "k", block=1)
    assert y.array[0] == 4095


# ---------------------------------------------------------------------------------------------- between warps


def relay(*defects: tuple[str, str], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    x, y = floats(4 * 32), output(4 * 32)
    buffers = [EmulatorBuffer("x", x), y]
    launch(kernel("relay", *defects), buffers, "relay", block=128, shared=512, n=3, seed=seed)
    return x, y.array


def test_warps_hand_over_by_barriers_with_a_number() -> None:
    for seed in range(4):
        x, y = relay(seed=seed)
        rounds = np.concatenate([x.reshape(4, 32)] * 3).cumsum(0, dtype=np.float32)
        assert np.array_equal(y.reshape(4, 32), rounds[-4:])


@pytest.mark.parametrize(
    ("defect", "found"),
    [
        # Nobody waits: a sum is read before it is there, and overwritten before it was read.
        (("if (warp + round > 0) emu_named_barrier(warp, 64, 1);", ""), {"race", "uninitialised"}),
        # Handed over before it is stored.
        (
            (
                "shared_memory[next * 32 + lane] = sum + a.x[warp * 32 + lane];\n"
                "    if (next > 0 || round + 1 < a.n) emu_named_barrier(next, 64, 0);",
                "if (next > 0 || round + 1 < a.n) emu_named_barrier(next, 64, 0);\n"
                "    shared_memory[next * 32 + lane] = sum + a.x[warp * 32 + lane];",
            ),
            {"race", "uninitialised"},
        ),
        # The last warp does not come back to the first.
        (("next > 0 || round + 1 < a.n", "next > 0"), {"deadlock"}),
        (("emu_named_barrier(next, 64, 0)", "emu_named_barrier(next, 96, 0)"), {"divergent-barrier"}),
        (("emu_named_barrier(warp, 64, 1)", "emu_named_barrier(warp + 16, 64, 1)"), {"divergent-barrier"}),
    ],
)
def test_warps_out_of_order_are_reported(defect: tuple[str, str], found: set[str]) -> None:
    with pytest.raises(EmulatorError) as error:
        relay(defect)
    assert kinds(error.value) & found


# ---------------------------------------------------------------------------------------------- between blocks


def handover(*defects: tuple[str, str], resident_blocks: int = 4, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    x, y = floats(8 * 32), output(8 * 32)
    flags = EmulatorBuffer("flags", np.zeros(8, np.uint32), writable=True)
    work = EmulatorBuffer("workspace", np.zeros(8 * 32, np.float32), writable=True, initialised=False)
    buffers = [EmulatorBuffer("x", x), y, flags, work]
    launch(
        kernel("handover", *defects),
        buffers,
        "handover",
        grid=8,
        shared=128,
        resident_blocks=resident_blocks,
        **options,
    )
    return x, y.array


@pytest.mark.parametrize("resident_blocks", [1, 2, 4, 8])
def test_blocks_hand_over_by_flag(resident_blocks: int) -> None:
    for seed in range(4):
        x, y = handover(resident_blocks=resident_blocks, seed=seed)
        assert np.array_equal(y.reshape(8, 32), x.reshape(8, 32).cumsum(0))


@pytest.mark.parametrize(
    "defect",
    [
        ("emu_st_release(&a.flags[b], 1u)", "atomicExch(&a.flags[b], 1u)"),  # no release
        ("emu_ld_acquire(&a.flags[b - 1])", "*(volatile unsigned*)&a.flags[b - 1]"),  # no acquire
        ("__syncthreads();  // acquired", ""),  # only thread 0 acquired
        ("__syncthreads();  // stored", "if (t == 0) __nanosleep(1);"),  # only thread 0's store is released
        ("while (emu_ld_acquire(&a.flags[b - 1]) == 0) emu_yield();", "{}"),  # no wait
    ],
)
def test_hand_over_without_order_is_reported(defect: tuple[str, str]) -> None:
    with pytest.raises(EmulatorError) as error:
        handover(defect)
    assert kinds(error.value) & {"race", "uninitialised"}


def test_wait_for_what_never_comes_is_reported() -> None:
    with pytest.raises(EmulatorError, match="8|4 blocks are resident") as error:
        handover(("emu_st_release(&a.flags[b], 1u)", "(void)0"))
    assert kinds(error.value) == {"runaway"}


@pytest.mark.parametrize("resident_blocks", [1, 4])
def test_last_block_adds_up(resident_blocks: int) -> None:
    for defect, good in [(None, True), ("release", False), ("acquire", False)]:
        x, y = floats(6), output(1)
        flags = EmulatorBuffer("flags", np.zeros(1, np.uint32), writable=True)
        work = EmulatorBuffer("workspace", np.zeros(6, np.float32), writable=True, initialised=False)
        source = kernel("last_block", *([(f"__threadfence();  // {defect}", "")] if defect else []))
        buffers = [EmulatorBuffer("x", x), y, flags, work]
        if good:
            launch(source, buffers, "last_block", grid=6, resident_blocks=resident_blocks, block_order="shuffled")
            assert y.array[0] == x.sum()
            continue
        with pytest.raises(EmulatorError) as error:
            launch(source, buffers, "last_block", grid=6, resident_blocks=resident_blocks)
        assert kinds(error.value) == {"race"}


@pytest.mark.parametrize("resident_blocks", [1, 4])
@pytest.mark.parametrize(
    ("statement", "bad"),
    [
        ("a.workspace[blockIdx.x * 32 + threadIdx.x] = 1.0f;", False),
        ("a.workspace[blockIdx.x * 31 + threadIdx.x] = 1.0f;", True),  # same value, still a race
        ("a.workspace[threadIdx.x] = a.workspace[threadIdx.x + 64];", True),
        ("a.y[blockIdx.x * 32 + threadIdx.x] = a.workspace[threadIdx.x];", False),  # all blocks read
        ("if (blockIdx.x == 3) a.workspace[5] = 0.0f; else a.y[blockIdx.x] = a.workspace[5];", True),
        ("atomicAdd(a.workspace, 1.0f);", False),
        ("if (blockIdx.x + threadIdx.x == 0) a.workspace[0] = 2.0f; else atomicAdd(a.workspace, 1.0f);", True),
        ("a.workspace[blockIdx.x * 32 + threadIdx.x / 2 * 2] = 1.0f;", True),  # two threads of a block
    ],
)
def test_races_in_global_memory(statement: str, bad: bool, resident_blocks: int) -> None:
    source = PROLOGUE + f'extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {{ {statement} }}'
    buffers = [EmulatorBuffer("workspace", floats(128), writable=True), output(128, initialised=True, must_write=False)]
    if not bad:
        launch(source, buffers, "k", grid=4, resident_blocks=resident_blocks)
        return
    with pytest.raises(EmulatorError) as error:
        launch(source, buffers, "k", grid=4, resident_blocks=resident_blocks)
    assert kinds(error.value) == {"race"}


# ---------------------------------------------------------------------------------------------- order, limits, errors


def test_the_seed_decides_the_order() -> None:
    source = (
        PROLOGUE
        + """
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  a.y[blockIdx.x * 32 + threadIdx.x] = (float)atomicAdd(a.flags, 1u);
}"""
    )

    def order(seed: int) -> list[float]:
        y, flags = output(128), EmulatorBuffer("flags", np.zeros(1, np.uint32), writable=True)
        launch(source, [y, flags], "k", grid=4, seed=seed, resident_blocks=2)
        return list(y.array)

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) == 5


def test_failed_assertion_is_a_finding() -> None:
    source = PROLOGUE + '#include <cassert>\nextern "C" __global__ void ssm_k(ScanArgs a) { assert(a.n == 1); }'
    with pytest.raises(EmulatorError, match=r"a\.n == 1") as error:
        launch(source, [], "k")
    assert kinds(error.value) == {"assert"}
    launch(source, [], "k", n=1)


def test_missing_entry_and_broken_source_are_toolchain_errors() -> None:
    with pytest.raises(ToolchainError, match="ssm_none"):
        launch(kernel("rows"), [], "none")
    with pytest.raises(ToolchainError, match="nonsense"):
        launch(PROLOGUE + "nonsense;", [], "k")


def test_a_compiler_that_checks_block_copies_by_default_is_told_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ubuntu's g++ does: glibc's own memcpy for that would be a second one."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} -D_FORTIFY_SOURCE=2 "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert build(kernel("reverse"), INCLUDE_DIRS, tmp_path / "cache").library.is_file()


def test_malformed_buffers_are_value_errors() -> None:
    x = floats(4)
    with pytest.raises(ValueError, match="negative"):
        launch(kernel("rows"), [EmulatorBuffer("x", x[::-1])], "rows")
    with pytest.raises(ValueError, match="differ"):
        launch(kernel("rows"), [EmulatorBuffer("x", x), EmulatorBuffer("x", x)], "rows")
    x.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        launch(kernel("rows"), [EmulatorBuffer("y", x, writable=True)], "rows")


def test_runs_and_indices_of_views() -> None:
    array = np.zeros((5, 4, 6), np.int16)[:, 1:3, :5]
    runs = runs_of(array)
    assert (runs.run_bytes, runs.shape, runs.strides) == (10, (5, 2), (48, 12))
    assert runs.span == 4 * 48 + 12 + 10
    assert [runs.contains(o) for o in (9, 10, 12, 24, runs.span)] == [True, False, True, False, False]
    assert element_index(array, 48 + 12 + 3) == (1, 1, 1)


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asserted: 16 blocks of 128 threads, 40 tokens, 32 state elements a thread."""
    source = (
        PROLOGUE
        + """
extern __shared__ __align__(16) float shared_memory[];
extern "C" __global__ void ssm_k(const __grid_constant__ ScanArgs a) {
  float s[32] = {};
  for (int token = 0; token < 40; ++token) {
    shared_memory[threadIdx.x] = a.x[token * 128 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 32; ++i) s[i] = fmaf(0.5f, s[i], shared_memory[(threadIdx.x % 4) * 32 + i] * a.x[i]);
    __syncthreads();
  }
  float* state = a.workspace + (blockIdx.x * 128 + threadIdx.x) * 32;
  for (int i = 0; i < 32; ++i) state[i] = s[i];
}"""
    )
    state = EmulatorBuffer("workspace", np.zeros(16 * 128 * 32, np.float32), writable=True, must_write=True)
    report = launch(source, [EmulatorBuffer("x", floats(40 * 128)), state], "k", grid=16, block=128, shared=512)
    with capsys.disabled():
        rate = report.accesses / report.seconds / 1e6
        counts = f"{report.accesses} accesses, {report.switches} switches"
        print(f"\nemulator: {counts} in {report.seconds:.3f} s, {rate:.0f} M/s")  # noqa: T201
