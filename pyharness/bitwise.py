"""Whether every configuration of an arithmetic gives the same bits: outputs and states compared exactly on a GPU.

All points share one set of inputs that the device fills for the largest of them. A kernel reads its states from one
part of a pool and writes them to another, so what it reads is never reset; a comparison is a kernel that counts words.
A point covers y, every written slot, the slot behind them, which nothing writes to, and the scales of an 8-bit state.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pyharness import build, toolchain
from pyharness.args import Flag, pack
from pyharness.device import Device, Entry, Kernel, Memory, image_target
from pyharness.errors import DeviceError
from pyharness.families import RecurrentSpec
from pyharness.problem import DTYPES
from pyharness.spec import Geometry, KernelSpec

SOURCE = toolchain.ROOT / "templates" / "kernels" / "bitwise.cu"
HEADS = (8, 16, 32, 64, 128)
BATCHES = (*range(1, 65), *range(72, 1025, 8))
HEAD_DIM = 64
_GROUPS = 8
_POISON = 0xFF
_FILL = {"f32": 0, "bf16": 1, "f16": 2, "i8": 3}
_SCALES = 4
_BLOCKS, _THREADS = 4096, 256
#: Every flag that an aligned, contiguous problem with softplus has; dt is of io.
_FLAGS = Flag.SOFTPLUS | Flag.VECTOR_X | Flag.VECTOR_Y | Flag.VECTOR_B | Flag.VECTOR_C | Flag.VECTOR_STATE


@dataclass(frozen=True)
class Arithmetic:
    """What may decide about bits: columns and types. Lanes, rows, warps and family may not.

    Kernels that are made for another number of rows a head than HEAD_DIM are compared at theirs.
    """

    d_state: int
    io: str
    state: str
    head_dim: int = HEAD_DIM

    def __str__(self) -> str:
        rows = "" if self.head_dim == HEAD_DIM else f" p{self.head_dim}"
        return f"n{self.d_state}{rows} {self.io} s{self.state}"


def classes(specs: Sequence[KernelSpec]) -> dict[Arithmetic, list[KernelSpec]]:
    """Kernels of each arithmetic, the first of which is what the others are compared with.

    That is `recurrent` with its default fields where the family has the state's type, since it sums in the same order.
    """
    found: dict[Arithmetic, list[KernelSpec]] = {}
    for spec in specs:
        head_dim = getattr(spec, "head_dim", 0) or HEAD_DIM
        found.setdefault(Arithmetic(spec.d_state, spec.io, spec.state, head_dim), []).append(spec)
    for key, members in found.items():
        if key.state != "i8":
            members.insert(0, RecurrentSpec(d_state=key.d_state, io=key.io, state=key.state))
    return found


class Bench:
    """Memory for the largest point of one arithmetic, and the helper kernels.

    The pool has three parts of as many slots as the largest batch and one more: the states that all read, those that
    the first kernel writes, and those that another one writes.

    Raises:
        DeviceError: the device has not the memory.
    """

    def __init__(self, device: Device, key: Arithmetic, heads: Sequence[int], batches: Sequence[int]) -> None:
        self.device, self.key, self.heads, self.batches = device, key, heads, batches
        job = toolchain.Job("bitwise", SOURCE.read_text(encoding="utf-8"), device.target, toolchain.flags("update"))
        image = toolchain.compile_cached(job, toolchain.find_compiler())
        module = device.module(image.data)
        self._entries = {symbol: Entry(device, module, symbol) for symbol in image.usage}
        most, batch = max(heads), max(batches)
        self._part = batch + 1
        io = DTYPES[key.io].itemsize
        self._memory: dict[str, Memory] = {
            "x": Memory(device, batch * most * self.key.head_dim * io),
            "dt": Memory(device, _whole(batch * most * io)),
            "B": Memory(device, batch * _GROUPS * key.d_state * io),
            "C": Memory(device, batch * _GROUPS * key.d_state * io),
        }
        for seed, memory in enumerate(self._memory.values()):
            self._fill(memory.address, memory.nbytes, _FILL[key.io], seed)
        rng = np.random.default_rng(0)
        constants: dict[str, Any] = {
            "A": -rng.uniform(1, 16, most).astype(np.float32),
            "D": rng.standard_normal(most, np.float32),
            "dt_bias": rng.uniform(-4, -1, most).astype(np.float32),
            "cu_seqlens": np.arange(batch + 1, dtype=np.int32),
            "read_slots": rng.permutation(batch).astype(np.int32),
            "write_slots 0": np.arange(self._part, 2 * self._part, dtype=np.int32),
            "write_slots 1": np.arange(2 * self._part, 3 * self._part, dtype=np.int32),
        }
        for name, array in constants.items():
            self._memory[name] = Memory(device, array.nbytes)
            self._memory[name].write(array)
        self._memory["state"] = Memory(device, 3 * self._part * self._slot_bytes(most))
        if key.state == "i8":
            self._memory["state_scale"] = Memory(device, 3 * self._part * most * self.key.head_dim * 4)
        for part in range(2):
            self._memory[f"y {part}"] = Memory(device, batch * most * self.key.head_dim * io)
        self._counter = Memory(device, 8)

    def _slot_bytes(self, heads: int) -> int:
        return heads * self.key.head_dim * self.key.d_state * DTYPES[self.key.state].itemsize

    def _fill(self, address: int, nbytes: int, kind: int, seed: int) -> None:
        arguments = struct.pack("<QQiI", address, nbytes // 4, kind, seed)
        self._entries["bitwise_fill"].launch((_BLOCKS, 1, 1), (_THREADS, 1, 1), arguments)

    def _compare(self, a: int, b: int, nbytes: int) -> None:
        arguments = struct.pack("<QQQQ", a, b, nbytes // 16, self._counter.address)
        self._entries["bitwise_compare"].launch((_BLOCKS, 1, 1), (_THREADS, 1, 1), arguments)

    def _parts(self, heads: int) -> dict[str, int]:
        """Bytes of a part of each pool at a number of heads."""
        parts = {"state": self._part * self._slot_bytes(heads)}
        if "state_scale" in self._memory:
            parts["state_scale"] = self._part * heads * self.key.head_dim * 4
        return parts

    def _reset(self, heads: int) -> None:
        for name, nbytes in self._parts(heads).items():
            memory = self._memory[name]
            self._fill(memory.address, nbytes, _SCALES if name == "state_scale" else _FILL[self.key.state], 7)
            memory.fill(_POISON, nbytes, 2 * nbytes)

    def geometry(self, heads: int, batch: int) -> Geometry:
        """The sizes of a point: one token a sequence; one group at up to 16 heads, else 8."""
        return Geometry(batch, batch, heads, self.key.head_dim, 1 if heads <= 16 else _GROUPS, self.key.d_state, 1)

    def _launch(self, kernel: Kernel, part: int, geometry: Geometry) -> None:
        g, d_state = geometry, self.key.d_state
        plan = kernel.spec.plan(geometry)
        names = ("x", "dt", "A", "B", "C", "D", "dt_bias", "state", "cu_seqlens", "read_slots")
        values: dict[str, int | float] = {name: self._memory[name].address for name in names}
        values |= {"y": self._memory[f"y {part}"].address, "write_slots": self._memory[f"write_slots {part}"].address}
        if "state_scale" in self._memory:
            values |= {
                "state_scale": self._memory["state_scale"].address,
                "state_scale_stride": g.heads * self.key.head_dim,
            }
        values |= {
            "x_stride": g.heads * self.key.head_dim,
            "y_stride": g.heads * self.key.head_dim,
            "dt_stride": g.heads,
        }
        values |= {"B_stride": g.groups * d_state, "C_stride": g.groups * d_state}
        values |= {"state_stride": g.heads * self.key.head_dim * d_state, "slots": 3 * self._part, "pad_slot": -1}
        values |= {"tokens": g.tokens, "sequences": g.sequences, "heads": g.heads, "head_dim": self.key.head_dim}
        values |= {"groups": g.groups, "d_state": d_state, "flags": int(_FLAGS)}
        values |= {"lanes": plan.lanes, "rows": plan.rows, "chunk": plan.chunk}
        kernel.launch(plan, pack(values))

    def differing(self, reference: Kernel, others: Sequence[Kernel]) -> dict[str, int]:
        """Words in which each kernel differs from the first, over all points.

        Raises:
            DeviceError: a launch failed, or something differs: the message has the first number of heads where it does.
        """
        counts = dict.fromkeys((kernel.spec.id for kernel in others), 0)
        for heads in self.heads:
            for kernel in others:
                # A smaller batch comes first, so that the slot behind it is one that nothing has written to.
                self._reset(heads)
                self._counter.fill(0)
                for batch in self.batches:
                    self._check(reference, kernel, heads, batch)
                self.device.synchronize(f"comparing {kernel.spec.id} at {heads} heads")
                found = int(self._counter.read().view(np.uint64)[0])
                counts[kernel.spec.id] += found
                if found:
                    raise DeviceError(
                        f"{kernel.spec.id} differs from {reference.spec.id} in {found} words of y and state over "
                        f"{len(self.batches)} batches at {heads} heads"
                    )
        return counts

    def _check(self, reference: Kernel, kernel: Kernel, heads: int, batch: int) -> None:
        geometry = self.geometry(heads, batch)
        y_bytes = batch * heads * self.key.head_dim * DTYPES[self.key.io].itemsize
        for part, run in enumerate((reference, kernel)):
            self._memory[f"y {part}"].fill(_POISON, 0, y_bytes)
            self._launch(run, part, geometry)
        self._compare(self._memory["y 0"].address, self._memory["y 1"].address, y_bytes)
        for name, nbytes in self._parts(heads).items():
            first = self._memory[name].address + nbytes
            self._compare(first, first + nbytes, nbytes // self._part * (batch + 1))
            for part in (1, 2):
                self._memory[name].fill(_POISON, part * nbytes, nbytes // self._part * batch)

    def free(self) -> None:
        """Give the memory back."""
        for memory in (*self._memory.values(), self._counter):
            memory.free()


def _whole(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


def check(
    device: Device,
    specs: Sequence[KernelSpec],
    heads: Sequence[int] = HEADS,
    batches: Sequence[int] = BATCHES,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Compare every configuration at every point.

    Returns:
        "points", "head_dim" (kernels made for another are compared at theirs), "differing_words" (0), "kernels": for
        each arithmetic the kernel that the others were compared with and them, and "images": the sha256 of those among
        `specs`, with their ids.

    Raises:
        DeviceError: bits differ, or something fails.
    """
    compared: dict[str, Any] = {}
    images: dict[str, str] = {}
    for key, members in classes(specs).items():
        tell(f"bits of {key}: {len(members)} kernels")
        kernels = [
            device.kernel(spec, build.image(spec, image_target(spec, device.capability, device.name)))
            for spec in members
        ]
        bench = Bench(device, key, heads, batches)
        try:
            bench.differing(kernels[0], kernels[1:])
        finally:
            bench.free()
        images |= {kernel.sha256: kernel.spec.id for kernel in kernels if kernel.spec in specs}
        compared[str(key)] = [spec.id for spec in members]
    points = len(heads) * len(batches)
    found = {"points": points, "head_dim": HEAD_DIM, "differing_words": 0, "kernels": compared}
    return found | {"images": dict(sorted(images.items()))}
