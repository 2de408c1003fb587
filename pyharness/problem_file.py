"""A `ScanProblem` in a file: every array with its strides and alignment, so that it runs again just as it ran."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.errors import InvalidProblem
from pyharness.problem import ScanProblem

Array = NDArray[Any]

_VERSION = 1
#: Bases are put back at the same place within this many bytes.
_ALIGNMENT = 64


def save(path: Path, problem: ScanProblem, notes: Mapping[str, Any]) -> None:
    """Write a problem to a `.npz`: the bytes that each array spans, gaps among them, and how the array lies in them.

    Arrays that share memory are written apart.

    Args:
        path: the file, whose folder is made.
        notes: what else to keep, as JSON: which kernel, what went wrong.
    """
    header: dict[str, Any] = {"version": _VERSION, "notes": dict(notes), "arrays": {}, "values": {}}
    memory: dict[str, Any] = {}
    for name in (field.name for field in fields(ScanProblem)):
        value = getattr(problem, name)
        if isinstance(value, np.ndarray):
            memory[name] = np.frombuffer(ctypes.string_at(value.ctypes.data, _span(value)), np.uint8)
            header["arrays"][name] = {
                "dtype": value.dtype.name,
                "shape": value.shape,
                "strides": value.strides,
                "place": value.ctypes.data % _ALIGNMENT,
            }
        elif value is not None:
            header["values"][name] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    encoded = np.frombuffer(json.dumps(header, sort_keys=True).encode(), np.uint8)
    np.savez_compressed(path, header=encoded, **memory)


def load(path: Path) -> tuple[ScanProblem, dict[str, Any]]:
    """Read what `save` wrote: the problem and the notes.

    Raises:
        InvalidProblem: the file is not one of these, or what it holds is no problem.
    """
    try:
        with np.load(path) as stored:
            header = json.loads(stored["header"].tobytes())
            if header["version"] != _VERSION:
                raise InvalidProblem(f"{path}: version {_VERSION} was wanted, found {header['version']}")
            arrays: dict[str, Any] = {name: _placed(stored[name], **how) for name, how in header["arrays"].items()}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InvalidProblem(f"{path}: a file of `invoke fuzz` was wanted, found another: {error}") from error
    values: dict[str, Any] = arrays | header["values"]
    if "dt_limit" in values:
        values["dt_limit"] = tuple(values["dt_limit"])
    return ScanProblem(**values), header["notes"]


def _span(array: Array) -> int:
    """Bytes from the first to past the last element; strides are never negative."""
    if array.size == 0:
        return 0
    return int(sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))) + array.itemsize


def _placed(memory: Array, dtype: str, shape: list[int], strides: list[int], place: int) -> Array:
    room = np.zeros(memory.size + 2 * _ALIGNMENT, np.uint8)
    start = (place - room.ctypes.data) % _ALIGNMENT
    room[start : start + memory.size] = memory
    return np.ndarray(tuple(shape), np.dtype(dtype), room, start, tuple(strides))
