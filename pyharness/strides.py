"""What strides say of an array."""

from __future__ import annotations

from typing import Any

from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Array = NDArray[Any]


def merged(array: Array, axis: int) -> Array | None:
    """An axis and the one after it as one, or None where no stride says that."""
    outer, inner = array.shape[axis : axis + 2]
    outer_stride, inner_stride = array.strides[axis : axis + 2]
    if inner == 1:
        stride = outer_stride
    elif outer == 1 or outer_stride == inner * inner_stride:
        stride = inner_stride
    else:
        return None
    shape = (*array.shape[:axis], outer * inner, *array.shape[axis + 2 :])
    return as_strided(array, shape, (*array.strides[:axis], stride, *array.strides[axis + 2 :]))
