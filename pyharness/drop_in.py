"""mamba-ssm's scan functions over any framework's tensors: their arguments, and what a call of ours makes of them.

A tensor is seen as a NumPy array at its device address, whose elements nobody may read: it carries shape, strides,
dtype and alignment, so that checks, views and ScanArgs are those of host arrays. `pyharness.torch` supplies PyTorch.

What a call needs besides addresses is worked out once for all arguments of the same shapes, strides, dtypes and
alignments, and kept. Nothing is waited for, and values on the device are not checked: a slot or an offset out of range
touches no memory outside the arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from pyharness import build
from pyharness.args import POINTERS
from pyharness.binding import Outputs, bind
from pyharness.device import image_target
from pyharness.errors import DeviceError, InvalidProblem, Unsupported, WrongShape
from pyharness.launcher import Launcher, LoadedKernel
from pyharness.problem import ARRAY_DTYPES, ScanProblem, inner_contiguous
from pyharness.scan import find_kernel
from pyharness.select import Device
from pyharness.spec import Geometry, KernelSpec, Plan

Array = NDArray[Any]
Tensor = Any

#: Axes of the arguments of `selective_state_update`; a tensor may come without its second to last but one, the heads
#: or groups, which are 1 then.
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
#: Arguments of the packages that are called otherwise here.
_FIELDS = {"state_batch_indices": "read_slots", "initial_states": "state"}
_FLOATS = ("f32", "bf16", "f16")
_NO_LIMIT = (0.0, float("inf"))
_ALIGNMENT = 16
#: Of tensors that are converted before a kernel sees them.
_DTYPES = ARRAY_DTYPES | {"i64": np.dtype(np.int64), "f64": np.dtype(np.float64)}


class Framework(Protocol):
    """What a framework does for a call. All work it queues goes to the stream of `place`."""

    def described(self, tensor: Tensor) -> Array:
        """A tensor as `described`.

        Raises:
            InvalidProblem: its dtype has no counterpart here.
        """

    def signature(self, tensor: Tensor) -> Hashable:
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


def _repeats(array: Array, *axes: int) -> bool:
    """Whether an array has one value along some axes, as `expand` leaves it."""
    return all(array.shape[axis] == 1 or array.strides[axis] == 0 for axis in axes)


def _same(array: Array) -> Array | None:
    return array


View = Callable[[Array], "Array | None"]
#: From the name of an argument and a dtype to the description of a contiguous copy.
Convert = Callable[[str, str], Array]


class _Arguments:
    """The described arguments of one call, on their way to a problem.

    Args:
        function: the name of the called function.
        arrays: what was given.
        axes: of every argument.
        convert: makes a copy where no view will do.
    """

    def __init__(
        self, function: str, arrays: Mapping[str, Array], axes: Mapping[str, tuple[str, ...]], convert: Convert
    ) -> None:
        self.function = function
        self.arrays = dict(arrays)
        self._axes = axes
        self._convert = convert
        self.sizes: dict[str, int] = {}

    def without_heads(self) -> None:
        """Give what came without heads or groups an axis of one."""
        for name, array in self.arrays.items():
            axes = self._axes[name]
            if array.ndim == len(axes) - 1 and len(axes) > 1:
                axis = next(i for i, label in enumerate(axes) if label in ("nheads", "ngroups"))
                self.arrays[name] = np.expand_dims(array, axis)

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

    def groups(self) -> None:
        """Check that groups divide heads."""
        heads, groups = self.sizes["nheads"], self.sizes["ngroups"]
        if groups < 1 or heads % groups:
            raise WrongShape(f"{self.function}: B: ngroups must divide the {heads} nheads, found {groups}")

    def rows(self, name: str, view: View, *also: str) -> Array | None:
        """An argument as rows of contiguous inner axes, copied where no view has them.

        Args:
            name: of the argument.
            view: to the axes of a problem.
            also: dtypes that it may have; f32 stands for all others then.
        """
        return self._placed(name, view, 1, also)

    def vector(self, name: str, view: View, dtype: str = "f32") -> Array | None:
        """An argument as a contiguous array of one dtype, copied where it is not one."""
        return self._placed(name, view, 0, (dtype,))

    def _placed(self, name: str, view: View, first: int, dtypes: tuple[str, ...]) -> Array | None:
        array = self.arrays.get(name)
        if array is None:
            return None
        fits = not dtypes or any(array.dtype == ARRAY_DTYPES[dtype] for dtype in dtypes)
        found = view(array) if fits else None
        if found is not None and inner_contiguous(found, first) and (first == 0 or _rising(found)):
            return found
        kept = next(n for n, kind in _DTYPES.items() if kind == array.dtype)
        ndim = array.ndim
        copy = self._convert(name, kept if fits else dtypes[-1])
        while copy.ndim < ndim:  # what came without heads
            axis = next(i for i, label in enumerate(self._axes[name]) if label in ("nheads", "ngroups"))
            copy = np.expand_dims(copy, axis)
        self.arrays[name] = copy
        return view(copy)


def _rising(array: Array) -> bool:
    """Whether the first stride may be one of rows."""
    return array.shape[0] <= 1 or array.strides[0] >= 0


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
    a = _Arguments("selective_state_update", arrays, UPDATE_AXES, convert)
    a.without_heads()
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
    once = {"A": (1, 2), "dt": (2,), "D": (1,), "dt_bias": (1,)}
    by_head = all(_repeats(a.arrays[name], *axes) for name, axes in once.items() if name in a.arrays)
    tokens: View
    slots: View
    if by_head:
        # Mamba-2: dt and A of a head.
        tokens, steps, vector, decays, slots = _same, _first(2), _first(1), _first(1, 2), _same
    else:
        # Mamba-1: every row of a head is a channel of its own.
        tokens, steps, vector, decays, slots = _channels(1), _merged(1), _merged(0), _merged(0), _channels(1)
    io = _name(a.arrays["x"])
    state = slots(a.arrays["state"])
    if state is None or not inner_contiguous(state, 1):
        raise InvalidProblem(
            f"state: wanted every axis after the first contiguous, as it is updated in place, found byte strides "
            f"{list(a.arrays['state'].strides)} for shape {list(a.arrays['state'].shape)}"
        )
    return DeviceProblem(
        x=_given(a.rows("x", tokens)),
        dt=_given(a.rows("dt", steps, io, "f32")),
        A=_given(a.vector("A", decays)),
        B=_given(a.rows("B", _same)),
        C=_given(a.rows("C", _same)),
        D=a.vector("D", vector),
        dt_bias=a.vector("dt_bias", vector),
        z=a.rows("z", tokens),
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
    io = _name(a.arrays["x"])
    return DeviceProblem(
        x=_given(a.rows("x", _merged(0))),
        dt=_given(a.rows("dt", _merged(0), io, "f32")),
        A=_given(a.vector("A", _same)),
        B=_given(a.rows("B", _merged(0))),
        C=_given(a.rows("C", _merged(0))),
        D=a.vector("D", _first(1) if by_row else _same),
        dt_bias=a.vector("dt_bias", _same),
        z=a.rows("z", _merged(0)),
        dt_softplus=dt_softplus,
        dt_limit=limit,
        state=lists["state"],
        resume=lists.get("resume"),
        cu_seqlens=a.vector("cu_seqlens", _same, "i32") if packed else lists.get("cu_seqlens"),
        longest=-1 if packed else a.sizes["seqlen"],
    )


def _name(array: Array) -> str:
    """The short name of a dtype that io may have.

    Raises:
        InvalidProblem: x has none of them.
    """
    for name in _FLOATS:
        if array.dtype == ARRAY_DTYPES[name]:
            return name
    raise InvalidProblem(f"x: wanted dtype {' or '.join(_FLOATS)}, found {array.dtype}")


def _given(array: Array | None) -> Array:
    assert array is not None
    return array


def _first(*axes: int) -> View:
    """Of axes along which nothing changes, the first element."""

    def view(array: Array) -> Array | None:
        if not _repeats(array, *axes):
            return None
        index = tuple(0 if axis in axes else slice(None) for axis in range(array.ndim))
        found: Array = array[index]
        return found

    return view


def _merged(axis: int) -> View:
    return lambda array: merged(array, axis)


def _channels(axis: int) -> View:
    """Heads and rows as channels of one row each."""

    def view(array: Array) -> Array | None:
        found = merged(array, axis)
        return None if found is None else np.expand_dims(found, axis + 1)

    return view


@dataclass(frozen=True)
class _Ready:
    """A call but for its addresses.

    Attributes:
        kernel, plan: what is launched.
        arguments: ScanArgs with other addresses.
        pointers: the tensor behind each pointer of ScanArgs, "" where there is none.
        conversions: dtypes of the arguments that are copied first.
    """

    kernel: LoadedKernel
    plan: Plan
    arguments: bytes
    pointers: tuple[str, ...]
    conversions: Mapping[str, str]


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
        #: Id of the kernel that the last call launched.
        self.last_kernel = ""

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
        x, state = tensors["x"], tensors["state"]
        heads = state.shape[1:-1] if len(state.shape) == 4 else state.shape[1:2]
        batch = x.shape[0]
        tensors = dict(tensors)
        y = self._framework.empty((batch, *heads), _name(self._framework.described(x)), place)
        if not batch:
            return y
        made = {"y": y}
        if batch > 1:
            made["cu_seqlens"] = self._framework.offsets(batch, 1, place)

        def problem(arrays: Mapping[str, Array], convert: Convert, lists: Mapping[str, Array]) -> DeviceProblem:
            return update_problem(arrays, convert, lists, dt_softplus=dt_softplus)

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
            # Says what was wanted.
            arrays = {name: self._framework.described(tensors[name]) for name in ("x", "B")}
            _Arguments("mamba_chunk_scan_combined", arrays, CHUNK_SCAN_AXES, _no_copies).measure("x", "B")
        batch, tokens, heads, head_dim = x.shape
        offsets = tensors.get("cu_seqlens")
        if tensors.pop("seq_idx", None) is not None or offsets is not None:
            _check_packed(batch, offsets, initial)
        sequences = batch if offsets is None else offsets.shape[0] - 1
        shape = (sequences, heads, head_dim, B.shape[-1])
        made = {"y": self._framework.empty(tuple(x.shape), _name(self._framework.described(x)), place)}
        if initial is None or not batch:
            made["state"] = self._framework.empty(shape, "f32", place)
            made["resume"] = self._framework.zeros(sequences, place)
        else:
            made["state"] = self._framework.converted(initial, "f32", fresh=True)
        if batch > 1 and tokens:
            made["cu_seqlens"] = self._framework.offsets(batch, tokens, place)
        if not batch:
            return made["y"], made["state"]

        def problem(arrays: Mapping[str, Array], convert: Convert, lists: Mapping[str, Array]) -> DeviceProblem:
            return chunk_scan_problem(arrays, convert, lists, dt_softplus=dt_softplus, dt_limit=dt_limit)

        self._run(("chunk", dt_softplus, tuple(dt_limit)), problem, tensors, made, place, kernel, workspace)
        return made["y"], made["state"]

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
        """Launch a call over tensors that were given (conversions replace them) and made for it."""
        framework = self._framework
        key: Hashable = (
            options,
            kernel,
            place.ordinal,
            *((n, framework.signature(t), framework.address(t) % _ALIGNMENT) for n, t in tensors.items()),
            *((n, framework.signature(t), framework.address(t) % _ALIGNMENT) for n, t in made.items()),
        )
        ready = self._ready.get(key)
        if ready is None:
            # Converts what has to be on the way.
            ready = self._ready[key] = self._prepare(problem, tensors, made, place, kernel)
        else:
            for name, dtype in ready.conversions.items():
                tensors[name] = framework.converted(tensors[name], dtype)
        held = {_FIELDS.get(name, name): tensor for name, tensor in tensors.items()} | dict(made)
        if ready.plan.workspace_bytes:
            held["workspace"] = self._workspace(workspace, ready.plan.workspace_bytes, place)
        arguments = bytearray(ready.arguments)
        struct.pack_into(
            f"<{len(POINTERS)}Q", arguments, 0, *(framework.address(held[n]) if n else 0 for n in ready.pointers)
        )
        self.last_kernel = ready.kernel.spec.id
        ready.kernel.launch(ready.plan, arguments, place.stream)

    def _prepare(
        self,
        problem: Callable[[Mapping[str, Array], Convert, Mapping[str, Array]], DeviceProblem],
        tensors: dict[str, Tensor],
        made: Mapping[str, Tensor],
        place: Place,
        kernel: str | None,
    ) -> _Ready:
        conversions: dict[str, str] = {}
        framework = self._framework

        def convert(name: str, dtype: str) -> Array:
            conversions[name] = dtype
            tensors[name] = framework.converted(tensors[name], dtype)
            return framework.described(tensors[name])

        lists = {name: framework.described(tensor) for name, tensor in made.items()}
        arrays = {name: framework.described(tensor) for name, tensor in tensors.items()}
        found = problem(arrays, convert, lists)
        gpu = self.launcher(place.ordinal)
        spec = find_kernel(found, kernel, Device(gpu.name, gpu.target, gpu.shared_limit))
        loaded = gpu.loaded(spec) or self._load(gpu, spec, place)
        plan = spec.plan(found.geometry)
        y = described(framework.address(made["y"]), found.x.shape, _contiguous(found.x.shape), found.io)
        assert found.state is not None
        binding = bind(found, plan, Outputs(y, found.state, None))
        addresses = {buffer.name: int(buffer.array.ctypes.data) for buffer in binding.buffers}
        pointers = tuple(name if name in addresses else "" for name in POINTERS)
        return _Ready(loaded, plan, binding.pack(addresses), pointers, conversions)

    def _load(self, gpu: Launcher, spec: KernelSpec, place: Place) -> LoadedKernel:
        if place.capturing:
            raise DeviceError(
                f"{spec.id} is not loaded, and nothing can be while a graph is captured: make the same call once before"
            )
        return gpu.load(spec, build.image(spec, image_target(spec, gpu.capability, gpu.name)))

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


def _no_copies(name: str, dtype: str) -> Array:
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
