"""The command line: `uv run invoke --list` shows it. Each task calls one function of pyharness and prints."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from invoke import Collection, Context, Exit, task

from pyharness import build as builder
from pyharness import doctor as doctors
from pyharness import golden, gpus, measure, report, suite
from pyharness import lint as linter
from pyharness import select as selection
from pyharness import vet as vetting
from pyharness.errors import SsmError
from pyharness.listing import Progress, table
from pyharness.spec import Geometry
from pyharness.workload import point_named


def _command(**options: Any) -> Callable[[Callable[..., None]], Any]:
    """A task whose `SsmError`s are the user's: printed without a traceback, exit code 1."""

    def wrap(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                body(*args, **kwargs)
            except SsmError as error:
                raise Exit(f"error: {error}", code=1) from error

        return task(run, **options)

    return wrap


def _whole(option: str, text: str) -> int:
    # invoke itself answers a wrong number with a traceback, so options that are numbers arrive as text.
    try:
        return int(text or 0)
    except ValueError:
        raise Exit(f"error: --{option} must be a whole number, found {text!r}", code=1) from None


def _show(rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    print(json.dumps(rows, indent=2) if as_json else table(rows))


@_command(
    help={
        "dstate": "columns of the state, 1 to 1024",
        "family": "kernel family",
        "layout": "one layout, or all that the catalogue has for this d_state",
        "lanes": "lanes of a warp that share a row",
        "rows": "head_dim rows of a block",
        "warps": "warps of a block",
        "chunk": "tokens staged at a time",
        "io": "dtype of x, z, B, C, y: f32, bf16, f16",
        "state": "dtype of the stored state: f32, bf16, f16, i8",
        "arch": "targets, comma-separated; default: the GPUs present, else sm_80,sm_86,sm_90,sm_120",
        "jobs": "compilers at a time; default: one a core",
        "nvcc": "another nvcc than the pinned one",
        "json": "print JSON",
    }
)
def generate(
    _c: Context,
    dstate: str,
    family: str = "recurrent",
    layout: str = "",
    lanes: str = "",
    rows: str = "",
    warps: str = "",
    chunk: str = "",
    io: str = "f32",
    state: str = "f32",
    arch: str = "",
    jobs: str = "",
    nvcc: str = "",
    json_: bool = False,
) -> None:
    """Emit, compile and list kernels for a d_state; exit code 1 if one spills and is left out."""
    given = {"lanes": lanes, "rows": rows, "warps": warps, "chunk": chunk}
    sizes = {name: _whole(name, text) for name, text in given.items()}
    choice = builder.choose(_whole("dstate", dstate), family, layout=layout, io=io, state=state, **sizes)
    made = builder.generate(choice, builder.targets(arch), nvcc=nvcc, workers=_whole("jobs", jobs), track=Progress)
    if json_:
        sources = {name: path.relative_to(builder.ROOT).as_posix() for name, path in made.sources.items()}
        print(json.dumps({"images": made.listing(), "left_out": made.left_out, "sources": sources}, indent=2))
    else:
        if made.images:
            print(table(made.listing()))
        for what, why in made.left_out.items():
            print(f"left out: {what}: {why}")
        for folder in sorted({path.parent for path in made.sources.values()}):
            print(f"sources: {folder.relative_to(builder.ROOT)}/")
    if made.spilled:
        raise Exit(f"error: left out because they spill: {', '.join(made.spilled)}", code=1)


@_command(
    help={
        "check": "write nothing; fail if generated/ is not what comes out",
        "jobs": "compilers at a time; default: one a core",
        "json": "print JSON",
    }
)
def build(_c: Context, check: bool = False, jobs: str = "", json_: bool = False) -> None:
    """Compile the catalogue for every target and refresh generated/kernels and generated/manifest."""
    built = builder.build(check=check, workers=_whole("jobs", jobs), track=Progress)
    _show(built.listing(), json_)
    if not json_:
        for name, how in built.changed.items():
            print(f"refreshed: generated/{name} was {how}")
        print(f"{len(built.rows)} kernels, {len(built.images)} images, {len(built.changed)} files changed")


@_command(help={"gpu": "fail where the GPU tests cannot run"})
def test(_c: Context, gpu: bool = False) -> None:
    """Run the tests; the summary names what was skipped and why."""
    outcome = suite.run(gpu)
    print(outcome.summary())
    if outcome.code:
        raise Exit("tests failed", code=outcome.code)


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@_command(
    help={
        "family": "prove only kernels of this family",
        "sanitize": "also run compute-sanitizer's four tools over a small set",
        "bitwise": "also compare the bits of all configurations of update at 920 points",
        "device": "number of the GPU",
        "json": "print JSON",
    }
)
def vet(
    _c: Context,
    family: str = "",
    sanitize: bool = False,
    bitwise: bool = False,
    device: str = "0",
    json_: bool = False,
) -> None:
    """Prove the catalogue on a GPU against the oracle and store the proofs in generated/vetting."""
    document = vetting.vet(family or None, _whole("device", device), sanitize, _tell, bitwise)
    names = ("kernel", "cases", "worst", "worst_case", "registers", "dynamic_shared")
    _show([{name: proof[name] for name in names} for proof in document["images"].values()], json_)
    for tool, verdict in document["sanitizers"].items():
        _tell(f"{tool}: {verdict}")
    if bitwise:
        _tell(f"bits: the same at {document['bitwise']['points']} points")


@_command(
    help={
        "family": "the family whose table is measured",
        "kernels": "further kernel ids, comma-separated",
        "points": "measure these points, comma-separated, and keep the other stored rows",
        "peers": "also time other packages' kernels, where they are installed",
        "device": "number of the GPU",
        "readme": "measure nothing: bring README.md (figures, sample listing) and the selection table in line",
        "json": "print JSON",
    }
)
def bench(
    _c: Context,
    family: str = "recurrent",
    kernels: str = "",
    points: str = "",
    peers: bool = False,
    device: str = "0",
    readme: bool = False,
    json_: bool = False,
) -> None:
    """Time kernels on a GPU beside the ceilings and store the figures in generated/bench."""
    if readme:
        print("README.md changed" if report.write_readme(family) else "README.md is what is stored")
        selection.refresh()
        return
    extra = [name for name in kernels.split(",") if name]
    part = [point_named(name) for name in points.split(",") if name]
    document = measure.bench(family, part, extra, ordinal=_whole("device", device), progress=_tell, peers=peers)
    selection.refresh()
    _show(document["rows"] if json_ else report.listing(document["rows"]), json_)


@_command(
    name="select",
    help={
        "tokens": "tokens of the call, over all sequences",
        "sequences": "sequences of the call",
        "heads": "heads",
        "head_dim": "rows of a head",
        "dstate": "columns of the state",
        "groups": "groups of B and C",
        "io": "dtype of x, z, B, C, y: f32, bf16, f16",
        "state": "dtype of the stored state: f32, bf16, f16, i8",
        "family": "take only kernels of this family",
        "device": "a GPU that was measured and need not be here, such as H200; default: the GPU present",
        "arch": "target of a GPU that need not be here, such as sm_90",
        "explain": "tell why, and every step down",
        "json": "print JSON",
    },
)
def select_(
    _c: Context,
    tokens: str = "4096",
    sequences: str = "1",
    heads: str = "64",
    head_dim: str = "64",
    dstate: str = "128",
    groups: str = "8",
    io: str = "f32",
    state: str = "f32",
    family: str = "",
    device: str = "",
    arch: str = "",
    explain: bool = False,
    json_: bool = False,
) -> None:
    """Say which kernel runs a problem on the GPU present, on one that is named, or on none."""
    geometry = Geometry(
        tokens=_whole("tokens", tokens),
        sequences=_whole("sequences", sequences),
        heads=_whole("heads", heads),
        head_dim=_whole("head-dim", head_dim),
        groups=_whole("groups", groups),
        d_state=_whole("dstate", dstate),
    )
    features = selection.checked(selection.Features(geometry, io, state))
    where = selection.named_device(device, arch)
    if where is None:
        where = next((selection.Device(gpu.name, gpu.target) for gpu in gpus.driver().gpus), None)
    chosen = selection.choose(features, where, family=family or None)
    if json_:
        print(json.dumps({"id": chosen.id, "why": chosen.why, "steps": chosen.steps}, indent=2))
        return
    print(chosen.id)
    if explain:
        print("\n".join([chosen.why, *chosen.steps]))


@_command(
    name="go",
    help={
        "arch": "target of the GPU that will run it",
        "kernels": "kernel ids, comma-separated; default: the recurrent kernels of d_state 128 in f32 and bf16",
    },
)
def go_(_c: Context, arch: str = "sm_90", kernels: str = "") -> None:
    """Build the Go launch test with its kernels and golden vectors, to be run on a machine with a GPU."""
    target, *more = builder.targets(arch)
    if more:
        raise Exit(f"error: --arch must name one target, found {target}, {', '.join(more)}", code=1)
    binary = golden.build_go_test(golden.stage_go(target, [name for name in kernels.split(",") if name]))
    print(binary.relative_to(builder.ROOT))
    print(f"to run it, copy that one file to a machine with a GPU for {target}: ./{binary.name} -test.v")


@_command(help={"install-pycuda": "build and install PyCUDA and cuda-bindings first", "json": "print JSON"})
def doctor(_c: Context, install_pycuda: bool = False, json_: bool = False) -> None:
    """Print what is here and, for each thing missing, the command that brings it."""
    if install_pycuda:
        doctors.install_pycuda()
    _show([finding.row() for finding in doctors.examine()], json_)


@_command()
def lint(_c: Context) -> None:
    """Check style, types and formatting of Python, CUDA and Go, emitted sources among it."""
    failed = []
    for check in linter.run():
        print(f"{check.name}: {'failed' if check.found else 'ok'}")
        if check.found:
            failed.append(check.name)
            print(check.found)
            if check.cure:
                print(f"to mend it: {check.cure}")
    if failed:
        raise Exit(f"lint failed: {', '.join(failed)}", code=1)


@_command()
def clean(_c: Context) -> None:
    """Remove build/ and dist/: images, caches, packages."""
    for folder in builder.clean():
        print(f"removed {folder.relative_to(builder.ROOT)}/")


ns = Collection(generate, build, test, vet, bench, select_, go_, doctor, lint, clean)
