"""Differential fuzzing: legal problems, as hostile as they may be, on a backend and on the oracle.

A draw takes a kernel (any family, d_state, storage, configuration), a shape around its chunk, any options, and values
that are hard on arithmetic: dt from -80 to 80, A from -1e4 to -1e-6, denormals, zeros of either sign, and NaN and
infinities wherever they must not matter. What fails is made smaller and written to a file that `replay` runs again.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness import problem_file, toolchain
from pyharness.binding import Outputs, outputs
from pyharness.cases import Options, Shape, draw
from pyharness.compare import compare
from pyharness.errors import DeviceError, InvalidProblem, NoKernel, ToolchainError
from pyharness.families import FAMILIES
from pyharness.hostile import hostile_room, in_range, operands_fit, without_underflow
from pyharness.oracle import OracleResult, oracle
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult, require, run_emulator, scan
from pyharness.select import Features, mismatch
from pyharness.shrink import shrink
from pyharness.spec import DTYPE_BYTES, IO_DTYPES, KernelSpec, parse_id
from pyharness.variants import launches_on, variants

Array = NDArray[Any]
Generator = np.random.Generator

FOLDER = toolchain.ROOT / "build" / "fuzz"
BACKENDS = ("emulator", "gpu")
#: Problems run on a kernel, on the average, before another kernel is made: making one takes a second or more.
_PROBLEMS_A_KERNEL = 40
_KERNELS_AT_ONCE = 24
#: State elements that a problem updates at most, counted once a token.
_MOST_ELEMENTS = {"emulator": 2**16, "gpu": 2**21}
#: One problem in so many also runs in another order, for the same bits.
_REPEATED = 8
_MOST_FAILURES = 10

_D_STATES = (1, 2, 3, 5, 8, 16, 19, 32, 38, 64, 80, 96, 100, 128, 192, 256, 512, 1024)
_HEAD_DIMS = (1, 2, 3, 4, 5, 8, 9, 16, 19, 32, 33, 64, 80, 96, 128)
_FIELDS: dict[str, tuple[int, ...]] = {
    "lanes": (1, 2, 4, 8, 16, 32),
    "rows": (1, 2, 4, 8, 16, 24, 32, 64),
    "warps": (1, 2, 3, 4, 8, 12, 16),
    "chunk": (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 25, 32, 40, 64, 128, 256),
    "segments": (1, 2, 3, 5, 8),
    "sequences": (1, 2, 3, 4, 7),
}


@dataclass(frozen=True)
class Failure:
    """One failure: the kernel, what went wrong with the smallest problem, and the file to replay it from."""

    kernel: str
    text: str
    path: Path


@dataclass
class Tally:
    """What a run of the fuzzer did.

    Attributes:
        problems: problems compared, by family.
        kernels: ids that ran.
        repeated: problems that also ran in another order.
        left_out: draws whose values leave the range of f32.
    """

    backend: str
    seed: int
    minutes: float
    problems: Counter[str] = field(default_factory=Counter)
    kernels: set[str] = field(default_factory=set)
    repeated: int = 0
    left_out: int = 0
    failures: list[Failure] = field(default_factory=list)

    def rows(self) -> list[dict[str, Any]]:
        """A line a family, for a listing."""
        return [
            {
                "family": family,
                "problems": self.problems[family],
                "kernels": sum(parse_id(name).family == family for name in self.kernels),
                "failures": sum(parse_id(f.kernel).family == family for f in self.failures),
            }
            for family in sorted(self.problems)
        ]


# Drawing.


def draw_kernel(rng: Generator, families: tuple[str, ...]) -> KernelSpec:
    """A kernel of one of some families, often with fields that are not its defaults."""
    family = families[rng.integers(len(families))]
    while True:
        io, state = IO_DTYPES[rng.integers(3)], tuple(DTYPE_BYTES)[rng.integers(4)]
        # The plain types are what most people run.
        io, state = ("f32", "f32") if rng.random() < 0.35 else (io, state)
        head_dim = int(rng.choice(_HEAD_DIMS))
        found = variants(family, int(rng.choice(_D_STATES)), io, state, head_dim=head_dim)
        if not found:
            continue
        spec = found[rng.integers(len(found))]
        return spec if rng.random() < 0.4 else _configured(rng, spec)


def _configured(rng: Generator, spec: KernelSpec) -> KernelSpec:
    """A kernel that differs from another in its configuration; the same if no draw is one that can exist."""
    names = {f.name for f in dataclasses.fields(spec)} & set(_FIELDS)
    for _ in range(40):
        given: dict[str, Any] = {name: int(rng.choice(_FIELDS[name])) if rng.random() < 0.4 else 0 for name in names}
        try:
            return replace(spec, **given)
        except NoKernel:
            continue
    return spec


def draw_problem(rng: Generator, spec: KernelSpec, most_elements: int) -> ScanProblem:
    """A legal problem that a kernel takes."""
    d_state = spec.d_state or int(rng.choice(_D_STATES))
    head_dim = spec.limits.get("head_dim", [0])[0] or int(rng.choice(_HEAD_DIMS))
    groups, ratio = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    chunk = getattr(spec, "chunk", 0) or 16
    if spec.operand_error:
        # Products of matrices take long chunks, and no longer for each token of them: room for a few.
        groups, ratio = min(groups, 2), min(ratio, 2)
        most_elements = max(most_elements, 3 * chunk * groups * ratio * head_dim * d_state)
    room = max(1, most_elements // (groups * ratio * head_dim * d_state))
    longest = min(room, spec.most_tokens or room)
    while True:
        lengths = _lengths(rng, chunk, room, longest)
        shape = Shape(lengths, groups * ratio, head_dim, d_state, groups)
        problem = draw(int(rng.integers(2**32)), shape, _options(rng, spec))
        if not mismatch(Features.of(problem), spec):
            return _hostile(rng, problem)


def _lengths(rng: Generator, chunk: int, room: int, longest: int) -> tuple[int, ...]:
    """Tokens of some sequences: few, or around multiples of the chunk, as far as there is room."""
    lengths = []
    for _ in range(int(rng.integers(0, 7))):
        near = int(rng.integers(0, 4)) * chunk + int(rng.integers(-1, 2))
        wanted = int(rng.choice((0, 1, int(rng.integers(0, 9)), int(rng.integers(0, 40)), max(near, 0))))
        lengths.append(min(wanted, room, longest))
        room -= lengths[-1]
    return tuple(lengths)


def _options(rng: Generator, spec: KernelSpec) -> Options:
    def switch() -> bool:
        return bool(rng.integers(2))

    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    limits = spec.limits
    step = limits.get("checkpoint_step_multiple", [1])[0]
    return Options(
        io=spec.io,
        state=None if spec.state == "f32" and rng.random() < 0.2 else spec.state,
        dt_f32=switch(),
        per_column_a=switch() and limits.get("per_column_a", [0, 1])[1] == 1,
        D=switch(),
        dt_bias=switch(),
        z=switch(),
        softplus=rng.random() < 0.75,
        dt_limit=one(None, None, (0.01, 0.5), (0.0, float("inf")), (1e-4, 30.0)),
        spread=one("peer", "peer", "peer", "ggml"),
        tail=one(0, 0, 1, 5),
        packed=switch(),
        gap=one(0, 1, 3, 4, 8),
        shift=one(0, 0, 1, 2, 4),
        spare=int(rng.integers(0, 3)),
        slot_gap=one(0, 0, 1, 4, 5),
        fresh=one("none", "all", "mixed", "mixed"),
        slots=one("default", "in place", "moved"),
        discard=one(0, 0, 1, 2, 3),
        padding=one(0, 0, 1, 2, 3),
        checkpoints=one(0, 0, 1, 2, 3) * step,
        by_sequence=step > 1 or switch(),
        order=switch(),
    )


def _hostile(rng: Generator, problem: ScanProblem) -> ScanProblem:
    """The same shape with values that are hard on arithmetic, and garbage wherever it must not matter."""
    changes: dict[str, Any] = {}
    if rng.random() < 0.6 or not problem.dt_softplus:
        problem.dt[...] = _steps(rng, problem).astype(problem.dt.dtype)
        changes["A"] = (-(10.0 ** rng.uniform(-6, 4, problem.A.shape))).astype(np.float32)
        if problem.dt_bias is not None:
            low, high = (-20, 20) if problem.dt_softplus else (0, 2)
            changes["dt_bias"] = rng.uniform(low, high, problem.heads).astype(np.float32)
    if rng.random() < 0.5:
        for name in ("x", "B", "C", "z", "state"):
            array = getattr(problem, name)
            if array is not None and array.dtype != np.int8:
                _rescale(rng, array)
        if problem.z is not None:
            # An f32 exp overflows below -88.7, where the gate becomes 0 a little early; beyond -104 it is 0 in truth.
            z = problem.z.astype(np.float64)
            problem.z[...] = np.where((z < -88) & (z > -110), -88.0, z).astype(problem.z.dtype)
    _garbage(rng, problem)
    changes |= _strange_slots(rng, problem)
    return replace(problem, **changes)


def _steps(rng: Generator, problem: ScanProblem) -> Array:
    shape = problem.dt.shape
    if not problem.dt_softplus:
        # Without softplus a negative dt grows the state without bound.
        return (
            rng.uniform(0, 80, shape) if rng.random() < 0.3 else rng.exponential(0.1, shape) * rng.integers(0, 2, shape)
        )
    wide = rng.uniform(-80, 80, shape)
    if rng.random() < 0.5:
        return wide
    # Around the threshold of softplus, and at the ends.
    ends = rng.choice((-80.0, -17.0, 0.0, 19.999998, 20.0, 20.000002, 80.0), shape)
    few = rng.random(shape)
    return np.where(few < 0.1, ends, np.where(few < 0.2, wide, rng.standard_normal(shape) - 4))


def _rescale(rng: Generator, array: Array) -> None:
    """Scale an array, and put zeros of either sign and, in f32, denormals among its values."""
    if array.dtype == np.float32 or array.dtype.name == "bfloat16":
        specials: tuple[float, ...] = (0.0, -0.0, 1e-40, -1e-40, 1e-38)
    else:
        specials = (0.0, -0.0, 6e-8, -6e-8, 6e-5)
    with np.errstate(invalid="ignore"):
        values = array.astype(np.float64) * 10.0 ** rng.uniform(-3, 2)
    special = rng.random(array.shape) < rng.choice((0.0, 0.1, 0.9))
    # NaN marks what must not be read: it stays.
    special &= ~np.isnan(values)
    array[...] = np.where(special, rng.choice(specials, array.shape), values).astype(array.dtype)


def _garbage(rng: Generator, problem: ScanProblem) -> None:
    """NaN or infinities in the rows of padding and of tokens past the last offset."""
    dead = ~problem.live_tokens
    bad = rng.choice((np.nan, np.inf, -np.inf))
    for name in ("x", "dt", "B", "C", "z"):
        array = getattr(problem, name)
        if array is not None:
            array[dead] = array.dtype.type(bad)


def _strange_slots(rng: Generator, problem: ScanProblem) -> dict[str, Any]:
    """Another number for padding, and wild slots wherever a slot is not looked at."""
    changes: dict[str, Any] = {}
    if problem.state is None or problem.read_slots is None:
        return changes
    used = set(problem.resolved_read.tolist()) | set(problem.resolved_write.tolist())
    unused = [slot for slot in range(problem.slots) if slot not in used and not problem.written[slot]]
    pads = [-1, -7, 2**31 - 1, *unused[:1]]
    pad = int(pads[rng.integers(len(pads))])
    read = problem.read_slots.copy()
    read[problem.padding] = pad
    if problem.write_slots is not None:
        write = problem.write_slots.copy()
        write[problem.padding] = int(rng.choice((-5, 2**31 - 1, 0)))
        changes["write_slots"] = write
        # A fresh sequence that names where it ends does not look at where it would have started.
        read[~problem.resumes & ~problem.padding] = int(rng.choice((-3, 2**31 - 2)))
    return changes | {"read_slots": read, "pad_slot": pad}


# Checking.


def check(problem: ScanProblem, spec: KernelSpec, backend: str, seed: int, truth: OracleResult | None = None) -> str:
    """What is wrong with a kernel's result, or an empty string.

    Args:
        seed: decides where y lies and the order of threads and blocks.
        truth: the oracle's result where the caller has it already.
    """
    try:
        result = _run(problem, spec, backend, seed)
    except (DeviceError, ToolchainError) as error:
        return f"{type(error).__name__}: {error}"
    truth = oracle(problem) if truth is None else truth
    errors = compare(without_underflow(result, problem, truth, spec), problem, truth)
    room = hostile_room(problem)
    if not errors.faults and errors.y <= errors.y_bound + room and errors.state <= errors.state_bound + room:
        return ""
    return f"{errors}, and {room:.2e} for hostile values"


def check_order(problem: ScanProblem, spec: KernelSpec, backend: str, seed: int) -> str:
    """How another order of sequences, blocks and threads changes a result's bits, or an empty string."""
    try:
        first = _run(problem, spec, backend, seed)
        order = np.random.default_rng(seed).permutation(problem.sequences).astype(np.int32)
        second = _run(replace(problem, sequence_order=order), spec, backend, seed + 1)
    except DeviceError as error:
        return f"{type(error).__name__}: {error}"
    for name in ("y", "state", "state_scale"):
        before, after = getattr(first, name), getattr(second, name)
        if before is not None and np.ascontiguousarray(before).tobytes() != np.ascontiguousarray(after).tobytes():
            return f"{name}: other bits with sequence_order {order.tolist()[:16]} and another order of threads"
    return ""


def _run(problem: ScanProblem, spec: KernelSpec, backend: str, seed: int) -> ScanResult:
    if backend == "gpu":
        return scan(problem, spec.id, "gpu")
    require(problem, spec)
    rng = np.random.default_rng(seed)
    results = run_emulator(
        problem, spec, results=_spread_y(rng, problem), seed=seed, resident_blocks=int(rng.integers(1, 4))
    )
    return ScanResult(results.y, results.state, spec.id, backend, results.state_scale)


def _spread_y(rng: Generator, problem: ScanProblem) -> Outputs:
    """Results whose y starts at any element and has gaps between its rows."""
    results = outputs(problem)
    row, item = problem.heads * problem.head_dim, results.y.itemsize
    stride, shift = row + int(rng.choice((0, 0, 3, 8))), int(rng.choice((0, 0, 1, 4)))
    room = np.full((problem.tokens * stride + shift + row + 32) * item, 0xFF, np.uint8)
    start = -room.ctypes.data % 64 + shift * item
    strides = (stride * item, problem.head_dim * item, item)
    y: Array = np.ndarray(results.y.shape, results.y.dtype, room, start, strides)
    return replace(results, y=y)


# The run.


def fuzz(
    minutes: float,
    seed: int = 0,
    backend: str = "emulator",
    family: str | None = None,
    problems: int = 0,
    tell: Callable[[str], None] | None = None,
    folder: Path = FOLDER,
) -> Tally:
    """Draw and check problems until time is up.

    Args:
        minutes: how long.
        seed: the same seed draws the same problems in the same order.
        backend: "emulator" or "gpu".
        family: only kernels of this family.
        problems: stop after so many as well; 0 is no limit.
        tell: told each failure as it is found, and now and then how far the run is.
        folder: where failures are written.

    Raises:
        NoKernel: there is no such family or backend.
        DeviceError: "gpu" without a usable GPU.
    """
    if family is not None and family not in FAMILIES:
        raise NoKernel(f"family must be one of {', '.join(FAMILIES)}, found {family!r}")
    target = require_backend(backend)
    say = tell or (lambda _: None)
    families = (family,) if family else tuple(FAMILIES)
    tally = Tally(backend, seed, minutes)
    pool: list[KernelSpec] = []
    started = said = time.monotonic()
    number = 0
    while time.monotonic() - started < 60 * minutes and len(tally.failures) < _MOST_FAILURES:
        if problems and sum(tally.problems.values()) >= problems:
            break
        rng = np.random.default_rng((seed, number))
        number += 1
        if not pool or rng.random() * _PROBLEMS_A_KERNEL < 1:
            spec = draw_kernel(rng, families)
            if not target or _launches(spec, target):
                pool = [*pool, spec][-_KERNELS_AT_ONCE:]
        if not pool:
            continue
        spec = pool[rng.integers(len(pool))]
        failure = _one(rng, spec, tally, folder, number)
        if failure is not None:
            tally.failures.append(failure)
            # One failure of a kernel is enough until it is mended.
            pool = [other for other in pool if other.id != spec.id]
            say(f"{failure.path.name}: {failure.kernel}: {failure.text}")
        if time.monotonic() - said > 60:
            said = time.monotonic()
            minute, count = (said - started) / 60, sum(tally.problems.values())
            say(f"{minute:.0f} min: {count} problems, {len(tally.kernels)} kernels")
    tally.minutes = round((time.monotonic() - started) / 60, 1)
    return tally


def _launches(spec: KernelSpec, target: str) -> bool:
    """`launches_on`; what does not compile is drawn too, and fails where it is run."""
    try:
        return launches_on(spec, target)
    except ToolchainError:
        return True


def _one(rng: Generator, spec: KernelSpec, tally: Tally, folder: Path, number: int) -> Failure | None:
    """Draw and check one problem; a failure is made smaller and written."""
    problem = draw_problem(rng, spec, _MOST_ELEMENTS[tally.backend])
    try:
        truth = oracle(problem) if operands_fit(problem, spec) else None
    except InvalidProblem:
        truth = None
    if truth is None or not in_range(truth, spec):
        tally.left_out += 1
        return None
    tally.problems[spec.family] += 1
    tally.kernels.add(spec.id)
    order = rng.random() * _REPEATED < 1
    tally.repeated += order
    text, kind = check(problem, spec, tally.backend, number, truth), "oracle"
    if not text and order:
        text, kind = check_order(problem, spec, tally.backend, number), "order"
    if not text:
        return None
    # What does not compile is no matter of the problem.
    most_runs = 0 if text.startswith(ToolchainError.__name__) else 400
    small = shrink(problem, lambda p: bool(_judge(p, spec, tally.backend, number, kind)), most_runs)
    text = _judge(small, spec, tally.backend, number, kind) or text
    path = folder / f"{spec.family}-{tally.seed}-{number}.npz"
    notes = {"kernel": spec.id, "backend": tally.backend, "seed": number, "kind": kind, "found": text}
    problem_file.save(path, small, notes)
    return Failure(spec.id, " ".join(text.split())[:500], path)


def _judge(problem: ScanProblem, spec: KernelSpec, backend: str, seed: int, kind: str) -> str:
    try:
        truth = oracle(problem)
        require(problem, spec)
    except (InvalidProblem, NoKernel):
        return ""
    if not operands_fit(problem, spec) or not in_range(truth, spec):
        return ""
    return check(problem, spec, backend, seed, truth) if kind == "oracle" else check_order(problem, spec, backend, seed)


def replay(path: Path, backend: str | None = None) -> tuple[str, str]:
    """Run a failure again.

    Args:
        path: what `fuzz` wrote.
        backend: "emulator" or "gpu"; None for the one it failed on.

    Returns:
        The kernel's id, and what is wrong now, or an empty string.

    Raises:
        InvalidProblem: the file is not one that `fuzz` wrote.
    """
    problem, notes = problem_file.load(path)
    where = backend or notes["backend"]
    require_backend(where)
    spec = parse_id(notes["kernel"])
    return spec.id, _judge(problem, spec, where, notes["seed"], notes["kind"])


def require_backend(backend: str) -> str:
    """The target of the GPU that a backend runs on, empty for the emulator.

    Raises:
        NoKernel: there is no such backend.
        DeviceError: "gpu" without a usable GPU.
    """
    if backend not in BACKENDS:
        raise NoKernel(f"backend must be one of {', '.join(BACKENDS)}, found {backend!r}")
    if backend == "gpu":
        from pyharness import device

        reason = device.available()
        if reason:
            raise DeviceError(f'backend "gpu" wants a usable GPU: {reason}')
        return device.identity()[1]
    return ""
