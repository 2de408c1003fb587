"""templates/kernels/transpose.cu in the emulator, against NumPy, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pyharness import transpose
from pyharness.emulator import EmulatorBuffer, EmulatorLaunch, run
from pyharness.errors import EmulatorError
from pyharness.toolchain import cuda_include_dirs, find_compiler
from pyharness.transpose import Sideways

Array = NDArray[Any]


def tokens_last(dtype: Any, batch: int, tokens: int, *inner: int, gap: int = 0, start: int = 0) -> Array:
    """[batch, tokens, ...] whose tokens lie side by side, `gap` elements between rows, `start` before the first."""
    rng = np.random.default_rng(tokens)
    info = np.iinfo(dtype)
    rows = int(np.prod(inner))
    memory = rng.integers(info.max, size=start + batch * rows * (tokens + gap), dtype=dtype)
    rows_of = memory[start:].reshape(batch, *inner, tokens + gap)[..., :tokens]
    return np.moveaxis(rows_of, -1, 1)


def turned(arrays: Sequence[Array], *defects: tuple[str, str]) -> list[Array]:
    """Contiguous copies by the kernel, with (old, new) of its text replaced."""
    source = transpose.SOURCE.read_text(encoding="utf-8")
    for old, new in defects:
        assert old in source, old
        source = source.replace(old, new)
    found: dict[str, Sideways] = {}
    for place, array in enumerate(arrays):
        one = transpose.sideways(array)
        assert one is not None
        found[f"source {place}"] = one
    results = [np.zeros(array.shape, array.dtype) for array in arrays]
    inputs = [EmulatorBuffer(name, array) for name, array in zip(found, arrays, strict=True)]
    outputs = [
        EmulatorBuffer(f"result {place}", array, writable=True, initialised=False, must_write=True)
        for place, array in enumerate(results)
    ]
    for each in transpose.transpositions(found):
        own = [name.removeprefix("source ") for name in each.arrays]

        def pack(address: Mapping[str, int], each: transpose.Transposition = each) -> bytes:
            results = {name: address[name.replace("source", "result")] for name in each.arrays}
            return each.pack(address, results)

        launches = [EmulatorLaunch(s.entry, s.grid, s.block, s.shared_bytes) for s in each.plan.launches]
        buffers = [buffer for buffer in (*inputs, *outputs) if buffer.name.split()[1] in own]
        run(source, launches, buffers, pack, include_dirs=cuda_include_dirs())
    return results


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32], ids=["16", "32"])
@pytest.mark.parametrize(
    ("batch", "tokens", "gap", "start"),
    [(1, 1, 0, 0), (2, 64, 0, 0), (2, 65, 3, 1), (3, 130, 1, 3)],
    ids=["token", "tile", "ragged", "tiles"],
)
def test_every_element_finds_its_place(dtype: Any, batch: int, tokens: int, gap: int, start: int) -> None:
    """x, B and C of one tensor as a convolution leaves it, and one array with fewer rows than a tile."""
    whole = tokens_last(dtype, batch, tokens, 160, gap=gap, start=start)
    x, B, C = (whole[..., first:last] for first, last in ((0, 96), (96, 128), (128, 160)))
    parts = [x.reshape(batch, tokens, 6, 16), B.reshape(batch, tokens, 2, 16), C, whole[..., 3:9]]
    assert np.shares_memory(parts[0], whole)
    for found, part in zip(turned(parts), parts, strict=True):
        np.testing.assert_array_equal(found, part)


def test_arrays_of_two_item_sizes_take_two_launches_and_more_than_five_as_many() -> None:
    wide, narrow = tokens_last(np.uint32, 1, 70, 40), tokens_last(np.uint16, 1, 70, 40)
    for found, part in zip(turned([wide, narrow]), [wide, narrow], strict=True):
        np.testing.assert_array_equal(found, part)
    one = transpose.sideways(wide)
    assert one is not None
    launches = transpose.transpositions({str(place): one for place in range(7)})
    assert [list(each.arrays) for each in launches] == [["0", "1", "2", "3", "4"], ["5", "6"]]


def test_the_emulator_sees_a_barrier_that_is_missing() -> None:
    with pytest.raises(EmulatorError, match="race"):
        turned([tokens_last(np.uint16, 1, 64, 64)], ("  __syncthreads();\n", ""))


def test_no_registers_spill_on_any_target() -> None:
    for target in ("sm_75", "sm_90"):
        usage = transpose.image(target).usage
        assert sorted(usage) == ["ssm_transpose_16", "ssm_transpose_32"]
        assert all(each.local_bytes == 0 for each in usage.values())
    assert find_compiler()


def test_what_the_kernel_cannot_turn_is_left_to_the_framework() -> None:
    array = tokens_last(np.uint16, 2, 5, 4, 8)
    one = transpose.sideways(array)
    assert one == Sideways((2, 5, 4, 8), 2, 160, 5)
    assert one.rows == 32
    assert transpose.sideways(np.ascontiguousarray(array)) is None
    # Rows of no one distance, half a word of a token, and an itemsize that no scan has.
    assert transpose.sideways(array[..., :4]) is None
    assert transpose.sideways(tokens_last(np.uint16, 2, 5, 3)) is None
    assert transpose.sideways(tokens_last(np.uint64, 2, 5, 4)) is None
    assert transpose.sideways(array[:, :0]) is None
    assert transpose.sideways(array[0, :, 0, 0]) is None
