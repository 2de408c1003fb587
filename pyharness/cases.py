"""Named problems: real models and edges, and the drawing of all problems.

Inputs are drawn so that a wrong index cannot pass: every array differs at every index, everything that must not be read
(gaps between rows and slots, slots that nothing names, slots of fresh sequences) holds NaN, and pools are larger than
what a call uses. No index of a shape is fitted to a kernel's.
"""

from __future__ import annotations

import math
import mmap
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness.binding import sparse_memory
from pyharness.problem import DTYPES, ScanProblem, element_stride

Array = NDArray[Any]
Generator = np.random.Generator


@dataclass(frozen=True)
class Shape:
    """What a draw needs to know of sizes: tokens of each sequence, and the geometry."""

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    d_state: int
    groups: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Options:
    """What a draw may vary besides sizes; the defaults are the plainest problem with a state.

    Attributes:
        io, state: short dtype names; state None has no pool.
        dt_f32: dt is stored as f32 though io is 16-bit.
        per_column_a: A for each column (Mamba-1).
        D, dt_bias, z, softplus: which parts of the formula are on.
        dt_limit: clamp of dt.
        spread: "peer" is the peers' usual draw, "ggml" uniform in -1..1 with A of either sign.
        tail: tokens past the last offset.
        packed: x, z, B, C (and dt where it is of io) are views of one row of one buffer.
        gap, shift: elements between token rows, and before the first: both move alignment.
        spare, slot_gap: slots beyond those that are used, and elements between slots.
        fresh: "none", "all" or "mixed".
        slots: "default" leaves slots out, "in place" reads and writes a shuffled list, "moved" writes other slots.
        discard, padding: every how many sequences one discards its state, or is padding; 0 is never.
        checkpoints: every how many tokens one is checkpointed; 0 is never.
        by_sequence: checkpoints are counted from each sequence's own start, and every sequence has one at its end.
        order, key: draw a sequence_order, a rounding_key.
    """

    io: str = "f32"
    state: str | None = "f32"
    dt_f32: bool = False
    per_column_a: bool = False
    D: bool = True
    dt_bias: bool = True
    z: bool = False
    softplus: bool = True
    dt_limit: tuple[float, float] | None = None
    spread: str = "peer"
    tail: int = 0
    packed: bool = False
    gap: int = 0
    shift: int = 0
    spare: int = 2
    slot_gap: int = 0
    fresh: str = "none"
    slots: str = "in place"
    discard: int = 0
    padding: int = 0
    checkpoints: int = 0
    by_sequence: bool = False
    order: bool = False
    key: bool = False


def draw(seed: int, shape: Shape, options: Options | None = None) -> ScanProblem:
    """A problem of a shape; the same seed gives the same problem."""
    o = options if options is not None else Options()
    rng = np.random.default_rng(seed)
    tokens = shape.tokens + o.tail
    per_head, per_group = (shape.heads, shape.head_dim), (shape.groups, shape.d_state)
    wide: dict[str, tuple[int, ...]] = {"x": per_head, "B": per_group, "C": per_group}
    if o.z:
        wide["z"] = per_head
    dt_io = o.io != "f32" and not o.dt_f32
    if dt_io:
        wide["dt"] = (shape.heads,)
    rows: dict[str, Any] = _packed_rows(rng, tokens, wide, o) if o.packed else _separate_rows(rng, tokens, wide, o)
    if not dt_io:
        rows |= _separate_rows(rng, tokens, {"dt": (shape.heads,)}, replace(o, io="f32"))
    per_a = (shape.heads, shape.d_state) if o.per_column_a else (shape.heads,)
    if o.spread == "ggml":
        A, bias = rng.uniform(-1, 1, per_a), rng.uniform(-1, 1, shape.heads)
    else:
        A, bias = -rng.uniform(0, 1, per_a) - 1, rng.uniform(0, 1, shape.heads) - 4
    sequences = len(shape.lengths)
    offsets = np.concatenate(([0], np.cumsum(shape.lengths))).astype(np.int32)
    return ScanProblem(
        **rows,
        A=A.astype(np.float32),
        D=_values(rng, (shape.heads,), o.spread).astype(np.float32) if o.D else None,
        dt_bias=bias.astype(np.float32) if o.dt_bias else None,
        dt_softplus=o.softplus,
        dt_limit=o.dt_limit,
        cu_seqlens=None if sequences == 1 and not o.tail else offsets,
        sequence_order=rng.permutation(sequences).astype(np.int32) if o.order else None,
        rounding_key=rng.integers(0, 2**63, 2, dtype=np.uint64) if o.key else None,
        **_pool(rng, shape, o),
    )


def _values(rng: Generator, shape: tuple[int, ...], spread: str) -> NDArray[np.float64]:
    return rng.uniform(-1, 1, shape) if spread == "ggml" else rng.standard_normal(shape)


def _nan(count: int, dtype: str) -> Array:
    """Memory of NaN (of -1 for i8) whose base is a multiple of 64 bytes."""
    item = DTYPES[dtype].itemsize
    raw = np.full(count * item + 64, 0xFF, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + count * item].view(DTYPES[dtype])


def _rows_of(memory: Array, shift: int, rows: int, stride: int, inner: tuple[int, ...]) -> Array:
    """The view [rows, *inner] that starts `shift` elements into flat memory, rows `stride` elements apart."""
    item = memory.itemsize
    steps = [item * math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
    return np.lib.stride_tricks.as_strided(memory[shift:], (rows, *inner), (stride * item, *steps))


def _separate_rows(rng: Generator, tokens: int, wide: dict[str, tuple[int, ...]], o: Options) -> dict[str, Array]:
    views = {}
    for name, inner in wide.items():
        stride = math.prod(inner) + o.gap
        views[name] = _rows_of(_nan(tokens * stride + o.shift + 1, o.io), o.shift, tokens, stride, inner)
        views[name][...] = _values(rng, (tokens, *inner), o.spread).astype(DTYPES[o.io])
    return views


def _packed_rows(rng: Generator, tokens: int, wide: dict[str, tuple[int, ...]], o: Options) -> dict[str, Array]:
    stride = sum(math.prod(inner) for inner in wide.values()) + o.gap
    memory = _nan(tokens * stride + o.shift + 1, o.io)
    views = {}
    start = o.shift
    for name, inner in wide.items():
        views[name] = _rows_of(memory, start, tokens, stride, inner)
        views[name][...] = _values(rng, (tokens, *inner), o.spread).astype(DTYPES[o.io])
        start += math.prod(inner)
    return views


def _pool(rng: Generator, shape: Shape, o: Options) -> dict[str, Any]:
    """State, slots, resume and checkpoints."""
    if o.state is None:
        return {}
    sequences = len(shape.lengths)
    padding = np.array([o.padding > 0 and s % o.padding == o.padding - 1 for s in range(sequences)], np.bool_)
    fresh = {"none": np.zeros(sequences), "all": np.ones(sequences)}.get(o.fresh, rng.integers(0, 2, sequences)) != 0
    marked = np.zeros(shape.tokens, np.bool_)
    if o.checkpoints:
        if o.by_sequence:
            behind = np.concatenate([np.arange(0), *(np.arange(1, length + 1) for length in shape.lengths)])
            marked[:] = (behind % o.checkpoints == 0) | (behind == np.repeat(shape.lengths, shape.lengths))
        else:
            marked[o.checkpoints - 1 :: o.checkpoints] = True
        marked &= ~np.repeat(padding, shape.lengths)
    slots = 2 * sequences + int(marked.sum()) + o.spare
    inner = (shape.heads, shape.head_dim, shape.d_state)
    stride = math.prod(inner) + o.slot_gap
    state = _rows_of(_nan(slots * stride + o.shift, o.state), o.shift, slots, stride, inner)
    names = np.arange(slots) if o.slots == "default" else rng.permutation(slots)
    read, moved = names[:sequences].astype(np.int32), names[sequences : 2 * sequences].astype(np.int32)
    write = moved if o.slots == "moved" else read.copy()
    if o.discard:
        write[o.discard - 1 :: o.discard] = -1
    scale = None
    if o.state == "i8":
        scale = np.full((slots, shape.heads, shape.head_dim), np.nan, np.float32)
    for slot in read[~fresh & ~padding]:
        if scale is None:
            state[slot] = _values(rng, inner, o.spread).astype(state.dtype)
        else:
            state[slot] = rng.integers(-127, 128, inner)
            scale[slot] = rng.uniform(0.01, 0.03, inner[:2])
    explicit = read.copy()
    explicit[padding] = -1
    pool: dict[str, Any] = {"state": state, "state_scale": scale}
    if o.slots != "default" or o.padding:
        pool["read_slots"] = explicit
    if o.slots == "moved" or o.discard:
        pool["write_slots"] = write
    if o.fresh != "none":
        pool["resume"] = (~fresh).astype(np.uint8)
    if o.checkpoints:
        checkpoints = np.full(shape.tokens + o.tail, -1, np.int32)
        checkpoints[: shape.tokens][marked] = names[2 * sequences : 2 * sequences + int(marked.sum())]
        pool["checkpoint_slots"] = checkpoints
    return pool


def as_channels(problem: ScanProblem) -> ScanProblem:
    """A problem in the form of Mamba-1: every row of every head becomes a channel with dt, A, D and dt_bias of its own.

    x, z and the state stay the views that they were; A gets a value for each column.
    """
    rng = np.random.default_rng(problem.heads * problem.head_dim)
    channels, d_state = problem.heads * problem.head_dim, problem.d_state
    stride = channels + max(0, element_stride(problem.dt) - problem.heads)
    shift = problem.dt.ctypes.data // problem.dt.itemsize % 8
    dtype = "f32" if problem.dt_is_f32 else problem.io
    dt = _rows_of(_nan(problem.tokens * stride + shift + 1, dtype), shift, problem.tokens, stride, (channels,))
    spread = np.repeat(problem.dt.astype(np.float64), problem.head_dim, axis=1)
    dt[...] = (spread + rng.uniform(-0.5, 0.5, dt.shape)).astype(dt.dtype)
    A = np.repeat(problem.A.reshape(problem.heads, -1), problem.head_dim, axis=0)

    def vector(values: Array | None) -> Array | None:
        if values is None:
            return None
        return np.repeat(values, problem.head_dim) + rng.uniform(-0.5, 0.5, channels).astype(np.float32)

    return replace(
        problem,
        x=problem.x.reshape(problem.tokens, channels, 1),
        z=None if problem.z is None else problem.z.reshape(problem.tokens, channels, 1),
        dt=dt,
        A=(A * rng.uniform(0.5, 1.5, (channels, d_state))).astype(np.float32),
        D=vector(problem.D),
        dt_bias=vector(problem.dt_bias),
        state=None if problem.state is None else problem.state.reshape(problem.slots, channels, 1, d_state),
    )


@dataclass(frozen=True)
class Case:
    """A named problem, built when asked for."""

    name: str
    build: Callable[[], ScanProblem]


@dataclass(frozen=True)
class Model:
    """The scan geometry of a published model; head_dim 1 is Mamba-1, whose channels are heads."""

    name: str
    heads: int
    head_dim: int
    d_state: int
    groups: int

    @property
    def mamba1(self) -> bool:
        """Whether A has a value for each column."""
        return self.head_dim == 1


MODELS = (
    Model("Nemotron 3 Nano 30B-A3B", 64, 64, 128, 8),
    Model("Nemotron 3 Super 120B-A12B, one of 8 ranks", 16, 64, 128, 1),
    Model("Nemotron-H 8B", 128, 64, 128, 8),
    Model("Nemotron-H 47B", 256, 64, 256, 8),
    Model("Nemotron-H 56B", 256, 64, 256, 8),
    Model("Nemotron Nano 9B v2", 128, 80, 128, 8),
    Model("Granite 4.0 h-micro", 64, 64, 128, 1),
    Model("Granite 4.0 h-tiny / h-1b", 48, 64, 128, 1),
    Model("Granite 4.0 h-350m", 48, 32, 128, 1),
    Model("Granite 4.0 h-small", 128, 64, 128, 1),
    Model("Codestral Mamba 7B", 128, 64, 128, 8),
    Model("Bamba 9B", 128, 64, 128, 1),
    Model("mamba2-130m", 24, 64, 128, 1),
    Model("mamba2-2.7b", 80, 64, 128, 1),
    Model("Falcon-H1 tiny 90M", 24, 32, 64, 1),
    Model("Falcon-H1 0.5B", 24, 64, 128, 1),
    Model("Falcon-H1 1.5B", 48, 64, 256, 1),
    Model("Falcon-H1 7B", 24, 128, 256, 1),
    Model("Falcon-H1 34B", 32, 128, 256, 2),
    Model("Zamba2 1.2B", 64, 64, 128, 1),
    Model("Plamo 2 8B", 64, 128, 64, 1),
    Model("Falcon-Mamba 7B", 8192, 1, 16, 1),
    Model("mamba-370m", 2048, 1, 16, 1),
    Model("mamba-2.8b", 5120, 1, 16, 1),
    Model("Jamba v0.1", 8192, 1, 16, 1),
)

#: Heads that a group keeps, and channels that a Mamba-1 problem keeps, in reduced form.
_REDUCED_RATIO = 2
_REDUCED_CHANNELS = 37
_REDUCED_BATCH = 3


def reduced(shape: Shape, *, batch: bool = True) -> Shape:
    """A shape with fewer heads and, if asked, sequences; d_state, head_dim, groups and the other lengths are kept."""
    ratio = _REDUCED_CHANNELS if shape.head_dim == 1 else _REDUCED_RATIO
    heads = shape.groups * min(ratio, shape.heads // shape.groups)
    return replace(shape, lengths=shape.lengths[:_REDUCED_BATCH] if batch else shape.lengths, heads=heads)


def model_cases(
    lengths: Sequence[int], *, reduce: bool = False, io: str = "bf16", state: str = "f32"
) -> Iterator[Case]:
    """Every real model once, with sequences of the given lengths, half of them fresh."""
    for model in MODELS:
        shape = Shape(tuple(lengths), model.heads, model.head_dim, model.d_state, model.groups)
        options = Options(
            io=io, state=state, dt_f32=True, per_column_a=model.mamba1, z=model.mamba1, fresh="mixed", packed=True
        )
        yield _case(f"{model.name} {io} {state}", shape, options, reduce)


def _case(name: str, shape: Shape, options: Options, reduce: bool) -> Case:
    used = reduced(shape) if reduce else shape
    return Case(name, lambda: draw(seed_of(name), used, options))


def seed_of(name: str) -> int:
    """A number that depends on the name alone, the same in every run."""
    return zlib.crc32(name.encode())


def edge_cases(
    d_state: int = 16, *, chunk: int = 8, io: str = "f32", state: str = "f32", head_dim: int = 0
) -> Iterator[Case]:
    """Faults that users met elsewhere, and the edges of what is legal; small enough for the emulator.

    Args:
        d_state: columns, for kernels that are specialised on them.
        chunk: tokens that the kernel stages at a time: boundaries and lengths are put around it.
        io, state: storage types; the cases without a pool, whose result is f32, are left out where state is not.
        head_dim: rows of a head, for kernels that are specialised on them; 0 takes several.
    """
    n = d_state

    def case(name: str, shape: Shape, **options: Any) -> Case:
        sized = replace(shape, head_dim=head_dim or shape.head_dim)
        return Case(name, lambda: draw(seed_of(name), sized, Options(**({"io": io, "state": state} | options))))

    # Every place within a short chunk; of a long one both ends and the middle.
    for first in (f for f in range(1, chunk + 1) if chunk <= 16 or f <= 8 or f > chunk - 8 or f == chunk // 2):
        yield case(f"boundary after {first} tokens", Shape((first, chunk), 2, 3, n), fresh="mixed")
    for tokens in (0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk, 2 * chunk + 1):
        yield case(f"length {tokens}", Shape((tokens,), 2, 3, n))
    yield case("empty sequences", Shape((0, 3, 0, 0, 2, 0), 2, 3, n), fresh="mixed", slots="moved")
    yield case("no sequence, only a tail", Shape((), 2, 3, n), tail=3)
    yield case("tail past the last offset", Shape((3, 2), 2, 3, n), tail=4)
    if state == "f32":
        yield case("tail without a state", Shape((3, 2), 2, 3, n), tail=4, state=None)
        yield case("no state", Shape((3, 0, 5), 2, 3, n), state=None)
    yield case("groups", Shape((5, 4), 6, 2, n, 3))
    yield case("padding keeps slot 0", Shape((2, 3, 1, 4), 2, 3, n), padding=2, slots="moved")
    yield case("discarded states", Shape((2, 3, 1, 4), 2, 3, n), discard=2)
    yield case("fresh over NaN", Shape((2, 3, 1), 2, 3, n), fresh="all")
    yield case("checkpoint after every token", Shape((4, 0, 5), 2, 3, n), checkpoints=1, slots="moved", fresh="mixed")
    yield case("sequence order", Shape((4, 1, 5, 2), 2, 3, n), order=True)
    yield case("every option", Shape((4, 1, 5), 4, 5, n, 2), z=True, dt_limit=(0.01, 0.1), tail=1, checkpoints=3)
    yield case("no option", Shape((4, 1, 5), 2, 5, n), D=False, dt_bias=False, softplus=False, dt_limit=(0.0, 0.5))
    yield case("positive A", Shape((6, 9), 2, 3, n), spread="ggml")
    yield case("A for each column", Shape((6, 9), 37, 1, n), per_column_a=True, z=True)
    yield case("odd base and strides", Shape((6, 9), 2, 5, n), shift=1, gap=3, slot_gap=5, z=True)
    yield case("one packed row", Shape((6, 9), 2, 4, n), packed=True, gap=4, z=True)
    if head_dim:
        return
    for rows in (1, 5, 19, 80, 96):
        yield case(f"head_dim {rows}", Shape((3, 2), 2, rows, n), fresh="mixed", z=True)
    yield Case("strong decay", lambda: strong_decay(n, io, state))
    yield Case("shared read slot", lambda: shared_read_slot(n, io, state))


def strong_decay(
    d_state: int, io: str = "f32", state: str = "f32", *, head_dim: int = 3, tokens: int = 40
) -> ScanProblem:
    """A = -1e4 with dt = 20 among small steps: every exponent is hugely negative, nothing may become Inf or NaN."""
    problem = draw(7, Shape((tokens, 25), 2, head_dim, d_state), Options(io=io, state=state, dt_bias=False))
    mixed = np.where(np.random.default_rng(8).uniform(size=problem.dt.shape) < 0.1, 20.0, -9.0)
    return replace(problem, dt=mixed.astype(problem.dt.dtype), A=np.full(problem.heads, -1e4, np.float32))


def shared_read_slot(d_state: int, io: str = "f32", state: str = "f32") -> ScanProblem:
    """Three sequences that start from one slot and end in three others."""
    problem = draw(9, Shape((3, 4, 0), 2, 3, d_state), Options(io=io, state=state, slots="moved"))
    assert problem.read_slots is not None
    return replace(problem, read_slots=np.full(3, problem.read_slots[0], np.int32))


def tiny_steps(d_state: int, head_dim: int = 1) -> ScanProblem:
    """One token a sequence, dt from -80 to 20 through softplus: y is softplus(dt), as x, B, C are 1 in one column."""
    dt = np.linspace(-80.0, 20.0, 101, dtype=np.float32)[:, None]
    one = np.zeros((101, 1, d_state), np.float32)
    one[..., -1] = 1.0
    return ScanProblem(
        np.ones((101, 1, head_dim), np.float32),
        dt,
        np.full(1, -1.0, np.float32),
        one,
        one.copy(),
        cu_seqlens=np.arange(102, dtype=np.int32),
    )


def many_sequences(d_state: int, sequences: int = 70_000, *, head_dim: int = 1, every: int = 1) -> ScanProblem:
    """More sequences than grid.y or grid.z can count, of one token each.

    Args:
        d_state, head_dim: as a kernel wants them.
        sequences: how many.
        every: only every so many-th has a token, for machines on which each token costs much; with 16 they are among
            them the 65536th and the 70000th.
    """
    lengths = tuple(int(s % every == every - 1) for s in range(sequences))
    return draw(10, Shape(lengths, 1, head_dim, d_state), Options(state=None))


def many_channels(d_state: int, channels: int = 70_000) -> ScanProblem:
    """More Mamba-1 channels than grid.y or grid.z can count."""
    return draw(11, Shape((2,), channels, 1, d_state), Options(per_column_a=True, state=None))


def _sparse_rows(rows: Array, stride: int) -> Array:
    """A copy of an array whose first axis is `stride` elements apart, over memory that costs nothing in between."""
    item = rows.itemsize
    span = ((rows.shape[0] - 1) * stride + math.prod(rows.shape[1:])) * item
    memory: mmap.mmap = sparse_memory(span)
    inner = [item * math.prod(rows.shape[axis + 1 :]) for axis in range(1, rows.ndim)]
    copy: Array = np.ndarray(rows.shape, rows.dtype, memory, 0, (stride * item, *inner))
    copy[...] = rows
    return copy


def huge_slot_stride(
    d_state: int, stride: int = 2**31 + 64, *, head_dim: int = 3, io: str = "f32", state: str = "f32"
) -> ScanProblem:
    """Slots so far apart that slot x stride passes 2^31 elements at slot 1 and 2^32 at slot 2, over sparse memory.

    One sequence reads slot 1 and ends there, one goes from slot 0 to slot 2, and its last state is kept in slot 3 too.

    Args:
        d_state, head_dim, io, state: as a kernel wants them.
        stride: elements between slots.
    """
    problem = draw(12, Shape((3, 2), 2, head_dim, d_state), Options(io=io, state=state, dt_f32=True, spare=0))
    assert problem.state is not None
    rng = np.random.default_rng(13)
    shape = (4, *problem.state.shape[1:])
    drawn = rng.integers(-127, 128, shape) if state == "i8" else rng.standard_normal(shape)
    scale = rng.uniform(0.01, 0.03, shape[:3]).astype(np.float32) if state == "i8" else None
    return replace(
        problem,
        state=_sparse_rows(drawn.astype(problem.state.dtype), stride),
        state_scale=scale,
        read_slots=np.array([1, 0], np.int32),
        write_slots=np.array([1, 2], np.int32),
        checkpoint_slots=np.array([-1, -1, -1, -1, 3], np.int32),
    )


def huge_token_stride(
    d_state: int, stride: int = 2**31 + 64, *, head_dim: int = 3, io: str = "f32", state: str = "f32"
) -> ScanProblem:
    """Two tokens so far apart in x, dt, B, C and z that token x stride passes 2^31 elements, over sparse memory."""
    problem = draw(16, Shape((1, 1), 2, head_dim, d_state), Options(io=io, state=state, dt_f32=True, z=True))
    names = ("x", "dt", "B", "C", "z")
    spread: dict[str, Any] = {name: _sparse_rows(getattr(problem, name), stride) for name in names}
    return replace(problem, **spread)


def ancestor_cases(d_state: int, *, reduce: bool = False, io: str = "f32", state: str = "f32") -> Iterator[Case]:
    """What the ancestor was tested on: mixed fresh and resuming sequences of up to 150 tokens, 96 rows.

    The ancestor is the kernel of a Go inference engine that the layout `padded` of `recurrent` restates; this project
    grew out of it, and its tests are the least that every kernel here has to pass. `reduce` keeps 2 heads of 24.
    """
    shape = Shape((150, 1, 37, 64), 2 if reduce else 24, 96, d_state)
    options = Options(io=io, state=state, fresh="mixed", z=True)
    suffix = "" if (io, state) == ("f32", "f32") else f" {io} s{state}"
    yield Case(f"ancestor n{d_state}{suffix}", lambda: draw(14, shape, options))


#: d_state of the ancestor's tests (see `ancestor_cases`): one that fills no lane evenly, and the largest.
ANCESTOR_D_STATE = (100, 1024)


def long_case(d_state: int = 128, *, reduce: bool = False) -> ScanProblem:
    """4096 tokens of one sequence, resumed."""
    return draw(15, Shape((4096,), 1 if reduce else 24, 8 if reduce else 64, d_state), Options())
