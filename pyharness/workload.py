"""What is timed: points, and their arrays on a device as K problems over disjoint slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.binding import Outputs, bind
from pyharness.compare import Errors, compare, relative_norm
from pyharness.device import Device, Memory
from pyharness.errors import DeviceError, NoKernel
from pyharness.oracle import OracleResult, oracle
from pyharness.problem import DTYPES, ScanProblem
from pyharness.scan import ScanResult, require
from pyharness.spec import Geometry, KernelSpec

#: Problems with more element updates than this are held against the oracle on three heads only, or on some channels.
_ORACLE_UPDATES = 2 * 10**7
_CHECKED_CHANNELS = 200
#: Inputs of all problems are drawn if they are no larger than this; else one problem is repeated.
_DRAWN_BYTES = 64 * 2**20
#: So many numbers are drawn for one array, and repeated: a prime, so that no two rows or slots are alike.
_DRAWN_NUMBERS = 4_194_301

Array = NDArray[Any]

#: Sizes that a point's name leaves out where they are these.
_USUAL = {"heads": 64, "head_dim": 64, "d_state": 128}


@dataclass(frozen=True)
class Point:
    """A shape that is measured: `sequences` of `tokens` each; they resume from the pool, or start at zero.

    `packed` lays x, B, C and dt of a token side by side in one row, as a model's projection leaves them. `lengths` are
    those of sequences that differ; `tokens` is then the longest.
    """

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
    packed: bool = False
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # As a stored table has them.
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if self.lengths and (len(self.lengths), max(self.lengths)) != (self.sequences, self.tokens):
            raise NoKernel(
                f"a point of {self.sequences} sequences of at most {self.tokens} tokens wants as many lengths, found "
                f"{len(self.lengths)} of at most {max(self.lengths)}"
            )

    def stored(self) -> dict[str, Any]:
        """The fields as a table stores them: what `Point` takes."""
        return asdict(self) | {"lengths": list(self.lengths)}

    @property
    def name(self) -> str:
        """The key of the point: decode_16x1_f32, with what is not usual decode_32x1_128_heads_bf16_sbf16_packed."""
        sizes = [f"{value}_{size}" for size, usual in _USUAL.items() if (value := getattr(self, size)) != usual]
        state = [] if self.state == "f32" else [f"s{self.state}"]
        packed = ["packed"] if self.packed else []
        many = f"{self.sequences}x{f'{min(self.lengths)}to' if self.lengths else ''}{self.tokens}"
        return "_".join([self.job, many, *sizes, self.io, *state, *packed])

    @property
    def mamba1(self) -> bool:
        """Whether heads are channels, with A for each column and a gate z."""
        return self.head_dim == 1

    @property
    def all_tokens(self) -> int:
        """Tokens of one call."""
        return sum(self.lengths) or self.sequences * self.tokens

    @property
    def offsets(self) -> NDArray[np.int32]:
        """Token offsets of the sequences, i32 [sequences + 1]."""
        lengths = self.lengths or (self.tokens,) * self.sequences
        return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)

    @property
    def geometry(self) -> Geometry:
        """The sizes that decide a launch."""
        sizes = (self.heads, self.head_dim, self.groups, self.d_state)
        return Geometry(self.all_tokens, self.sequences, *sizes, longest=self.tokens)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state."""
        return self.heads * self.head_dim * self.d_state * DTYPES[self.state].itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of x, dt, B and C, and of z where there is one, of one call."""
        row = self.heads * self.head_dim + self.heads + 2 * self.groups * self.d_state + self.heads * self.mamba1
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


def _mamba1(job: str, sequences: int, tokens: int, channels: int = 8192) -> Point:
    return Point(job, sequences, tokens, job == "decode", heads=channels, head_dim=1, d_state=16, groups=1, io="bf16")


#: Mamba-1 as Falcon-Mamba and Jamba have it: one long prompt, a batch of prompts, decode; and the one prompt through
#: fewer channels, where most multiprocessors are idle unless time is cut.
MAMBA1 = (
    *(_mamba1("prefill", *many) for many in ((1, 4096), (8, 1024))),
    *(_mamba1("decode", batch, 1) for batch in (1, 16, 128, 512)),
    *(_mamba1("prefill", 1, 4096, channels) for channels in (1536, 2048, 5120)),
)


def _decode(
    sequences: int,
    heads: int,
    groups: int,
    *,
    tokens: int = 1,
    head_dim: int = 64,
    io: str = "bf16",
    state: str = "f32",
) -> Point:
    return Point("decode", sequences, tokens, True, heads, head_dim, 128, groups, io, state, packed=True)


#: Decode as serving engines meet it: small and large batches of one rank's heads, whole models, drafts, stored types.
DECODE = (
    *(_decode(batch, 16, 1) for batch in (1, 8, 16, 64, 128, 512)),
    *(_decode(batch, 64, 8) for batch in (16, 128)),
    _decode(32, 128, 8, head_dim=80),
    _decode(64, 16, 1, tokens=4),
    *(_decode(128, 64, 8, state=state) for state in ("bf16", "f16", "i8")),
    *(_decode(batch, 16, 1, state="bf16") for batch in (16, 128)),
    _decode(16, 64, 8, io="f32"),
    # Other d_state, so that selection knows what decodes there.
    *(replace(_decode(64, 16, 1), d_state=n) for n in (64, 256)),
    replace(_decode(64, 16, 1, io="f32"), d_state=16),
)


def _mixed_lengths(sequences: int, longest: int) -> tuple[int, ...]:
    """Lengths from 1 to `longest`, both among them, evenly spread and in no order."""
    spread = np.linspace(1, longest, sequences).astype(int)
    return tuple(int(length) for length in np.random.default_rng(sequences).permutation(spread))


def _prefill(
    sequences: int,
    tokens: int,
    io: str = "bf16",
    *,
    heads: int = 64,
    head_dim: int = 64,
    d_state: int = 128,
    groups: int = 8,
) -> Point:
    return Point("prefill", sequences, tokens, False, heads, head_dim, d_state, groups, io)


#: Prompts as chunked products take them: short to very long, batches, other models, every io; and where they begin to
#: pay, in tokens and in heads.
PREFILL = (
    *(_prefill(*many) for many in ((1, 512), (1, 4096), (8, 1024), (1, 32768), (1, 131072))),
    replace(_prefill(32, 2000), lengths=_mixed_lengths(32, 2000)),
    _prefill(1, 4096, heads=128, head_dim=80),
    _prefill(1, 4096, heads=32, head_dim=128, d_state=256, groups=2),
    _prefill(1, 4096, heads=48, groups=1),
    *(_prefill(*many, d_state=64, groups=1) for many in ((8, 1024), (4, 4096))),
    _prefill(1, 4096, io="f16"),
    *(_prefill(*many, io="f32") for many in ((1, 512), (1, 4096), (8, 1024))),
    *(_prefill(1, tokens) for tokens in (16, 32, 64, 128, 256, 1024, 2048)),
    *(_prefill(*many, heads=128, head_dim=80) for many in ((1, 512), (8, 1024))),
    *(_prefill(1, tokens, heads=16, groups=1) for tokens in (64, 256, 1024, 4096)),
    _prefill(2, 4096),
    *(_prefill(1, 4096, heads=heads, groups=groups) for heads, groups in ((32, 4), (8, 1))),
    *(_prefill(sequences, 4096, d_state=64, groups=1) for sequences in (1, 2)),
    _prefill(1, 4096, head_dim=80),
    *(_prefill(1, tokens, io="f32") for tokens in (64, 256)),
)


def point_named(name: str) -> Point:
    """The point of a name.

    Raises:
        NoKernel: there is none.
    """
    known = (*SWEEP_POINTS, *DECODE, *PREFILL, *MAMBA1)
    for point in known:
        if point.name == name:
            return point
    raise NoKernel(f"no point {name!r} is measured; on offer: {', '.join(dict.fromkeys(p.name for p in known))}")


@dataclass(frozen=True)
class Norms:
    """||out - oracle|| / ||oracle|| of y and of the final states, over all; infinite where a value is not finite."""

    y: float
    state: float


def slot_sets(set_bytes: int, l2_bytes: int) -> int:
    """Disjoint sets that together hold at least 3x the L2 cache."""
    return max(1, -(-3 * l2_bytes // set_bytes))


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Normal numbers, repeated where there are very many."""
    drawn = rng.standard_normal(min(math.prod(shape), _DRAWN_NUMBERS), np.float32).astype(dtype)
    return np.resize(drawn, shape)


class Workload:
    """The arrays of a point on a device: K problems with slots of their own in one pool, in random order.

    Inputs are drawn on the host for one problem, and for all of them where that is little; slots repeat the states of
    one problem. Nothing is zero. `cold` makes K so large that the sets outgrow the L2 cache; else K is 1.
    """

    def __init__(self, device: Device, point: Point, seed: int = 0, cold: bool = True) -> None:
        self.device, self.point = device, point
        set_bytes = point.sequences * point.slot_bytes
        if point.job == "prefill":
            set_bytes += point.input_bytes + point.y_bytes
        self.sets = slot_sets(set_bytes, device.l2_bytes) if cold else 1
        self._draw(np.random.default_rng(seed))
        self._place()

    def _draw(self, rng: np.random.Generator) -> None:
        p = self.point
        problems = self.sets if self.sets * p.input_bytes <= _DRAWN_BYTES else 1
        rows = problems * p.all_tokens
        shapes = {"x": (p.heads, p.head_dim), "B": (p.groups, p.d_state), "C": (p.groups, p.d_state), "dt": (p.heads,)}
        if p.mamba1:
            shapes["z"] = shapes["x"]
        self._inputs: dict[str, Any] = {}
        #: Elements of a packed token row, and where each input starts in it.
        self._width = sum(math.prod(shape) for shape in shapes.values())
        self._first: dict[str, int] = {}
        memory = np.empty((rows, self._width), DTYPES[p.io])
        start = 0
        for name, shape in shapes.items():
            columns = memory[:, start : start + math.prod(shape)]
            columns[...] = _normal(rng, columns.shape, memory.dtype)
            view = columns.reshape(rows, *shape)
            self._inputs[name] = view if p.packed else np.ascontiguousarray(view)
            self._first[name] = start
            start += math.prod(shape)
        self._packed_rows: Array = memory
        # A and the range of dt are those of trained models.
        self._constants: dict[str, Any] = {
            "A": -rng.uniform(1, 16, (p.heads, p.d_state) if p.mamba1 else p.heads).astype(np.float32),
            "D": rng.standard_normal(p.heads, np.float32),
            "dt_bias": rng.uniform(-6, -3, p.heads).astype(np.float32),
        }
        shape = (p.sequences, p.heads, p.head_dim, p.d_state)
        self._scales: Array | None = None
        if p.state == "i8":
            self._states: Array = rng.integers(-127, 128, shape, np.int8)
            self._scales = rng.uniform(0.01, 0.03, shape[:3]).astype(np.float32)
        else:
            self._states = _normal(rng, shape, np.dtype(DTYPES[p.state]))
        self._slots = rng.permutation(self.sets * p.sequences).astype(np.int32)
        sets = self._slots.reshape(self.sets, p.sequences)
        #: For each set its slots in ascending order, and the order of its sequences that visits them so.
        self._ascending = np.sort(sets, axis=1)
        self._order = np.argsort(sets, axis=1).astype(np.int32)

    def _place(self) -> None:
        p, device = self.point, self.device
        self._constants["cu_seqlens"] = p.offsets
        self._constants["resume"] = np.full(p.sequences, p.resume, np.uint8)
        self._memory: dict[str, Memory] = {}
        for name, array in self._constants.items():
            self._memory[name] = Memory(device, array.nbytes)
            self._memory[name].write(array)
        sources = {"packed": self._packed_rows} if p.packed else self._inputs
        for name, array in sources.items():
            nbytes = array[: p.all_tokens].nbytes
            self._memory[name] = memory = Memory(device, self.sets * nbytes)
            memory.write(array)
            for index in range(1, self.sets if array.nbytes == nbytes else 1):
                memory.repeat(nbytes, index * nbytes)
        self._memory["y"] = Memory(device, self.sets * p.y_bytes)
        lists = {"read_slots": self._slots, "ascending_slots": self._ascending, "sequence_order": self._order}
        for name, array in lists.items():
            self._memory[name] = Memory(device, array.nbytes)
            self._memory[name].write(array)
        if self._scales is not None:
            self._memory["state_scale"] = Memory(device, self.sets * self._scales.nbytes)
        self._memory["state"] = Memory(device, self.sets * p.sequences * p.slot_bytes)
        self.reset()

    def reset(self) -> None:
        """Give all slots the states that they were drawn with, and poison y."""
        pool = self._memory["state"]
        pool.write(self._states)
        for index in range(1, self.sets):
            pool.repeat(self._states.nbytes, index * self._states.nbytes)
        if self._scales is not None:
            scales = self._memory["state_scale"]
            scales.write(self._scales)
            for index in range(1, self.sets):
                scales.repeat(self._scales.nbytes, index * self._scales.nbytes)
        self._memory["y"].fill(0xFF)
        self.device.synchronize("resetting the states")

    def address(self, name: str, index: int) -> int:
        """Device address of what a set has of an array; constants and the pool are shared by all."""
        p = self.point
        if p.packed and name in self._inputs:
            item = DTYPES[p.io].itemsize
            elements = index * p.all_tokens * self._width + self._first[name]
            return self._memory["packed"].address + elements * item
        nbytes = {"y": p.y_bytes}
        nbytes |= dict.fromkeys(("read_slots", "ascending_slots", "sequence_order"), 4 * p.sequences)
        nbytes |= {name: array[: p.all_tokens].nbytes for name, array in self._inputs.items()}
        return self._memory[name].address + index * nbytes.get(name, 0)

    def row_elements(self, name: str) -> int:
        """Elements from one token of an input, or of y, to the next."""
        p = self.point
        if name == "y":
            return p.heads * p.head_dim
        return self._width if p.packed else math.prod(self._inputs[name].shape[1:])

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
        scale = None if self._scales is None else np.zeros(pool.shape[:3], np.float32)
        return ScanProblem(
            **inputs, **self._constants, state=pool, state_scale=scale, read_slots=self._slots[: p.sequences]
        )

    def arguments(self, spec: KernelSpec, ascending: bool = False) -> list[bytes]:
        """One ScanArgs a set; `ascending` visits the sequences in the order of their slots."""
        p = self.point
        require(self.problem, spec)
        plan = spec.plan(self.problem.geometry)
        held = self._memory.get("workspace")
        if plan.workspace_bytes and (held is None or held.nbytes < plan.workspace_bytes):
            self._memory["workspace"] = Memory(self.device, plan.workspace_bytes)
        y = np.empty((p.all_tokens, p.heads, p.head_dim), DTYPES[p.io])
        problem = replace(self.problem, sequence_order=self._order[0]) if ascending else self.problem
        assert problem.state is not None
        binding = bind(problem, plan, Outputs(y, problem.state, problem.state_scale))
        names = [buffer.name for buffer in binding.buffers]
        return [binding.pack({name: self.address(name, k) for name in names}) for k in range(self.sets)]

    @cached_property
    def _checked_heads(self) -> NDArray[np.int64]:
        heads = self.point.heads
        if self.point.updates <= _ORACLE_UPDATES or heads <= 3:
            return np.arange(heads)
        if self.point.mamba1:
            return np.unique(np.linspace(0, heads - 1, _CHECKED_CHANNELS).astype(np.int64))
        return np.array([0, heads // 2 - 1, heads - 1])

    @cached_property
    def _truth(self) -> tuple[ScanProblem, OracleResult]:
        """Set 0 cut to the heads that are held against the oracle, a pool of its own slots, and what is right."""
        p, heads = self.point, self._checked_heads
        per_head = heads if len(heads) < p.heads else slice(None)
        per_group = heads // (p.heads // p.groups) if len(heads) < p.heads else slice(None)
        rows = {name: array[: p.all_tokens] for name, array in self._inputs.items()}
        channels: dict[str, Any] = {
            name: np.ascontiguousarray(rows[name][:, per_head]) for name in ("x", "dt", "z") if name in rows
        }
        drawn = self._slots[: p.sequences] % p.sequences
        scale = None if self._scales is None else np.ascontiguousarray(self._scales[drawn][:, per_head])
        problem = ScanProblem(
            **channels,
            A=self._constants["A"][per_head],
            B=np.ascontiguousarray(rows["B"][:, per_group]),
            C=np.ascontiguousarray(rows["C"][:, per_group]),
            D=self._constants["D"][per_head],
            dt_bias=self._constants["dt_bias"][per_head],
            cu_seqlens=self._constants["cu_seqlens"],
            state=np.ascontiguousarray(self._states[drawn][:, per_head]),
            state_scale=scale,
            resume=self._constants["resume"],
        )
        return problem, oracle(problem)

    def _found(self, call: Callable[[int], None], what: str) -> ScanResult:
        """What set 0 gives from fresh memory, cut to the heads that are held against the oracle."""
        p, heads = self.point, self._checked_heads
        self.reset()
        call(0)
        self.device.synchronize(f"checking {what}")
        y = self._memory["y"].read(0, p.y_bytes).view(DTYPES[p.io]).reshape(p.all_tokens, p.heads, p.head_dim)
        states = [self._read_heads(int(slot) * p.slot_bytes) for slot in self._slots[: p.sequences]]
        state = np.stack(states).view(DTYPES[p.state]).reshape(p.sequences, len(heads), p.head_dim, p.d_state)
        scale = None
        if self._scales is not None:
            row = self._scales[0].nbytes
            found = [self._memory["state_scale"].read(int(s) * row, row) for s in self._slots[: p.sequences]]
            scale = np.stack(found).view(np.float32).reshape(p.sequences, p.heads, p.head_dim)[:, heads]
        return ScanResult(y[:, heads], state, what, "gpu", scale)

    def _read_heads(self, first: int) -> NDArray[np.uint8]:
        """The bytes of the heads that are held against the oracle, of the slot that begins at a byte of the pool."""
        p, heads = self.point, self._checked_heads
        if len(heads) == p.heads:
            return self.pool.read(first, p.slot_bytes)
        of_head = p.slot_bytes // p.heads
        return np.concatenate([self.pool.read(first + int(head) * of_head, of_head) for head in heads])

    def check(self, call: Callable[[int], None], kernel: str) -> tuple[Errors, Norms]:
        """Run set 0 once from fresh memory and hold it against the oracle.

        Raises:
            DeviceError: the output is wrong; the message has the errors.
        """
        found = self._found(call, kernel)
        problem, truth = self._truth
        errors = compare(found, problem, truth)
        if not errors.ok:
            raise DeviceError(f"{kernel} is wrong at {self.point.name} and was not timed: {errors}")
        return errors, self._norms(found)

    def norms(self, call: Callable[[int], None], what: str) -> Norms:
        """Run set 0 once from fresh memory: how far it is from the oracle, right or wrong."""
        return self._norms(self._found(call, what))

    def _norms(self, found: ScanResult) -> Norms:
        _, truth = self._truth
        state = found.state.astype(np.float64)
        if found.state_scale is not None:
            state *= found.state_scale[..., None]
        wanted = np.stack([truth.states[s] for s in range(self.point.sequences)])
        return Norms(
            relative_norm(found.y.astype(np.float64) - truth.y, truth.y), relative_norm(state - wanted, wanted)
        )

    def free(self) -> None:
        """Give the memory back."""
        for memory in self._memory.values():
            memory.free()
        self._memory.clear()
