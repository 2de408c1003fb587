"""ScanProblem: the arrays of one scan on the host, checked in full before anything runs.

Checking changes nothing: arrays are kept as they were given, views and odd strides included. What the host side of a
kernel must know (sizes, dtype names, resolved slots, which sequences are padding) is derived here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pyharness.errors import InvalidProblem
from pyharness.spec import Geometry

Array = NDArray[Any]

#: NumPy types by the short names that specs and ids use.
DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
    "i8": np.dtype(np.int8),
}
_IO = ("f32", "bf16", "f16")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INT32_MAX = 2**31 - 1


def element_stride(array: Array) -> int:
    """Elements between neighbours of the first axis; that of a contiguous array where nothing has a neighbour."""
    if array.shape[0] > 1:
        return array.strides[0] // array.itemsize
    return math.prod(array.shape[1:])


@dataclass(frozen=True, eq=False)
class ScanProblem:
    """One selective scan over packed tokens; section 1 of the design gives the formula.

    `io` below is one of f32, f16 and ml_dtypes.bfloat16, the same for x, z, B and C. "Rows" are arrays whose first
    stride is free (any whole number of elements from 0 up) and whose inner axes are contiguous.

    Attributes:
        x: io [tokens, heads, head_dim], rows.
        dt: io or f32 [tokens, heads], rows.
        A: f32 [heads], or [heads, d_state] with one value a column.
        B, C: io [tokens, groups, d_state], rows.
        D, dt_bias: f32 [heads], or None.
        z: io [tokens, heads, head_dim], rows, or None for no gate.
        dt_softplus: apply softplus to dt + dt_bias, up to 20.
        dt_limit: (min, max) of dt after softplus, or None.
        cu_seqlens: i32 [sequences + 1], or None for one sequence over all tokens.
        state: f32, bf16, f16 or i8 [slots, heads, head_dim, d_state], slot stride free but not overlapping; None
            starts every sequence at zero and gives an f32 result of [sequences, heads, head_dim, d_state].
        state_scale: f32 [slots, heads, head_dim], slot stride free; wanted with an i8 state and only then.
        read_slots: i32 [sequences]; None is 0, 1, 2, ...
        write_slots: i32 [sequences]; -1 discards the final state; None is read_slots.
        resume: u8 [sequences] of 0 and 1; None is all 1 with a state and all 0 without.
        pad_slot: a sequence whose read slot equals it is padding, whether it resumes or not.
        checkpoint_slots: i32 [tokens]; the slot that also stores the state after a token, -1 for none, and -1 outside
            of live sequences.
        sequence_order: i32 [sequences], a permutation, or None.
        rounding_key: u64 [2], {seed, step} of stochastic rounding, or None for round to nearest.

    Raises:
        InvalidProblem: an array or option is malformed; the message names it.
    """

    x: Array
    dt: Array
    A: Array
    B: Array
    C: Array
    D: Array | None = None
    dt_bias: Array | None = None
    z: Array | None = None
    dt_softplus: bool = True
    dt_limit: tuple[float, float] | None = None
    cu_seqlens: Array | None = None
    state: Array | None = None
    state_scale: Array | None = None
    read_slots: Array | None = None
    write_slots: Array | None = None
    resume: Array | None = None
    pad_slot: int = -1
    checkpoint_slots: Array | None = None
    sequence_order: Array | None = None
    rounding_key: Array | None = None

    def __post_init__(self) -> None:
        self._check_structure()
        self._check_offsets()
        self._check_slots()
        self._check_races()
        self._check_order()

    def _check_structure(self) -> None:
        """All that can be said without reading an element: shapes, strides, dtypes, options and what goes with what."""
        self._check_inputs()
        self._check_options()
        self._check_state()
        self._check_lists()

    # Sizes and names.

    @property
    def tokens(self) -> int:
        """Rows of x, of which those past the last offset belong to no sequence."""
        return int(self.x.shape[0])

    @property
    def sequences(self) -> int:
        """Sequences, empty and padding ones included."""
        return 1 if self.cu_seqlens is None else int(self.cu_seqlens.shape[0]) - 1

    @property
    def heads(self) -> int:
        """Heads of x."""
        return int(self.x.shape[1])

    @property
    def head_dim(self) -> int:
        """Rows of one head's state."""
        return int(self.x.shape[2])

    @property
    def groups(self) -> int:
        """Groups of B and C; head h uses group h // (heads // groups)."""
        return int(self.B.shape[1])

    @property
    def d_state(self) -> int:
        """Columns of the state."""
        return int(self.B.shape[2])

    @property
    def slots(self) -> int:
        """Slots of the pool; without a state, the slots of the result, one a sequence."""
        return self.sequences if self.state is None else int(self.state.shape[0])

    @property
    def io(self) -> str:
        """Short name of the dtype of x, z, B, C and y."""
        return _NAMES[self.x.dtype]

    @property
    def state_dtype(self) -> str:
        """Short name of the storage dtype of the state; "f32" without one."""
        return "f32" if self.state is None else _NAMES[self.state.dtype]

    @property
    def dt_is_f32(self) -> bool:
        """Whether dt is stored as f32, whatever io is."""
        return bool(self.dt.dtype == np.float32)

    @property
    def per_column_a(self) -> bool:
        """Whether A has a value for each column (Mamba-1)."""
        return self.A.ndim == 2

    @property
    def geometry(self) -> Geometry:
        """The sizes that decide a launch."""
        longest = int(self.lengths[~self.padding].max(initial=0))
        return Geometry(
            self.tokens,
            self.sequences,
            self.heads,
            self.head_dim,
            self.groups,
            self.d_state,
            longest,
            self.per_column_a,
            self._checkpoint_step(),
        )

    def _checkpoint_step(self) -> int:
        """The greatest common divisor of the tokens behind which a checkpoint is stored before its sequence's end."""
        if self.checkpoint_slots is None:
            return 0
        begins, lengths = self.offsets[:-1], self.lengths
        owner = np.repeat(np.arange(self.sequences), lengths)
        stored = np.flatnonzero((self.checkpoint_slots[: owner.size] != -1) & ~self.padding[owner])
        behind = stored - begins[owner[stored]] + 1
        return int(np.gcd.reduce(behind[behind < lengths[owner[stored]]], initial=0))

    # Values with their defaults filled in. All are copies.

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Token offsets, i64 [sequences + 1]."""
        if self.cu_seqlens is None:
            return np.array([0, self.tokens], np.int64)
        return self.cu_seqlens.astype(np.int64)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sequence, i64 [sequences]."""
        return np.diff(self.offsets)

    @cached_property
    def resolved_read(self) -> NDArray[np.int64]:
        """Read slots, i64 [sequences]; meaningless where a sequence is padding or fresh."""
        if self.read_slots is None:
            return np.arange(self.sequences, dtype=np.int64)
        return self.read_slots.astype(np.int64)

    @cached_property
    def resolved_write(self) -> NDArray[np.int64]:
        """Write slots, i64 [sequences], -1 where the final state is discarded; meaningless for padding."""
        return self.resolved_read if self.write_slots is None else self.write_slots.astype(np.int64)

    @cached_property
    def resumes(self) -> NDArray[np.bool_]:
        """Which sequences start from their read slot, bool [sequences]; the others start at zero."""
        if self.resume is None:
            return np.full(self.sequences, self.state is not None)
        return self.resume.astype(np.bool_)

    @cached_property
    def padding(self) -> NDArray[np.bool_]:
        """Which sequences are padding, bool [sequences]. Without a state there are none."""
        if self.state is None:
            return np.zeros(self.sequences, np.bool_)
        return np.equal(self.resolved_read, self.pad_slot)

    @cached_property
    def live_tokens(self) -> NDArray[np.bool_]:
        """Which tokens belong to a sequence that is not padding, bool [tokens]; y is 0 at the others."""
        live = np.zeros(self.tokens, np.bool_)
        live[: self.offsets[-1]] = np.repeat(~self.padding, self.lengths)
        return live

    @cached_property
    def written(self) -> NDArray[np.bool_]:
        """Which slots of the result's state the scan stores to, bool [slots]; the others keep their bits."""
        mask = np.zeros(self.slots, np.bool_)
        mask[self._written_slots()] = True
        return mask

    def _written_slots(self) -> NDArray[np.int64]:
        """Slots of every store, finals first, then checkpoints."""
        finals = self.resolved_write[~self.padding]
        checkpoints = np.empty(0, np.int64)
        if self.checkpoint_slots is not None:
            checkpoints = self.checkpoint_slots[self.live_tokens].astype(np.int64)
        stores = np.concatenate((finals, checkpoints))
        return np.extract(stores != -1, stores)

    # Checks.

    def _check_inputs(self) -> None:
        for name in ("x", "dt", "A", "B", "C"):
            if getattr(self, name) is None:
                raise InvalidProblem(f"{name}: wanted a NumPy array, found None")
        _check_ndim("x", self.x, "[tokens, heads, head_dim]", 3)
        _check_dtype("x", self.x, _IO)
        _check_ndim("B", self.B, "[tokens, groups, d_state]", 3)
        tokens, heads, head_dim = self.x.shape
        groups, d_state = self.B.shape[1:]
        for name, size in (
            ("x: heads", heads),
            ("x: head_dim", head_dim),
            ("B: groups", groups),
            ("B: d_state", d_state),
        ):
            if size < 1:
                raise InvalidProblem(f"{name} must be at least 1, found {size}")
        if tokens > _INT32_MAX:
            raise InvalidProblem(f"x: tokens must stay below 2^31, found {tokens}: split the problem")
        if heads * head_dim > _INT32_MAX:
            raise InvalidProblem(f"x: heads x head_dim must stay below 2^31, found {heads * head_dim}")
        if heads % groups:
            raise InvalidProblem(f"B: groups must divide the {heads} heads of x, found {groups}")
        _check_rows("x", self.x)
        for name, array, shape in (("B", self.B, "groups"), ("C", self.C, "groups"), ("z", self.z, "heads")):
            if array is None:
                continue
            _check_dtype(name, array, (self.io,), "the dtype of x")
            if shape == "groups":
                _check_shape(name, array, tokens=tokens, groups=groups, d_state=d_state)
            else:
                _check_shape(name, array, tokens=tokens, heads=heads, head_dim=head_dim)
            _check_rows(name, array)
        _check_dtype("dt", self.dt, tuple(dict.fromkeys((self.io, "f32"))), "the dtype of x or f32")
        _check_shape("dt", self.dt, tokens=tokens, heads=heads)
        _check_rows("dt", self.dt)
        _check_dtype("A", self.A, ("f32",))
        if self.A.ndim == 2:
            _check_shape("A", self.A, heads=heads, d_state=d_state)
        else:
            _check_shape("A", self.A, heads=heads)
        _check_contiguous("A", self.A)
        for name, vector in (("D", self.D), ("dt_bias", self.dt_bias)):
            if vector is not None:
                _check_dtype(name, vector, ("f32",))
                _check_shape(name, vector, heads=heads)
                _check_contiguous(name, vector)

    def _check_options(self) -> None:
        if not isinstance(self.dt_softplus, bool | np.bool_):
            raise InvalidProblem(f"dt_softplus: wanted True or False, found {self.dt_softplus!r}")
        if isinstance(self.pad_slot, bool) or not isinstance(self.pad_slot, int | np.integer):
            raise InvalidProblem(f"pad_slot: wanted an integer, found {self.pad_slot!r}")
        if not -(2**31) <= self.pad_slot <= _INT32_MAX:
            raise InvalidProblem(f"pad_slot: wanted a 32-bit integer, found {self.pad_slot}")
        if self.dt_limit is None:
            return
        try:
            low, high = (float(value) for value in self.dt_limit)
        except (TypeError, ValueError) as error:
            raise InvalidProblem(f"dt_limit: wanted two numbers (min, max), found {self.dt_limit!r}") from error
        if not low <= high:
            raise InvalidProblem(f"dt_limit: wanted min <= max, found ({low}, {high})")

    def _check_lists(self) -> None:
        if self.cu_seqlens is not None:
            _check_dtype("cu_seqlens", self.cu_seqlens, ("i32",))
            _check_ndim("cu_seqlens", self.cu_seqlens, "[sequences + 1]", 1)
            _check_contiguous("cu_seqlens", self.cu_seqlens)
            if not 1 <= self.cu_seqlens.shape[0] <= _INT32_MAX:
                raise InvalidProblem(f"cu_seqlens: wanted sequences + 1 offsets, found {self.cu_seqlens.shape[0]}")
        for name, kind, axis, size in (
            ("read_slots", "i32", "sequences", self.sequences),
            ("write_slots", "i32", "sequences", self.sequences),
            ("resume", "u8", "sequences", self.sequences),
            ("checkpoint_slots", "i32", "tokens", self.tokens),
            ("sequence_order", "i32", "sequences", self.sequences),
            ("rounding_key", "u64", "seed and step", 2),
        ):
            array = getattr(self, name)
            if array is not None:
                _check_dtype(name, array, (kind,))
                _check_shape(name, array, **{axis: size})
                _check_contiguous(name, array)

    def _check_offsets(self) -> None:
        if self.cu_seqlens is None:
            return
        if self.offsets[0] != 0:
            raise InvalidProblem(f"cu_seqlens: the first offset must be 0, found {self.offsets[0]}")
        falling = np.flatnonzero(self.lengths < 0)
        if falling.size:
            s = int(falling[0])
            raise InvalidProblem(
                f"cu_seqlens: offsets must not fall, found {self.offsets[s]} then {self.offsets[s + 1]} at sequence {s}"
            )
        if self.offsets[-1] > self.tokens:
            raise InvalidProblem(
                f"cu_seqlens: the last offset must be at most the {self.tokens} tokens of x, found {self.offsets[-1]}"
            )

    def _check_state(self) -> None:
        if self.state is None:
            for name in ("state_scale", "read_slots", "write_slots", "checkpoint_slots"):
                if getattr(self, name) is not None:
                    raise InvalidProblem(f"{name}: needs a state, found none: pass state or leave {name} out")
            return
        _check_dtype("state", self.state, tuple(DTYPES))
        _check_ndim("state", self.state, "[slots, heads, head_dim, d_state]", 4)
        sizes = {"heads": self.heads, "head_dim": self.head_dim}
        _check_shape("state", self.state, slots=None, **sizes, d_state=self.d_state)
        if self.slots > _INT32_MAX:
            raise InvalidProblem(f"state: slots must stay below 2^31, found {self.slots}")
        _check_rows("state", self.state, apart=True)
        if self.state_dtype != "i8":
            if self.state_scale is not None:
                raise InvalidProblem(f"state_scale: wanted only with an i8 state, found a {self.state_dtype} state")
            return
        if self.state_scale is None:
            raise InvalidProblem("state_scale: an i8 state needs f32 [slots, heads, head_dim], found None")
        _check_dtype("state_scale", self.state_scale, ("f32",))
        _check_shape("state_scale", self.state_scale, slots=self.slots, **sizes)
        _check_rows("state_scale", self.state_scale, apart=True)

    def _check_slots(self) -> None:
        if self.resume is not None and (self.resume > 1).any():
            raise InvalidProblem(f"resume: wanted 0 or 1, found {self.resume[self.resume > 1][0]}")
        if self.state is None:
            if self.resumes.any():
                s = int(np.flatnonzero(self.resumes)[0])
                raise InvalidProblem(f"resume: sequence {s} resumes, but there is no state: pass state or 0")
            return
        live = ~self.padding
        slots = self.slots
        source = "read_slots" if self.read_slots is not None else "read_slots (by default 0, 1, 2, ...)"
        self._check_range(source, self.resolved_read, live & self.resumes, 0)
        if self.write_slots is None:
            self._check_range(f"{source}, which write_slots defaults to,", self.resolved_read, live, 0)
        else:
            self._check_range("write_slots", self.resolved_write, live, -1)
        if self.checkpoint_slots is None:
            return
        bad = np.flatnonzero((self.checkpoint_slots < -1) | (self.checkpoint_slots >= slots))
        if bad.size:
            t = int(bad[0])
            raise InvalidProblem(
                f"checkpoint_slots: wanted -1 or 0 to {slots - 1}, found {self.checkpoint_slots[t]} at token {t}"
            )
        stray = np.flatnonzero((self.checkpoint_slots != -1) & ~self.live_tokens)
        if stray.size:
            t = int(stray[0])
            raise InvalidProblem(
                f"checkpoint_slots: token {t} belongs to no live sequence, wanted -1, found {self.checkpoint_slots[t]}"
            )

    def _check_range(self, name: str, values: NDArray[np.int64], looked_at: NDArray[np.bool_], low: int) -> None:
        bad = np.flatnonzero(looked_at & ((values < low) | (values >= self.slots)))
        if bad.size:
            s = int(bad[0])
            raise InvalidProblem(
                f"{name}: wanted {low} to {self.slots - 1}, as state has {self.slots} slots, found {values[s]} "
                f"at sequence {s}"
            )

    def _check_races(self) -> None:
        if self.state is None:
            return
        stores = self._written_slots()
        slots, counts = np.unique(stores, return_counts=True)
        twice = slots[counts > 1]
        if twice.size:
            raise InvalidProblem(
                f"write_slots, checkpoint_slots: a slot may be stored to once, found slot {twice[0]} stored to "
                f"{counts[counts > 1][0]} times: give each final and checkpointed state a slot of its own"
            )
        reads = ~self.padding & self.resumes
        readers = np.flatnonzero(reads)
        own = reads & (self.resolved_read == self.resolved_write)
        # A slot may be read and stored to only by one sequence that ends in the slot that it started from.
        shared = np.isin(self.resolved_read[readers], stores) & ~own[readers]
        if shared.any():
            s = int(readers[shared][0])
            slot = int(self.resolved_read[s])
            raise InvalidProblem(
                f"read_slots: sequence {s} reads slot {slot}, which another final state or a checkpoint overwrites: "
                "store to another slot"
            )

    def _check_order(self) -> None:
        if self.sequence_order is None:
            return
        if not np.array_equal(np.sort(self.sequence_order), np.arange(self.sequences)):
            raise InvalidProblem(
                f"sequence_order: wanted a permutation of 0 to {self.sequences - 1}, found another list"
            )


#: Those of lists and keys as well.
ARRAY_DTYPES = DTYPES | {"i32": np.dtype(np.int32), "u8": np.dtype(np.uint8), "u64": np.dtype(np.uint64)}


def _check_dtype(name: str, array: object, wanted: tuple[str, ...], why: str = "") -> None:
    if not isinstance(array, np.ndarray):
        raise InvalidProblem(f"{name}: wanted a NumPy array, found {type(array).__name__}")
    if not any(array.dtype == ARRAY_DTYPES[kind] for kind in wanted):
        reason = f" ({why})" if why else ""
        raise InvalidProblem(f"{name}: wanted dtype {' or '.join(wanted)}{reason}, found {array.dtype}")


def _check_ndim(name: str, array: object, axes: str, ndim: int) -> None:
    if not isinstance(array, np.ndarray):
        raise InvalidProblem(f"{name}: wanted a NumPy array, found {type(array).__name__}")
    if array.ndim != ndim:
        raise InvalidProblem(f"{name}: wanted {axes}, found shape {list(array.shape)}")


def _check_shape(name: str, array: Array, **axes: int | None) -> None:
    """Compare a shape with named sizes; None takes any size."""

    def fits() -> Iterator[bool]:
        yield array.ndim == len(axes)
        yield from (want is None or have == want for want, have in zip(axes.values(), array.shape, strict=True))

    if not all(fits()):
        wanted = ", ".join(axis if size is None else f"{axis} = {size}" for axis, size in axes.items())
        raise InvalidProblem(f"{name}: wanted [{wanted}], found shape {list(array.shape)}")


def inner_contiguous(array: Array, first: int) -> bool:
    """Whether the axes from `first` on lie as in a C-contiguous array; the stride of a size of 1 means nothing."""
    if array.size == 0:
        return True
    expected = array.itemsize
    for size, stride in zip(reversed(array.shape[first:]), reversed(array.strides[first:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _check_aligned(name: str, array: Array) -> None:
    if array.size and array.ctypes.data % array.dtype.alignment:
        raise InvalidProblem(
            f"{name}: wanted elements at multiples of {array.dtype.alignment} bytes, found an odd base: copy it"
        )


def _check_contiguous(name: str, array: Array) -> None:
    _check_aligned(name, array)
    if not inner_contiguous(array, 0):
        raise InvalidProblem(f"{name}: wanted a contiguous array, found strides {list(array.strides)}: copy it")


def _check_rows(name: str, array: Array, *, apart: bool = False) -> None:
    """Check that inner axes are contiguous and that the first stride is a whole, legal number of elements."""
    _check_aligned(name, array)
    if not inner_contiguous(array, 1):
        raise InvalidProblem(
            f"{name}: wanted every axis after the first contiguous, found byte strides {list(array.strides)} "
            f"for shape {list(array.shape)}: copy it"
        )
    if array.shape[0] <= 1 or array.size == 0:
        return
    stride = array.strides[0]
    if stride < 0:
        raise InvalidProblem(f"{name}: wanted a first stride of 0 or more, found {stride} bytes: copy it")
    if stride % array.itemsize:
        raise InvalidProblem(
            f"{name}: wanted a first stride of whole {array.itemsize}-byte elements, found {stride} bytes: copy it"
        )
    slot_bytes = math.prod(array.shape[1:]) * array.itemsize
    if apart and stride < slot_bytes:
        raise InvalidProblem(f"{name}: slots of {slot_bytes} bytes must not overlap, found a stride of {stride} bytes")
