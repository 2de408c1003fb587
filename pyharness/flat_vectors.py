"""Golden vectors in a form that C reads without a parser: for examples/c.

One file a problem, little-endian: the magic "SSMFLAT2"; i64 number of the io in `IO`, bytes of data, bytes of y, values
of y, stored slots; f64 norm, rtol and atol of y, then of the state; ScanArgs, whose pointers are 1 + an offset in the
data, 0 where an array is absent and for y; i64 numbers of the stored slots; the data; f64 expected y [tokens, heads,
head_dim]; f64 expected states [slots, heads, head_dim, d_state]. y is stored with the stride of ScanArgs, and every
byte of the data outside of the stored slots has to stay as it was.
"""

from __future__ import annotations

import struct

import numpy as np

from pyharness.binding import Outputs, bind
from pyharness.golden import Golden, tolerances
from pyharness.oracle import oracle
from pyharness.problem import DTYPES
from pyharness.spec import Plan

_MAGIC = b"SSMFLAT2"
#: Types of x, B, C and y that examples/c reads.
IO = ("f32", "bf16")
_ALIGNMENT = 256


def encode(vector: Golden) -> bytes:
    """The file of one vector whose problem has a pool."""
    problem, truth = vector.problem, oracle(vector.problem)
    assert problem.state is not None
    width = DTYPES[problem.io].itemsize
    y = np.ndarray(
        (problem.tokens, problem.heads, problem.head_dim),
        DTYPES[problem.io],
        np.zeros((problem.tokens + 1) * vector.y_stride * width, np.uint8),
        0,
        (vector.y_stride * width, problem.head_dim * width, width),
    )
    binding = bind(problem, Plan(()), Outputs(y, problem.state, problem.state_scale))
    data = bytearray()
    roots: dict[int, int] = {}
    addresses = {"y": 0}
    for buffer in binding.buffers:
        if buffer.name == "y":
            continue
        root = buffer.array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) not in roots:
            data += bytes(-len(data) % _ALIGNMENT)
            roots[id(root)] = len(data)
            data += root.tobytes()
        addresses[buffer.name] = 1 + roots[id(root)] + buffer.array.ctypes.data - root.ctypes.data
    slots = sorted(truth.states)
    states = np.array([truth.states[slot] for slot in slots])
    y_bytes = problem.tokens * vector.y_stride * width
    bounds = [tolerances(problem, values)[name] for values in (truth.y, states) for name in ("norm", "rtol", "atol")]
    parts = [
        _MAGIC,
        struct.pack("<5q", IO.index(problem.io), len(data), y_bytes, truth.y.size, len(slots)),
        struct.pack("<6d", *bounds),
        binding.pack(addresses),
        np.array(slots, "<i8").tobytes(),
        bytes(data),
        truth.y.astype("<f8").tobytes(),
        states.astype("<f8").tobytes(),
    ]
    return b"".join(parts)
