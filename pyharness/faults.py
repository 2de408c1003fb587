"""Kinds of faults that users of other scans met, each as the problems that would show it in one of ours.

A kind is covered, not the one input that was reported: every boundary within a chunk, every length around it, several
groupings. Problems are small, many sequences to a problem, so that all of them run on every kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pyharness import cases
from pyharness.cases import Case, Options, Shape, draw
from pyharness.problem import ScanProblem
from pyharness.spec import DTYPE_BYTES, Geometry, KernelSpec

#: Boundaries are put at every place of a chunk up to this one, and at the last ones.
_LONGEST_RUN = 64


@dataclass(frozen=True)
class Place:
    """What the problems for a kernel keep to: its d_state, head_dim and storage types, and how long sequences may be.

    Attributes:
        chunk: tokens around which boundaries and lengths are put.
        longest: tokens of a sequence at most, 0 for any number.
    """

    d_state: int
    head_dim: int
    io: str
    state: str
    chunk: int
    longest: int

    @classmethod
    def of(cls, spec: KernelSpec) -> Place:
        """The place of a kernel."""
        # Three rows where a kernel takes any number.
        d_state, head_dim = spec.d_state or 38, spec.limits.get("head_dim", [3])[0]
        chunk = spec.plan(Geometry(1, 1, 1, head_dim, 1, d_state)).chunk or getattr(spec, "chunk", 0)
        longest = int(getattr(spec, "most_tokens", 0))
        # What holds a token or two at a time has no chunk to speak of.
        chunk = chunk if chunk > 2 else 8
        return cls(d_state, head_dim, spec.io, spec.state, min(chunk, longest or chunk), longest)

    def options(self, **options: Any) -> Options:
        """Options in the kernel's storage types; heads of one row are the channels of Mamba-1."""
        return Options(io=self.io, state=self.state, dt_f32=True, per_column_a=self.head_dim == 1, **options)

    def shape(self, *lengths: int, heads: int = 2, groups: int = 1) -> Shape:
        """A shape with these sequences, each as long as the kernel allows."""
        cut = tuple(min(n, self.longest or n) for n in lengths)
        return Shape(cut, heads, self.head_dim, self.d_state, groups)


Fault = Callable[[Place], Iterator[Case]]


def _case(name: str, shape: Shape, options: Options) -> Case:
    return Case(name, lambda: draw(cases.seed_of(name), shape, options))


def offsets(place: Place) -> Iterator[Case]:
    """Slot or token times stride in 32 bits, by elements and by bytes; slots are read, written and checkpointed."""
    types: dict[str, Any] = {"head_dim": place.head_dim, "io": place.io, "state": place.state}
    for what, make, kind in (
        ("slots", cases.huge_slot_stride, place.state),
        ("tokens", cases.huge_token_stride, place.io),
    ):
        for unit, stride in (("elements", 2**31 + 64), ("bytes", 2**31 // DTYPE_BYTES[kind] + 64)):
            yield Case(f"{what} 2^31 {unit} apart", partial(make, place.d_state, stride, **types))


def decays(place: Place) -> Iterator[Case]:
    """A decay exponent that rounds to above 0 at large |A|, then Inf, then NaN: A = -1e4, dt up to 20."""
    problem = draw(7, place.shape(*(40, 25, 1, 8, 8, 8, 8)), place.options(dt_bias=False))
    rng = np.random.default_rng(8)
    small = -9.0
    for share in (0.05, 0.5, 1.0):
        for A in (-1e4, -1e2):
            mixed = np.where(rng.uniform(size=problem.dt.shape) < share, 20.0, small).astype(problem.dt.dtype)
            hard = replace(problem, dt=mixed, A=np.full(problem.A.shape, A, np.float32))
            yield Case(f"A = {A:g}, {share:.0%} of dt = 20", partial(_as_it_is, hard))


def _as_it_is(problem: ScanProblem) -> ScanProblem:
    return problem


def boundaries(place: Place) -> Iterator[Case]:
    """A sequence that begins within a chunk: its initial state decays from its own start, at every offset."""
    chunk = place.chunk
    # Sequences of one token begin at every offset of a chunk, those of 1, 2, 3, ... tokens end at every one.
    yield _case("a boundary after every token", place.shape(*(1,) * chunk, chunk), place.options())
    run = sorted({*range(1, min(chunk, _LONGEST_RUN) + 1), chunk - 1, chunk, chunk + 1})
    yield _case("sequences of 1 to chunk tokens, resumed", place.shape(*run), place.options())
    yield _case("sequences of chunk to 1 tokens, some fresh", place.shape(*reversed(run)), place.options(fresh="mixed"))


def lengths(place: Place) -> Iterator[Case]:
    """A length that is no multiple of the chunk, from none to a token past two chunks."""
    chunk = place.chunk
    around = (0, 1, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1, 3, 0)
    yield _case("lengths around the chunk", place.shape(*around), place.options(fresh="mixed", slots="moved"))
    yield _case("one sequence a token past two chunks", place.shape(2 * chunk + 1), place.options())
    yield _case("only empty sequences", place.shape(0, 0, 0), place.options(fresh="mixed", slots="moved"))
    yield _case("no sequence", place.shape(), place.options(tail=3))


def groups(place: Place) -> Iterator[Case]:
    """Head h reads group h // (heads // groups), not h mod groups."""
    for heads, count in ((6, 3), (8, 2), (5, 5), (6, 1), (12, 4)):
        shape = place.shape(3, 2, heads=heads, groups=count)
        yield _case(f"{heads} heads in {count} groups", shape, place.options())


def padding(place: Place) -> Iterator[Case]:
    """A pad index taken for a slot: slot 0, live or not named at all, and the others keep their bits."""
    shape = place.shape(2, 3, 1, 4, 2)
    for slots in ("default", "in place", "moved"):
        yield _case(f"padding among live sequences, slots {slots}", shape, place.options(padding=2, slots=slots))
    yield _case("slot 0 that nothing names", shape, place.options(padding=2, slots="moved", spare=9))
    yield _case("nothing but padding", shape, place.options(padding=1, tail=2))
    yield Case("padding by another number", lambda: _other_pad(place))
    # A discarded state is another -1.
    yield _case("discarded states", shape, place.options(discard=2))


def _other_pad(place: Place) -> ScanProblem:
    problem = draw(21, place.shape(2, 3, 1, 4), place.options(padding=2, slots="moved"))
    assert problem.read_slots is not None
    return replace(
        problem, pad_slot=-77, read_slots=np.where(problem.padding, -77, problem.read_slots).astype(np.int32)
    )


def initial_states(place: Place) -> Iterator[Case]:
    """Initial states that a kernel was built without: whether a sequence resumes is data."""
    shape = place.shape(3, place.chunk + 1, 1, 2)
    for fresh in ("none", "mixed", "all"):
        yield _case(f"resuming sequences, fresh {fresh}", shape, place.options(fresh=fresh))
    yield _case("resuming to empty sequences", place.shape(0, 2, 0), place.options(slots="moved"))
    if place.state == "f32":
        yield _case("no pool", shape, replace(place.options(), state=None))


def fresh_slots(place: Place) -> Iterator[Case]:
    """A fresh sequence over a slot that holds NaN, infinities, or that does not exist."""
    shape = place.shape(2, 3, 1, 0)
    yield _case("fresh over NaN", shape, place.options(fresh="all"))
    for bad in (np.inf, -np.inf, np.nan):
        yield Case(f"fresh over {bad}", partial(_fresh_over, place, bad))
    yield Case("fresh with a read slot that does not exist", lambda: _fresh_over(place, None))


def _fresh_over(place: Place, bad: float | None) -> ScanProblem:
    problem = draw(23, place.shape(2, 3, 1, 0), place.options(fresh="all", slots="moved"))
    assert problem.state is not None
    assert problem.read_slots is not None
    if bad is None:
        wild = np.array([2**31 - 1, -2, problem.slots, -(2**31)], np.int32)
        return replace(problem, read_slots=wild)
    with np.errstate(invalid="ignore"):
        problem.state[...] = np.float64(bad).astype(problem.state.dtype)
    if problem.state_scale is not None:
        problem.state_scale[...] = bad
    return problem


#: Each kind by its name, with the problems for a kernel.
FAULTS: dict[str, Fault] = {
    "offset in 32 bits": offsets,
    "decay above 1 at large A": decays,
    "boundary inside a chunk": boundaries,
    "length that is no multiple of the chunk": lengths,
    "wrong group of a head": groups,
    "padding taken for a slot": padding,
    "initial states dropped": initial_states,
    "fresh sequence over garbage": fresh_slots,
}
