"""mamba-ssm's functions over host arrays and the stand-in driver: all but PyTorch's own part, which needs a GPU."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from pyharness import manifest, transpose
from pyharness.args import SCAN_ARGS
from pyharness.drop_in import DropIn, Place, described
from pyharness.emulator import EmulatorBuffer, EmulatorLaunch, run
from pyharness.errors import DeviceError, ImageError, InvalidProblem, NoKernel, Unsupported, WrongShape
from pyharness.launcher import Launcher
from pyharness.problem import DTYPES
from pyharness.spec import Launch, Plan, parse_id
from pyharness.strides import merged
from pyharness.toolchain import ROOT, Image, Usage, cuda_include_dirs
from tests.fake_cuda import build_driver, write_facts

Array = NDArray[Any]

#: Kernels that these tests launch; the stand-in driver knows these symbols alone.
KERNELS = (
    "recurrent_n16_l4_r32_w1_c32_tiled_f32_sf32",
    "update_n16_l4_r64_w2_c1_f32_sf32",
    "update_n128_l32_r8_w2_c1_bf16_sf32",
)
RECURRENT, UPDATE, UPDATE_BF16 = KERNELS
#: The stand-in computes in double and stores in f32; bf16 keeps eight bits.
F32, BF16 = 1e-6, 2.0**-8


class HostArrays:
    """NumPy in the place of a framework: device memory is host memory."""

    def __init__(self) -> None:
        self.copies: list[str] = []
        self.capturing = False

    def described(self, tensor: Array) -> Array:
        return tensor

    def dtype(self, tensor: Array) -> str:
        return next((name for name, kind in DTYPES.items() if kind == tensor.dtype), str(tensor.dtype))

    def signature(self, tensor: Array) -> Any:
        return tensor.shape, tensor.strides, tensor.dtype.str, tensor.dtype.name

    def address(self, tensor: Array) -> int:
        return int(tensor.ctypes.data)

    def place(self, tensors: Mapping[str, Array]) -> Place:
        return Place(1, 0, self.capturing)

    def converted(self, tensor: Array, dtype: str, *, fresh: bool = False) -> Array:
        kind = {**DTYPES, "i32": np.dtype(np.int32)}[dtype]
        self.copies.append(dtype)
        return np.array(tensor, kind, order="C")

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Array:
        return np.full(shape, np.nan, DTYPES[dtype])

    def offsets(self, sequences: int, tokens: int, place: Place) -> Array:
        return np.arange(0, sequences * tokens + 1, tokens, dtype=np.int32)

    def zeros(self, count: int, place: Place) -> Array:
        return np.zeros(count, np.uint8)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_driver(tmp_path_factory.mktemp("driver"))
    write_facts(folder / "facts", [manifest.read(name) for name in KERNELS])
    return folder


@pytest.fixture
def host(driver: Path, monkeypatch: pytest.MonkeyPatch) -> HostArrays:
    monkeypatch.setenv("FAKECUDA_FACTS", str(driver / "facts"))
    return HostArrays()


class Turning:
    """The kernel of transpositions in the place of a loaded one: its text in the emulator, over host memory."""

    def __init__(self, image: Image, argument_bytes: int) -> None:
        self.symbols, self.argument_bytes = set(image.usage), argument_bytes
        self.launches: list[int] = []

    def launch(self, plan: Plan, arguments: bytes, stream: int) -> None:
        assert len(arguments) == self.argument_bytes
        (launch,) = plan.launches
        assert launch.entry in self.symbols
        dtype = {"ssm_transpose_16": "f16", "ssm_transpose_32": "f32"}[launch.entry]
        *_, count, tokens = struct.unpack("<25q2i", arguments)
        self.launches.append(count)
        buffers = []
        for place in range(count):
            source, result, batch_stride, row_stride, rows = struct.unpack_from("<5q", arguments, 40 * place)
            shape = (launch.grid[2], tokens, rows)
            given = described(source, shape, (batch_stride, 1, row_stride), dtype)
            made = described(result, shape, (tokens * rows, rows, 1), dtype)
            buffers.append(EmulatorBuffer(f"source {place}", given))
            buffers.append(EmulatorBuffer(f"result {place}", made, writable=True, initialised=False, must_write=True))

        def pack(address: Mapping[str, int]) -> bytes:
            packed = bytearray(arguments)
            for place in range(count):
                both = (address[f"source {place}"], address[f"result {place}"])
                struct.pack_into("<2q", packed, 40 * place, *both)
            return bytes(packed)

        text = transpose.SOURCE.read_text(encoding="utf-8")
        one = EmulatorLaunch(launch.entry, launch.grid, launch.block, launch.shared_bytes)
        run(text, [one], buffers, pack, include_dirs=cuda_include_dirs())


class HostLauncher(Launcher):
    """The stand-in driver, which knows kernels of scans alone."""

    turning: Any = None

    def loaded(self, kernel: str) -> Any:
        return self.turning if kernel == transpose.NAME else super().loaded(kernel)

    def load(self, kernel: str, image: Image, argument_bytes: int = SCAN_ARGS.itemsize) -> Any:
        if kernel != transpose.NAME:
            return super().load(kernel, image, argument_bytes)
        self.turning = Turning(image, argument_bytes)
        return self.turning


@pytest.fixture
def calls(host: HostArrays, driver: Path) -> DropIn:
    return DropIn(host, lambda ordinal: HostLauncher(ordinal, str(driver / "libcuda.so.1")))


def turned(calls: DropIn) -> list[int]:
    """How many arrays each launch turned."""
    turning = calls.launcher(1).loaded(transpose.NAME)
    return [] if turning is None else list(turning.launches)


def softplus(value: Array) -> Array:
    return np.where(value <= 20, np.log1p(np.exp(np.minimum(value, 20))), value)


def plain_update(t: Mapping[str, Array], dt_softplus: bool) -> tuple[Array, Array]:
    """y and the states of every batch row, from the formula of the package with every argument spelled out, in f64."""
    x = t["x"].astype(float)
    dt = t["dt"].astype(float) + t.get("dt_bias", 0.0)
    dt = softplus(dt) if dt_softplus else dt
    slots = t.get("state_batch_indices", np.arange(len(x)))
    B, C = (np.repeat(t[n].astype(float), x.shape[1] // t[n].shape[1], axis=1) for n in ("B", "C"))
    state = t["state"].astype(float)[slots]
    state = state * np.exp(dt[..., None] * t["A"]) + dt[..., None] * B[:, :, None] * x[..., None]
    y = (state * C[:, :, None]).sum(-1) + t.get("D", 0.0) * x
    if "z" in t:
        z = t["z"].astype(float)
        y = y * z / (1 + np.exp(-z))
    return y, state


def plain_scan(t: Mapping[str, Array], low: float, high: float, dt_softplus: bool) -> tuple[Array, Array]:
    """y and the final states of a batch of prompts, token by token."""
    batch, tokens, heads, dim = t["x"].shape
    state = np.zeros((batch, heads, dim, t["B"].shape[-1]))
    if "initial_states" in t:
        state = t["initial_states"].astype(float)
    dt = t["dt"].astype(float) + t.get("dt_bias", np.zeros(heads))
    dt = np.clip(softplus(dt) if dt_softplus else dt, low, high)
    y = np.empty(t["x"].shape)
    for i in range(tokens):
        step = {n: t[n][:, i] for n in ("x", "B", "C", "z") if n in t}
        step |= {"dt": np.repeat(dt[:, i, :, None], dim, 2), "A": t["A"][:, None, None], "state": state}
        step |= {"D": t["D"][:, None]} if "D" in t else {}
        y[:, i], state = plain_update(step, False)
    return y, state


def error(found: Array, wanted: Array) -> float:
    return float(np.linalg.norm(found.astype(float) - wanted) / np.linalg.norm(wanted))


def part(row: Array, first: int, *inner: int) -> Array:
    """Columns of packed rows as axes of their own, in place."""
    item = row.itemsize
    steps = [item * int(np.prod(inner[axis + 1 :])) for axis in range(len(inner))]
    outer = row.ndim - 1
    return np.lib.stride_tricks.as_strided(
        row[..., first:], (*row.shape[:outer], *inner), (*row.strides[:outer], *steps)
    )


def packed_row(rng: np.random.Generator, io: str, *outer: int, heads: int, dim: int, n: int) -> dict[str, Array]:
    """x, B and C of two groups as views of one projection row, the rows an odd number of elements apart."""
    row = rng.standard_normal((*outer, heads * dim + 4 * n + 3)).astype(DTYPES[io])
    first = heads * dim
    return {"x": part(row, 0, heads, dim), "B": part(row, first, 2, n), "C": part(row, first + 2 * n, 2, n)}


def decode(
    batch: int = 3, heads: int = 4, dim: int = 8, n: int = 16, io: str = "f32", slots: int = 5
) -> dict[str, Any]:
    """Arguments of a decode step of Mamba-2 as models hand them over."""
    rng = np.random.default_rng(batch)
    full = (batch, heads, dim)
    vectors = {name: rng.standard_normal((heads, 1)).astype(np.float32) for name in ("D", "dt_bias")}
    return {
        "state": rng.standard_normal((slots, heads, dim, n)).astype(np.float32),
        **packed_row(rng, io, batch, heads=heads, dim=dim, n=n),
        "dt": np.broadcast_to(rng.standard_normal((batch, heads, 1)).astype(DTYPES[io]), full),
        "A": np.broadcast_to(-np.exp(rng.standard_normal((heads, 1, 1))).astype(np.float32), (heads, dim, n)),
        **{name: np.broadcast_to(vector, (heads, dim)) for name, vector in vectors.items()},
        "z": rng.standard_normal(full).astype(DTYPES[io]),
    }


def prompt(batch: int = 2, tokens: int = 37, heads: int = 4, dim: int = 8, n: int = 16) -> dict[str, Any]:
    """Arguments of a prefill in f32."""
    rng = np.random.default_rng(tokens)
    return {
        **packed_row(rng, "f32", batch, tokens, heads=heads, dim=dim, n=n),
        "dt": rng.standard_normal((batch, tokens, heads)).astype(np.float32),
        "A": -np.exp(rng.standard_normal(heads)).astype(np.float32),
        "D": rng.standard_normal(heads).astype(np.float32),
        "dt_bias": rng.standard_normal(heads).astype(np.float32),
        "z": rng.standard_normal((batch, tokens, heads, dim)).astype(np.float32),
    }


def update(calls: DropIn, tensors: dict[str, Any], kernel: str | None = UPDATE, **options: Any) -> Array:
    return calls.selective_state_update(tensors, **{"dt_softplus": True, "workspace": None, **options}, kernel=kernel)


def chunk_scan(calls: DropIn, tensors: dict[str, Any], kernel: str | None = RECURRENT, **options: Any) -> Any:
    defaults = {"dt_softplus": True, "dt_limit": (0.0, float("inf")), "workspace": None}
    return calls.mamba_chunk_scan_combined(tensors, **{**defaults, **options}, kernel=kernel)


# Decode.


@pytest.mark.parametrize("missing", [(), ("z",), ("D", "dt_bias", "z")])
@pytest.mark.parametrize("dt_softplus", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_decode_step_is_the_packages(
    calls: DropIn, host: HostArrays, batch: int, dt_softplus: bool, missing: tuple[str, ...]
) -> None:
    tensors = {name: array for name, array in decode(batch).items() if name not in missing}
    wanted, states = plain_update({**tensors, "state": tensors["state"][:batch].copy()}, dt_softplus)
    untouched = tensors["state"][batch:].copy()
    y = update(calls, tensors, dt_softplus=dt_softplus)
    assert error(y, wanted) < F32
    assert error(tensors["state"][:batch], states) < F32
    np.testing.assert_array_equal(tensors["state"][batch:], untouched)
    assert host.copies == []
    assert calls.launched == {UPDATE: 1}


def test_slots_are_those_of_the_indices_and_a_negative_one_is_padding(calls: DropIn, host: HostArrays) -> None:
    tensors = decode(3) | {"state_batch_indices": np.array([4, -1, 0], np.int64)}
    before = tensors["state"].copy()
    wanted, states = plain_update(tensors, True)
    y = update(calls, tensors)
    assert host.copies == ["i32"]
    assert error(y[[0, 2]], wanted[[0, 2]]) < F32
    assert not y[1].any()
    assert error(tensors["state"][[4, 0]], states[[0, 2]]) < F32
    np.testing.assert_array_equal(tensors["state"][1:4], before[1:4])


def test_bf16_of_a_128_column_state_and_f32_parameters_converted_from_bf16(calls: DropIn, host: HostArrays) -> None:
    tensors = decode(2, n=128, io="bf16")
    tensors["D"] = np.broadcast_to(tensors["D"][:, :1].astype(ml_dtypes.bfloat16), (4, 8))
    wanted, states = plain_update({**tensors, "state": tensors["state"][:2].copy()}, True)
    y = update(calls, tensors, kernel=UPDATE_BF16)
    assert y.dtype == ml_dtypes.bfloat16
    assert error(y, wanted) < BF16
    assert error(tensors["state"][:2], states) < F32
    assert host.copies == ["f32"]


@pytest.mark.parametrize("kernel", [RECURRENT, UPDATE])
def test_mamba_1_without_heads_has_its_values_for_each_channel_and_column(calls: DropIn, kernel: str) -> None:
    rng = np.random.default_rng(1)
    batch, dim, n = 3, 64, 16

    def drawn(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {
        "state": drawn(batch, dim, n),
        "x": drawn(batch, dim),
        "dt": drawn(batch, dim),
        "A": -np.exp(drawn(dim, n)),
        "B": drawn(batch, n),
        "C": drawn(batch, n),
        "D": drawn(dim),
        "z": drawn(batch, dim),
        "dt_bias": drawn(dim),
    }
    axis = {"state": 1, "x": 1, "dt": 1, "A": 0, "B": 1, "C": 1, "D": 0, "z": 1, "dt_bias": 0}
    wanted, states = plain_update({name: np.expand_dims(t, axis[name]) for name, t in tensors.items()}, True)
    y = update(calls, tensors, kernel=kernel)
    assert y.shape == (batch, dim)
    assert error(y, wanted[:, 0]) < F32
    assert error(tensors["state"], states[:, 0]) < F32


def test_heads_with_values_for_each_row_are_channels(calls: DropIn, host: HostArrays) -> None:
    """The same result whichever way the arguments say it; what is expanded has to be spelled out then."""
    tensors = decode(2)
    rng = np.random.default_rng(2)
    tensors["A"] = -np.exp(rng.standard_normal((4, 8, 16))).astype(np.float32)
    wanted, states = plain_update({**tensors, "state": tensors["state"][:2].copy()}, True)
    y = update(calls, tensors, kernel=UPDATE)
    assert error(y, wanted) < F32
    assert error(tensors["state"][:2], states) < F32
    # dt, D and dt_bias were expanded.
    assert host.copies == ["f32"] * 3


def test_a_call_that_was_made_before_finds_other_addresses_and_contents(calls: DropIn) -> None:
    first, second = decode(3), decode(3)
    second["x"] = -2 * second["x"]
    update(calls, first)
    wanted, _ = plain_update({**second, "state": second["state"][:3].copy()}, True)
    assert error(update(calls, second), wanted) < F32


def test_arguments_that_differ_in_alignment_alone_are_told_apart(calls: DropIn) -> None:
    """The stand-in driver refuses flags that do not fit the addresses."""
    for shift in (0, 1, 4, 0):
        tensors = decode(3)
        memory = np.zeros(tensors["z"].size + 8, np.float32)
        start = -memory.ctypes.data % 16 // 4 + shift
        z = memory[start : start + tensors["z"].size].reshape(tensors["z"].shape)
        z[...] = tensors["z"]
        wanted, _ = plain_update({**tensors, "state": tensors["state"][:3].copy()}, True)
        assert error(update(calls, tensors | {"z": z}), wanted) < F32


# Prefill.


@pytest.mark.parametrize("start", [False, True], ids=["fresh", "resumed"])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_prompt_is_the_packages(calls: DropIn, batch: int, start: bool) -> None:
    tensors = prompt(batch)
    if start:
        tensors["initial_states"] = np.random.default_rng(3).standard_normal((batch, 4, 8, 16)).astype(np.float32)
    given = {name: array.copy() for name, array in tensors.items()}
    wanted, states = plain_scan(tensors, 0.0, np.inf, True)
    y, final = chunk_scan(calls, tensors)
    assert error(y, wanted) < F32
    assert error(final, states) < F32
    for name, array in given.items():
        np.testing.assert_array_equal(tensors[name], array)


@pytest.mark.parametrize(("dt_softplus", "limit"), [(False, (0.0, np.inf)), (True, (0.1, 0.5)), (False, (0.1, 0.5))])
def test_steps_are_clamped_as_the_package_does(calls: DropIn, dt_softplus: bool, limit: tuple[float, float]) -> None:
    """Its default limit holds negative steps at zero where there is no softplus."""
    tensors = prompt(1)
    wanted, states = plain_scan(tensors, *limit, dt_softplus)
    y, final = chunk_scan(calls, tensors, dt_softplus=dt_softplus, dt_limit=limit)
    assert error(y, wanted) < F32
    assert error(final, states) < F32


def test_packed_prompts_are_as_if_alone(calls: DropIn) -> None:
    tensors = prompt(1, 20)
    tensors["cu_seqlens"] = np.array([0, 5, 6, 20], np.int32)
    tensors["seq_idx"] = np.repeat(np.arange(3, dtype=np.int32), [5, 1, 14])[None]
    y, final = chunk_scan(calls, tensors)
    assert final.shape == (3, 4, 8, 16)
    of_tokens = ("x", "B", "C", "dt", "z")
    for s, (first, last) in enumerate([(0, 5), (5, 6), (6, 20)]):
        alone = {name: tensors[name][:, first:last] if name in of_tokens else tensors[name] for name in prompt(1)}
        wanted, states = plain_scan(alone, 0.0, np.inf, True)
        assert error(y[:, first:last], wanted) < F32
        assert error(final[s : s + 1], states) < F32


def test_what_strides_cannot_say_is_copied_and_nothing_else(calls: DropIn, host: HostArrays) -> None:
    tensors = prompt(2)
    # Heads before tokens: no view has the rows that a scan wants.
    tensors["x"] = np.ascontiguousarray(tensors["x"].transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    wanted, _ = plain_scan(tensors, 0.0, np.inf, True)
    for _ in range(2):
        y, _ = chunk_scan(calls, tensors)
        assert error(y, wanted) < F32
    assert host.copies == ["f32"] * 2


@pytest.mark.parametrize("gap", [0, 3])
def test_what_a_convolution_leaves_is_turned_by_one_launch(calls: DropIn, host: HostArrays, gap: int) -> None:
    """x, B and C of one tensor whose tokens lie side by side, of a longer one where a prompt goes on."""
    tensors = prompt(2, 37)
    row = np.random.default_rng(5).standard_normal((2, 4 * 8 + 4 * 16, 37 + gap)).astype(np.float32)
    channels = row[:, :, gap:].swapaxes(1, 2)
    parts = {"x": (0, 4, 8), "B": (32, 2, 16), "C": (64, 2, 16)}
    for name, (first, *inner) in parts.items():
        tensors[name] = channels[:, :, first : first + int(np.prod(inner))].reshape(2, 37, *inner)
        assert np.shares_memory(tensors[name], row)
    for factor in (1.0, -2.0):
        row *= factor
        wanted, states = plain_scan(tensors, 0.0, np.inf, True)
        y, final = chunk_scan(calls, tensors)
        assert error(y, wanted) < F32
        assert error(final, states) < F32
    assert host.copies == []
    assert turned(calls) == [3, 3]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_prompt_of_mamba_1_is_the_packages(calls: DropIn, host: HostArrays, batch: int, grouped: bool) -> None:
    rng = np.random.default_rng(4)
    dim, tokens, n, groups = 64, 21, 16, 2 if grouped else 1

    def drawn(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    def channels_last(*shape: int) -> Array:
        return drawn(shape[0], shape[-1], *shape[1:-1]).transpose(0, *range(2, len(shape)), 1)

    tensors = {
        "u": channels_last(batch, dim, tokens),
        "delta": drawn(batch, dim, tokens),
        "A": -np.exp(drawn(dim, n)),
        "B": channels_last(batch, groups, n, tokens),
        "C": channels_last(batch, groups, n, tokens),
        "D": drawn(dim),
        "z": channels_last(batch, dim, tokens),
        "delta_bias": drawn(dim),
    }
    state = np.zeros((batch, 1, dim, n))
    wanted = np.empty((batch, dim, tokens))
    for i in range(tokens):
        step = {
            "x": tensors["u"][:, :, i].reshape(batch, groups, -1),
            "dt": tensors["delta"][:, :, i].reshape(batch, groups, -1),
            "A": tensors["A"].reshape(groups, -1, n),
            "B": tensors["B"][..., i],
            "C": tensors["C"][..., i],
            "D": tensors["D"].reshape(groups, -1),
            "z": tensors["z"][:, :, i].reshape(batch, groups, -1),
            "dt_bias": tensors["delta_bias"].reshape(groups, -1),
            "state": state.reshape(batch, groups, -1, n),
        }
        y, state = plain_update(step, True)
        wanted[:, :, i] = y.reshape(batch, dim)
    if not grouped:
        tensors |= {name: tensors[name][:, 0] for name in ("B", "C")}
    found, final = calls.selective_scan(tensors, delta_softplus=True, kernel=RECURRENT, workspace=None)
    assert error(found, wanted) < F32
    assert error(final, state.reshape(batch, dim, n)) < F32
    # Of all that has tokens, delta alone came with them side by side.
    assert host.copies == []
    assert turned(calls) == [1]


def test_d_expanded_over_rows_is_one_value_a_head(calls: DropIn) -> None:
    tensors = prompt(1)
    wanted, _ = chunk_scan(calls, tensors)
    tensors["D"] = np.broadcast_to(tensors["D"][:, None], (4, 8))
    y, _ = chunk_scan(calls, tensors)
    np.testing.assert_array_equal(y, wanted)
    with pytest.raises(Unsupported, match="D: wanted one value a head"):
        chunk_scan(calls, tensors | {"D": tensors["D"].copy()})


# Errors.


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state", "state_batch_indices"])
def test_a_wrong_shape_of_a_decode_argument_is_refused_by_name(calls: DropIn, name: str) -> None:
    """One row, head or index too few: mamba-ssm asserts, and `except AssertionError` works here too."""
    tensors = decode(3) | {"state_batch_indices": np.arange(3, dtype=np.int32)}
    before = tensors["state"].copy()
    for wrong in (tensors[name][..., :-1], tensors[name][None, None], np.zeros((), tensors[name].dtype)):
        with pytest.raises(AssertionError, match="selective_state_update: ") as caught:
            update(calls, tensors | {name: wrong})
        assert isinstance(caught.value, InvalidProblem)
    np.testing.assert_array_equal(tensors["state"], before)


def test_a_wrong_list_of_sequences_is_refused(calls: DropIn) -> None:
    tensors = prompt(1, 20) | {"cu_seqlens": np.array([0, 20], np.int32), "seq_idx": np.zeros((1, 19), np.int32)}
    with pytest.raises(WrongShape, match="seq_idx: wanted .batch = 1, seqlen = 20."):
        chunk_scan(calls, tensors)
    with pytest.raises(WrongShape, match="cu_seqlens: wanted .sequences . 1., found shape .1, 2."):
        chunk_scan(calls, tensors | {"cu_seqlens": np.array([[0, 20]], np.int32)})


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states"])
def test_a_wrong_shape_of_a_prompt_is_refused_by_name(calls: DropIn, name: str) -> None:
    tensors = prompt(2) | {"initial_states": np.zeros((2, 4, 8, 16), np.float32)}
    for wrong in (tensors[name][..., :-1], tensors[name][None, None]):
        with pytest.raises(WrongShape, match="mamba_chunk_scan_combined: "):
            chunk_scan(calls, tensors | {name: wrong})


@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias"])
def test_a_wrong_shape_of_a_prompt_of_mamba_1_is_refused_by_name(calls: DropIn, name: str) -> None:
    tensors = {"u": (2, 8, 5), "delta": (2, 8, 5), "A": (8, 16), "B": (2, 16, 5), "C": (2, 16, 5), "D": (8,)}
    arrays = {n: np.zeros(shape, np.float32) for n, shape in (tensors | {"z": (2, 8, 5), "delta_bias": (8,)}).items()}
    arrays[name] = arrays[name][..., :-1]
    with pytest.raises(WrongShape, match="selective_scan_fn: "):
        calls.selective_scan(arrays, delta_softplus=True, kernel=RECURRENT, workspace=None)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"B": np.zeros((3, 3, 16), np.float32), "C": np.zeros((3, 3, 16), np.float32)},
            WrongShape,
            "ngroups must div",
        ),
        ({"state": np.zeros((2, 4, 8, 16), np.float32)}, WrongShape, "state_batch_indices, found 2"),
        ({"B": np.zeros((3, 2, 16), np.float16)}, InvalidProblem, "B: wanted dtype f32"),
        ({"x": np.zeros((3, 4, 8), np.int32)}, InvalidProblem, "x: wanted dtype f32 or bf16 or f16"),
        ({"state": np.zeros((5, 4, 16, 8), np.float32).swapaxes(2, 3)}, InvalidProblem, "state: wanted every axis"),
        ({"state": np.zeros((5, 4, 8, 16), np.int32)}, InvalidProblem, "state: wanted dtype"),
    ],
    ids=["groups", "states", "B", "x", "layout", "state"],
)
def test_what_a_decode_step_cannot_take_is_refused(
    calls: DropIn, change: dict[str, Array], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        update(calls, decode(3) | change)


def test_packed_prompts_want_their_offsets_and_start_from_zero(calls: DropIn) -> None:
    tensors = prompt(1, 20)
    index = {"seq_idx": np.zeros((1, 20), np.int32)}
    with pytest.raises(Unsupported, match="seq_idx: wanted cu_seqlens beside it"):
        chunk_scan(calls, tensors | index)
    offsets = index | {"cu_seqlens": np.array([0, 20], np.int32)}
    with pytest.raises(Unsupported, match="packed sequences start from zero"):
        chunk_scan(calls, tensors | offsets | {"initial_states": np.zeros((1, 4, 8, 16), np.float32)})
    with pytest.raises(WrongShape, match="batch = 1 with cu_seqlens, found 2"):
        chunk_scan(calls, prompt(2, 20) | offsets)


def test_a_kernel_that_does_not_fit_is_refused_and_so_is_a_load_within_a_capture(
    calls: DropIn, host: HostArrays
) -> None:
    with pytest.raises(NoKernel, match="cannot run this problem: specialised on d_state 128"):
        update(calls, decode(3), kernel=UPDATE_BF16.replace("bf16", "f32"))
    host.capturing = True
    with pytest.raises(DeviceError, match="make the same call once before"):
        update(calls, decode(3))
    host.capturing = False
    chunk_scan(calls, prompt(2))
    host.capturing = True
    sideways = {"x": np.ascontiguousarray(prompt(2)["x"].reshape(2, 37, 32).swapaxes(1, 2)).swapaxes(1, 2)}
    with pytest.raises(DeviceError, match="transpose is not loaded"):
        chunk_scan(calls, prompt(2) | {"x": sideways["x"].reshape(2, 37, 4, 8)})


@pytest.mark.parametrize(("io", "state"), [("f16", "f16"), ("f32", "bf16")])
def test_types_that_the_catalogue_lacks_are_made_on_demand(
    calls: DropIn, host: HostArrays, io: str, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = decode(3)
    for name in ("x", "B", "C", "z"):
        tensors[name] = tensors[name].astype(DTYPES[io])
    tensors["state"] = tensors["state"].astype(DTYPES[state])
    # Nothing is loaded within a capture, so that the kernel is named and not compiled.
    host.capturing = True
    with pytest.raises(DeviceError, match=f"^recurrent_n16_l4_r32_w1_c32_tiled_{io}_s{state} is not loaded"):
        update(calls, tensors, kernel=None)
    assert "which is not in the catalogue" in caplog.text
    with pytest.raises(NoKernel):
        update(calls, tensors, kernel="update")


# Parts.


def test_axes_are_merged_where_strides_say_so() -> None:
    array = np.arange(24.0).reshape(2, 3, 4)
    for axis in (0, 1):
        view = merged(array, axis)
        assert view is not None
        assert np.shares_memory(view, array)
        np.testing.assert_array_equal(view, array.reshape((6, 4) if axis == 0 else (2, 12)))
    assert merged(array[:, :2], 0) is None
    assert merged(array.swapaxes(1, 2), 1) is None
    assert merged(array[:1, :2], 0) is not None


def test_described_memory_is_never_read() -> None:
    """An address that no process has: shape, strides and alignment are all there is."""
    array = described(0x10, (2, 3), (5, 1), "bf16")
    assert array.strides == (10, 2)
    assert array.ctypes.data == 0x10
    assert array.dtype == ml_dtypes.bfloat16
    view = merged(array[None], 0)
    assert view is not None
    assert view.ctypes.data == 0x10


def test_a_gpu_that_is_not_there_is_named(driver: Path) -> None:
    with pytest.raises(DeviceError, match="NVIDIA's driver was wanted, found none"):
        Launcher(0, str(driver / "nothing.so"))
    with pytest.raises(DeviceError, match="GPU 7: cuDeviceGet gave FAKE_ERROR"):
        Launcher(7, str(driver / "libcuda.so.1"))


def test_an_image_that_uses_other_resources_than_it_was_built_with_is_refused(
    calls: DropIn, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = (driver / "facts").read_text().splitlines()
    symbol, registers, *others = next(line for line in facts if UPDATE in line).split()
    (tmp_path / "facts").write_text(" ".join([symbol, str(int(registers) + 1), *others]) + "\n")
    monkeypatch.setenv("FAKECUDA_FACTS", str(tmp_path / "facts"))
    with pytest.raises(ImageError, match=f"{symbol} has registers {int(registers) + 1} as loaded"):
        update(calls, decode(3))


def test_arguments_of_another_size_are_refused(calls: DropIn) -> None:
    update(calls, decode(1))
    gpu = calls.launcher(1)
    kernel = gpu.loaded(UPDATE)
    assert kernel is not None
    with pytest.raises(DeviceError, match="takes 288 bytes of arguments, found 280"):
        kernel.launch(Plan(()), bytes(280), 0)


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlapping", "in_turn"])
def test_what_may_overlap_is_launched_so_and_nothing_else_is(
    overlaps: bool, driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = parse_id("ssd_n16_p16_r16_w1_c64_t2_f32_sf32_tf32")
    usage = {symbol: Usage(40, 0, 0, 0, 0) for symbol in spec.launchable.entries}
    # -2 and -4: the first of two launches, and a second that the stand-in wants launched as one that overlaps.
    lines = [f"{symbol} 40 0 0 32 {kind}\n" for symbol, kind in zip(spec.launchable.entries, (-2, -4), strict=True)]
    (tmp_path / "facts").write_text("".join(lines))
    monkeypatch.setenv("FAKECUDA_FACTS", str(tmp_path / "facts"))
    launcher = Launcher(0, str(driver / "libcuda.so.1"))
    kernel = launcher.load(spec.id, Image(spec.id, "sm_90", "cubin", b"\x7fELF", usage, "", 0.0))
    first, second = (Launch(symbol, (1, 1, 1), (32, 1, 1), 0) for symbol in spec.launchable.entries)
    workspace = np.zeros(64, np.uint8)
    arguments = np.zeros((), SCAN_ARGS)
    arguments["workspace"], arguments["workspace_bytes"] = workspace.ctypes.data, workspace.nbytes
    kernel.launch(Plan((first,)), arguments.tobytes(), 0)
    assert bytes(workspace[:7]) == b"stamped"
    if overlaps:
        kernel.launch(Plan((replace(second, overlaps=True),)), arguments.tobytes(), 0)
        assert not workspace.any(), "the second launch found the first one's stamp and took it"
        with pytest.raises(DeviceError, match="cuLaunchKernelEx gave CUDA_ERROR_INVALID_VALUE"):
            kernel.launch(Plan((replace(first, overlaps=True),)), arguments.tobytes(), 0)
    else:
        with pytest.raises(DeviceError, match="cuLaunchKernel gave CUDA_ERROR_INVALID_VALUE"):
            kernel.launch(Plan((second,)), arguments.tobytes(), 0)


def test_without_pytorch_the_module_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None\nimport pyharness\nimport pyharness.torch"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: pyharness.torch wants PyTorch, found none")
    assert done.stderr.splitlines()[-1].endswith("pip install torch")
