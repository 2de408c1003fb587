"""mamba-ssm's scan functions over any framework's tensors: their arguments, and what a call of ours makes of them.

A tensor is seen as a NumPy array at its device address, whose elements nobody may read: it carries shape, strides,
dtype and alignment, so that checks, views and ScanArgs are those of host arrays. `pyharness.torch` supplies PyTorch.

What a call needs besides addresses is worked out once for all arguments of the same shapes, strides, dtypes and
alignments, and kept. Nothing is waited for, and values on the device are not checked: a slot or an offset out of range
touches no memory outside the arrays.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pyharness import build, transpose
from pyharness.args import POINTERS
from pyharness.binding import Outputs, bind
from pyharness.device import image_target
from pyharness.errors import DeviceError, InvalidProblem, NoKernel, Unsupported, WrongShape
from pyharness.families import RecurrentSpec
from pyharness.launcher import Launcher, LoadedKernel
from pyharness.problem import ARRAY_DTYPES, ScanProblem, inner_contiguous
from pyharness.scan import find_kernel
from pyharness.select import Device, Features, unfit
from pyharness.spec import Geometry, KernelSpec, Plan
from pyharness.strides import merged
from pyharness.transpose import Sideways, Transposition

_log = logging.getLogger(__name__)

Array = NDArray[Any]
Tensor = Any

#: Axes of the arguments of `selective_state_update`; a tensor may come without nheads or ngroups.
UPDATE_AXES = {
    "state": ("slots", "nheads", "dim", "dstate"),
    "x": ("batch", "nheads", "dim"),
    "dt": ("batch", "nheads", "dim"),
    "A": ("nheads", "dim", "dstate"),
    "B": ("batch", "ngroups", "dstate"),
    "C": ("batch", "ngroups", "dstate"),
    "D": ("nheads", "dim"),
    "z": ("batch", "nheads", "dim"),
    "dt_bias": ("nheads", "dim"),
    "state_batch_indices": ("batch",),
}
#: Axes of the arguments of `mamba_chunk_scan_combined`; D may come without headdim.
CHUNK_SCAN_AXES = {
    "x": ("batch", "seqlen", "nheads", "headdim"),
    "dt": ("batch", "seqlen", "nheads"),
    "A": ("nheads",),
    "B": ("batch", "seqlen", "ngroups", "dstate"),
    "C": ("batch", "seqlen", "ngroups", "dstate"),
    "D": ("nheads", "headdim"),
    "z": ("batch", "seqlen", "nheads", "headdim"),
    "dt_bias": ("nheads",),
    "initial_states": ("batch", "nheads", "headdim", "dstate"),
    "seq_idx": ("batch", "seqlen"),
    "cu_seqlens": ("sequences + 1",),
}
#: Axes of the arguments of `selective_scan_fn`; B and C may come without ngroups.
SELECTIVE_AXES = {
    "u": ("batch", "dim", "seqlen"),
    "delta": ("batch", "dim", "seqlen"),
    "A": ("dim", "dstate"),
    "B": ("batch", "ngroups", "dstate", "seqlen"),
    "C": ("batch", "ngroups", "dstate", "seqlen"),
    "D": ("dim",),
    "z": ("batch", "dim", "seqlen"),
    "delta_bias": ("dim",),
}
_TOKENS_LAST = ("u", "delta", "B", "C", "z")
_TOKENS_FIRST = SELECTIVE_AXES | {
    "u": ("batch", "seqlen", "dim"),
    "delta": ("batch", "seqlen", "dim"),
    "B": ("batch", "seqlen", "ngroups", "dstate"),
    "C": ("batch", "seqlen", "ngroups", "dstate"),
    "z": ("batch", "seqlen", "dim"),
}
#: Arguments of the packages that are called otherwise here.
_FIELDS = {
    "state_batch_indices": "read_slots",
    "initial_states": "state",
    "u": "x",
    "delta": "dt",
    "delta_bias": "dt_bias",
}
_FLOATS = ("f32", "bf16", "f16")
_NO_LIMIT = (0.0, float("inf"))
_ALIGNMENT = 16
#: Calls that are kept worked out: one for each length that prompts have, and more.
_MOST_READY = 4096
_POINTERS = struct.Struct(f"<{len(POINTERS)}Q")
#: Of tensors that are converted before a kernel sees them.
_DTYPES = ARRAY_DTYPES | {"i64": np.dtype(np.int64), "f64": np.dtype(np.float64)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Framework(Protocol):
    """What a framework does for a call. All work it queues goes to the stream of `place`."""

    def described(self, tensor: Tensor) -> Array:
        """A tensor as `described`; raises what `dtype` does."""

    def dtype(self, tensor: Tensor) -> str:
        """The short name of a dtype, as `described` takes it.

        Raises:
            InvalidProblem: it has none here.
        """

    def signature(self, tensor: Tensor) -> tuple[Hashable, ...]:
        """Shape, strides and dtype."""

    def address(self, tensor: Tensor) -> int:
        """Of its first element, in bytes."""

    def place(self, tensors: Mapping[str, Tensor]) -> Place:
        """Where a call over some tensors runs.

        Raises:
            InvalidProblem: they are not all on one GPU.
            Unsupported: one of them wants a gradient.
        """

    def converted(self, tensor: Tensor, dtype: str, *, fresh: bool = False) -> Tensor:
        """A contiguous tensor of a dtype, by its short name: the same where it is one already and need not be fresh."""

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Tensor:
        """Memory of undefined contents."""

    def offsets(self, sequences: int, tokens: int, place: Place) -> Tensor:
        """i32 [sequences + 1]: 0, tokens, 2 tokens, ..."""

    def zeros(self, count: int, place: Place) -> Tensor:
        """u8 [count] of zeros."""


@dataclass(frozen=True)
class Place:
    """A GPU by its ordinal, a stream by its handle, and whether the stream is being captured."""

    ordinal: int
    stream: int
    capturing: bool = False


class _Memory:
    """What NumPy takes an array from."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": f"<u{item}",
            "version": 3,
        }


def described(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> Array:
    """Memory of a device as an array, whose elements must not be read.

    Args:
        address: of the first element, in bytes.
        shape: of the array.
        strides: in elements.
        dtype: f32, f64, bf16, f16, i8, i32, i64, u8 or u64.
    """
    kind = _DTYPES[dtype]
    words = np.asarray(_Memory(address, shape, tuple(s * kind.itemsize for s in strides), kind.itemsize))
    return words.view(kind)


@dataclass(frozen=True, eq=False)
class DeviceProblem(ScanProblem):
    """The arrays of a scan on a device, checked as far as no element need be read.

    Attributes:
        longest: tokens of the longest sequence, -1 where they are not known.

    Raises:
        InvalidProblem: an array or option is malformed; the message names it.
    """

    longest: int = -1

    def __post_init__(self) -> None:
        self._check_structure()

    @property
    def geometry(self) -> Geometry:
        """The sizes that decide a launch."""
        sizes = (self.tokens, self.sequences, self.heads, self.head_dim, self.groups, self.d_state)
        return Geometry(*sizes, self.longest, self.per_column_a)


def _repeats(array: Array, *axes: int) -> bool:
    """Whether an array has one value along some axes, as `expand` leaves it."""
    return all(array.shape[axis] == 1 or array.strides[axis] == 0 for axis in axes)


def _same(array: Array) -> Array | None:
    return array


View = Callable[[Array], "Array | None"]
#: What `tensor[index]` takes.
Index = tuple["int | slice | None", ...]
#: From the name of an argument, a dtype and an index to the description of a contiguous copy of what is there, whose
#: elements may come later, before the launch.
Convert = Callable[[str, str, Index], Array]


class _Arguments:
    """The described arguments of one call, on their way to a problem.

    Args:
        function: the name of the called function.
        arrays: what was given.
        axes: of every argument.
        convert: makes a copy where no view will do.
        heads_optional: an argument may come without its axis of heads or groups, which is 1 then.
    """

    def __init__(
        self,
        function: str,
        arrays: Mapping[str, Array],
        axes: Mapping[str, tuple[str, ...]],
        convert: Convert,
        *,
        heads_optional: bool = False,
    ) -> None:
        self.function = function
        self._given = arrays
        self._axes = axes
        self._convert = convert
        self._heads_optional = heads_optional
        #: Axes of one, for heads or groups, that a tensor came without.
        self._absent = {name: self._absent_axis(name) for name in arrays}
        self.arrays = {name: array[self._index(name)] for name, array in arrays.items()}
        self.sizes: dict[str, int] = {}

    def _absent_axis(self, name: str) -> int | None:
        axes, shape = self._axes[name], self._given[name].shape
        if len(shape) == len(axes):
            return None
        optional = [axis for axis, label in enumerate(axes) if label in ("nheads", "ngroups")]
        if len(shape) != len(axes) - 1 or not self._heads_optional or not optional:
            raise WrongShape(f"{self.function}: {name}: wanted ({', '.join(axes)}), found shape {tuple(shape)}")
        return optional[0]

    def _index(self, name: str, once: tuple[int, ...] = ()) -> Index:
        """Of a tensor as it was given: with the axis that it came without, the first of what repeats along others."""
        axes = range(len(self._axes[name]))
        return tuple(None if axis == self._absent[name] else 0 if axis in once else slice(None) for axis in axes)

    def measure(self, *names: str) -> None:
        """Take sizes from the shapes of arguments, checking those that are known."""
        for name in names:
            self.check(name)
            self.sizes |= dict(zip(self._axes[name], self.arrays[name].shape, strict=True))

    def check(self, name: str) -> None:
        """Compare a shape with the sizes that are known.

        Raises:
            WrongShape: they differ.
        """
        axes, shape = self._axes[name], self.arrays[name].shape
        known = [self.sizes.get(axis) for axis in axes]
        if len(shape) != len(axes) or any(k not in (None, n) for k, n in zip(known, shape, strict=True)):
            wanted = ", ".join(a if k is None else f"{a} = {k}" for a, k in zip(axes, known, strict=True))
            raise WrongShape(f"{self.function}: {name}: wanted ({wanted}), found shape {tuple(shape)}")

    def groups(self, label: str = "nheads") -> None:
        """Check that groups divide heads."""
        heads, groups = self.sizes[label], self.sizes["ngroups"]
        if groups < 1 or heads % groups:
            raise WrongShape(f"{self.function}: B: ngroups must divide the {heads} {label}, found {groups}")

    def rows(self, name: str, view: View, *dtypes: str, once: tuple[int, ...] = ()) -> Array | None:
        """An argument as rows of contiguous inner axes, copied where no view has them.

        Args:
            name: of the argument.
            view: to the axes of a problem.
            dtypes: that it may have, of which the last stands for all others; none for any.
            once: axes along which it repeats, of which the first element is taken.
        """
        return self._placed(name, view, 1, dtypes, once)

    def vector(self, name: str, view: View, dtype: str = "f32", once: tuple[int, ...] = ()) -> Array | None:
        """An argument as a contiguous array of one dtype, copied where it is not one."""
        return self._placed(name, view, 0, (dtype,), once)

    def _placed(
        self, name: str, view: View, first: int, dtypes: tuple[str, ...], once: tuple[int, ...]
    ) -> Array | None:
        if name not in self._given:
            return None
        index = self._index(name, once)
        array = self._given[name][index]
        fits = not dtypes or any(array.dtype == _DTYPES[dtype] for dtype in dtypes)
        found = view(array) if fits else None
        if found is None or not inner_contiguous(found, first):
            kept = _NAMES[array.dtype]
            found = view(self._convert(name, kept if fits else dtypes[-1], index))
        # Of a contiguous array there is every view.
        assert found is not None
        return found


def update_problem(
    arrays: Mapping[str, Array], convert: Convert, lists: Mapping[str, Array], *, dt_softplus: bool
) -> DeviceProblem:
    """One token of each of some sequences, the states updated where they are.

    Args:
        arrays: the arguments of `selective_state_update` by name, described.
        convert: where no view will do.
        lists: what the caller made: cu_seqlens of one token a sequence, unless there is one sequence.
        dt_softplus: as there.

    Raises:
        WrongShape, InvalidProblem: an argument is malformed.
    """
    a = _Arguments("selective_state_update", arrays, UPDATE_AXES, convert, heads_optional=True)
    a.measure("state", "x", "B")
    for name in a.arrays:
        a.check(name)
    a.groups()
    sizes = a.sizes
    if "state_batch_indices" not in a.arrays and sizes["slots"] < sizes["batch"]:
        raise WrongShape(
            f"selective_state_update: state: wanted a state for each of batch = {sizes['batch']} or "
            f"state_batch_indices, found {sizes['slots']}"
        )
    repeating = {"A": (1, 2), "dt": (2,), "D": (1,), "dt_bias": (1,)}
    by_head = all(_repeats(a.arrays[name], *axes) for name, axes in repeating.items() if name in a.arrays)
    # Mamba-2: dt and A of a head. Else Mamba-1: every row of a head is a channel of its own.
    once = repeating if by_head else dict.fromkeys(repeating, ())
    channels, values, steps = (_same, _same, _same) if by_head else (_channels, _merged(0), _merged(1))
    io = _NAMES[a.arrays["x"].dtype]
    state = channels(a.arrays["state"])
    if state is None or not inner_contiguous(state, 1):
        raise InvalidProblem(
            f"state: wanted every axis after the first contiguous, as it is updated in place, found byte strides "
            f"{list(a.arrays['state'].strides)} for shape {list(a.arrays['state'].shape)}"
        )
    return DeviceProblem(
        x=_given(a.rows("x", channels)),
        dt=_given(a.rows("dt", steps, io, "f32", once=once["dt"])),
        A=_given(a.vector("A", values, once=once["A"])),
        B=_given(a.rows("B", _same)),
        C=_given(a.rows("C", _same)),
        D=a.vector("D", values, once=once["D"]),
        dt_bias=a.vector("dt_bias", values, once=once["dt_bias"]),
        z=a.rows("z", channels),
        dt_softplus=dt_softplus,
        state=state,
        read_slots=a.vector("state_batch_indices", _same, "i32"),
        cu_seqlens=lists.get("cu_seqlens"),
        longest=1,
    )


def chunk_scan_problem(
    arrays: Mapping[str, Array],
    convert: Convert,
    lists: Mapping[str, Array],
    *,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> DeviceProblem:
    """Prompts: sequences of one length, or packed in one row behind cu_seqlens.

    Args:
        arrays: the arguments of `mamba_chunk_scan_combined` by name, described.
        convert: where no view will do.
        lists: what the caller made: state, f32 [sequences, nheads, headdim, dstate], which holds the initial states if
            there are any; resume, of zeros, if there are none; cu_seqlens of sequences of one length.
        dt_softplus, dt_limit: as there.

    Raises:
        WrongShape, InvalidProblem, Unsupported: an argument is malformed, or asks for what is not done here.
    """
    by_row = "D" in arrays and arrays["D"].ndim != 1
    axes = CHUNK_SCAN_AXES if by_row else CHUNK_SCAN_AXES | {"D": ("nheads",)}
    a = _Arguments("mamba_chunk_scan_combined", arrays, axes, convert)
    a.measure("x", "B")
    for name in a.arrays:
        a.check(name)
    a.groups()
    if a.sizes["seqlen"] < 1:
        raise WrongShape("mamba_chunk_scan_combined: x: wanted a seqlen of at least 1, found 0")
    if by_row and not _repeats(a.arrays["D"], 1):
        raise Unsupported(
            "mamba_chunk_scan_combined: D: wanted one value a head, (nheads,) or expanded from that, found a value for "
            "each row of a head: leave D and z out and apply them to the result"
        )
    packed = "cu_seqlens" in a.arrays
    limit = None if dt_softplus and tuple(dt_limit) == _NO_LIMIT else (float(dt_limit[0]), float(dt_limit[1]))
    io = _NAMES[a.arrays["x"].dtype]
    return DeviceProblem(
        x=_given(a.rows("x", _merged(0))),
        dt=_given(a.rows("dt", _merged(0), io, "f32")),
        A=_given(a.vector("A", _same)),
        B=_given(a.rows("B", _merged(0))),
        C=_given(a.rows("C", _merged(0))),
        D=a.vector("D", _same, once=(1,) if by_row else ()),
        dt_bias=a.vector("dt_bias", _same),
        z=a.rows("z", _merged(0)),
        dt_softplus=dt_softplus,
        dt_limit=limit,
        state=lists["state"],
        resume=lists.get("resume"),
        cu_seqlens=a.vector("cu_seqlens", _same, "i32") if packed else lists.get("cu_seqlens"),
        longest=-1 if packed else a.sizes["seqlen"],
    )


def selective_problem(
    arrays: Mapping[str, Array], convert: Convert, lists: Mapping[str, Array], *, delta_softplus: bool
) -> DeviceProblem:
    """Prompts of Mamba-1, from zero.

    Args:
        arrays: the arguments of `selective_scan_fn` by name, described, their axes in the order of `_TOKENS_FIRST`.
        convert: where no view will do.
        lists: what the caller made: state, f32 [batch, dim, dstate]; resume, of zeros; cu_seqlens unless batch is 1.
        delta_softplus: as there.

    Raises:
        WrongShape, InvalidProblem, Unsupported: an argument is malformed, or asks for what is not done here.
    """
    for name in ("B", "C"):
        if arrays[name].ndim == 2:
            raise Unsupported(
                f"selective_scan_fn: {name}: wanted one for each token, found the same for all: expand it"
            )
    # Messages have the order of axes that the caller has.
    given = {n: array.swapaxes(1, 2) if array.ndim == 4 else array for n, array in arrays.items()}
    given |= {n: array.swapaxes(-1, -2) for n, array in given.items() if n in _TOKENS_LAST}
    seen = _Arguments("selective_scan_fn", given, SELECTIVE_AXES, convert, heads_optional=True)
    seen.measure("u", "A", "B")
    for name in seen.arrays:
        seen.check(name)
    seen.groups("dim")
    a = _Arguments("selective_scan_fn", arrays, _TOKENS_FIRST, convert, heads_optional=True)
    if seen.sizes["seqlen"] < 1:
        raise WrongShape("selective_scan_fn: u: wanted a seqlen of at least 1, found 0")
    io = _NAMES[a.arrays["u"].dtype]

    def channels(array: Array) -> Array | None:
        found = merged(array, 0)
        return None if found is None else np.expand_dims(found, 2)

    return DeviceProblem(
        x=_given(a.rows("u", channels)),
        dt=_given(a.rows("delta", _merged(0), io, "f32")),
        A=_given(a.vector("A", _same)),
        B=_given(a.rows("B", _merged(0))),
        C=_given(a.rows("C", _merged(0))),
        D=a.vector("D", _same),
        dt_bias=a.vector("delta_bias", _same),
        z=a.rows("z", channels),
        dt_softplus=delta_softplus,
        state=np.expand_dims(lists["state"], 2),
        resume=lists["resume"],
        cu_seqlens=lists.get("cu_seqlens"),
        longest=seen.sizes["seqlen"],
    )


def _given(array: Array | None) -> Array:
    assert array is not None
    return array


def _merged(axis: int) -> View:
    return lambda array: merged(array, axis)


def _channels(array: Array) -> Array | None:
    """[..., heads, rows, ...] with heads second as [..., channels, 1, ...]."""
    found = merged(array, 1)
    return None if found is None else np.expand_dims(found, 2)


@dataclass(frozen=True)
class _Ready:
    """A call but for its addresses.

    Attributes:
        kernel, id, plan: what is launched.
        arguments: ScanArgs with other addresses.
        pointers: the tensor behind each pointer of ScanArgs, "" where there is none.
        conversions: arguments of which a part is copied first, and to which dtype.
        sideways: arguments whose tokens lie side by side, and to which dtype they belong; launches of their own turn
            them first.
        transpositions: those launches.
    """

    kernel: LoadedKernel
    id: str
    plan: Plan
    arguments: bytes
    pointers: tuple[str, ...]
    conversions: Mapping[str, tuple[str, Index]]
    sideways: Mapping[str, tuple[str, Sideways]]
    transpositions: Sequence[tuple[LoadedKernel, Transposition]]


class DropIn:
    """mamba-ssm's functions for a framework.

    Args:
        framework: of the tensors.
        open_gpu: from an ordinal to its launcher.
    """

    def __init__(self, framework: Framework, open_gpu: Callable[[int], Launcher] = Launcher) -> None:
        self._framework = framework
        self._open = open_gpu
        self._gpus: dict[int, Launcher] = {}
        self._ready: dict[Hashable, _Ready] = {}
        #: Calls by the id of the kernel that they launched.
        self.launched: Counter[str] = Counter()

    def launcher(self, ordinal: int) -> Launcher:
        """A GPU, opened once."""
        if ordinal not in self._gpus:
            self._gpus[ordinal] = self._open(ordinal)
        return self._gpus[ordinal]

    def selective_state_update(
        self,
        tensors: dict[str, Tensor],
        *,
        dt_softplus: bool,
        kernel: str | None,
        workspace: Tensor | None,
    ) -> Tensor:
        """y of one token a sequence; `pyharness.torch` documents it."""
        place = self._framework.place(tensors)
        tensors = dict(tensors)
        x, state = tensors["x"], tensors["state"]
        if len(state.shape) not in (3, 4) or len(x.shape) not in (2, 3):
            self._look("selective_state_update", UPDATE_AXES, "state", "x", tensors=tensors)
        batch = x.shape[0]
        y = self._framework.empty((batch, *state.shape[1:-1]), self._io(x), place)
        if not batch:
            return y
        made = {"y": y}
        if batch > 1:
            made["cu_seqlens"] = self._framework.offsets(batch, 1, place)

        problem = partial(update_problem, dt_softplus=dt_softplus)
        self._run(("update", dt_softplus), problem, tensors, made, place, kernel, workspace)
        return y

    def mamba_chunk_scan_combined(
        self,
        tensors: dict[str, Tensor],
        *,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
        kernel: str | None,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """y and the final states, f32; `pyharness.torch` documents it."""
        place = self._framework.place(tensors)
        tensors = dict(tensors)
        x, B, initial = tensors["x"], tensors["B"], tensors.get("initial_states")
        if len(x.shape) != 4 or len(B.shape) != 4:
            self._look("mamba_chunk_scan_combined", CHUNK_SCAN_AXES, "x", "B", tensors=tensors)
        batch, tokens, heads, head_dim = x.shape
        offsets = tensors.get("cu_seqlens")
        if "seq_idx" in tensors or offsets is not None:
            _check_packed(batch, offsets, initial)
        sequences = batch if offsets is None else offsets.shape[0] - 1
        shape = (sequences, heads, head_dim, B.shape[-1])
        made = {"y": self._framework.empty(tuple(x.shape), self._io(x), place)}
        if initial is None or not batch:
            made["state"] = self._framework.empty(shape, "f32", place)
            made["resume"] = self._framework.zeros(sequences, place)
        else:
            made["state"] = self._framework.converted(initial, "f32", fresh=True)
        if batch > 1 and tokens:
            made["cu_seqlens"] = self._framework.offsets(batch, tokens, place)
        if not batch:
            return made["y"], made["state"]

        problem = partial(chunk_scan_problem, dt_softplus=dt_softplus, dt_limit=dt_limit)
        self._run(("chunk", dt_softplus, tuple(dt_limit)), problem, tensors, made, place, kernel, workspace)
        return made["y"], made["state"]

    def selective_scan(
        self,
        tensors: dict[str, Tensor],
        *,
        delta_softplus: bool,
        kernel: str | None,
        workspace: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """y (batch, dim, seqlen), whose dim is contiguous, and the final states, f32 (batch, dim, dstate)."""
        place = self._framework.place(tensors)
        u, A = tensors["u"], tensors["A"]
        if len(u.shape) != 3 or len(A.shape) != 2:
            self._look("selective_scan_fn", SELECTIVE_AXES, "u", "A", tensors=tensors)
        batch, dim, tokens = u.shape
        # Tokens first: what the channels of a token are to a scan.
        swapped = {n: t.swapaxes(-1, -2) if n in _TOKENS_LAST else t for n, t in tensors.items()}
        swapped |= {n: t.swapaxes(1, 2) for n, t in swapped.items() if n in ("B", "C") and len(t.shape) == 4}
        made = {
            "y": self._framework.empty((batch, tokens, dim), self._io(u), place),
            "state": self._framework.empty((batch, dim, A.shape[1]), "f32", place),
        }
        if not batch:
            return made["y"].swapaxes(1, 2), made["state"]
        made["resume"] = self._framework.zeros(batch, place)
        if batch > 1 and tokens:
            made["cu_seqlens"] = self._framework.offsets(batch, tokens, place)

        problem = partial(selective_problem, delta_softplus=delta_softplus)
        self._run(("selective", delta_softplus), problem, swapped, made, place, kernel, workspace)
        return made["y"].swapaxes(1, 2), made["state"]

    def _io(self, x: Tensor) -> str:
        name = self._framework.dtype(x)
        if name not in _FLOATS:
            raise InvalidProblem(f"x: wanted dtype {' or '.join(_FLOATS)}, found {name}")
        return name

    def _look(
        self, function: str, axes: Mapping[str, tuple[str, ...]], *names: str, tensors: Mapping[str, Tensor]
    ) -> None:
        """Say what is wrong with the shapes of tensors of other numbers of axes."""
        arrays = {name: self._framework.described(tensors[name]) for name in names}
        _Arguments(function, arrays, axes, _no_copies, heads_optional=axes is UPDATE_AXES)

    def _run(
        self,
        options: Hashable,
        problem: Callable[[Mapping[str, Array], Convert, Mapping[str, Array]], DeviceProblem],
        tensors: dict[str, Tensor],
        made: Mapping[str, Tensor],
        place: Place,
        kernel: str | None,
        workspace: Tensor | None,
    ) -> None:
        """Launch a call over tensors that were given (copies replace them) and made for it."""
        framework = self._framework
        address = framework.address
        addresses: dict[str, int] = {}
        seen: list[Hashable] = [options, kernel, place.ordinal]
        for name, tensor in tensors.items():
            at = addresses[_FIELDS.get(name, name)] = address(tensor)
            seen += (name, *framework.signature(tensor), at % _ALIGNMENT)
        for name, tensor in made.items():
            # Their shapes follow from the others'.
            at = addresses[name] = address(tensor)
            seen += (name, at % _ALIGNMENT)
        key = tuple(seen)
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            # Makes the copies that have to be on the way.
            ready = self._ready[key] = self._prepare(problem, tensors, made, place, kernel)
        else:
            for name, (dtype, index) in ready.conversions.items():
                tensors[name] = framework.converted(tensors[name][index], dtype)
            for name, (dtype, array) in ready.sideways.items():
                tensors[name] = framework.empty(array.shape, dtype, place)
        if ready.transpositions:
            sources = {name: addresses[_FIELDS.get(name, name)] for name in ready.sideways}
            results = {name: address(tensors[name]) for name in ready.sideways}
            for turning, transposition in ready.transpositions:
                turning.launch(transposition.plan, transposition.pack(sources, results), place.stream)
        for name in (*ready.conversions, *ready.sideways):
            addresses[_FIELDS.get(name, name)] = address(tensors[name])
        if ready.plan.workspace_bytes:
            # Held until the launch is queued: what the stream does later does not get the memory before.
            space = self._workspace(workspace, ready.plan.workspace_bytes, place)
            addresses["workspace"] = address(space)
        arguments = bytearray(ready.arguments)
        _POINTERS.pack_into(arguments, 0, *(addresses[name] if name else 0 for name in ready.pointers))
        ready.kernel.launch(ready.plan, arguments, place.stream)
        self.launched[ready.id] += 1

    def _prepare(
        self,
        problem: Callable[[Mapping[str, Array], Convert, Mapping[str, Array]], DeviceProblem],
        tensors: dict[str, Tensor],
        made: Mapping[str, Tensor],
        place: Place,
        kernel: str | None,
    ) -> _Ready:
        conversions: dict[str, tuple[str, Index]] = {}
        sideways: dict[str, tuple[str, Sideways]] = {}
        framework = self._framework

        def convert(name: str, dtype: str, index: Index) -> Array:
            given = framework.described(tensors[name])[index]
            turned = transpose.sideways(given) if given.dtype == _DTYPES[dtype] else None
            if turned is None:
                conversions[name] = (dtype, index)
                tensors[name] = framework.converted(tensors[name][index], dtype)
            else:
                sideways[name] = (dtype, turned)
                tensors[name] = framework.empty(turned.shape, dtype, place)
            return framework.described(tensors[name])

        lists = {name: framework.described(tensor) for name, tensor in made.items()}
        arrays = {name: framework.described(tensor) for name, tensor in tensors.items()}
        found = problem(arrays, convert, lists)
        gpu = self.launcher(place.ordinal)
        spec = _kernel(found, kernel, Device(gpu.name, gpu.target, gpu.shared_limit))
        loaded = gpu.loaded(spec.id) or self._load(gpu, spec, place)
        plan = spec.plan(found.geometry)
        y = described(framework.address(made["y"]), found.x.shape, _contiguous(found.x.shape), found.io)
        assert found.state is not None
        binding = bind(found, plan, Outputs(y, found.state, None))
        addresses = {buffer.name: int(buffer.array.ctypes.data) for buffer in binding.buffers}
        pointers = tuple(name if name in addresses else "" for name in POINTERS)
        turning = transpose.transpositions({name: array for name, (_, array) in sideways.items()})
        launches = [(self._turning(gpu, place), each) for each in turning]
        return _Ready(loaded, spec.id, plan, binding.pack(addresses), pointers, conversions, sideways, launches)

    def _load(self, gpu: Launcher, spec: KernelSpec, place: Place) -> LoadedKernel:
        _check_loads(spec.id, place)
        return gpu.load(spec.id, build.image(spec, image_target(spec, gpu.capability, gpu.name)))

    def _turning(self, gpu: Launcher, place: Place) -> LoadedKernel:
        """The kernel of transpositions."""
        loaded = gpu.loaded(transpose.NAME)
        if loaded is None:
            _check_loads(transpose.NAME, place)
            loaded = gpu.load(transpose.NAME, transpose.image(gpu.target), transpose.ARGUMENT_BYTES)
        return loaded

    def _workspace(self, given: Tensor | None, nbytes: int, place: Place) -> Tensor:
        if given is None:
            return self._framework.empty((nbytes,), "u8", place)
        array = self._framework.described(given)
        if not inner_contiguous(array, 0) or array.nbytes < nbytes or array.ctypes.data % _ALIGNMENT:
            raise InvalidProblem(
                f"workspace: wanted {nbytes} contiguous bytes at a multiple of {_ALIGNMENT}, found {array.nbytes} of "
                f"shape {list(array.shape)}: leave it out, and the framework's allocator gives one"
            )
        return given


def _kernel(problem: DeviceProblem, kernel: str | None, device: Device) -> KernelSpec:
    """What selection picks or what is named; where the catalogue has nothing, the kernel of `recurrent` for such types.

    That one is compiled on its first call.

    Raises:
        NoKernel: there is none either, or what is named does not take the problem.
    """
    try:
        return find_kernel(problem, kernel, device)
    except NoKernel as nothing:
        if kernel is not None:
            raise
        made = RecurrentSpec(d_state=problem.d_state, io=problem.io, state=problem.state_dtype)
        if unfit(Features.of(problem), made, device):
            raise
        _log.warning("%s, which is not in the catalogue: %s", made.id, nothing)
        return made


def _check_loads(kernel: str, place: Place) -> None:
    if place.capturing:
        raise DeviceError(
            f"{kernel} is not loaded, and nothing can be while a graph is captured: make the same call once before"
        )


def _no_copies(name: str, dtype: str, index: Index) -> Array:
    raise AssertionError(f"{name} is only looked at")


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _check_packed(batch: int, offsets: Tensor | None, initial: Tensor | None) -> None:
    """Check what comes with sequences that are packed in one row."""
    function = "mamba_chunk_scan_combined"
    if offsets is None:
        raise Unsupported(
            f"{function}: seq_idx: wanted cu_seqlens beside it, which says how many sequences there are without a look "
            "at the device, found none: pass the offsets of the sequences as well"
        )
    if len(offsets.shape) != 1 or offsets.shape[0] < 2:
        raise WrongShape(f"{function}: cu_seqlens: wanted (sequences + 1), found shape {tuple(offsets.shape)}")
    if batch != 1:
        raise WrongShape(f"{function}: x: wanted batch = 1 with cu_seqlens, found {batch}")
    if initial is not None:
        raise Unsupported(
            f"{function}: initial_states: packed sequences start from zero here, found states: scan that sequence alone"
        )
