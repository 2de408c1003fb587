"""ScanArgs: the one argument of every kernel entry, mirrored for NumPy.

The order of the fields is frozen. `templates/ssm/args.cuh` states the same struct for CUDA and asserts every offset;
`templates/go` states it for Go; the manifest carries `layout()` so that all of them can be compared.
Strides are in elements, pointers are device addresses (0 where an optional array is absent).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag

import numpy as np

POINTERS = (
    "x",
    "z",
    "y",
    "dt",
    "A",
    "B",
    "C",
    "D",
    "dt_bias",
    "state",
    "state_scale",
    "cu_seqlens",
    "read_slots",
    "write_slots",
    "resume",
    "checkpoint_slots",
    "sequence_order",
    "rounding_key",
    "workspace",
)
INT64 = (
    "x_stride",
    "z_stride",
    "y_stride",
    "dt_stride",
    "B_stride",
    "C_stride",
    "state_stride",
    "state_scale_stride",
    "slots",
    "workspace_bytes",
)
WORDS = (
    ("tokens", "<i4"),
    ("sequences", "<i4"),
    ("heads", "<i4"),
    ("head_dim", "<i4"),
    ("groups", "<i4"),
    ("d_state", "<i4"),
    ("pad_slot", "<i4"),
    ("dt_min", "<f4"),
    ("dt_max", "<f4"),
    ("flags", "<u4"),
    ("lanes", "<i4"),
    ("rows", "<i4"),
    ("chunk", "<i4"),
)

_FIELDS: list[tuple[str, str]] = [(name, "<u8") for name in POINTERS] + [(name, "<i8") for name in INT64] + list(WORDS)

#: The struct as a NumPy dtype, padded as a C compiler pads it.
SCAN_ARGS = np.dtype(_FIELDS, align=True)


class Flag(IntFlag):
    """Bits of `ScanArgs.flags`.

    The VECTOR bits say that a 16-byte access at any multiple of 16 bytes inside a row of that array is aligned: the
    base address, the token (or slot) stride and the length of every inner row are multiples of 16 bytes.
    """

    SOFTPLUS = 1 << 0
    PER_COLUMN_A = 1 << 1
    DT_F32 = 1 << 2
    DT_LIMIT = 1 << 3
    VECTOR_X = 1 << 4
    VECTOR_Z = 1 << 5
    VECTOR_Y = 1 << 6
    VECTOR_B = 1 << 7
    VECTOR_C = 1 << 8
    VECTOR_STATE = 1 << 9


def layout() -> list[dict[str, int | str]]:
    """Name, byte offset and NumPy type string of each field, in order, as the manifest stores them."""
    fields = SCAN_ARGS.fields
    assert fields is not None
    return [{"name": name, "offset": int(fields[name][1]), "type": np.dtype(kind).str} for name, kind in _FIELDS]


def pack(values: Mapping[str, int | float]) -> bytes:
    """The bytes of one ScanArgs; fields not named are zero.

    Raises:
        KeyError: a name is not a field.
    """
    record = np.zeros((), SCAN_ARGS)
    for name, value in values.items():
        if name not in SCAN_ARGS.names:  # type: ignore[operator]
            raise KeyError(f"ScanArgs has no field {name!r}")
        record[name] = value
    return record.tobytes()
