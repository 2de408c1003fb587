"""Matrices as the fragments of tensor-core instructions, and the small kernels that take them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from pyharness.render import helper
from tests.small_kernels import kernel

#: Storage types of A and B by the name in the entry, and the inner dimension of their product.
TYPES: dict[str, tuple[Any, int]] = {"bf16": (ml_dtypes.bfloat16, 16), "f16": (np.float16, 16), "tf32": (np.float32, 8)}
#: How far a tensor core may be from the exact sum, in units of |D| + sum of |A B|.
TOLERANCE = 2.0**-20

_LANE = np.arange(32)
_GROUP, _MEMBER = _LANE // 4, _LANE % 4


def source(name: str, *defects: tuple[str, str]) -> str:
    """A kernel that uses templates/ssm, with each (old, new) replaced; it compiles with nvcc too."""
    includes = "".join(f"#include <{header}>\n" for header in ("cstdint", "cuda_bf16.h", "cuda_fp16.h"))
    helpers = "\n".join(helper(part) for part in ("async_copy", "pack", "exp2", "mma"))
    return includes + helpers + kernel(name, *defects)


def draw(name: str, warps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A [warps, 16, k] and B [warps, k, 8] as stored, D [warps, 16, 8] in f32; magnitudes from 2^-18 to 2^3."""
    dtype, k = TYPES[name]
    generator = np.random.default_rng(warps)

    def spread(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape) * 2.0 ** generator.integers(-18, 3, shape)

    a, b = spread(warps, 16, k).astype(dtype), spread(warps, k, 8).astype(dtype)
    return a, b, spread(warps, 16, 8).astype(np.float32)


def operands(name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A and B as the product sees them, in float64: tf32 without the 13 low bits."""
    if name == "tf32":
        a, b = ((v.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for v in (a, b))
    return a.astype(np.float64), b.astype(np.float64)


def _words(elements: np.ndarray) -> np.ndarray:
    """The elements [..., per word] of words as words."""
    return np.ascontiguousarray(elements).view(np.uint32)[..., 0]


def words(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The 10 words of each lane, [warps, 32, 10]: a, b, d."""
    per_word = 4 // a.itemsize
    out = np.empty((len(a), 32, 10), np.uint32)
    inner = per_word * _MEMBER[:, None] + np.arange(per_word)  # [32, per word]
    for i in range(4):
        row, half = _GROUP + 8 * (i % 2), i // 2
        out[:, :, i] = _words(a[:, row[:, None], inner + 4 * per_word * half])
        out[:, :, 6 + i] = d[:, _GROUP + 8 * (i // 2), 2 * _MEMBER + i % 2].view(np.uint32)
    for i in range(2):
        out[:, :, 4 + i] = _words(b[:, inner + 4 * per_word * i, _GROUP[:, None]])
    return out


def result(y: np.ndarray) -> np.ndarray:
    """D [warps, 16, 8] from each lane's d."""
    lanes = y.reshape(-1, 32, 4)
    d = np.empty((len(lanes), 16, 8), np.float32)
    for i in range(4):
        d[:, _GROUP + 8 * (i // 2), 2 * _MEMBER + i % 2] = lanes[:, :, i]
    return d


def matrices() -> tuple[np.ndarray, np.ndarray]:
    """x of matrices.cu, [32, 8], all elements different, and the y that it must give, [64, 4] words."""
    x = np.random.default_rng(0).permutation(1 << 16)[:256].astype(np.uint16).reshape(32, 8)
    plain = x.reshape(4, 8, 8)
    y = [_words(m.reshape(4, 32, 2)).T for m in (plain, plain.transpose(0, 2, 1))]
    return x, np.concatenate(y)


def product() -> tuple[np.ndarray, np.ndarray]:
    """x of product.cu, [2, 16, 16] small integers, and the y that it must give, [16, 16], which is exact."""
    x = np.random.default_rng(1).integers(-2, 3, (2, 16, 16)).astype(np.float32)
    return x.astype(ml_dtypes.bfloat16), x[0] @ x[1] @ x[1]
