"""Every kind of fault that users of other scans met, on every family, in the emulator.

`pyharness.faults` has the problems of a kind; a test of each kind's name runs them. FAULTY has what a scan with the
fault would give: the comparison has to see it, or a kind's problems would prove nothing.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pyharness import DeviceError, NoKernel, ScanProblem, scan
from pyharness import select as selection
from pyharness.cases import many_channels, many_sequences, tiny_steps
from pyharness.compare import compare
from pyharness.families import FAMILIES
from pyharness.faults import FAULTS, Place
from pyharness.oracle import oracle
from pyharness.problem import DTYPES
from pyharness.scan import ScanResult, run_emulator
from pyharness.select import Device, Features
from pyharness.spec import Geometry, KernelSpec
from pyharness.variants import variants
from tests.emulated import assert_right
from tests.stand_ins import EVERY_ID, EVERY_KERNEL

F = np.float32
EACH_KERNEL = pytest.mark.parametrize("spec", EVERY_KERNEL, ids=EVERY_ID)
EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@EACH_KERNEL
@pytest.mark.parametrize("kind", FAULTS)
def test_fault(kind: str, spec: KernelSpec) -> None:
    """No kernel has the fault."""
    for case in FAULTS[kind](Place.of(spec)):
        assert_right(case.build(), spec, case.name)


# What a scan with the fault would give.


def oracle_scan(problem: ScanProblem) -> ScanResult:
    return scan(problem, backend="oracle")


def wrong_offset(problem: ScanProblem) -> ScanResult:
    """What slot x stride gives in 32 bits is another slot or another token."""
    right = oracle_scan(problem)
    first, last = (right.y[:1], right.y[-1:]) if problem.z is not None else (right.state[:1], right.state[-1:])
    first[...], last[...] = last.copy(), first.copy()
    return right


def growing_decay(problem: ScanProblem) -> ScanResult:
    """Where a sum rounds, an exponent comes out a little above 0 instead of far below."""
    return oracle_scan(replace(problem, A=np.where(problem.A < -1e3, F(1e-3), problem.A)))


def one_long_sequence(problem: ScanProblem) -> ScanResult:
    """Boundaries that are not seen: each sequence goes on from the end of the one before."""
    if problem.sequences < 2 or problem.state is None:
        return oracle_scan(problem)
    whole = np.array([0, problem.offsets[-1]], np.int32)
    names = ("read_slots", "write_slots", "resume")
    first: dict[str, Any] = {n: getattr(problem, n)[:1] for n in names if getattr(problem, n) is not None}
    return oracle_scan(replace(problem, cu_seqlens=whole, **first))


def short_last_chunk(problem: ScanProblem) -> ScanResult:
    """The tokens after the last whole chunk are lost."""
    right = oracle_scan(problem)
    for s, length in enumerate(problem.lengths):
        right.y[problem.offsets[s + 1] - length % 5 : problem.offsets[s + 1]] = 0
    return right


def head_modulo_groups(problem: ScanProblem) -> ScanResult:
    index = np.arange(problem.heads) % problem.groups
    B, C = (np.ascontiguousarray(a[:, index]) for a in (problem.B, problem.C))
    return oracle_scan(replace(problem, B=B, C=C))


def padding_to_slot_0(problem: ScanProblem) -> ScanResult:
    """The pad index is clamped to 0, whose state is overwritten by nothing in particular."""
    right = oracle_scan(problem)
    if problem.padding.any():
        right.state[0] = 0
    return right


def nothing_resumes(problem: ScanProblem) -> ScanResult:
    return oracle_scan(replace(problem, resume=np.zeros(problem.sequences, np.uint8)))


def everything_resumes(problem: ScanProblem) -> ScanResult:
    """A fresh sequence multiplies what its slot holds by 0, which NaN and infinities survive."""
    right = oracle_scan(problem)
    assert problem.resume is not None
    for s in np.flatnonzero((problem.resume == 0) & (problem.lengths > 0)):
        right.y[problem.offsets[s] : problem.offsets[s + 1]] = np.nan
    return right


FAULTY: dict[str, Callable[[ScanProblem], ScanResult]] = {
    "offset in 32 bits": wrong_offset,
    "decay above 1 at large A": growing_decay,
    "boundary inside a chunk": one_long_sequence,
    "length that is no multiple of the chunk": short_last_chunk,
    "wrong group of a head": head_modulo_groups,
    "padding taken for a slot": padding_to_slot_0,
    "initial states dropped": nothing_resumes,
    "fresh sequence over garbage": everything_resumes,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_problems_of_a_kind_show_the_fault(kind: str) -> None:
    place = Place(16, 3, "f32", "f32", 5, 0)
    seen = [not compare(FAULTY[kind](case.build()), case.build()).ok for case in FAULTS[kind](place)]
    assert any(seen), f"{kind}: a scan that has it would pass"
    if kind == "offset in 32 bits":
        assert all(seen)


# Sizes.


def smallest(family: str) -> KernelSpec:
    """The kernel of the fewest columns that a family has, in f32."""
    found = (variants(family, n, head_dim=p) for p in (1, 16, 64) for n in (1, 2, 4, 8, 16, 32, 64))
    return next(filter(None, found))[0]


@EACH_FAMILY
@pytest.mark.parametrize("build", [many_sequences, many_channels])
def test_more_sequences_or_channels_than_grid_y_counts(family: str, build: Callable[..., ScanProblem]) -> None:
    """70000 of each, on the family's smallest kernel."""
    spec = smallest(family)
    if build is many_sequences:
        problem = many_sequences(spec.d_state, head_dim=Place.of(spec).head_dim, every=16)
    else:
        problem = many_channels(spec.d_state)
        refusal = selection.mismatch(Features.of(problem), spec)
        if refusal:
            # Channels are heads of one row.
            assert "head_dim" in refusal
            return
    assert_right(problem, spec, build.__name__)


@EACH_FAMILY
@pytest.mark.parametrize("d_state", [1, 3, 5, 19, 80, 96, 100, 192, 1000, 1024])
def test_odd_states_are_right_or_refused_with_a_reason(family: str, d_state: int) -> None:
    found = next(filter(None, (variants(family, d_state, head_dim=p) for p in (19, 64, 1))), ())
    if not found:
        with pytest.raises(NoKernel, match=f"{d_state}|d_state"):
            FAMILIES[family](d_state=d_state)
        return
    spec = found[0]
    place = Place(d_state, Place.of(spec).head_dim, "f32", "f32", 4, 8)
    for case in FAULTS["initial states dropped"](place):
        assert_right(case.build(), spec, case.name)


def refusal_of(family: str, head_dim: int) -> str:
    """Why a family has no kernel of 64 columns for a head_dim: it cannot be made, or takes others only."""
    given = {"head_dim": head_dim} if "head_dim" in FAMILIES[family].__dataclass_fields__ else {}
    try:
        return FAMILIES[family](d_state=64, **given).refusal(Geometry(4, 1, 1, head_dim, 1, 64, 4))
    except NoKernel as error:
        return str(error)


@EACH_FAMILY
@pytest.mark.parametrize("head_dim", [1, 2, 5, 7, 19, 33, 80, 96])
def test_odd_heads_are_right_or_refused_with_a_reason(family: str, head_dim: int) -> None:
    found = variants(family, 38, head_dim=head_dim, chunk=5) or variants(family, 64, head_dim=head_dim)
    if not found:
        assert re.search(rf"head_dim.*\b{head_dim}\b", refusal_of(family, head_dim))
        return
    place = Place(found[0].d_state, head_dim, "f32", "f32", 5, 8)
    for case in FAULTS["initial states dropped"](place):
        assert_right(case.build(), found[0], case.name)


@EACH_FAMILY
def test_a_chunk_that_no_kernel_can_have_is_refused_where_it_is_asked_for(family: str) -> None:
    spec = smallest(family)
    if not hasattr(spec, "chunk"):
        pytest.skip(f"{family} has no chunk")
    for chunk in (-1, 100_003):
        with pytest.raises(NoKernel, match="chunk"):
            replace(spec, chunk=chunk)  # type: ignore[call-arg]


# Arithmetic.


@EACH_FAMILY
def test_softplus_keeps_its_digits_where_log_of_exp_plus_1_is_0(family: str) -> None:
    """dt from -80 to 20, element by element within 1e-6; log(exp(dt) + 1) is exactly 0 below -17."""
    smallest_spec = smallest(family)
    rows = Place.of(smallest_spec).head_dim
    for spec in variants(family, smallest_spec.d_state, head_dim=rows):
        problem = tiny_steps(spec.d_state or 4, head_dim=rows)
        y = scan(problem, spec.id, "emulator").y.astype(np.float64)
        # x, B and C are 1: operands of tensor cores take them as they are, but the step size is rounded.
        np.testing.assert_allclose(y, oracle(problem).y, rtol=max(1e-6, spec.operand_error), atol=0)


def small_steps(state: str, tokens: int, rows: int) -> ScanProblem:
    """A state of 1 in 64 rows x 16 columns to which every token adds 2^-10, with no decay to speak of."""
    heads, columns = 64 // rows, 16
    return ScanProblem(
        x=np.ones((tokens, heads, rows), F),
        dt=np.full((tokens, heads), 2.0**-10, F),
        A=np.full(heads, -1e-6, F),
        B=np.ones((tokens, 1, columns), F),
        C=np.ones((tokens, 1, columns), F),
        dt_softplus=False,
        state=np.ones((1, heads, rows, columns), DTYPES[state]),
    )


@EACH_FAMILY
def test_a_long_context_is_not_lost_in_16_bits(family: str) -> None:
    """64 steps of 2^-10 from 1, each stored in bf16, whose next value after 1 is 1 + 2^-7.

    Rounded to nearest every step is lost; rounded stochastically the mean of 1024 elements is right within 5 standard
    errors; f32, which is the default, loses nothing. One call carries its state in f32 whatever the storage.
    """
    rows = next(p for p in (8, 16, 1) if variants(family, 16, head_dim=p))
    kernels = {state: variants(family, 16, "f32", state, head_dim=rows) for state in ("f32", "bf16")}
    assert kernels["f32"][0].state == type(kernels["f32"][0]).__dataclass_fields__["state"].default
    steps, exact = 64, 1 + 64 * 2.0**-10

    def decode(state: str, seed: int | None) -> Any:
        problem = small_steps(state, 1, rows)
        for step in range(steps):
            key = None if seed is None else np.array([seed, step], np.uint64)
            result = run_emulator(replace(problem, rounding_key=key), kernels[state][0])
            problem = replace(problem, state=result.state)
        assert problem.state is not None
        return problem.state.astype(np.float64)

    assert np.abs(decode("f32", None) - exact).max() < 1e-4
    assert (decode("bf16", None) == 1).all()
    drawn = decode("bf16", 7)
    # A step's rounding has a variance of p (1 - p) 2^-14 with p = 1/8, and 64 steps add up.
    deviation = np.sqrt(steps * 0.125 * 0.875) * 2.0**-7
    assert abs(drawn.mean() - exact) < 5 * deviation / np.sqrt(drawn.size) + 1e-4
    whole = run_emulator(small_steps("bf16", 8, rows), kernels["bf16"][0]).state.astype(np.float64)
    assert (whole == 1 + 2.0**-7).all(), "eight steps in one call are carried in f32 and stored once"


# What the host says.


@EACH_FAMILY
def test_no_kernel_says_what_was_wanted_what_there_is_and_what_builds_it(family: str) -> None:
    geometry = Geometry(64, 2, 4, 64, 1, 48, 8)
    device = Device("NVIDIA H200", "sm_90")
    with pytest.raises(NoKernel) as caught:
        selection.choose(Features(geometry, "f32", "f32"), device, family=family, ids=["recurrent_n16_block_f32_sf32"])
    text = str(caught.value)
    for wanted in ("NVIDIA H200", "sm_90", "d_state 48", "On offer:", "invoke generate --dstate 48"):
        assert wanted in text or "None can be generated" in text, f"{wanted!r} is missing: {text}"


def test_a_scan_that_falls_back_to_the_cpu_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanning = sys.modules["pyharness.scan"]
    monkeypatch.setattr(scanning, "_gpu_missing", lambda: "no GPU in this test")
    scanning._warn_once.cache_clear()
    problem = tiny_steps(4)
    with caplog.at_level(logging.WARNING):
        results = [scan(problem), scan(problem)]
    assert [r.backend for r in results] == ["oracle", "oracle"]
    assert len([r for r in caplog.records if "no GPU in this test" in r.getMessage()]) == 1
    with pytest.raises(DeviceError, match="no GPU in this test"):
        scan(problem, backend="gpu")
