"""The test suites of other packages' scans, as shapes, draws and tolerances of ours.

What a suite leaves open is filled in with what its kernels are used for. Shapes are the peers'; in reduced form only
heads and batch are cut, never d_state, head_dim, groups or lengths. A case is held to the peer's own tolerance, y and
states both, and to the bound of `pyharness.compare`, which is tighter nearly everywhere. Rows of padding are held to
our rule alone, as peers differ about them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from pyharness.cases import Options, Shape, draw, reduced, seed_of
from pyharness.problem import ScanProblem

Generator = np.random.Generator


@dataclass(frozen=True)
class Tolerance:
    """A peer's own: |out - oracle| <= atol + rtol |oracle|, or a normalised mean square error."""

    rtol: float = 0.0
    atol: float = 0.0
    nmse: float = 0.0

    @property
    def of_one(self) -> float:
        """The error that is allowed of a value of 1."""
        return math.sqrt(self.nmse) if self.nmse else self.atol + self.rtol


@dataclass(frozen=True)
class Replay:
    """One case of a suite.

    Attributes:
        shape: lengths are whole sequences, over all calls.
        adjust: what the suite draws otherwise than `cases.draw`.
        calls: tokens of each sequence in each call, the state carried from one to the next; none is one call.
        drafts: tokens of each of two calls, of which the second goes on from the state before the first (for even
            sequences: no draft was accepted) or after it (for odd ones: all were).
        chunk: the peer's chunk, for kernels that can take it.
        whole_batch: sequences play parts of their own and are not cut.
    """

    name: str
    shape: Shape
    options: Options
    tolerance: Tolerance
    adjust: Callable[[Generator, ScanProblem], ScanProblem] | None = None
    calls: tuple[tuple[int, ...], ...] = ()
    drafts: int = 0
    chunk: int = 0
    whole_batch: bool = False

    def problem(self, reduce: bool = False) -> ScanProblem:
        """The problem over all calls, the same each time."""
        shape = reduced(self.shape, batch=not self.whole_batch and not self.calls) if reduce else self.shape
        seed = seed_of(self.name)
        problem = draw(seed, shape, self.options)
        return problem if self.adjust is None else self.adjust(np.random.default_rng(seed + 1), problem)


@dataclass(frozen=True)
class Suite:
    """A peer's suite: its key, as tables of results use it, and its cases."""

    key: str
    cases: Callable[[], Iterator[Replay]]


# ggml.


def _ggml() -> Iterator[Replay]:
    limit = Tolerance(nmse=1e-7)
    plain = Options(spread="ggml", D=False, dt_bias=False, slots="moved")
    for name, shape, options in (
        ("mamba-1", Shape((32,) * 4, 1024, 1, 16), replace(plain, per_column_a=True)),
        ("n128", Shape((32,) * 4, 16, 64, 128, 2), plain),
        ("n256", Shape((32,) * 4, 8, 64, 256, 2), plain),
        ("n128, x, B and C views of one buffer", Shape((16,) * 2, 4, 128, 128, 4), replace(plain, packed=True)),
    ):
        yield Replay(f"ggml {name}", shape, options, limit)
    # None of theirs is long enough for their path of matrix products.
    yield Replay("ggml n128, 512 tokens", Shape((512,) * 2, 16, 64, 128, 2), plain, limit, _negative_a)


def _negative_a(rng: Generator, problem: ScanProblem) -> ScanProblem:
    return replace(problem, A=-rng.uniform(0, 1, problem.A.shape).astype(np.float32))


# Decode.

_CHANNELS = (2048, 2064, 4096)


def _mamba_state_update() -> Iterator[Replay]:
    """One token of each of two sequences."""
    channels = {"f32": Tolerance(3e-4, 1e-3), "f16": Tolerance(5e-3, 1e-2), "bf16": Tolerance(1e-2, 5e-2)}
    headed = {"f16": Tolerance(5e-3, 3e-2), "bf16": Tolerance(1e-2, 1e-1)}
    slots = Tolerance(6e-2, 6e-2)
    for n in (16, 32, 64):
        for z in (False, True):
            gate = ", z" if z else ""
            for dim in _CHANNELS:
                shape = Shape((1, 1), dim, 1, n)
                for io, tolerance in channels.items():
                    options = Options(io=io, state=io, per_column_a=True, z=z, slots="default")
                    yield Replay(f"mamba-ssm update n{n} {io}, {dim} channels{gate}", shape, options, tolerance)
                pooled = Options(io="bf16", state="bf16", per_column_a=True, z=z, spare=128)
                shape = replace(shape, lengths=(1,) * 16)
                yield Replay(f"mamba-ssm update n{n}, {dim} channels in 16 of 160 slots{gate}", shape, pooled, slots)
            for dim in (2048, 4096):
                for groups in (1, 2, 4):
                    shape = Shape((1, 1), dim // 64, 64, n, groups)
                    for io, tolerance in headed.items():
                        name = f"mamba-ssm update n{n} {io}, {dim // 64} heads in {groups} groups{gate}"
                        yield Replay(name, shape, Options(io=io, state=io, z=z, slots="default"), tolerance)
                shape = Shape((1,) * 16, dim // 64, 64, n)
                pooled = Options(io="bf16", state="bf16", z=z, spare=128)
                yield Replay(f"mamba-ssm update n{n}, {dim // 64} heads in 16 of 160 slots{gate}", shape, pooled, slots)


def _vllm_state_update() -> Iterator[Replay]:
    """Three sequences of a pool of 30 with five rows of padding; variable lengths; drafts; stochastic rounding."""
    plain, varlen = Tolerance(1e-1, 1e-1), Tolerance(5e-2, 1.5e-1)
    for n in (16, 64):
        for what, heads, head_dim in (
            *((f"{dim} channels", dim, 1) for dim in _CHANNELS),
            ("64 heads", 64, 64),
        ):
            bf16 = Options(io="bf16", state="bf16", per_column_a=head_dim == 1, z=True)
            padded = replace(bf16, spare=14)
            shape = Shape((1,) * 8, heads, head_dim, n)
            yield Replay(f"vllm update n{n}, {what}, padding", shape, padded, plain, _five_padded, whole_batch=True)
            shape = Shape((3, 1, 4, 2), heads, head_dim, n)
            yield Replay(f"vllm update n{n}, {what}, lengths 1 to 4", shape, bf16, varlen, whole_batch=True)
            drafts = replace(bf16, checkpoints=1, slots="moved")
            shape = Shape((4, 4), heads, head_dim, n)
            yield Replay(f"vllm update n{n}, {what}, accepted 0 and 4", shape, drafts, varlen, drafts=4)
            rounded = replace(bf16, state="f16", key=True)
            shape = Shape((1,) * 3, heads, head_dim, n)
            name = f"vllm update n{n}, {what}, stochastic rounding"
            yield Replay(name, shape, rounded, Tolerance(5e-3, 1e-1))


def _five_padded(_: Generator, problem: ScanProblem) -> ScanProblem:
    read = problem.resolved_read.astype(np.int32)
    read[3:] = problem.pad_slot
    return replace(problem, read_slots=read)


def _flashinfer_state_update() -> Iterator[Replay]:
    """One to eight tokens of each of up to 256 sequences; slots twice as far apart as they are long."""
    few, many = ((1, 1), (64, 1)), ((1, 1), (64, 1), (2, 2), (2, 4), (2, 8))
    for n in (64, 96, 128, 256):
        for heads, head_dim, groups, batches in (
            (8, 64, 1, (*many, (256, 1))),
            (8, 128, 2, many),
            (8, 64, 4, many),
            (8, 128, 8, many),
            (64, 64, 16, few),
            (64, 128, 32, few),
            (64, 64, 64, few),
        ):
            for batch, tokens in batches:
                name = f"flashinfer update n{n} p{head_dim}, {heads} heads in {groups} groups, {batch} x {tokens}"
                shape = Shape((tokens,) * batch, heads, head_dim, n, groups)
                options = Options(io="bf16", state="bf16", z=tokens == 2, slot_gap=heads * head_dim * n)
                yield Replay(name, shape, options, Tolerance(1e-2, 1e-3))
    # Their integer state has 16 bits; ours has 8, held to the same tolerance.
    for n in (64, 128):
        shape = Shape((1, 1), 8, 64, n, 2)
        options = Options(io="bf16", state="i8", slot_gap=8 * 64 * n)
        yield Replay(f"flashinfer update n{n}, integer state", shape, options, Tolerance(1e-2, 1e-1))


# Prefill.


def _mamba_selective_scan() -> Iterator[Replay]:
    """Mamba-1 prompts in one call and, with the state carried, in three."""
    tolerances = {"f32": Tolerance(6e-4, 2e-3), "f16": Tolerance(3e-3, 5e-3), "bf16": Tolerance(3e-2, 5e-2)}
    for tokens in (8, 16, 32, 64, 128, 256, 372, 512, 784, 1024, 1134, 2048, 4096):
        third = -(-tokens // 3)
        for io, tolerance in tolerances.items():
            options = Options(io=io, per_column_a=True, z=True, fresh="all")
            shape = Shape((tokens,) * 2, 4, 1, 8)
            yield Replay(f"mamba-ssm scan {io}, {tokens} tokens", shape, options, tolerance)
            cut = tuple((count, count) for count in (third, third, tokens - 2 * third))
            name = f"mamba-ssm scan {io}, {tokens} tokens in 3 calls"
            yield Replay(name, shape, options, tolerance, calls=cut)


def _flashinfer_ssd() -> Iterator[Replay]:
    options = Options(io="bf16", fresh="all")
    for lengths in ((128, 256, 128), (80, 176)):
        shape = Shape(lengths, 8, 64, 128, 8)
        yield Replay(f"flashinfer ssd, lengths {lengths}", shape, options, Tolerance(7e-2, 7e-2), chunk=128)


def _vllm_ssd() -> Iterator[Replay]:
    """One prompt, then batches that go on over several calls."""
    limit = Tolerance(1e-3, 1e-3)
    fresh = Options(fresh="all", D=False)
    columns = (16, 32, 64, 128)
    number = 0
    for heads in (3, 4, 11, 16, 32):
        for head_dim in (5, 8, 19, 32, 128):
            for tokens, chunk in ((119, 17), (128, 32)):
                # Theirs has a group a head, as wide as the head; d_state and groups are open.
                shapes = [Shape((tokens,), heads, head_dim, head_dim, heads)] if heads <= 4 else []
                shapes.append(Shape((tokens,), heads, head_dim, columns[number % 4]))
                number += 1
                for shape in shapes:
                    name = f"vllm ssd {heads} heads in {shape.groups} groups, p{head_dim} n{shape.d_state}, {tokens}"
                    yield Replay(name, shape, fresh, limit, chunk=chunk)
    for head_dim, n, groups in ((8, 16, 4), (64, 128, 1)):
        for chunk, calls in _CONTINUED:
            lengths = tuple(sum(call[s] for call in calls) for s in range(len(calls[0])))
            shape = Shape(lengths, 4, head_dim, n, groups)
            name = f"vllm ssd p{head_dim} n{n}, calls {calls}"
            yield Replay(name, shape, fresh, limit, calls=calls, chunk=chunk)


#: The chunk, and the tokens of each sequence in each call.
_CONTINUED: tuple[tuple[int, tuple[tuple[int, ...], ...]], ...] = (
    (8, ((64, 32),) * 2),
    (8, ((32, 32),) * 3),
    (8, ((8, 8),) * 3),
    (8, ((4, 4),) * 4),
    (8, ((64, 32, 16, 8, 8), (8, 16, 32, 16, 8), (8, 8, 16, 32, 16))),
    (29, ((11, 4), (13, 23), (19, 22), (21, 15))),
    (256, ((5,), (1,), (1,), (1,))),
    (256, ((5, 30), (1, 2), (1, 2), (1, 2))),
)


def _mamba_varlen() -> Iterator[Replay]:
    """300 packed sequences of 1 to 199 tokens."""
    lengths = tuple(int(n) for n in np.random.default_rng(300).integers(1, 200, 300))
    options = Options(fresh="all", D=False, dt_bias=False)
    for chunk in (64, 128):
        for groups in (1, 2, 8, 64):
            name = f"mamba-ssm varlen, {groups} groups, chunk {chunk}"
            shape = Shape(lengths, 64, 64, 32, groups)
            yield Replay(name, shape, options, Tolerance(1e-2, 3e-3), _slow, chunk=chunk)


def _slow(rng: Generator, problem: ScanProblem) -> ScanProblem:
    """B / 5, A = -0.1 U(0, 1), dt = softplus(N(0, 1) - 4)."""
    problem.B[...] = problem.B / 5
    problem.dt[...] -= 4
    return replace(problem, A=(-0.1 * rng.uniform(0, 1, problem.A.shape)).astype(np.float32))


SUITES = (
    Suite("ggml SSM_SCAN", _ggml),
    Suite("mamba-ssm selective_state_update", _mamba_state_update),
    Suite("vllm selective_state_update", _vllm_state_update),
    Suite("mamba-ssm selective_scan", _mamba_selective_scan),
    Suite("flashinfer selective_state_update", _flashinfer_state_update),
    Suite("flashinfer ssd", _flashinfer_ssd),
    Suite("vllm ssd", _vllm_ssd),
    Suite("mamba-ssm chunk_state_varlen", _mamba_varlen),
)
#: Suites of chunked prefill.
PREFILL_SUITES = tuple(each for each in SUITES if each.key.endswith(("ssd", "chunk_state_varlen")))
#: Those of one call that goes on from stored states.
DECODE_SUITES = tuple(each for each in SUITES if each.key.endswith("selective_state_update"))


def suite(key: str) -> Suite:
    """The suite of a key.

    Raises:
        KeyError: there is none.
    """
    return {each.key: each for each in SUITES}[key]
