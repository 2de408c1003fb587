"""Other packages' kernels over the very arrays of a workload, timed by the same protocol in the same process.

Nothing here is needed to use this project. Who wants the comparison installs torch and the packages beside it; each is
imported when asked for, and one that is missing or cannot run a point is shown with the reason. Launch configurations
that a package fixes inside are chosen by standing in for its compiled kernel, not by copying it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pyharness.errors import DeviceError
from pyharness.workload import Norms, Point, Workload

#: (BLOCK_SIZE_M, num_warps) of mamba-ssm's Triton kernel that are timed; the first is its own choice at the usual
#: d_state.
TRITON_CONFIGURATIONS = ((4, 4), (4, 1), (8, 1), (8, 4), (16, 1), (16, 4), (32, 8))
#: Of Mamba-1, whose states have few columns: a block takes more channels. Of ten that were timed on an H200, those that
#: came first or close to it at some batch.
TRITON_CHANNELS = ((32, 4), (16, 1), (32, 1), (64, 2), (128, 4))
#: FlashInfer's kernels of one token a sequence; the first takes several too. Each combination of types and sizes costs
#: a compilation of some 20 s when it is first called.
FLASHINFER_ALGORITHMS = ("simple", "vertical")
#: mamba-ssm's compiled scan of Mamba-1; who benches builds it from the package's source distribution.
_SCAN_MODULE = "selective_scan_cuda"
_TRITON_MODULE = "mamba_ssm.ops.triton.selective_state_update"
#: Chunks of mamba-ssm's prefill that are timed, each after its own autotune.
TRITON_CHUNKS = (128, 256)
_MAMBA_PACKAGES = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
_TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
#: Most relative error of y: D and dt_bias may be 16-bit there. It tells a wrong call from a right one, no more.
LOOSE_BOUND = 2e-2
_MESSAGE = 200


@dataclass(frozen=True)
class Peer:
    """One kernel of another package: its name in tables, and from the tensors of a set to a call of it.

    A call returns y, or y and the final states where the kernel does not store them to the pool.
    """

    name: str
    prepare: Callable[[Workload], Callable[[int], Any]]


def peers(point: Point) -> Iterator[Peer]:
    """Every kernel and configuration that is compared at a point, installed or not.

    flashinfer's kernels take one A a head, so that there is none for Mamba-1.
    """
    if point.mamba1 and point.job == "prefill":
        yield Peer("mamba-ssm selective_scan", _selective_scan)
        return
    if point.job == "prefill":
        for chunk in TRITON_CHUNKS:
            yield Peer(f"mamba-ssm chunk_scan {chunk}", functools.partial(_chunk_scan, chunk=chunk))
        return
    several = point.tokens > 1
    for rows, warps in () if several else TRITON_CHANNELS if point.mamba1 else TRITON_CONFIGURATIONS:
        yield Peer(f"mamba-ssm triton ({rows}, {warps})", functools.partial(_triton, rows=rows, warps=warps))
    for algorithm in () if point.mamba1 else FLASHINFER_ALGORITHMS[:1] if several else FLASHINFER_ALGORITHMS:
        yield Peer(f"flashinfer {algorithm}", functools.partial(_flashinfer, algorithm=algorithm))


class _Words:
    """Device memory as torch takes it: bytes at an address."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise DeviceError(f"torch is not installed ({error})") from error


def tensors(workload: Workload, k: int) -> dict[str, Any]:
    """Set k of a workload as torch tensors over the same memory.

    x, y and z, where the point has one, are [sequences, tokens, heads, head_dim], of sequences that differ in length
    [1, tokens, ...]; dt, A, D, dt_bias are broadcast to the shapes that decode takes, with strides of 0 (dt_of_head,
    A_of_head are not); B, C are [sequences, tokens, groups, d_state]; state is the whole pool; slots are i32
    [sequences]. The channels of Mamba-1 are the rows of one head a group, each with values of its own.

    Raises:
        DeviceError: torch is missing, or the point has a type that peers do not have.
    """
    torch = _torch()
    p = workload.point
    if p.state not in _TORCH_TYPES:
        raise DeviceError(f"no {p.state} state")

    def flat(name: str, index: int, elements: int, kind: str) -> Any:
        dtype = getattr(torch, kind)
        nbytes = elements * torch.empty(0, dtype=dtype).element_size()
        words = _Words(workload.address(name, index), nbytes)
        return torch.as_tensor(words, device=f"cuda:{workload.device.ordinal}").view(dtype)

    def rows(name: str, *inner: int) -> Any:
        stride = workload.row_elements(name)
        size = int(np.prod(inner))
        whole = flat(name, k, (p.all_tokens - 1) * stride + size, _TORCH_TYPES[p.io])
        steps = [int(np.prod(inner[axis + 1 :])) for axis in range(len(inner))]
        batch, tokens = (1, p.all_tokens) if p.lengths else (p.sequences, p.tokens)
        return whole.as_strided((batch, tokens, *inner), (tokens * stride, stride, *steps))

    heads, head_dim = (p.groups, p.heads // p.groups) if p.mamba1 else (p.heads, p.head_dim)
    rank = (heads, head_dim, p.d_state)
    columns = p.d_state if p.mamba1 else 1
    vectors = {name: flat(name, 0, p.heads, "float32") for name in ("D", "dt_bias")}
    vectors["A"] = flat("A", 0, p.heads * columns, "float32")
    dt = rows("dt", p.heads)
    if p.mamba1:
        inner = {"dt": dt.unflatten(2, rank[:2]), "z": rows("z", *rank[:2]), "A": vectors["A"].view(rank)}
        inner |= {name: vectors[name].view(rank[:2]) for name in ("D", "dt_bias")}
    else:
        inner = {"dt": dt[..., None].expand(-1, -1, -1, head_dim), "A": vectors["A"][:, None, None].expand(*rank)}
        inner |= {name: vectors[name][:, None].expand(*rank[:2]) for name in ("D", "dt_bias")}
    slots = workload.sets * p.sequences
    return inner | {
        "x": rows("x", *rank[:2]),
        "y": rows("y", *rank[:2]),
        "B": rows("B", p.groups, p.d_state),
        "C": rows("C", p.groups, p.d_state),
        "dt_of_head": dt,
        "A_of_head": vectors["A"],
        "state": flat("state", 0, slots * int(np.prod(rank)), _TORCH_TYPES[p.state]).view(slots, *rank),
        "slots": flat("read_slots", k, p.sequences, "int32"),
    }


def mamba_module(name: str) -> Any:
    """A Triton module of mamba-ssm, also where the package's own import fails for want of its compiled parts."""
    module = f"{_MAMBA_PACKAGES[-1]}.{name}"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        found = importlib.util.find_spec("mamba_ssm")
        if found is None or not found.submodule_search_locations:
            raise DeviceError("mamba-ssm is not installed") from error
        root = Path(next(iter(found.submodule_search_locations)))
        for package_name in _MAMBA_PACKAGES:
            package = types.ModuleType(package_name)
            package.__path__ = [str(root.joinpath(*package_name.split(".")[1:]))]
            sys.modules[package_name] = package
        try:
            return importlib.import_module(module)
        except ImportError as second:
            raise DeviceError(f"mamba-ssm does not import: {second}") from second


class _Configured:
    """Stands in for a Triton kernel and launches it with another block of rows and number of warps."""

    def __init__(self, kernel: Any, rows: int, warps: int) -> None:
        self._kernel, self._rows, self._warps = kernel, rows, warps

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            # The package passes its own rows of a block last.
            return self._kernel[grid](*arguments[:-1], self._rows, **(options | {"num_warps": self._warps}))

        return launch


def _triton(workload: Workload, rows: int, warps: int) -> Callable[[int], Any]:
    if workload.point.tokens != 1:
        raise DeviceError("one token a sequence only")
    module = mamba_module("selective_state_update")
    name = "_selective_scan_update_kernel"
    plain = getattr(module, name)
    configured = _Configured(plain, rows, warps)
    sets = [_one_token(tensors(workload, k)) for k in range(workload.sets)]

    def call(k: int) -> Any:
        t = sets[k]
        setattr(module, name, configured)
        try:
            return module.selective_state_update(
                *(t[n] for n in ("state", "x", "dt", "A", "B", "C", "D")),
                z=t.get("z"),
                dt_bias=t["dt_bias"],
                dt_softplus=True,
                state_batch_indices=t["slots"],
            )
        finally:
            setattr(module, name, plain)

    return call


def _one_token(t: dict[str, Any]) -> dict[str, Any]:
    return {name: value[:, 0] if name in ("x", "y", "z", "B", "C", "dt") else value for name, value in t.items()}


def _selective_scan(workload: Workload) -> Callable[[int], Any]:
    """mamba-ssm's compiled scan; it wants a channel's tokens side by side, and its inputs are laid out so beforehand.

    It starts from zero, and gives what each of its own chunks ends with: its decay and its state, column by column.
    """
    if workload.point.resume:
        raise DeviceError("sequences start from zero there")
    _torch()
    try:
        module = importlib.import_module(_SCAN_MODULE)
    except ImportError as error:
        raise DeviceError(f"{_SCAN_MODULE} is not built ({error})") from error
    sets = []
    for k in range(workload.sets):
        t = tensors(workload, k)
        rows = {name: t[name].flatten(2).transpose(1, 2).contiguous() for name in ("x", "dt", "z")}
        columns = {name: t[name].permute(0, 2, 3, 1).contiguous() for name in ("B", "C")}
        sets.append(rows | columns | {name: t[name].flatten(0, 1) for name in ("A", "D", "dt_bias")})

    def call(k: int) -> Any:
        t = sets[k]
        found = module.fwd(*(t[n] for n in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")), True)
        # y without the gate, the chunks, y with it.
        return found[2].transpose(1, 2), found[1][:, :, -1, 1::2].unsqueeze(1)

    return call


def _flashinfer(workload: Workload, algorithm: str) -> Callable[[int], Any]:
    try:
        module = importlib.import_module("flashinfer.mamba")
    except ImportError as error:
        raise DeviceError(f"flashinfer is not installed ({error})") from error
    sets = [tensors(workload, k) for k in range(workload.sets)]
    # D and dt_bias are of dt's type there.
    few = {name: sets[0][name][:, :1].to(sets[0]["dt"].dtype).expand_as(sets[0][name]) for name in ("D", "dt_bias")}
    single = workload.point.tokens == 1
    sets = [(_one_token(t) if single else t) | few for t in sets]
    drafts = {} if single else {"cache_steps": workload.point.tokens}

    def call(k: int) -> Any:
        t = sets[k]
        return module.selective_state_update(
            *(t[n] for n in ("state", "x", "dt", "A", "B", "C", "D")),
            dt_bias=t["dt_bias"],
            dt_softplus=True,
            state_batch_indices=t["slots"],
            algorithm=algorithm,
            **drafts,
        )

    return call


def _chunk_scan(workload: Workload, chunk: int) -> Callable[[int], Any]:
    """Prefill by mamba-ssm's five kernels, the final states with it: of a batch, or packed where lengths differ."""
    p = workload.point
    if p.resume:
        raise DeviceError("prompts that begin at zero only")
    torch, module = _torch(), mamba_module("ssd_combined")
    place = f"cuda:{workload.device.ordinal}"
    packed: dict[str, Any] = {"return_final_states": True}
    if p.lengths:
        lengths = torch.tensor(p.lengths, device=place)
        packed = {
            "cu_seqlens": torch.tensor(p.offsets, device=place),
            "seq_idx": torch.repeat_interleave(torch.arange(p.sequences, device=place), lengths).int()[None],
            "return_varlen_states": True,
        }
    sets = [tensors(workload, k) for k in range(workload.sets)]

    def call(k: int) -> Any:
        t = sets[k]
        return module.mamba_chunk_scan_combined(
            *(t[n] for n in ("x", "dt_of_head", "A_of_head", "B", "C")),
            chunk,
            D=t["D"][:, 0],
            dt_bias=t["dt_bias"][:, 0],
            dt_softplus=True,
            **packed,
        )

    return call


def reason(error: BaseException) -> str:
    """Why a peer did not run, in one short line without the folders of this machine: of a compiler, its first error."""
    lines = str(error).splitlines()
    complaint = next((line for line in lines if re.search(r"\berror\b.*: ", line)), str(error))
    text = re.sub(r"(?<!\w)(?:/[^\s/:'\"]+)+/", "", f"{type(error).__name__}: {complaint}")
    # An address is another in each run.
    return re.sub(r"\s*\(?\b(?:0x[0-9a-f]{6,}|\d{12,})\b\)?", "", " ".join(text.split()))[:_MESSAGE]


def time_peer(
    workload: Workload, peer: Peer, calls: int, replays: int, rounds: int, warm_up_us: float
) -> tuple[list[float], Norms]:
    """Microseconds of one call by rounds, and how far y and the states are from the oracle.

    A graph of `calls` calls over the sets is captured by torch and replayed; the sets, the slots and every input are
    those that our kernels were timed on.

    Raises:
        Exception: whatever the package raises for what it cannot do.
        DeviceError: its y is wrong, or it is not installed.
    """
    torch = _torch()
    with torch.cuda.device(workload.device.ordinal), torch.no_grad():
        call = peer.prepare(workload)
        first_set = tensors(workload, 0)

        def checked(k: int) -> None:
            y, *states = found if isinstance(found := call(k), tuple) else (found,)
            first_set["y"].copy_(y.reshape(first_set["y"].shape))
            for state in states:
                first_set["state"][first_set["slots"].long()] = state.to(first_set["state"].dtype)

        norms = workload.norms(checked, peer.name)
        if not norms.y <= LOOSE_BOUND:
            raise DeviceError(f"y is wrong: relative error {norms.y:.1e}")
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(calls):
                call(index % workload.sets)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def timed(count: int) -> float:
            first.record()
            for _ in range(count):
                graph.replay()
            last.record()
            last.synchronize()
            return 1e3 * float(first.elapsed_time(last))

        warm = 0.0
        while warm < warm_up_us:
            warm += timed(1)
        return [timed(replays) / (replays * calls) for _ in range(rounds)], norms
