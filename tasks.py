"""The command line: `uv run invoke --list` shows it. Each task calls one function of pyharness and prints."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from invoke import Collection, Context, Exit, task

from pyharness import build as builder
from pyharness import doctor as doctors
from pyharness import (
    emulator_proof,
    figures,
    go_module,
    golden,
    gpus,
    history,
    launch_cost,
    logits_table,
    models_table,
    package_sizes,
    proof,
    readme_tables,
    regressions,
    replay,
    suites,
)
from pyharness import explain as explaining
from pyharness import fuzz as fuzzing
from pyharness import lint as linter
from pyharness import merge as merging
from pyharness import package as packing
from pyharness import report as reports
from pyharness import select as selection
from pyharness import suite as testing
from pyharness import tune as tuning
from pyharness import verify as verifying
from pyharness import vet as vetting
from pyharness.errors import SsmError
from pyharness.listing import Progress, table
from pyharness.report import pictures
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
        for folder in sorted({builder.image_path(image).parent for image in made.images}):
            print(f"images: {folder.relative_to(builder.ROOT)}/")
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


@_command(
    help={
        "gpu": "fail where the GPU tests cannot run",
        "store": "keep how the GPU tests ended and show it in docs/proof.md; with --gpu",
    }
)
def test(_c: Context, gpu: bool = False, store: bool = False) -> None:
    """Run the tests; the summary names what was skipped and why."""
    if store and not gpu:
        raise Exit("error: --store keeps how GPU tests ended: --gpu was wanted beside it, found none", code=1)
    outcome = testing.run(gpu)
    print(outcome.summary())
    if store:
        testing.store_gpu()
        proof.write_page()
    if outcome.code:
        raise Exit("tests failed", code=outcome.code)


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


@_command(
    help={
        "family": "prove only kernels of this family",
        "sanitize": "also run compute-sanitizer's four tools over a small set",
        "bitwise": "also compare the bits of all configurations of update at 920 points",
        "emulator": "prove sources in the emulator instead of images on a GPU: those that have no proof yet",
        "device": "number of the GPU",
        "json": "print JSON",
    }
)
def vet(
    _c: Context,
    family: str = "",
    sanitize: bool = False,
    bitwise: bool = False,
    emulator: bool = False,
    device: str = "0",
    json_: bool = False,
) -> None:
    """Prove the catalogue on a GPU or in the emulator; the proofs are kept in generated/vetting."""
    if emulator:
        proven = emulator_proof.vet_on_emulator(family or None, progress=_tell)
        _show(sorted(proven["sources"].values(), key=lambda source: source["kernel"]), json_)
        return
    document = vetting.vet(family or None, _whole("device", device), sanitize, _tell, bitwise)
    names = ("kernel", "cases", "worst", "worst_case", "registers", "dynamic_shared")
    _show([{name: proof[name] for name in names} for proof in document["images"].values()], json_)
    for tool, verdict in document["sanitizers"].items():
        _tell(f"{tool}: {verdict}")
    if bitwise:
        _tell(f"bits: the same at {document['bitwise']['points']} points")


@_command(
    optional=["against"],
    help={
        "suite": f"suites, comma-separated: {', '.join(suite.name for suite in suites.SUITES)}; default: all",
        "family": "only suites that time this family",
        "kernels": "further kernel ids, comma-separated",
        "points": "measure these points, comma-separated, and keep the other stored rows",
        "peers": "also time other packages' kernels, those that import; the reason of each other one is shown",
        "against": "say what changed beyond the spread: against what is stored, or against a file or folder of figures",
        "fail_slower": "exit code 1 if a kernel got slower, beyond the spread and by more than, say, 5%",
        "device": "number of the GPU",
        "readme": "measure nothing: bring README.md (figures, plots, sample listing) and the selection table in line",
        "json": "print JSON",
    },
)
def bench(
    _c: Context,
    suite: str = "",
    family: str = "",
    kernels: str = "",
    points: str = "",
    peers: bool = False,
    against: str = "",
    fail_slower: str = "",
    device: str = "0",
    readme: bool = False,
    json_: bool = False,
) -> None:
    """Time kernels on a GPU beside the ceilings and store the figures in generated/bench."""
    part = [point_named(name) for name in points.split(",") if name]
    chosen = suites.chosen(suite, family, part)
    if readme:
        history.mark_stored()
        # Figures of whole models are the examples', not a suite's.
        names = [one.stored for one in chosen] + ([] if suite or family else [models_table.SUITE, logits_table.SUITE])
        changed = [name for name in names if figures.has(name) and readme_tables.write_page(name)]
        changed += ["plots"] if reports.write_readme_plots() else []
        changed += ["pictures"] if pictures.refresh(reports.page(), reports.DOCS) else []
        print(f"changed: {', '.join(changed)}" if changed else "README.md and docs/ are what is stored")
        selection.refresh()
        return
    share = regressions.percentage(fail_slower) if fail_slower else 0.0
    extra = [name for name in kernels.split(",") if name]
    slower, lines = [], []
    for one in chosen:
        # A plain --against arrives as True. What is stored is read before it is replaced.
        earlier = regressions.earlier(one.stored, against, _whole("device", device)) if against or fail_slower else None
        document = suites.run(one, part, extra, _whole("device", device), Progress, peers)
        rows = launch_cost.listing(document) if one.stored == launch_cost.SUITE else figures.listing(document["rows"])
        lines += [document] if json_ else [table(rows)]
        if earlier is not None:
            found = regressions.changes(earlier, document)
            slower += regressions.failing(found, share)
            for line in regressions.report(found):
                _tell(line)
    selection.refresh()
    print(json.dumps(lines, indent=2) if json_ else "\n\n".join(lines))
    if fail_slower and slower:
        named = "; ".join(map(str, slower))
        raise Exit(f"error: {len(slower)} timings got slower by more than {fail_slower}: {named}", code=1)


@_command(
    help={
        "out": "where the page goes; default: dist/report.html",
        "shots": "also make the pictures of docs/ anew; needs Chromium",
    }
)
def report(_c: Context, out: str = "", shots: bool = False) -> None:
    """Make one HTML page of what is stored: timings beside peers and ceilings, proofs, resources, sizes."""
    written = [reports.write(Path(out) if out else reports.PAGE)]
    written += pictures.take(reports.page(), reports.DOCS) if shots else []
    for path in written:
        print(path.relative_to(builder.ROOT) if path.is_relative_to(builder.ROOT) else path)


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
        "invariant": "choose by geometry and a sequence's own length alone, so that bits do not change with the batch",
        "explain": "tell why and every step down, the grade, the expected time and the runners-up",
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
    invariant: bool = False,
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
    told = explaining.explain(features, where, family=family or None, invariant=invariant)
    if json_:
        print(json.dumps(told.document(), indent=2))
        return
    print(told.selection.id)
    if explain:
        print("\n".join(told.lines()))


@_command(
    help={
        "family": "measure only kernels of this family",
        "points": "points of the grid, comma-separated; default: all",
        "again": "measure also what the record holds",
        "table": "measure nothing: write the selection table from what is stored",
        "device": "number of the GPU",
        "json": "print JSON",
    }
)
def tune(
    _c: Context,
    family: str = "",
    points: str = "",
    again: bool = False,
    table: bool = False,
    device: str = "0",
    json_: bool = False,
) -> None:
    """Measure kernels over a grid of problems on a GPU, resumably, and write the selection table."""
    if not table:
        named = [name for name in points.split(",") if name]
        ordinal = _whole("device", device)
        record = tuning.tune(family or None, named, again=again, ordinal=ordinal, track=Progress)
        _show(tuning.winners(record), json_)
    written = tuning.write_table()
    tuning.write_page()
    _tell(f"generated/selection.json: {len(written.entries)} entries")


@_command(
    name="package",
    help={
        "arch": "targets, comma-separated; default: all",
        "family": "families, comma-separated; default: all",
        "module": "path of the Go module",
        "version": "version of the package, v1.2.3; default: the project's",
        "nvcc": "an nvcc of another CUDA major version, such as 12.9: adds a lane for older drivers",
        "include_unproven": "also pack images that nothing proves",
        "merge": "pack nothing: take in a file of proofs that ssmvet wrote on another card",
        "jobs": "compilers at a time; default: one a core",
        "json": "print JSON",
    },
)
def package_(
    _c: Context,
    arch: str = "",
    family: str = "",
    module: str = go_module.PLACEHOLDER,
    version: str = "",
    nvcc: str = "",
    include_unproven: bool = False,
    merge: str = "",
    jobs: str = "",
    json_: bool = False,
) -> None:
    """Pack images, proofs, the selection table, the Go module and the C headers into dist/."""
    if merge:
        where, count = merging.merge(Path(merge))
        print(f"{where.relative_to(builder.ROOT)}: {count} images proven")
        return
    made = packing.package(
        arch,
        family,
        module,
        version,
        nvcc=nvcc,
        include_unproven=include_unproven,
        workers=_whole("jobs", jobs),
        track=Progress,
    )
    if not (arch or family or nvcc or include_unproven):
        package_sizes.keep(package_sizes.document(made))
    if json_:
        written = [path.relative_to(builder.ROOT).as_posix() for path in made.paths]
        print(
            json.dumps(
                {"sizes": made.sizes, "images": made.grades, "left_out": made.left_out, "files": written}, indent=2
            )
        )
        return
    print(table(made.grades))
    print(table(made.sizes))
    for what, why in made.left_out.items():
        print(f"left out: {what}: {why}")
    for path in made.paths:
        print(path.relative_to(builder.ROOT))


@_command(name="verify", positional=["file"], help={"file": "an archive of invoke package, or its folder"})
def verify_(_c: Context, file: str) -> None:
    """Check a package: every byte, every image against its manifest row, and the ABI."""
    whole = verifying.verify(Path(file))
    print(f"{whole.name}: whole, {whole.files} files, {whole.rows} kernels, {whole.images} images")


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


def _place(backend: str) -> tuple[str, dict[str, Any]]:
    """Under which name results of a backend are stored, and what is said of it there."""
    if backend != "gpu":
        return replay.EMULATOR, {}
    about = gpus.about_run()
    return figures.device_slug(about["device"]), about


@_command(
    help={
        "backend": "emulator (heads and batch cut) or gpu (in full)",
        "family": "only kernels of this family; what is stored of others is kept",
        "jobs": "processes; default: one a core",
        "page": "run nothing: bring docs/proof.md in line with what is stored",
        "json": "print JSON",
    }
)
def peers(
    _c: Context,
    backend: str = replay.EMULATOR,
    family: str = "",
    jobs: str = "",
    page: bool = False,
    json_: bool = False,
) -> None:
    """Replay the test suites of other packages on our kernels, store the table and show it in docs/proof.md."""
    if page:
        print("docs/proof.md changed" if proof.write_page() else "docs/proof.md is what is stored")
        return
    fuzzing.require_backend(backend)
    rows, failed = replay.replay_all(backend, [family] if family else [], _whole("jobs", jobs), _tell)
    _show([vars(row) for row in rows], json_)
    if failed:
        raise Exit(f"error: {len(failed)} cases failed, nothing is stored; the first: {failed[0]}", code=1)
    place, about = _place(backend)
    replay.store(place, rows, about)
    proof.write_page()


@_command(
    help={
        "minutes": "how long",
        "problems": "stop after so many as well",
        "seed": "the same seed draws the same problems",
        "backend": "emulator or gpu",
        "family": "only kernels of this family",
        "store": "add the run to those of docs/proof.md",
        "replay": "run one failure again: a file that an earlier run wrote",
        "json": "print JSON",
    }
)
def fuzz(
    _c: Context,
    minutes: str = "1",
    problems: str = "",
    seed: str = "0",
    backend: str = "",
    family: str = "",
    store: bool = False,
    replay: str = "",
    json_: bool = False,
) -> None:
    """Draw hostile problems, compare a backend with the oracle, and write what fails to build/fuzz."""
    if replay:
        kernel, found = fuzzing.replay(Path(replay), backend or None)
        print(f"{kernel}: {found or 'right'}")
        if found:
            raise Exit("it still fails", code=1)
        return
    where = backend or "emulator"
    tally = fuzzing.fuzz(
        _whole("minutes", minutes), _whole("seed", seed), where, family or None, _whole("problems", problems), _tell
    )
    _show(tally.rows(), json_)
    if store:
        proof.store_fuzz(_place(where)[0], tally)
        proof.write_page()
    if tally.failures:
        raise Exit(f"{len(tally.failures)} failures, to be run again with invoke fuzz --replay FILE", code=1)


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


ns = Collection(
    *(generate, build, test, vet, tune, bench, report, select_, package_, verify_, go_),
    *(peers, fuzz, doctor, lint, clean),
)
