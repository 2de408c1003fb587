"""The drop-in functions beside mamba-ssm's own, on the same CUDA tensors."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import re
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")

from pyharness import peer_suites  # noqa: E402
from pyharness.errors import DeviceError, InvalidProblem, Unsupported, WrongShape  # noqa: E402
from pyharness.launcher import Launcher  # noqa: E402
from pyharness.oracle import oracle  # noqa: E402
from pyharness.peers import mamba_module  # noqa: E402
from pyharness.problem import ScanProblem  # noqa: E402
from pyharness.toolchain import ROOT  # noqa: E402

#: Norms of differences. Both round y to bf16 once: half a unit in the last place each. In f32 their exponentials are
#: approximate. Chunked scans multiply in bf16, theirs of f32 in tf32.
STEP = {torch.bfloat16: 2.0**-8, torch.float32: 1e-5}
SCAN = {torch.bfloat16: 2.0**-7, torch.float32: 2.0**-9}
STATE = 1e-5
EVERY_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
SSD = "ssd_n128_p64_r16_w16_c64_t4_bf16_sf32_sm90a"


@pytest.fixture(scope="module")
def ours() -> Any:
    import pyharness.torch

    return pyharness.torch


@pytest.fixture(scope="module")
def theirs() -> Any:
    """mamba-ssm's functions, or a skip where they are not installed."""
    try:
        names = ("selective_state_update", "ssd_combined")
        update, scan = (mamba_module(name) for name in names)
    except DeviceError as error:
        pytest.skip(f"needs mamba-ssm: {error}")
    for name in ("bmm", "chunk_scan", "chunk_state", "state_passing"):
        for kernel in vars(mamba_module(f"ssd_{name}")).values():
            # Speed is no matter here: its smallest tile, which always fits, instead of a search.
            tuned = kernel
            while tuned is not None and not hasattr(tuned, "configs"):
                tuned = getattr(tuned, "fn", None)
            if tuned is not None:
                tuned.configs = tuned.configs[-1:]

    class Functions:
        selective_state_update = staticmethod(update.selective_state_update)
        mamba_chunk_scan_combined = staticmethod(scan.mamba_chunk_scan_combined)

    return Functions


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.inference_mode():
        yield


def error(found: Any, wanted: Any) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def drawn(*shape: int, dtype: Any = torch.float32, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed + math.prod(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def decode(batch: int, dtype: Any, heads: int = 64, dim: int = 64, n: int = 128, groups: int = 8) -> dict[str, Any]:
    """A decode step of Mamba-2 as models call it: x, B, C views of one row, the rest expanded."""
    row = drawn(batch, heads * dim + 2 * groups * n, dtype=dtype)
    x, B, C = row.split([heads * dim, groups * n, groups * n], dim=-1)
    return {
        "state": drawn(batch + 3, heads, dim, n),
        "x": x.view(batch, heads, dim),
        "dt": drawn(batch, heads, dtype=dtype)[..., None].expand(-1, -1, dim),
        "A": (-drawn(heads, seed=1).exp())[:, None, None].expand(-1, dim, n),
        "B": B.view(batch, groups, n),
        "C": C.view(batch, groups, n),
        "D": drawn(heads, seed=2)[:, None].expand(-1, dim),
        "z": drawn(batch, heads, dim, dtype=dtype, seed=3),
        "dt_bias": drawn(heads, seed=4)[:, None].expand(-1, dim),
        "dt_softplus": True,
        "state_batch_indices": torch.randperm(batch + 3, device="cuda")[:batch].int(),
    }


def mamba1_step(batch: int, dtype: Any, dim: int = 8192, n: int = 16) -> dict[str, Any]:
    return {
        "state": drawn(batch, dim, n),
        "x": drawn(batch, dim, dtype=dtype),
        "dt": drawn(batch, dim, dtype=dtype, seed=1),
        "A": -drawn(dim, n, seed=2).exp(),
        "B": drawn(batch, n, dtype=dtype, seed=3),
        "C": drawn(batch, n, dtype=dtype, seed=4),
        "D": drawn(dim, seed=5),
        "z": drawn(batch, dim, dtype=dtype, seed=6),
        "dt_bias": drawn(dim, seed=7),
        "dt_softplus": True,
    }


def prompt(batch: int, tokens: int, dtype: Any, heads: int = 24, dim: int = 64, n: int = 128) -> dict[str, Any]:
    row = drawn(batch, tokens, heads * dim + 2 * n, dtype=dtype)
    x, B, C = row.split([heads * dim, n, n], dim=-1)
    return {
        "x": x.view(batch, tokens, heads, dim),
        "dt": drawn(batch, tokens, heads, dtype=dtype),
        "A": -drawn(heads, seed=1).exp(),
        "B": B.view(batch, tokens, 1, n),
        "C": C.view(batch, tokens, 1, n),
        "chunk_size": 256,
        "D": drawn(heads, seed=2),
        "dt_bias": drawn(heads, seed=3),
        "dt_softplus": True,
        "return_final_states": True,
    }


def both(ours: Any, theirs: Any, name: str, arguments: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    """Results of ours and theirs, each with a state of its own."""
    states = [arguments["state"].clone() for _ in range(2)] if "state" in arguments else []
    given = [arguments | ({"state": state} if states else {}) for state in states or [None, None]]
    found = getattr(ours, name)(**given[0], **options)
    wanted = getattr(theirs, name)(**given[1])
    if states:
        return (found, states[0]), (wanted, states[1])
    return found, wanted


@EVERY_DTYPE
@pytest.mark.parametrize("batch", [1, 16, 128])
@pytest.mark.parametrize("without", [(), ("z",), ("state_batch_indices",)])
def test_a_decode_step_is_theirs(ours: Any, theirs: Any, batch: int, dtype: Any, without: tuple[str, ...]) -> None:
    arguments = {name: value for name, value in decode(batch, dtype).items() if name not in without}
    (y, state), (wanted, wanted_state) = both(ours, theirs, "selective_state_update", arguments)
    assert y.dtype == wanted.dtype
    assert y.shape == wanted.shape
    assert error(y, wanted) < STEP[dtype]
    assert error(state, wanted_state) < STATE


@EVERY_DTYPE
@pytest.mark.parametrize("batch", [1, 5])
def test_a_mamba_1_step_is_theirs(ours: Any, theirs: Any, batch: int, dtype: Any) -> None:
    (y, state), (wanted, wanted_state) = both(ours, theirs, "selective_state_update", mamba1_step(batch, dtype))
    assert y.shape == wanted.shape
    assert error(y, wanted) < STEP[dtype]
    assert error(state, wanted_state) < STATE


#: Of mamba-ssm's own suite of decode steps the least and the most columns, the odd number of channels and the fewest
#: heads; `invoke peers` has all of it.
THEIR_CASES = [
    case
    for suite in peer_suites.SUITES
    if suite.key == "mamba-ssm selective_state_update"
    for case in suite.cases()
    if case.shape.d_state != 32 and case.shape.heads in (2064, 32)
]


def on_gpu(array: Any) -> Any:
    """A host array as a CUDA tensor."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(array).view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def step_of(problem: ScanProblem) -> dict[str, Any]:
    """A problem of one token a sequence as the arguments of `selective_state_update`."""
    mamba1 = problem.head_dim == 1
    dim, n = problem.head_dim, problem.d_state
    given = {name: on_gpu(getattr(problem, name)) for name in ("x", "dt", "A", "B", "C", "D", "dt_bias", "state")}
    given |= {name: on_gpu(value) for name in ("z",) if (value := getattr(problem, name)) is not None}
    if problem.read_slots is None:
        # Without indices there is a state for each sequence and no more.
        given["state"] = given["state"][: problem.sequences]
    else:
        given["state_batch_indices"] = on_gpu(problem.read_slots)
    if mamba1:
        # Channels have no axis of heads, and B and C none of groups.
        squeezed = {"x": 2, "z": 2, "state": 2, "B": 1, "C": 1}
        return {name: value.squeeze(squeezed[name]) if name in squeezed else value for name, value in given.items()}
    given["A"] = given["A"][:, None, None].expand(-1, dim, n)
    given["dt"] = given["dt"][..., None].expand(-1, -1, dim)
    return given | {name: given[name][:, None].expand(-1, dim) for name in ("D", "dt_bias")}


@pytest.mark.parametrize("package", ["theirs", "ours"])
@pytest.mark.parametrize("case", THEIR_CASES, ids=lambda case: case.name.removeprefix("mamba-ssm update "))
def test_a_case_of_their_suite_passes(request: pytest.FixtureRequest, package: str, case: peer_suites.Replay) -> None:
    problem = case.problem()
    truth = oracle(problem)
    given = step_of(problem)
    y = request.getfixturevalue(package).selective_state_update(**given, dt_softplus=problem.dt_softplus)
    slots = list(truth.states)
    found = {"y": y.reshape(problem.x.shape), "state": given["state"][slots].reshape(-1, *problem.state.shape[1:])}
    wanted = {"y": truth.y, "state": np.stack([truth.states[slot] for slot in slots])}
    for name, one in found.items():
        right = torch.from_numpy(wanted[name]).cuda()
        allowed = case.tolerance.atol + case.tolerance.rtol * right.abs()
        assert bool(((one.double() - right).abs() <= allowed).all()), name


@EVERY_DTYPE
@pytest.mark.parametrize("start", [False, True], ids=["fresh", "resumed"])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1024), (3, 300)])
@pytest.mark.parametrize("family", [None, "ssd", "recurrent"])
def test_a_prompt_is_theirs(
    ours: Any, theirs: Any, batch: int, tokens: int, dtype: Any, start: bool, family: str | None
) -> None:
    arguments = prompt(batch, tokens, dtype)
    if start:
        arguments["initial_states"] = drawn(batch, 24, 64, 128)
    found, wanted = both(ours, theirs, "mamba_chunk_scan_combined", arguments, kernel=family)
    for ours_, theirs_ in zip(found, wanted, strict=True):
        assert ours_.shape == theirs_.shape
        assert ours_.dtype == theirs_.dtype
        assert error(ours_, theirs_) < SCAN[dtype]


@pytest.mark.parametrize(("softplus", "limit"), [(False, (0.0, math.inf)), (True, (0.1, 0.5))])
def test_clamped_and_gated_prompts_are_theirs(
    ours: Any, theirs: Any, softplus: bool, limit: tuple[float, float]
) -> None:
    arguments = prompt(1, 300, torch.bfloat16) | {"dt_softplus": softplus, "dt_limit": limit}
    arguments["z"] = drawn(1, 300, 24, 64, dtype=torch.bfloat16, seed=9)
    found, wanted = both(ours, theirs, "mamba_chunk_scan_combined", arguments, kernel=SSD)
    for ours_, theirs_ in zip(found, wanted, strict=True):
        assert error(ours_, theirs_) < SCAN[torch.bfloat16]


@EVERY_DTYPE
def test_packed_prompts_are_theirs(ours: Any, theirs: Any, dtype: Any) -> None:
    arguments = prompt(1, 600, dtype) | {"return_varlen_states": True}
    ends = [0, 5, 300, 301, 600]
    arguments["cu_seqlens"] = torch.tensor(ends, device="cuda", dtype=torch.int32)
    lengths = torch.tensor([b - a for a, b in itertools.pairwise(ends)], device="cuda")
    arguments["seq_idx"] = torch.repeat_interleave(torch.arange(4, device="cuda"), lengths).int()[None]
    found, wanted = both(ours, theirs, "mamba_chunk_scan_combined", arguments)
    for ours_, theirs_ in zip(found, wanted, strict=True):
        assert ours_.shape == theirs_.shape
        assert ours_.dtype == theirs_.dtype
        assert error(ours_, theirs_) < SCAN[dtype]


@EVERY_DTYPE
def test_a_prompt_of_mamba_1_is_its_decode_steps(ours: Any, dtype: Any) -> None:
    """Their scan has to be compiled; what is compared with them, token by token, is the step."""
    steps = [mamba1_step(2, dtype) | {"x": drawn(2, 8192, dtype=dtype, seed=20 + i)} for i in range(9)]
    state = torch.zeros_like(steps[0]["state"])
    wanted = torch.stack([ours.selective_state_update(**(step | {"state": state})) for step in steps], dim=2)
    rows = {n: torch.stack([step[n] for step in steps], dim=1).transpose(1, 2) for n in ("x", "dt", "z", "B", "C")}
    found, final = ours.selective_scan_fn(
        rows["x"],
        rows["dt"],
        steps[0]["A"],
        rows["B"],
        rows["C"],
        D=steps[0]["D"],
        z=rows["z"],
        delta_bias=steps[0]["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    assert error(found, wanted) < STEP[dtype]
    assert error(final, state) < STATE


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D", "z", "dt_bias", "state"])
def test_a_wrong_shape_is_refused_where_they_refuse_it(ours: Any, theirs: Any, name: str) -> None:
    arguments = decode(4, torch.bfloat16)
    arguments[name] = arguments[name][..., :-1]
    for package in (theirs, ours):
        with pytest.raises(AssertionError):
            package.selective_state_update(**arguments)


@pytest.mark.parametrize("name", ["x", "dt", "A", "B", "C", "D"])
def test_a_wrong_shape_of_a_prompt_is_refused_where_they_refuse_it(ours: Any, theirs: Any, name: str) -> None:
    arguments = prompt(2, 64, torch.bfloat16)
    # x without its last head: any headdim would do.
    arguments[name] = arguments[name][:, :, :-1] if name == "x" else arguments[name][..., :-1]
    for package in (theirs, ours):
        with pytest.raises(AssertionError):
            package.mamba_chunk_scan_combined(**arguments)


def test_what_is_not_done_is_refused(ours: Any) -> None:
    arguments = decode(2, torch.bfloat16)
    with pytest.raises(InvalidProblem, match="x: wanted a CUDA tensor, found one on cpu"):
        ours.selective_state_update(**(arguments | {"x": arguments["x"].cpu()}))
    with pytest.raises(WrongShape, match="return_varlen_states wants cu_seqlens"):
        ours.mamba_chunk_scan_combined(**prompt(1, 64, torch.bfloat16), return_varlen_states=True)
    small = torch.empty(16, dtype=torch.uint8, device="cuda")
    with pytest.raises(InvalidProblem, match="workspace: wanted [0-9]+ contiguous bytes"):
        ours.mamba_chunk_scan_combined(**prompt(1, 1024, torch.bfloat16), kernel=SSD, workspace=small)
    with torch.inference_mode(False):
        arguments = decode(2, torch.bfloat16)
        arguments["x"] = arguments["x"].clone().requires_grad_()
        with pytest.raises(Unsupported, match="x requires a gradient"):
            ours.selective_state_update(**arguments)
        with torch.no_grad():
            ours.selective_state_update(**arguments)


def test_a_callers_workspace_gives_the_same_bits(ours: Any) -> None:
    arguments = prompt(1, 2048, torch.bfloat16)
    wanted = ours.mamba_chunk_scan_combined(**arguments, kernel=SSD)
    space = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    found = ours.mamba_chunk_scan_combined(**arguments, kernel=SSD, workspace=space)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_nothing_is_waited_for_and_another_stream_is_used(ours: Any) -> None:
    arguments = decode(16, torch.bfloat16)
    state = arguments["state"].clone()
    wanted = ours.selective_state_update(**arguments)
    arguments["state"] = state
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            # Keeps the stream busy: a launch elsewhere would come first and see a state that is all zeros.
            kept = state.clone()
            state.zero_()
            torch.cuda._sleep(20_000_000)
            state.copy_(kept)
            found = ours.selective_state_update(**arguments)
        assert not side.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert torch.equal(found, wanted)


def test_a_captured_step_is_replayed_with_other_contents(ours: Any) -> None:
    arguments = decode(16, torch.bfloat16)
    before = arguments["state"].clone()
    ours.selective_state_update(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ours.selective_state_update(**arguments)
    for seed in (1, 2):
        arguments["x"].copy_(drawn(16, 64, 64, seed=seed))
        arguments["state"].copy_(before)
        graph.replay()
        again = arguments | {"state": before.clone()}
        assert torch.equal(y, ours.selective_state_update(**again))
        assert torch.equal(arguments["state"], again["state"])


def test_what_models_hand_over_is_used_where_it_lies(ours: Any) -> None:
    """But for y, the final states and a workspace, a call allocates nothing once it was made before."""
    for name, arguments in (
        ("selective_state_update", decode(16, torch.bfloat16)),
        ("mamba_chunk_scan_combined", prompt(2, 256, torch.bfloat16) | {"kernel": "recurrent"}),
    ):
        call = getattr(ours, name)
        call(**arguments)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call(**arguments)
        made = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        assert made == (1 if name == "selective_state_update" else 2)


def nodes(call: Any) -> int:
    """Of the CUDA graph that a call is captured in, made once before."""
    call()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    count = ctypes.c_size_t()
    driver = Launcher(torch.cuda.current_device())
    driver.call("cuGraphGetNodes", ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    return count.value


@pytest.mark.parametrize("batch", [1, 16])
def test_a_captured_step_is_one_launch(ours: Any, batch: int) -> None:
    assert nodes(functools.partial(ours.selective_state_update, **decode(batch, torch.bfloat16))) == 1


def test_a_captured_prompt_is_its_launches_and_one_that_turns_what_lies_sideways(ours: Any) -> None:
    arguments = prompt(1, 1024, torch.bfloat16) | {"kernel": SSD}
    assert nodes(functools.partial(ours.mamba_chunk_scan_combined, **arguments)) == 2
    sideways = behind_a_convolution(arguments, 0)
    assert nodes(functools.partial(ours.mamba_chunk_scan_combined, **sideways)) == 3


def behind_a_convolution(arguments: dict[str, Any], gap: int) -> dict[str, Any]:
    """The same prompt as transformers hands it over: x, B and C of one tensor whose tokens lie side by side."""
    batch, tokens = arguments["x"].shape[:2]
    parts = {name: arguments[name].flatten(2) for name in ("x", "B", "C")}
    row = torch.nn.functional.pad(torch.cat(list(parts.values()), dim=2).transpose(1, 2), (gap, 0)).contiguous()
    channels = row[:, :, gap:].transpose(1, 2).split([part.shape[2] for part in parts.values()], dim=2)
    views = {n: one.unflatten(2, arguments[n].shape[2:]) for n, one in zip(parts, channels, strict=True)}
    for view in views.values():
        assert view.stride(1) == 1
        assert view.untyped_storage().data_ptr() == row.data_ptr()
    return arguments | views


@EVERY_DTYPE
@pytest.mark.parametrize(("batch", "tokens", "gap"), [(1, 4096, 0), (2, 300, 4), (3, 257, 3)])
def test_a_prompt_whose_tokens_lie_side_by_side_gives_the_same_bits(
    ours: Any, dtype: Any, batch: int, tokens: int, gap: int
) -> None:
    arguments = prompt(batch, tokens, dtype)
    sideways = behind_a_convolution(arguments, gap)
    wanted = ours.mamba_chunk_scan_combined(**arguments)
    for one, other in zip(ours.mamba_chunk_scan_combined(**sideways), wanted, strict=True):
        assert torch.equal(one, other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ours.mamba_chunk_scan_combined(**sideways)
    sideways["x"].mul_(2)
    graph.replay()
    for one, other in zip(found, ours.mamba_chunk_scan_combined(**sideways), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0], wanted[0])


@EVERY_DTYPE
def test_a_prompt_of_mamba_1_whose_tokens_lie_side_by_side_gives_the_same_bits(ours: Any, dtype: Any) -> None:
    """Every argument that has tokens, as mamba-ssm's compiled scan wants them."""
    step = mamba1_step(2, dtype)
    rows = {"u": (8192,), "delta": (8192,), "B": (16,), "C": (16,), "z": (8192,)}
    sideways = {name: drawn(2, *size, 77, dtype=dtype, seed=3) for name, size in rows.items()}
    parameters = {"A": step["A"], "D": step["D"], "delta_bias": step["dt_bias"], "delta_softplus": True}
    channels_last = {name: one.transpose(1, 2).contiguous().transpose(1, 2) for name, one in sideways.items()}
    wanted = ours.selective_scan_fn(**channels_last, **parameters)
    assert torch.equal(ours.selective_scan_fn(**sideways, **parameters), wanted)


def test_the_example_of_the_docs_prints_what_it_is_for() -> None:
    text = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    done = subprocess.run([sys.executable, "-c", example], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == "(1, 64, 64) (1, 64, 64, 128)"


@pytest.mark.slow
@pytest.mark.parametrize("command", [["transformers_models.py", "--steps", "4"], ["share_of_scan.py"]])
def test_the_examples_run(command: list[str]) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    program = [sys.executable, f"examples/{command[0]}", *command[1:]]
    done = subprocess.run(program, cwd=ROOT, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
