"""What is timed: points, and their arrays on a device as K problems over disjoint slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.binding import Outputs, bind
from pyharness.compare import Errors, compare
from pyharness.device import Device, Memory
from pyharness.errors import DeviceError, NoKernel
from pyharness.oracle import OracleResult, oracle
from pyharness.problem import DTYPES, ScanProblem
from pyharness.scan import ScanResult, require
from pyharness.spec import KernelSpec

#: Problems with more element updates than this are held against the oracle on three heads only.
_ORACLE_UPDATES = 2 * 10**8
#: Inputs of all problems are drawn if they are no larger than this; else one problem is repeated.
_DRAWN_BYTES = 64 * 2**20

Array = NDArray[Any]


@dataclass(frozen=True)
class Point:
    """A shape that is measured: `sequences` of `tokens` each; they resume from the pool, or start at zero."""

    job: str
    sequences: int
    tokens: int
    resume: bool
    heads: int = 64
    head_dim: int = 64
    d_state: int = 128
    groups: int = 8
    io: str = "f32"
    state: str = "f32"

    @property
    def name(self) -> str:
        """The key of the point: decode_16x1_f32, with its heads where they are not 64."""
        heads = "" if self.heads == 64 else f"_{self.heads}_heads"
        return f"{self.job}_{self.sequences}x{self.tokens}{heads}_{self.io}"

    @property
    def all_tokens(self) -> int:
        """Tokens of one call."""
        return self.sequences * self.tokens

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state."""
        return self.heads * self.head_dim * self.d_state * DTYPES[self.state].itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of x, dt, B and C of one call."""
        row = self.heads * self.head_dim + self.heads + 2 * self.groups * self.d_state
        return self.all_tokens * row * DTYPES[self.io].itemsize

    @property
    def y_bytes(self) -> int:
        """Bytes of y of one call."""
        return self.all_tokens * self.heads * self.head_dim * DTYPES[self.io].itemsize

    @property
    def moved_bytes(self) -> int:
        """Fewest bytes that one call moves: inputs and resumed states read once, y and states written once."""
        return self.input_bytes + self.y_bytes + self.sequences * self.slot_bytes * (2 if self.resume else 1)

    @property
    def updates(self) -> int:
        """State elements times tokens of one call."""
        return self.all_tokens * self.heads * self.head_dim * self.d_state


#: What the project's first kernel was measured on, in both io types.
POINTS = tuple(
    point
    for io in ("f32", "bf16")
    for point in (Point("prefill", 1, 4096, False, io=io), Point("decode", 16, 1, True, io=io))
)


#: Measured in sweeps only: one of eight ranks of a large model, where one sequence leaves most multiprocessors idle.
SWEEP_POINTS = (*POINTS, Point("prefill", 1, 4096, False, heads=16, groups=1))


def point_named(name: str) -> Point:
    """The point of a name.

    Raises:
        NoKernel: there is none.
    """
    for point in SWEEP_POINTS:
        if point.name == name:
            return point
    raise NoKernel(f"no point {name!r} is measured; on offer: {', '.join(point.name for point in SWEEP_POINTS)}")


def slot_sets(set_bytes: int, l2_bytes: int) -> int:
    """Disjoint sets that together hold at least 3x the L2 cache."""
    return max(1, -(-3 * l2_bytes // set_bytes))


class Workload:
    """The arrays of a point on a device: K problems with slots of their own in one pool, in random order.

    Inputs are drawn on the host for one problem, and for all of them where that is little; slots repeat the states of
    one problem. Nothing is zero.
    """

    def __init__(self, device: Device, point: Point, seed: int = 0) -> None:
        self.device, self.point = device, point
        set_bytes = point.sequences * point.slot_bytes
        if point.job == "prefill":
            set_bytes += point.input_bytes + point.y_bytes
        self.sets = slot_sets(set_bytes, device.l2_bytes)
        self._draw(np.random.default_rng(seed))
        self._place()

    def _draw(self, rng: np.random.Generator) -> None:
        p = self.point
        problems = self.sets if self.sets * p.input_bytes <= _DRAWN_BYTES else 1
        rows = problems * p.all_tokens
        shapes = {"x": (p.heads, p.head_dim), "dt": (p.heads,), "B": (p.groups, p.d_state), "C": (p.groups, p.d_state)}
        self._inputs: dict[str, Any] = {
            name: rng.standard_normal((rows, *shape), np.float32).astype(DTYPES[p.io]) for name, shape in shapes.items()
        }
        # A and the range of dt are those of trained models.
        self._constants: dict[str, Any] = {
            "A": -rng.uniform(1, 16, p.heads).astype(np.float32),
            "D": rng.standard_normal(p.heads, np.float32),
            "dt_bias": rng.uniform(-6, -3, p.heads).astype(np.float32),
        }
        shape = (p.sequences, p.heads, p.head_dim, p.d_state)
        self._states: Array = rng.standard_normal(shape, np.float32).astype(DTYPES[p.state])
        self._slots = rng.permutation(self.sets * p.sequences).astype(np.int32)

    def _place(self) -> None:
        p, device = self.point, self.device
        sequences = np.arange(p.sequences + 1, dtype=np.int32)
        self._constants["cu_seqlens"] = sequences * np.int32(p.tokens)
        self._constants["resume"] = np.full(p.sequences, p.resume, np.uint8)
        self._memory: dict[str, Memory] = {}
        for name, array in self._constants.items():
            self._memory[name] = Memory(device, array.nbytes)
            self._memory[name].write(array)
        for name, array in self._inputs.items():
            nbytes = array[: p.all_tokens].nbytes
            self._memory[name] = memory = Memory(device, self.sets * nbytes)
            memory.write(array)
            for index in range(1, self.sets if array.nbytes == nbytes else 1):
                memory.repeat(nbytes, index * nbytes)
        self._memory["y"] = Memory(device, self.sets * p.y_bytes)
        self._memory["read_slots"] = Memory(device, self._slots.nbytes)
        self._memory["read_slots"].write(self._slots)
        self._memory["state"] = Memory(device, self.sets * p.sequences * p.slot_bytes)
        self.reset()

    def reset(self) -> None:
        """Give all slots the states that they were drawn with, and poison y."""
        pool = self._memory["state"]
        pool.write(self._states)
        for index in range(1, self.sets):
            pool.repeat(self._states.nbytes, index * self._states.nbytes)
        self._memory["y"].fill(0xFF)
        self.device.synchronize("resetting the states")

    def address(self, name: str, index: int) -> int:
        """Device address of what a set has of an array; constants and the pool are shared by all."""
        p = self.point
        nbytes = {"y": p.y_bytes, "read_slots": 4 * p.sequences}
        nbytes |= {name: array[: p.all_tokens].nbytes for name, array in self._inputs.items()}
        return self._memory[name].address + index * nbytes.get(name, 0)

    @property
    def pool(self) -> Memory:
        """All slots."""
        return self._memory["state"]

    @cached_property
    def problem(self) -> ScanProblem:
        """The problem of set 0, its pool being as large as the device's but never filled."""
        p = self.point
        pool = np.zeros((self.sets * p.sequences, p.heads, p.head_dim, p.d_state), DTYPES[p.state])
        inputs = {name: array[: p.all_tokens] for name, array in self._inputs.items()}
        return ScanProblem(**inputs, **self._constants, state=pool, read_slots=self._slots[: p.sequences])

    def arguments(self, spec: KernelSpec) -> list[bytes]:
        """One ScanArgs a set."""
        p = self.point
        require(self.problem, spec)
        plan = spec.plan(self.problem.geometry)
        held = self._memory.get("workspace")
        if plan.workspace_bytes and (held is None or held.nbytes < plan.workspace_bytes):
            self._memory["workspace"] = Memory(self.device, plan.workspace_bytes)
        y = np.empty((p.all_tokens, p.heads, p.head_dim), DTYPES[p.io])
        assert self.problem.state is not None
        binding = bind(self.problem, plan, Outputs(y, self.problem.state, None))
        names = [buffer.name for buffer in binding.buffers]
        return [binding.pack({name: self.address(name, k) for name in names}) for k in range(self.sets)]

    @cached_property
    def _checked_heads(self) -> NDArray[np.int64]:
        heads = self.point.heads
        if self.point.updates <= _ORACLE_UPDATES or heads <= 3:
            return np.arange(heads)
        return np.array([0, heads // 2 - 1, heads - 1])

    @cached_property
    def _truth(self) -> tuple[ScanProblem, OracleResult]:
        """Set 0 cut to the heads that are held against the oracle, a pool of its own slots, and what is right."""
        p, heads = self.point, self._checked_heads
        per_head = heads if len(heads) < p.heads else slice(None)
        per_group = heads // (p.heads // p.groups) if len(heads) < p.heads else slice(None)
        rows = {name: array[: p.all_tokens] for name, array in self._inputs.items()}
        problem = ScanProblem(
            x=np.ascontiguousarray(rows["x"][:, per_head]),
            dt=np.ascontiguousarray(rows["dt"][:, per_head]),
            A=self._constants["A"][per_head],
            B=np.ascontiguousarray(rows["B"][:, per_group]),
            C=np.ascontiguousarray(rows["C"][:, per_group]),
            D=self._constants["D"][per_head],
            dt_bias=self._constants["dt_bias"][per_head],
            cu_seqlens=self._constants["cu_seqlens"],
            state=np.ascontiguousarray(self._states[self._slots[: p.sequences] % p.sequences][:, per_head]),
            resume=self._constants["resume"],
        )
        return problem, oracle(problem)

    def check(self, call: Callable[[int], None], kernel: str) -> Errors:
        """Run set 0 once from fresh memory and hold it against the oracle.

        Raises:
            DeviceError: the output is wrong; the message has the errors.
        """
        p, heads = self.point, self._checked_heads
        self.reset()
        call(0)
        self.device.synchronize(f"checking {kernel}")
        y = self._memory["y"].read(0, p.y_bytes).view(DTYPES[p.io]).reshape(p.all_tokens, p.heads, p.head_dim)
        states = [
            self.pool.read(int(slot) * p.slot_bytes, p.slot_bytes).view(DTYPES[p.state])
            for slot in self._slots[: p.sequences]
        ]
        state = np.stack(states).reshape(p.sequences, p.heads, p.head_dim, p.d_state)
        problem, truth = self._truth
        errors = compare(ScanResult(y[:, heads], state[:, heads], kernel, "gpu"), problem, truth)
        if not errors.ok:
            raise DeviceError(f"{kernel} is wrong at {p.name} and was not timed: {errors}")
        return errors

    def free(self) -> None:
        """Give the memory back."""
        for memory in self._memory.values():
            memory.free()
        self._memory.clear()
