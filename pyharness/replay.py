"""The peers' suites, run on our kernels: results case by case, and the table of them that is stored and shown."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness import toolchain
from pyharness.compare import compare, scaled_error
from pyharness.errors import NoKernel, SsmError
from pyharness.families import FAMILIES
from pyharness.oracle import OracleResult, oracle
from pyharness.peer_suites import SUITES, Replay, Suite, Tolerance, suite
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult, scan
from pyharness.select import Features, mismatch
from pyharness.spec import KernelSpec
from pyharness.variants import launches_on, variants

Array = NDArray[Any]
Float64 = NDArray[np.float64]
Run = Callable[[ScanProblem], ScanResult]

FOLDER = toolchain.ROOT / "generated" / "peers"
EMULATOR = "emulator"
_MOST_WORKERS = 12
#: A kernel that gives every state element a thread takes the emulator seconds beyond this many updates.
_MOST_BLOCK_UPDATES = 2**18
#: Peers hold every element alone, and one that is small beside its terms has the error of the terms: a kernel is held
#: to a tolerance so many times what rounding of its operands may cost in the norm.
_ROOM_FOR_OPERANDS = 4
#: Why no kernel of a family runs a case: it has none for the shape or the types, or all round what they multiply.
SHAPE, TOLERANCE = "shape", "tolerance"


@dataclass(frozen=True)
class Outcome:
    """What a kernel made of a case.

    Attributes:
        kernel: its id, or empty where none of the family takes the case.
        left: SHAPE or TOLERANCE where none takes it, else empty.
        peer: the largest error of y or a state over the peer's tolerance; at most 1 passes.
        ours: the largest relative norm over the bound of `compare`; at most 1 passes.
        fault: what else is wrong, or empty.
    """

    suite: str
    family: str
    case: str
    kernel: str
    peer: float = 0.0
    ours: float = 0.0
    fault: str = ""
    left: str = ""

    @property
    def passed(self) -> bool:
        """Whether a kernel ran and was right by both measures."""
        return bool(self.kernel) and not self.fault and self.peer <= 1 and self.ours <= 1


# One case.


def takers(family: str, case: Replay, calls: Sequence[ScanProblem]) -> tuple[list[KernelSpec], str]:
    """The kernels of a family that take every call of a case or, where there is none, SHAPE or TOLERANCE.

    A kernel takes what has its sizes and storage types, as far as the peer's tolerance has room for what rounding of
    the kernel's operands costs: in a value of 1, and in what C makes of states that are stored in more digits than
    those of the operands. A tolerance of the mean square is one of the norm, as that cost is.
    """
    call = calls[0]
    made = variants(family, call.d_state, call.io, call.state_dtype, head_dim=call.head_dim, chunk=case.chunk)
    fitting = [spec for spec in made if not any(mismatch(Features.of(each), spec) for each in calls)]
    size = 1.0 if case.tolerance.nmse else max(1.0, _size_of_rounded_reads(call))
    found = [spec for spec in fitting if _ROOM_FOR_OPERANDS * spec.operand_error * size <= case.tolerance.of_one]
    return found, "" if found else TOLERANCE if fitting else SHAPE


def _size_of_rounded_reads(call: ScanProblem) -> float:
    """The norm of what states that are read add to an element of y; 0 where operands hold the states as they are."""
    reads = call.resolved_read[call.resumes & ~call.padding]
    if call.state is None or not reads.size or (call.state_dtype == call.io and call.io != "f32"):
        return 0.0
    squares = (np.square(each, dtype=np.float64).mean() for each in (call.state[reads], call.C[call.live_tokens]))
    return math.sqrt(call.d_state * math.prod(squares))


def dealt(case: Replay, calls: Sequence[ScanProblem], found: Sequence[KernelSpec], backend: str) -> list[KernelSpec]:
    """Those of the kernels that take a case which run it.

    Each combination of d_state, storage types and chunk is dealt to one of the family's layouts and configurations;
    on a GPU the family's default kernel runs too.
    """
    if not found:
        return []
    call = calls[0]
    key = (call.d_state, call.io, call.state_dtype)
    place = zlib.crc32(repr((key, case.chunk)).encode()) % len(found)
    if backend != EMULATOR:
        from pyharness import device

        _, target, _ = device.identity()
        # Some configurations spill; the next one of the family is taken then.
        both = (
            next((spec for spec in [*found[first:], *found[:first]] if launches_on(spec, target)), None)
            for first in (0, place)
        )
        return list({each.id: each for each in both if each is not None}.values())
    spec = found[place]
    updates = max(each.tokens for each in calls) * call.heads * call.head_dim * call.d_state
    return [found[0] if getattr(spec, "layout", "") == "block" and updates > _MOST_BLOCK_UPDATES else spec]


def replay_case(key: str, number: int, families: Sequence[str], backend: str) -> list[Outcome]:
    """Run one case of a suite on kernels of each family: in full on a GPU, in reduced form on the emulator.

    Returns:
        An outcome a family, the worse one where two kernels ran.
    """
    case = next(c for i, c in enumerate(suite(key).cases()) if i == number)
    problem = case.problem(reduce=backend == EMULATOR)
    calls = list(_calls(case, problem))
    found = {family: takers(family, case, calls) for family in families}
    truth = oracle(problem) if any(specs for specs, _ in found.values()) else None
    outcomes = []
    for family, (specs, left) in found.items():
        ran = [
            _replay_kernel(Outcome(key, family, case.name, spec.id), case, problem, truth, backend)
            for spec in dealt(case, calls, specs, backend)
        ]
        ran.sort(key=lambda outcome: (not outcome.passed, outcome.peer))
        outcomes.append(ran[-1] if ran else Outcome(key, family, case.name, "", left=left or SHAPE))
    return outcomes


def _replay_kernel(
    outcome: Outcome, case: Replay, problem: ScanProblem, truth: OracleResult | None, backend: str
) -> Outcome:
    try:
        return judge(outcome, case, problem, functools.partial(scan, kernel=outcome.kernel, backend=backend), truth)
    except SsmError as error:
        return replace(outcome, fault=f"{type(error).__name__}: {error}")


def _calls(case: Replay, problem: ScanProblem) -> Iterator[ScanProblem]:
    """The problem of each call, with the first call's states in every pool."""
    if not case.calls:
        yield problem
        return
    done = np.zeros(problem.sequences, np.int64)
    for counts in case.calls:
        yield cut(problem, done, done + np.array(counts))
        done += np.array(counts)


def cut(problem: ScanProblem, first: NDArray[np.int64], last: NDArray[np.int64]) -> ScanProblem:
    """The tokens of each sequence from `first` to before `last`, i64 [sequences] within the sequence."""
    starts = problem.offsets[:-1]
    spans = zip(starts + first, starts + last, strict=True)
    tokens = np.concatenate([np.arange(begin, end) for begin, end in spans])
    names = ("x", "dt", "B", "C", "z")
    rows = {
        name: np.ascontiguousarray(getattr(problem, name)[tokens])
        for name in names
        if getattr(problem, name) is not None
    }
    offsets = np.concatenate(([0], np.cumsum(last - first))).astype(np.int32)
    changes: dict[str, Any] = rows | {"cu_seqlens": offsets}
    return replace(problem, **changes)


def judge(outcome: Outcome, case: Replay, problem: ScanProblem, run: Run, truth: OracleResult | None) -> Outcome:
    """Run a case and hold y and states against the oracle, by the peer's measure and ours.

    Args:
        outcome: suite, family, case and kernel, without results.
        run: runs one call.
        truth: the oracle's result over all calls where the caller has it already.
    """
    pairs = [(problem, _run_all(case, problem, run))]
    if case.drafts:
        again = going_on(problem, pairs[0][1], case)
        pairs.append((again, run(again)))
    for number, (each, result) in enumerate(pairs):
        exact = truth if number == 0 and truth is not None else oracle(each)
        errors = compare(result, each, exact)
        outcome = replace(
            outcome,
            peer=max(outcome.peer, peer_share(result, each, exact, case.tolerance)),
            ours=max(outcome.ours, errors.share),
            fault="; ".join(filter(None, (outcome.fault, *errors.faults))),
        )
    return outcome


def _run_all(case: Replay, problem: ScanProblem, run: Run) -> ScanResult:
    """Run a case's calls one after the other, each from the states that the last one left."""
    if not case.calls:
        return run(problem)
    y = np.zeros(problem.x.shape, problem.x.dtype)
    done = np.zeros(problem.sequences, np.int64)
    result: ScanResult | None = None
    for call in _calls(case, problem):
        if result is not None:
            call = replace(call, state=result.state, resume=np.ones(problem.sequences, np.uint8))
        result = run(call)
        for s in range(problem.sequences):
            start = problem.offsets[s] + done[s]
            y[start : start + call.lengths[s]] = result.y[call.offsets[s] : call.offsets[s + 1]]
        done += call.lengths
    assert result is not None
    return replace(result, y=y)


def going_on(problem: ScanProblem, result: ScanResult, case: Replay) -> ScanProblem:
    """The call after drafts: even sequences start from where the drafts started, odd ones from the last checkpoint."""
    assert problem.checkpoint_slots is not None
    last = problem.checkpoint_slots[problem.offsets[1:] - 1]
    odd = np.arange(problem.sequences) % 2 == 1
    read = np.where(odd, last, problem.resolved_read).astype(np.int32)
    fresh_slots = np.where(odd, problem.resolved_read, last).astype(np.int32)
    # The same inputs in reverse, as another call's; they end where nothing that is read stands.
    rows = {name: np.ascontiguousarray(getattr(problem, name)[::-1]) for name in ("x", "dt", "B", "C", "z")}
    changes: dict[str, Any] = rows | {"checkpoint_slots": None, "read_slots": read, "write_slots": fresh_slots}
    return replace(problem, state=result.state, **changes)


def peer_share(result: ScanResult, problem: ScanProblem, truth: OracleResult, tolerance: Tolerance) -> float:
    """The largest error of y and of every stored state over a peer's tolerance; rows of padding do not count."""
    live = problem.live_tokens
    pairs: list[tuple[Array, Float64]] = [(result.y[live], truth.y[live])]
    for slot, state in truth.states.items():
        found = result.state[slot].astype(np.float64)
        if result.state_scale is not None:
            found = found * result.state_scale[slot].astype(np.float64)[..., None]
        pairs.append((found, state))
    if tolerance.nmse:
        shares = [_mean_square(out, exact) / tolerance.nmse for out, exact in pairs if exact.size]
    else:
        shares = [scaled_error(out, exact, tolerance.rtol, tolerance.atol) for out, exact in pairs]
    return max(shares, default=0.0)


def _mean_square(out: Array, exact: Float64) -> float:
    """Mean square error over the mean square of what is right; infinite where there is no number."""
    error = float(((out.astype(np.float64) - exact) ** 2).mean() / (exact**2).mean())
    return error if np.isfinite(error) else float("inf")


# The table.


@dataclass(frozen=True)
class Row:
    """A suite on a family: cases, those that ran and passed, those that no kernel takes, and the largest errors.

    Attributes:
        no_kernel: cases whose shape or storage types the family has not.
        too_tight: cases whose tolerance has no room for the rounding of the family's operands.
    """

    suite: str
    family: str
    cases: int
    passed: int
    no_kernel: int
    too_tight: int
    worst: float
    worst_case: str
    ours: float

    @property
    def ran(self) -> int:
        """Cases that a kernel ran."""
        return self.cases - self.no_kernel - self.too_tight

    @property
    def ok(self) -> bool:
        """Whether every case that the family can take passed."""
        return self.passed == self.ran


def tabulate(outcomes: Iterable[Outcome]) -> list[Row]:
    """A row a suite and family, in the order of SUITES and FAMILIES."""
    by_row: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        by_row.setdefault((outcome.suite, outcome.family), []).append(outcome)
    rows = []
    for each in SUITES:
        for family in FAMILIES:
            found = by_row.get((each.key, family), [])
            if not found:
                continue
            ran = [outcome for outcome in found if outcome.kernel]
            worst = max(ran, key=lambda outcome: outcome.peer, default=None)
            rows.append(
                Row(
                    each.key,
                    family,
                    len(found),
                    sum(outcome.passed for outcome in ran),
                    sum(outcome.left == SHAPE for outcome in found),
                    sum(outcome.left == TOLERANCE for outcome in found),
                    _short(worst.peer) if worst else 0.0,
                    f"{worst.case} on {worst.kernel}" if worst else "",
                    _short(max((outcome.ours for outcome in ran), default=0.0)),
                )
            )
    return rows


def _short(share: float) -> float:
    """Three digits, as many as a table needs."""
    return float(f"{share:.3g}")


def replay_suite(each: Suite, family: str, backend: str, most_kernels: int = 0) -> tuple[Row, list[Outcome]]:
    """A suite on a family in this process: its row, and the outcomes that did not pass.

    Args:
        most_kernels: cases of further kernels are left out, those that no kernel takes are not; 0 leaves none out.
    """
    outcomes: list[Outcome] = []
    kernels: set[str] = set()
    for number, case in enumerate(each.cases()):
        if most_kernels:
            calls = list(_calls(case, case.problem(reduce=backend == EMULATOR)))
            ids = {spec.id for spec in dealt(case, calls, takers(family, case, calls)[0], backend)}
            if len(kernels | ids) > most_kernels:
                continue
            kernels |= ids
        outcomes += replay_case(each.key, number, [family], backend)
    (row,) = tabulate(outcomes)
    return row, [o for o in outcomes if o.kernel and not o.passed]


def replay_all(
    backend: str = EMULATOR,
    families: Sequence[str] = (),
    workers: int = 0,
    tell: Callable[[str], None] | None = None,
) -> tuple[list[Row], list[Outcome]]:
    """Every suite on some families, cases side by side in several processes.

    Args:
        backend: "emulator" (reduced form) or "gpu" (in full).
        families: none is all.
        workers: processes; 0 is one a core.
        tell: told each case that does not pass, and now and then how far the run is.

    Returns:
        The table, and the outcomes that did not pass.

    Raises:
        NoKernel: there is no such family.
    """
    unknown = sorted(set(families) - set(FAMILIES))
    if unknown:
        raise NoKernel(f"family must be one of {', '.join(FAMILIES)}, found {', '.join(unknown)}")
    say = tell or (lambda _: None)
    wanted = tuple(families) or tuple(FAMILIES)
    jobs = [(each.key, number) for each in SUITES for number, _ in enumerate(each.cases())]
    if backend != EMULATOR:
        # Neighbours share kernels: side by side, all processes would compile the same one.
        random.Random(0).shuffle(jobs)
    outcomes: list[Outcome] = []
    count = workers or min(os.cpu_count() or 1, _MOST_WORKERS)
    # A forked child cannot use a CUDA context of its parent.
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(replay_case, key, number, wanted, backend) for key, number in jobs]
        for done, future in enumerate(futures, 1):
            found = future.result()
            outcomes += found
            for outcome in found:
                if outcome.kernel and not outcome.passed:
                    say(f"failed: {outcome}")
            if done % 50 == 0 or done == len(jobs):
                say(f"{done} of {len(jobs)} cases")
    return tabulate(outcomes), [o for o in outcomes if o.kernel and not o.passed]


# What is stored.


def stored_path(place: str, folder: Path = FOLDER) -> Path:
    """The file of a table: of the emulator, or of a device by its slug."""
    return folder / f"{place}.json"


def store(place: str, rows: Sequence[Row], about: dict[str, Any], folder: Path = FOLDER) -> None:
    """Store a table; rows of families that were not run are kept."""
    path = stored_path(place, folder)
    ran = {(row.suite, row.family) for row in rows}
    kept = [row for row in read(path) if (row.suite, row.family) not in ran] if path.is_file() else []
    order = [(each.key, family) for each in SUITES for family in FAMILIES]
    every = [row for row in [*rows, *kept] if (row.suite, row.family) in order]
    every.sort(key=lambda row: order.index((row.suite, row.family)))
    document = {"about": about, "rows": [vars(row) for row in every]}
    toolchain.publish_json(path, document)


def read(path: Path) -> list[Row]:
    """The rows of a stored table.

    Raises:
        SsmError: there is none.
    """
    if not path.is_file():
        raise SsmError(f"a table was wanted at {path.name}, found none: run invoke peers")
    return [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
