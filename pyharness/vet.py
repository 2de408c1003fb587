"""Proof on a GPU: every kernel of the catalogue against the oracle, and what must hold of its bits and its image.

python -m pyharness.vet [--family F] [--sanitize] [--bitwise]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness import bitwise, build, cases, gpus, mamba1_cases, manifest, toolchain
from pyharness.cases import Case, Options, Shape, as_channels, draw
from pyharness.catalogue import CATALOGUE
from pyharness.compare import Errors, compare
from pyharness.device import Device, get, image_target
from pyharness.errors import DeviceError, NoKernel, SsmError, exit_code
from pyharness.families import RecurrentSpec, SelectiveSpec, SsdSpec, UpdateSpec
from pyharness.figures import device_slug
from pyharness.oracle import OracleResult, oracle
from pyharness.peer_suites import DECODE_SUITES, PREFILL_SUITES, Suite
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult, scan
from pyharness.select import Features, mismatch
from pyharness.spec import Geometry, KernelSpec, parse_id

GENERATED = toolchain.ROOT / "generated" / "vetting"
REPEATS = 20
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
_SANITIZER_FOUND = 99
_SANITIZER_SECONDS = 120
#: What a tool has for a verdict until it is asked for, and from when an image it watched changes.
NOT_ASKED = "not run: ask for it with --sanitize"
#: d_state at which a kernel that takes any is held against the cases of specialised ones.
_GENERIC_D_STATES = (100, 5, 16, 128, 1024)
#: The ancestor's tests keep all their heads up to this d_state: beyond it the oracle takes seconds.
_ANCESTOR_WHOLE = 256

Array = NDArray[Any]


def d_states(spec: KernelSpec) -> tuple[int, ...]:
    """The d_state that a kernel is proven at."""
    return (spec.d_state,) if spec.d_state else _GENERIC_D_STATES


def lengths_for(spec: KernelSpec, lengths: Sequence[int]) -> tuple[int, ...]:
    """Lengths of sequences, cut to the longest that a kernel is for."""
    return tuple(min(length, spec.most_tokens or length) for length in lengths)


def head_dim_of(spec: KernelSpec, usual: int) -> int:
    """The head_dim that a kernel is made for, else the usual one."""
    if isinstance(spec, SelectiveSpec):
        return 1
    return getattr(spec, "head_dim", 0) or usual


def chunk_of(spec: KernelSpec, d_state: int) -> int:
    """Tokens that a kernel stages at a time, 0 where it stages none."""
    return spec.plan(Geometry(1, 1, 1, head_dim_of(spec, 1), 1, d_state)).chunk


def state_step(spec: KernelSpec) -> int:
    """Tokens of a sequence behind each of which a kernel can leave a state; 0 where that is every one."""
    return spec.chunk if isinstance(spec, SsdSpec) else 0


def kernel_cases(spec: KernelSpec) -> Iterator[Case]:
    """The cases of a kernel: options in its types, the edges, the ancestor's tests, a long prompt, the real models.

    A kernel for short sequences or for one head_dim gets those that it runs; decode and chunked prefill the peers'
    suites too; one for Mamba-1 those of `mamba1_cases`.
    """
    if isinstance(spec, SelectiveSpec):
        yield from mamba1_cases.kernel_cases(spec)
        return
    for d_state in d_states(spec):
        lengths, head_dim = lengths_for(spec, OPTION_LENGTHS), head_dim_of(spec, OPTION_HEAD_DIM)
        drawn = option_cases(d_state, spec.io, spec.state, lengths, head_dim, state_step(spec))
        yield from (case for case in drawn if _runs(spec, case))
        if spec.most_tokens:
            head_dim = head_dim_of(spec, ALIGNED_HEAD_DIM)
            drawn = option_cases(d_state, spec.io, spec.state, DECODE_LENGTHS, head_dim)
            yield from (case for case in drawn if _runs(spec, case))
        else:
            yield long_case(d_state, spec.io, spec.state, head_dim_of(spec, 64))
    yield from plain_cases(spec)
    yield from geometry_cases(spec)
    if spec.most_tokens:
        yield from _suite_cases(spec, DECODE_SUITES)
    if isinstance(spec, SsdSpec):
        yield from prefill_cases(spec)


def _runs(spec: KernelSpec, case: Case) -> bool:
    """Whether a kernel runs a case; only cases of one that is for some sizes alone are drawn to find out."""
    if not spec.most_tokens and not head_dim_of(spec, 0):
        return True
    problem = _kept[case.name][0] if case.name in _kept else case.build()
    return not mismatch(Features.of(problem), spec)


def _suite_cases(spec: KernelSpec, suites: Iterable[Suite]) -> Iterator[Case]:
    """What a kernel runs of the peers' suites; heads and batch are cut, for the oracle's sake."""
    for replay in itertools.chain.from_iterable(suite.cases() for suite in suites):
        if (replay.shape.d_state, replay.options.io, replay.options.state) != (spec.d_state, spec.io, spec.state):
            continue
        case = Case(replay.name, functools.partial(replay.problem, reduce=True))
        if _runs(spec, case):
            yield case


def prefill_cases(spec: KernelSpec) -> Iterator[Case]:
    """The peers' suites of chunked prefill, and strong decay over all parts that a sequence is cut into."""
    yield from _suite_cases(spec, PREFILL_SUITES)
    head_dim, tokens = head_dim_of(spec, 64), getattr(spec, "segments", 1) * chunk_of(spec, spec.d_state) + 3
    name = f"strong decay n{spec.d_state} p{head_dim} {tokens} tokens {spec.io} s{spec.state}"
    strong = functools.partial(cases.strong_decay, spec.d_state, spec.io, spec.state, head_dim=head_dim, tokens=tokens)
    yield Case(name, strong)


def plain_cases(spec: KernelSpec) -> Iterator[Case]:
    """Edges and the ancestor's tests (`cases.ancestor_cases`) in a kernel's own storage types, where it runs them."""
    yield from (case for case in _plain_cases(spec) if _runs(spec, case))


def _plain_cases(spec: KernelSpec) -> Iterator[Case]:
    for d_state in d_states(spec):
        # A layout that stages nothing has no chunk; the cases around 8 tokens serve it as well, and around 4 one that
        # takes no more than 8.
        chunk = chunk_of(spec, d_state) or (spec.most_tokens // 2 or 8)
        rows = head_dim_of(spec, 0)
        for case in cases.edge_cases(d_state, chunk=chunk, io=spec.io, state=spec.state, head_dim=rows):
            sizes = f"n{d_state}{f' p{rows}' if rows else ''} chunk {chunk} {spec.io} s{spec.state}"
            yield replace(case, name=f"{case.name} {sizes}")
        yield from cases.ancestor_cases(d_state, reduce=d_state > _ANCESTOR_WHOLE, io=spec.io, state=spec.state)


def long_case(d_state: int, io: str, state: str, head_dim: int = 64, tokens: int = 4096) -> Case:
    """Many tokens of one sequence that resumes; fewer heads than a model has, for the oracle's sake."""
    heads = 8 if d_state <= 256 else 2
    options = Options(io=io, state=state, dt_f32=True)
    shape = Shape((tokens,), heads, head_dim, d_state, 2)
    size = "" if head_dim == 64 else f" p{head_dim}"
    return Case(f"{tokens} tokens n{d_state}{size} {io} s{state}", functools.partial(draw, tokens, shape, options))


def geometry_cases(spec: KernelSpec) -> Iterator[Case]:
    """Every real geometry of a kernel's d_state once, three tokens in two sequences."""
    seen = set()
    for model, case in zip(cases.MODELS, cases.model_cases((2, 1), io=spec.io, state=spec.state), strict=True):
        geometry = (model.heads, model.head_dim, model.d_state, model.groups)
        if geometry not in seen and spec.d_state in (0, model.d_state) and _runs(spec, case):
            seen.add(geometry)
            yield case


#: The sizes of the option cases, for kernels that take them.
OPTION_LENGTHS = (67, 1, 0, 130, 9)
OPTION_HEAD_DIM = 33
#: One token a sequence, and rows that vectors fit.
DECODE_LENGTHS = (1,) * 7
ALIGNED_HEAD_DIM = 40


def option_cases(
    d_state: int,
    io: str,
    state: str,
    lengths: tuple[int, ...] = OPTION_LENGTHS,
    head_dim: int = OPTION_HEAD_DIM,
    step: int = 0,
) -> Iterator[Case]:
    """Options of the operation in a kernel's own storage types; lengths cross several chunks.

    Args:
        step: checkpoints lie behind multiples of so many tokens of a sequence, and at its end; 0 puts them anywhere.
    """
    plain = Options(io=io, state=state, dt_f32=True, fresh="mixed")
    shape = Shape(lengths, 6, head_dim, d_state, 3)
    sizes = "" if (lengths, head_dim) == (OPTION_LENGTHS, OPTION_HEAD_DIM) else f" {lengths} p{head_dim}"
    sizes += f" step {step}" if step else ""
    kept = replace(plain, checkpoints=step or 7, by_sequence=step > 0, slots="moved")
    for name, options in (
        ("mixed", plain),
        (
            "every option",
            replace(kept, z=True, dt_limit=(0.01, 0.1), tail=2, order=True),
        ),
        ("padding and discard", replace(plain, padding=3, discard=2, slots="moved")),
        ("one packed row", replace(plain, packed=True, z=True, gap=8)),
        ("odd base and strides", replace(plain, shift=1, gap=3, slot_gap=5)),
        ("dt in io", replace(plain, dt_f32=False, D=False, dt_bias=False)),
        ("A for each column", replace(plain, per_column_a=True, softplus=False, dt_limit=(0.0, 0.2))),
    ):
        text = f"{name} n{d_state} {io} s{state}{sizes}"
        yield Case(text, functools.partial(draw, len(text), shape, options))
    if state != "f32":
        text = f"stochastic rounding n{d_state} {io} s{state}{sizes}"
        yield Case(text, functools.partial(draw, 6, shape, replace(kept, key=True)))
    if state == "f32":
        text = f"no state n{d_state} {io}{sizes}"
        yield Case(text, functools.partial(draw, 5, shape, Options(io=io, state=None)))


_kept: dict[str, tuple[ScanProblem, OracleResult]] = {}


def solved(case: Case) -> tuple[ScanProblem, OracleResult]:
    """A case's problem and what is right, worked out once for each name: kernels share them."""
    if case.name not in _kept:
        problem = case.build()
        _kept[case.name] = (problem, oracle(problem))
    return _kept[case.name]


def check_case(spec: KernelSpec, case: Case) -> Errors:
    """Run a case on the GPU and hold it against the oracle.

    Raises:
        DeviceError: the result is wrong, or the run failed.
    """
    problem, truth = solved(case)
    errors = compare(scan(problem, spec.id, "gpu"), problem, truth)
    if not errors.ok:
        raise DeviceError(f"{spec.id}, {case.name}: {errors}")
    return errors


# The same bits.


def batch(spec: KernelSpec) -> ScanProblem:
    """Sequences of several lengths over a pool, some fresh: what the checks of bits run."""
    options = Options(io=spec.io, state=spec.state, dt_f32=True, fresh="mixed", z=True)
    # Of a kernel that cuts long sequences in time, one is as long as all parts.
    longest = max(150, getattr(spec, "segments", 0) * chunk_of(spec, d_states(spec)[0]) + 5)
    lengths = lengths_for(spec, (40, 1, longest, 7, 33))
    problem = draw(21, Shape(lengths, 4, head_dim_of(spec, 64), d_states(spec)[0], 2), options)
    return as_channels(problem) if isinstance(spec, SelectiveSpec) else problem


def _slots(problem: ScanProblem) -> tuple[Array, Array]:
    assert problem.read_slots is not None
    assert problem.resume is not None
    return problem.read_slots, problem.resume


def alone(problem: ScanProblem, sequence: int) -> ScanProblem:
    """One sequence of a batch without the others, over the same pool."""
    tokens = slice(int(problem.offsets[sequence]), int(problem.offsets[sequence + 1]))
    one = slice(sequence, sequence + 1)
    read, resume = _slots(problem)
    rows: dict[str, Any] = {name: getattr(problem, name)[tokens] for name in ("x", "dt", "B", "C", "z")}
    return replace(problem, **rows, cu_seqlens=None, read_slots=read[one], resume=resume[one])


def rearranged(problem: ScanProblem, order: Sequence[int]) -> ScanProblem:
    """The sequences of a batch in another order of memory."""
    tokens = np.concatenate([np.arange(problem.offsets[s], problem.offsets[s + 1]) for s in order])
    names = ("x", "dt", "B", "C", "z")
    rows: dict[str, Any] = {name: np.ascontiguousarray(getattr(problem, name)[tokens]) for name in names}
    offsets = np.concatenate(([0], np.cumsum(problem.lengths[list(order)]))).astype(np.int32)
    read, resume = _slots(problem)
    index = list(order)
    return replace(problem, **rows, cu_seqlens=offsets, read_slots=read[index], resume=resume[index])


def _bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def _same(result: ScanResult, whole: ScanResult, rows: slice, whole_rows: slice, slot: int) -> bool:
    return _bits(result.y[rows]) == _bits(whole.y[whole_rows]) and _bits(result.state[slot]) == _bits(whole.state[slot])


def check_repeats(spec: KernelSpec, repeats: int = REPEATS) -> None:
    """The same call gives the same bits each time.

    Raises:
        DeviceError: a run differs.
    """
    problem = batch(spec)
    first = scan(problem, spec.id, "gpu")
    for run in range(1, repeats):
        again = scan(problem, spec.id, "gpu")
        if _bits(again.y) != _bits(first.y) or _bits(again.state) != _bits(first.state):
            raise DeviceError(f"{spec.id}: run {run + 1} of {repeats} of one problem gave other bits than the first")


def check_batch(spec: KernelSpec) -> None:
    """A sequence has the same bits alone, beside others, at any place in memory and in any order of visits.

    Raises:
        DeviceError: a sequence differs.
    """
    problem = batch(spec)
    whole = scan(problem, spec.id, "gpu")
    read, _ = _slots(problem)
    sequences, offsets = problem.sequences, problem.offsets
    order = list(reversed(range(sequences)))
    visited = scan(replace(problem, sequence_order=np.array(order, np.int32)), spec.id, "gpu")
    moved_problem = rearranged(problem, order)
    moved = scan(moved_problem, spec.id, "gpu")
    for s in range(sequences):
        rows, slot = slice(int(offsets[s]), int(offsets[s + 1])), int(read[s])
        place = order.index(s)
        moved_rows = slice(int(moved_problem.offsets[place]), int(moved_problem.offsets[place + 1]))
        lone = scan(alone(problem, s), spec.id, "gpu")
        for what, same in (
            ("alone", _same(lone, whole, slice(None), rows, slot)),
            ("visited in another order", _same(visited, whole, rows, rows, slot)),
            ("at another place", _same(moved, whole, moved_rows, rows, slot)),
        ):
            if not same:
                raise DeviceError(f"{spec.id}: sequence {s} of {sequences} has other bits {what} than in its batch")


# The whole.


@dataclass(frozen=True)
class Proof:
    """What one image passed: cases, the largest error over what is allowed and where, and what it uses."""

    kernel: str
    target: str
    sha256: str
    cases: int
    worst: float
    worst_case: str
    registers: int
    dynamic_shared: int


def vet_kernel(spec: KernelSpec, device: Device) -> Proof:
    """Prove one kernel on a device.

    Raises:
        SsmError: it fails, or its image is not the one that the manifest promises.
    """
    target = image_target(spec, device.capability, device.name)
    image = build.image(spec, target)
    manifest.check(manifest.read(spec.id), target, image.data)
    kernel = device.kernel(spec, image)
    count, worst, worst_case = 0, 0.0, ""
    for case in kernel_cases(spec):
        errors = check_case(spec, case)
        count += 1
        share = errors.share
        if share >= worst:
            worst, worst_case = share, case.name
    check_repeats(spec)
    check_batch(spec)
    registers = max(entry.registers for entry in kernel.entries.values())
    return Proof(spec.id, target, kernel.sha256, count, round(worst, 3), worst_case, registers, spec.shared_bytes)


def vet(
    family: str | None = None,
    device: int = 0,
    sanitize: bool = False,
    progress: Callable[[str], None] | None = None,
    bits: bool = False,
) -> dict[str, Any]:
    """Prove the catalogue on a GPU and store it in generated/vetting/<device>.json.

    Args:
        family: only kernels of this family; what is stored of others is kept.
        device: the GPU.
        sanitize: also run compute-sanitizer's tools, where they run on this machine.
        progress: told before each kernel.
        bits: also compare the bits of all configurations of `update` at 920 points (`pyharness.bitwise`).

    Returns:
        What was stored.

    Raises:
        NoKernel: nothing in the catalogue is of that family, or bits are asked for and nothing of it is of `update`.
        DeviceError: there is no GPU, or something fails; nothing is stored then, and the message names all that failed.
    """
    tell = progress or (lambda _: None)
    specs = [spec for spec in CATALOGUE if family in (None, spec.family)]
    if not specs:
        known = ", ".join(sorted({spec.family for spec in CATALOGUE}))
        raise NoKernel(f"family {family!r} has no kernel in the catalogue; on offer: {known}")
    decode = [spec for spec in specs if isinstance(spec, UpdateSpec)]
    if bits and not decode:
        raise NoKernel(f"bits are compared between kernels of {UpdateSpec.family!r}, found family {family!r}")
    gpu = get(device)
    proofs: list[Proof] = []
    failed: list[str] = []
    for spec in specs:
        tell(spec.id)
        try:
            proofs.append(vet_kernel(spec, gpu))
        except SsmError as error:
            failed.append(f"{spec.id}: {error}")
    watched = sanitizer_specs(specs)
    found = run_sanitizers(watched, tell) if sanitize else {}
    failed += [f"{tool}: {text}" for tool, text in found.items() if text.startswith("found")]
    same: dict[str, Any] = {}
    if bits:
        try:
            same = bitwise.check(gpu, decode, tell=tell)
        except SsmError as error:
            failed.append(f"bits: {error}")
    if failed:
        raise DeviceError(f"nothing is stored, {len(failed)} failed on {gpu.name}:\n" + "\n".join(failed))
    return _store(gpu, proofs, found, [spec.id for spec in watched], same)


def _store(
    gpu: Device,
    proofs: Sequence[Proof],
    found: dict[str, str],
    watched: Sequence[str],
    same: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    path = GENERATED / f"{device_slug(gpu.name)}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    families = {proof.kernel.split("_")[0] for proof in proofs}
    images = {
        sha: image for sha, image in kept.get("images", {}).items() if image["kernel"].split("_")[0] not in families
    }
    date = gpus.today()
    for proof in proofs:
        fields = {name: value for name, value in vars(proof).items() if name != "sha256"}
        images[proof.sha256] = fields | {"repeats": REPEATS, "driver": gpus.driver().version, "date": date}
    document = {
        "device": gpu.name,
        "target": gpu.target,
        "cuda": gpus.driver().cuda,
        "images": images,
    }
    if found:
        # Where no tool ran, nothing is covered.
        ran = any(not text.startswith("not run") for text in found.values())
        covered = {proof.kernel: proof.sha256 for proof in proofs if ran and proof.kernel in watched}
        document |= {"sanitizers": found, "sanitized": {"date": date, "images": covered}}
    else:
        document |= kept_verdicts(kept, set(images))
    stamped = dict(same) | {"date": date, "driver": gpus.driver().version} if same else kept.get("bitwise", {})
    # Bits are known only while every image that was compared is the same.
    if stamped and set(stamped["images"]) <= set(images):
        document["bitwise"] = stamped
    toolchain.publish_json(path, document)
    return document


# compute-sanitizer.


def kept_verdicts(kept: dict[str, Any], images: set[str]) -> dict[str, Any]:
    """Verdicts of an earlier run with the images they cover, if every one of those is still among `images`."""
    covered = kept.get("sanitized", {}).get("images", {})
    if covered and set(covered.values()) <= images:
        return {"sanitizers": kept["sanitizers"], "sanitized": kept["sanitized"]}
    return {"sanitizers": dict.fromkeys(SANITIZERS, NOT_ASKED), "sanitized": {"date": None, "images": {}}}


def sanitizer_specs(specs: Sequence[KernelSpec]) -> list[KernelSpec]:
    """The few kernels that compute-sanitizer watches: the first of each kind of code among some."""
    wanted: tuple[Callable[[RecurrentSpec], bool], ...] = (
        lambda spec: spec.layout == "tiled" and spec.io == "f32" and not spec.few_tokens,
        lambda spec: spec.layout == "tiled" and spec.io == "f32" and spec.few_tokens,
        lambda spec: spec.layout == "tiled" and spec.io == "bf16" and not spec.few_tokens,
        lambda spec: spec.layout == "padded",
        lambda spec: spec.layout == "swizzled",
        lambda spec: spec.layout == "generic" and spec.io == "f32",
    )
    recurrent = [spec for spec in specs if isinstance(spec, RecurrentSpec)]
    picked = (next((spec for spec in recurrent if fits(spec)), None) for fits in wanted)
    # Of `update`, one of each stored type and each way of loading tokens.
    decode = {(spec.state, spec.chunk): spec for spec in reversed(specs) if isinstance(spec, UpdateSpec)}
    # Of `selective`, one of each stored type for prefill and for decode.
    channels = {(spec.state, spec.decodes): spec for spec in reversed(specs) if isinstance(spec, SelectiveSpec)}
    # Of `ssd`, one of each kind of product, with one launch and with two.
    chunked = {
        (spec.exact, spec.precision or spec.io, spec.segments > 1): spec
        for spec in reversed(specs)
        if isinstance(spec, SsdSpec)
    }
    # Of other families, all: they have their own templates.
    known = RecurrentSpec | UpdateSpec | SelectiveSpec | SsdSpec
    others = [spec for spec in specs if not isinstance(spec, known)]
    by_kind = (*reversed(decode.values()), *reversed(channels.values()), *reversed(chunked.values()))
    return [*(spec for spec in picked if spec is not None), *by_kind, *others]


def run_sanitizers(specs: Sequence[KernelSpec], tell: Callable[[str], None]) -> dict[str, str]:
    """Run each tool over a few cases of some kernels: "clean", "found: ..." or "not run: ..." with the reason."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return dict.fromkeys(SANITIZERS, "not run: compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    child = [sys.executable, "-m", "pyharness.vet", "--sanitize-child", *(spec.id for spec in specs)]
    results = {}
    for tool in SANITIZERS:
        tell(f"compute-sanitizer {tool}")
        command = [program, "--tool", tool, "--error-exitcode", str(_SANITIZER_FOUND), *child]
        try:
            done = subprocess.run(
                command, cwd=toolchain.ROOT, text=True, capture_output=True, timeout=_SANITIZER_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            results[tool] = f"not run: it took more than {_SANITIZER_SECONDS} s"
            continue
        results[tool] = sanitizer_verdict(done.returncode, done.stdout + done.stderr)
    return results


def sanitizer_verdict(code: int, output: str) -> str:
    """What a run of compute-sanitizer means; without its summary line the tool did not work here."""
    lines = [line.strip("= ").strip() for line in output.splitlines() if line.strip("= ").strip()]
    summaries = [line for line in lines if "SUMMARY" in line]
    if code == 0 and summaries and all("SUMMARY: 0 " in line for line in summaries):
        return "clean"
    if summaries:
        # The first finding and the summary; or what the watched program itself failed of.
        return "found: " + " | ".join([*lines[:8], *lines[-4:]])
    return f"not run: exit code {code}: " + " | ".join(lines[:4] or ["no output"])


def sanitizer_cases(spec: KernelSpec) -> Iterator[Case]:
    """A few tiny cases: two chunks and a part of a kernel that takes long ones, every option, odd strides."""
    d_state = d_states(spec)[0]
    plain = Options(io=spec.io, state=spec.state, dt_f32=True, fresh="mixed")
    step = state_step(spec)
    every = replace(plain, z=True, checkpoints=step or 5, slots="moved", padding=4, order=True, tail=1)
    every = replace(every, by_sequence=step > 0)
    chunk, head_dim = chunk_of(spec, d_state), head_dim_of(spec, 9)
    for name, lengths, options in (
        ("chunks", (min(2 * chunk + 3, 131), 1), plain),
        ("options", (9, 1, 0, 5), every),
        ("odd", (7, 2), replace(plain, shift=1, gap=3, slot_gap=5)),
    ):
        shape = Shape(lengths_for(spec, lengths), 2, head_dim, d_state)
        if isinstance(spec, SelectiveSpec):
            # A whole block and a cut one of most kernels; A has a value for each column but for the last case.
            shape, options = replace(shape, heads=70), replace(options, per_column_a=name != "odd", z=True)
        build = functools.partial(draw, 3, shape, options)
        yield Case(f"{name} {shape.lengths} n{d_state} p{head_dim} {spec.io} s{spec.state}", build)


def sanitize_child(ids: Sequence[str]) -> None:
    """Run the sanitizer's cases of kernels: what compute-sanitizer watches.

    Raises:
        SsmError: a result is wrong or a run failed.
    """
    for kernel in ids:
        spec = parse_id(kernel)
        for case in sanitizer_cases(spec):
            check_case(spec, case)


def main(arguments: Sequence[str] | None = None) -> int:
    """Vet, and print a line a kernel."""
    from rich.console import Console

    from pyharness.listing import table

    parser = argparse.ArgumentParser(prog="python -m pyharness.vet", description=__doc__)
    parser.add_argument("--family", help="only kernels of this family")
    parser.add_argument("--device", type=int, default=0, help="number of the GPU")
    parser.add_argument("--sanitize", action="store_true", help="also run compute-sanitizer's tools")
    parser.add_argument("--bitwise", action="store_true", help="also compare the bits of all decode configurations")
    parser.add_argument("--sanitize-child", nargs="*", metavar="ID", help="run what compute-sanitizer watches")
    options = parser.parse_args(arguments)
    console, notes = Console(width=200, highlight=False), Console(stderr=True, highlight=False)
    if options.sanitize_child is not None:
        sanitize_child(options.sanitize_child or [spec.id for spec in sanitizer_specs(CATALOGUE)])
        return 0
    document = vet(options.family, options.device, options.sanitize, notes.print, options.bitwise)
    rows = [
        {name: image[name] for name in ("kernel", "cases", "registers", "dynamic_shared")}
        | {"worst": f"{image['worst']:.3f} of what is allowed: {image['worst_case']}"}
        for image in document["images"].values()
    ]
    console.print(table(rows), markup=False, soft_wrap=True)
    for tool, text in document["sanitizers"].items():
        console.print(f"{tool}: {text}", markup=False, soft_wrap=True)
    if options.bitwise:
        console.print(f"bits: the same at {document['bitwise']['points']} points", markup=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
