"""mamba-ssm's scan functions for PyTorch, by the kernels of this project: drop-ins for inference.

    from pyharness.torch import mamba_chunk_scan_combined, selective_scan_fn, selective_state_update

Arguments, results and the kind of errors are those of mamba-ssm's functions of the same names.
Tensors are used where they lie, with the strides that they have; work goes to PyTorch's current stream and can be
captured in a CUDA graph once the same call was made before; but for what a first call makes, nothing is waited for.
There is no backward.

What costs a copy: parameters D, dt_bias and A that are not f32, indices that are not int32, initial_states (a call
updates its own copy), and tensors whose strides a scan cannot follow; those whose tokens lie side by side are turned by
one launch. docs/torch.md has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any

from pyharness.drop_in import Array, DropIn, Place, described
from pyharness.errors import InvalidProblem, Unsupported, WrongShape

try:
    import torch
except ImportError as error:
    raise ImportError(f"pyharness.torch wants PyTorch, found none ({error}): pip install torch") from error

Tensor = Any

_NAMES: dict[Any, str] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.float64: "f64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
#: Elements that a constant has at first: more sequences than most batches have.
_LEAST_CONSTANTS = 4096


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    kernel: str | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """One token of each sequence; the states are updated in place.

    Heads may be left out, (batch, dim) for (batch, nheads, dim) and so on. Mamba-2 is told by strides: A expanded over
    dim and dstate, dt, D and dt_bias expanded over dim. All else is Mamba-1, with values for each row of a head.

    Args:
        state: (slots, nheads, dim, dstate), f32, bf16 or f16, slots as far apart as they are, each contiguous.
        x: (batch, nheads, dim), f32, bf16 or f16: the dtype of z, B, C and the result as well.
        dt: (batch, nheads, dim), of x's dtype or f32.
        A: (nheads, dim, dstate).
        B: (batch, ngroups, dstate), ngroups dividing nheads.
        C: as B.
        D: (nheads, dim), or None.
        z: as x, the gate, or None.
        dt_bias: (nheads, dim), or None.
        dt_softplus: apply softplus to dt + dt_bias.
        state_batch_indices: (batch,) the slot of each sequence, each of which occurs once; None is 0, 1, 2, ... A
            negative index is padding: its row of the result is 0 and no state is touched.
        kernel: None for what selection picks, a family name, or a full id.
        workspace: CUDA memory for what the kernel keeps between launches; None takes it from PyTorch's allocator.

    Returns:
        (batch, nheads, dim), or (batch, dim) for a state without heads, of x's dtype.

    Raises:
        WrongShape: a shape does not fit the others; also an AssertionError.
        InvalidProblem: a dtype, device or stride does not; also a ValueError.
        Unsupported: an argument requires a gradient; also a NotImplementedError.
        NoKernel: nothing in the catalogue takes the problem.
        DeviceError: a launch was refused.
    """
    tensors = {"state": state, "x": x, "dt": dt, "A": A, "B": B, "C": C}
    tensors |= _present(D=D, z=z, dt_bias=dt_bias, state_batch_indices=state_batch_indices)
    return calls.selective_state_update(tensors, dt_softplus=bool(dt_softplus), kernel=kernel, workspace=workspace)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    *,
    kernel: str | None = None,
    workspace: Tensor | None = None,
) -> Any:
    """Scan prompts.

    Args:
        x: (batch, seqlen, nheads, headdim), f32, bf16 or f16: the dtype of z, B, C and the result as well.
        dt: (batch, seqlen, nheads), of x's dtype or f32.
        A: (nheads,).
        B: (batch, seqlen, ngroups, dstate), ngroups dividing nheads.
        C: as B.
        chunk_size: at least 1; how a kernel cuts a sequence is its own affair, and no result depends on it.
        D: (nheads,), or (nheads, headdim) expanded from that, or None.
        z: as x, the gate, or None.
        dt_bias: (nheads,), or None.
        initial_states: (batch, nheads, headdim, dstate), or None for zero.
        seq_idx: (1, seqlen): which sequence a token belongs to, 0, 0, ..., 1, ...; wants cu_seqlens, whose offsets are
            the ones that count.
        cu_seqlens: (sequences + 1,) offsets of sequences packed in one row; looked at with seq_idx or
            return_varlen_states.
        dt_softplus: apply softplus to dt + dt_bias.
        dt_limit: least and greatest dt after that.
        return_final_states: also return the states behind the last tokens, f32 (batch, nheads, headdim, dstate).
        return_varlen_states: also return those of every packed sequence, of C's dtype; wants seq_idx.
        kernel, workspace: as for `selective_state_update`.

    Returns:
        The result of x's shape and dtype, alone or in a tuple with the states that were asked for.

    Raises:
        WrongShape, InvalidProblem, NoKernel, DeviceError: as for `selective_state_update`.
        Unsupported: a gradient; a D for each row of a head; seq_idx without cu_seqlens; initial_states of packed
            sequences.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise InvalidProblem(f"chunk_size: wanted a number of tokens of at least 1, found {chunk_size!r}")
    if return_varlen_states and (cu_seqlens is None or seq_idx is None):
        missing = "cu_seqlens" if cu_seqlens is None else "seq_idx"
        raise WrongShape(f"mamba_chunk_scan_combined: return_varlen_states wants {missing}, found None")
    if seq_idx is None:
        cu_seqlens = None
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    tensors |= _present(D=D, z=z, dt_bias=dt_bias)
    tensors |= _present(initial_states=initial_states, seq_idx=seq_idx, cu_seqlens=cu_seqlens)
    y, states = calls.mamba_chunk_scan_combined(
        tensors, dt_softplus=bool(dt_softplus), dt_limit=dt_limit, kernel=kernel, workspace=workspace
    )
    results = [y]
    if return_final_states:
        results.append(states if cu_seqlens is None else states[-1:])
    if return_varlen_states:
        results.append(states.to(C.dtype))
    return results[0] if len(results) == 1 else tuple(results)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    *,
    kernel: str | None = None,
    workspace: Tensor | None = None,
) -> Any:
    """Scan prompts of Mamba-1.

    A scan reads the channels of a token side by side: arguments whose dim is contiguous are used where they lie, those
    whose seqlen is are copied, and the result's dim is contiguous.

    Args:
        u: (batch, dim, seqlen), f32, bf16 or f16: the dtype of z, B, C and the result as well.
        delta: (batch, dim, seqlen), of u's dtype or f32.
        A: (dim, dstate).
        B: (batch, dstate, seqlen) or (batch, ngroups, dstate, seqlen), ngroups dividing dim.
        C: as B.
        D: (dim,), or None.
        z: as u, the gate, or None.
        delta_bias: (dim,), or None.
        delta_softplus: apply softplus to delta + delta_bias.
        return_last_state: also return the states behind the last tokens, f32 (batch, dim, dstate).
        kernel, workspace: as for `selective_state_update`.

    Returns:
        The result of u's shape and dtype, alone or in a tuple with the states.

    Raises:
        WrongShape, InvalidProblem, NoKernel, DeviceError: as for `selective_state_update`.
        Unsupported: a gradient; a B or C that is the same for all tokens.
    """
    tensors = {"u": u, "delta": delta, "A": A, "B": B, "C": C} | _present(D=D, z=z, delta_bias=delta_bias)
    y, states = calls.selective_scan(tensors, delta_softplus=bool(delta_softplus), kernel=kernel, workspace=workspace)
    return (y, states) if return_last_state else y


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


class Torch:
    """PyTorch as `pyharness.drop_in` wants a framework."""

    def __init__(self) -> None:
        #: By what makes them, GPU, and length.
        self._constants: dict[tuple[Callable[..., Tensor], int, int], Tensor] = {}
        self._longest: dict[tuple[Callable[..., Tensor], int], Tensor] = {}

    def dtype(self, tensor: Tensor) -> str:
        name = _NAMES.get(tensor.dtype)
        if name is None:
            raise InvalidProblem(f"wanted tensors of {', '.join(_DTYPES)}, found one of {tensor.dtype}: convert it")
        return name

    def described(self, tensor: Tensor) -> Array:
        return described(tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), self.dtype(tensor))

    def signature(self, tensor: Tensor) -> tuple[Hashable, ...]:
        return tensor.shape, tensor.stride(), tensor.dtype

    def address(self, tensor: Tensor) -> int:
        address: int = tensor.data_ptr()
        return address

    def place(self, tensors: Mapping[str, Tensor]) -> Place:
        graded = torch.is_grad_enabled()
        home = None
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise InvalidProblem(f"{name}: wanted a tensor, found {type(tensor).__name__}")
            home = tensor.device if home is None else home
            if tensor.device.type != "cuda":
                raise InvalidProblem(f"{name}: wanted a CUDA tensor, found one on {tensor.device}: move it to the GPU")
            if tensor.device != home:
                raise InvalidProblem(f"{name}: wanted all tensors on {home}, found one on {tensor.device}: move it")
            if graded and tensor.requires_grad:
                raise Unsupported(
                    f"{name} requires a gradient, and these kernels have no backward: call them under "
                    "torch.inference_mode() or torch.no_grad(), or detach it"
                )
        assert home is not None
        stream = torch.cuda.current_stream(home).cuda_stream
        if home.index == torch.cuda.current_device():
            return Place(home.index, stream, torch.cuda.is_current_stream_capturing())
        with torch.cuda.device(home):
            return Place(home.index, stream, torch.cuda.is_current_stream_capturing())

    def converted(self, tensor: Tensor, dtype: str, *, fresh: bool = False) -> Tensor:
        return tensor.to(_DTYPES[dtype], memory_format=torch.contiguous_format, copy=fresh).contiguous()

    def empty(self, shape: tuple[int, ...], dtype: str, place: Place) -> Tensor:
        return torch.empty(shape, dtype=_DTYPES[dtype], device=f"cuda:{place.ordinal}")

    def offsets(self, sequences: int, tokens: int, place: Place) -> Tensor:
        if tokens == 1:
            return self._constant(torch.arange, torch.int32, sequences + 1, place)
        return _offsets(sequences, tokens, place) if place.capturing else _kept_offsets(sequences, tokens, place)

    def zeros(self, count: int, place: Place) -> Tensor:
        return self._constant(torch.zeros, torch.uint8, count, place)

    def _constant(self, make: Callable[..., Tensor], dtype: Any, count: int, place: Place) -> Tensor:
        """The first elements of what is the same in every call: made once a GPU, and never freed.

        So a captured graph may read it, as long as it was made before; else what a capture makes is the graph's.
        """
        key = (make, place.ordinal, count)
        if key not in self._constants:
            whole = self._longest.get(key[:2])
            if whole is None or len(whole) < count:
                device = f"cuda:{place.ordinal}"
                if place.capturing:
                    return make(count, dtype=dtype, device=device)
                whole = self._longest[key[:2]] = make(max(_LEAST_CONSTANTS, 2 * count), dtype=dtype, device=device)
                # From now on whatever stream may read it.
                torch.cuda.current_stream(device).synchronize()
            self._constants[key] = whole[:count]
        return self._constants[key]


def _offsets(sequences: int, tokens: int, place: Place) -> Tensor:
    last = sequences * tokens
    return torch.arange(0, last + 1, tokens, dtype=torch.int32, device=f"cuda:{place.ordinal}")


# Of the stream that filled them. What a capture makes is filled at replay and belongs to the graph.
_kept_offsets = lru_cache(maxsize=64)(_offsets)

calls = DropIn(Torch())
