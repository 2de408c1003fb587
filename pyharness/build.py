"""From specs to files: what `invoke generate` and `invoke build` do.

Both compile everything before they write anything, so a refused source leaves the folders as they were.
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyharness import gpus, manifest, toolchain
from pyharness.catalogue import CATALOGUE
from pyharness.errors import ImageError, NoKernel, ToolchainError
from pyharness.families import FAMILIES
from pyharness.manifest import Row
from pyharness.render import render
from pyharness.spec import TARGETS, KernelSpec
from pyharness.toolchain import ROOT, Compiler, Image, Job, publish

GENERATED = ROOT / "generated"
BUILD = ROOT / "build"
#: What `generate` compiles for where there is no GPU: a data centre and a desktop card of each generation in use.
USUAL_TARGETS = ("sm_80", "sm_86", "sm_90", "sm_120")

#: Starts the progress of some steps; the result is a context manager whose `step(what)` counts one.
Track = Callable[[str, int], Any]


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, what: str) -> None:
        return None


def silent(label: str, total: int) -> _Silent:
    """A `Track` that shows nothing."""
    return _Silent()


def job(spec: KernelSpec, target: str) -> Job:
    """What to compile for a kernel and a target."""
    return Job(spec.id, render(spec), target, toolchain.flags(spec.family))


def image(spec: KernelSpec, target: str, nvcc: str | None = None) -> Image:
    """The image of a kernel for a target, from the cache or compiled into it.

    If the manifest has a row for this source, the image is the one that the row promises.

    Raises:
        NoKernel: the kernel has no image for the target; the message has the reason.
        ToolchainError: there is no compiler, or it refused the source.
        ImageError: the bytes are not those of the manifest.
    """
    reason = spec.excluded(target)
    if reason:
        raise NoKernel(f"{spec.id} has no image for {target}: {reason}")
    compiler = toolchain.find_compiler(nvcc)
    wanted = job(spec, target)
    made = toolchain.compile_cached(wanted, compiler)
    if spec.id in manifest.ids():
        row = manifest.read(spec.id)
        same = (row.source_sha256, row.compiler) == (manifest.source_sha256(wanted.source), compiler.version)
        if same and row.flags == list(wanted.flags):
            manifest.check(row, target, made.data)
    return made


def targets(arch: str = "") -> tuple[str, ...]:
    """Targets named in a comma-separated list, else those of the GPUs present, else the usual ones.

    Raises:
        NoKernel: a name is not a target.
    """
    if not arch:
        return tuple(dict.fromkeys(gpu.target for gpu in gpus.driver().gpus)) or USUAL_TARGETS
    names = tuple(dict.fromkeys(name.strip() for name in arch.split(",") if name.strip()))
    wrong = [name for name in names if name not in TARGETS]
    if wrong or not names:
        raise NoKernel(f"--arch must name some of {', '.join(TARGETS)}, found {', '.join(wrong) or repr(arch)}")
    return names


@dataclass(frozen=True)
class Choice:
    """Specs to generate, and the reason of each layout that cannot take the options."""

    specs: tuple[KernelSpec, ...]
    refused: dict[str, str]


def choose(
    d_state: int, family: str = "recurrent", *, layout: str = "", io: str = "f32", state: str = "f32", **sizes: int
) -> Choice:
    """The specs that some options mean.

    Without a layout: the catalogue's layouts for this d_state (or the family's default one), with `sizes` in place of
    the catalogue's own where any is given.

    Args:
        sizes: lanes, rows, warps, chunk; 0 takes the default.

    Raises:
        NoKernel: no such family, or no layout can take the options.
    """
    if family not in FAMILIES:
        raise NoKernel(f"family must be one of {', '.join(FAMILIES)}, found {family!r}")
    kind: type[Any] = FAMILIES[family]
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value}
    unknown = sorted(set(given) - set(inspect.signature(kind).parameters))
    if unknown:
        raise NoKernel(f"{family} kernels have no {', '.join(unknown)}")
    base: dict[str, Any] = {"d_state": 0 if layout == "generic" else d_state, "io": io, "state": state}
    if layout:
        return Choice((kind(**base, layout=layout, **given),), {})
    same = [s for s in CATALOGUE if (s.family, s.d_state, s.io, s.state) == (family, d_state, io, state)]
    if same and not given:
        return Choice(tuple(same), {})
    specs: dict[str, KernelSpec] = {}
    refused: dict[str, str] = {}
    layouts = dict.fromkeys(getattr(spec, "layout", "") for spec in same) or {"": None}
    for name in layouts:
        try:
            spec = kind(**base, **given, **({"layout": name} if name else {}))
        except NoKernel as error:
            if len(layouts) == 1:
                raise
            refused[name] = str(error).rpartition("}: ")[2]
        else:
            specs[spec.id] = spec
    if not specs:
        raise NoKernel("no layout takes these options\n" + "\n".join(f"{name}: {why}" for name, why in refused.items()))
    return Choice(tuple(specs.values()), refused)


@dataclass(frozen=True)
class Made:
    """What `generate` made.

    Attributes:
        images: those that were published.
        sources: by kernel, the source that was written.
        left_out: why there is no image, by layout or by kernel and target.
        spilled: those of `left_out` that were compiled and whose threads keep data in local memory.
    """

    images: tuple[Image, ...]
    specs: dict[str, KernelSpec]
    sources: dict[str, Path]
    left_out: dict[str, str]
    spilled: tuple[str, ...] = ()

    def listing(self) -> list[dict[str, Any]]:
        """A row an image: registers and spills are the most of any entry, sizes are bytes, "-" is not known yet."""
        return [
            {
                "id": image.name,
                "target": image.target,
                "registers": toolchain.worst([image], "registers") if image.usage else "-",
                "spills": toolchain.worst([image], "local_bytes") if image.usage else "-",
                "shared": toolchain.worst([image], "static_shared") + self.specs[image.name].shared_bytes,
                "bytes": len(image.data),
                "seconds": round(image.seconds, 2),
            }
            for image in self.images
        ]


def _write_if_changed(path: Path, data: bytes) -> bool:
    if path.is_file() and path.read_bytes() == data:
        return False
    publish(path, data)
    return True


def image_path(made: Image, build: Path = BUILD) -> Path:
    """Where an image is put."""
    return build / "images" / made.target / f"{made.name}.{made.kind}"


def _compile(
    specs: Sequence[KernelSpec], names: Sequence[str], compiler: Compiler, workers: int, track: Track, cache: Path
) -> list[Image]:
    jobs = [job(spec, target) for spec in specs for target in names if not spec.excluded(target)]
    with track("compile", len(jobs)) as progress:
        return toolchain.compile_many(
            jobs, compiler, workers=workers, cache=cache, done=lambda made: progress.step(f"{made.name} {made.target}")
        )


def generate(
    choice: Choice,
    names: Sequence[str],
    *,
    nvcc: str | None = None,
    workers: int = 0,
    track: Track = silent,
    generated: Path = GENERATED,
    build: Path = BUILD,
) -> Made:
    """Emit and compile kernels; sources go to generated/kernels if the catalogue has them, else to build/kernels.

    An image that spills is left out: a device would refuse it.

    Raises:
        NoKernel: no kernel has an image for any of the targets.
        ToolchainError: there is no compiler, or it refused a source.
    """
    left_out = {f"layout {name}": why for name, why in choice.refused.items()}
    left_out |= {f"{s.id} for {name}": s.excluded(name) for s in choice.specs for name in names if s.excluded(name)}
    if all(spec.excluded(name) for spec in choice.specs for name in names):
        raise NoKernel("nothing to compile\n" + "\n".join(f"{what}: {why}" for what, why in left_out.items()))
    compiler = toolchain.find_compiler(nvcc)
    images = _compile(choice.specs, names, compiler, workers, track, build / "cache")
    committed = {spec.id for spec in CATALOGUE}
    sources = {}
    for spec in choice.specs:
        folder = generated / "kernels" if spec.id in committed else build / "kernels"
        sources[spec.id] = folder / f"{spec.id}.cu"
        _write_if_changed(sources[spec.id], render(spec).encode())
    spilled = {}
    for made in images:
        path, local = image_path(made, build), toolchain.worst([made], "local_bytes")
        if local:
            spilled[f"{made.name} for {made.target}"] = f"spills {local} bytes a thread; use more lanes or fewer rows"
            path.unlink(missing_ok=True)
        else:
            _write_if_changed(path, made.data)
    kept = tuple(made for made in images if not toolchain.worst([made], "local_bytes"))
    return Made(kept, {spec.id: spec for spec in choice.specs}, sources, left_out | spilled, tuple(spilled))


def expected(rows: Sequence[Row], sources: Mapping[str, str]) -> dict[str, bytes]:
    """What generated/ has to hold, by path below it: sources and manifest."""
    kernels = {f"kernels/{name}.cu": source.encode() for name, source in sources.items()}
    return kernels | {f"manifest/{name}": data for name, data in manifest.files(rows).items()}


def differences(wanted: Mapping[str, bytes], generated: Path = GENERATED) -> dict[str, str]:
    """How generated/ differs from what it has to hold: missing, stale or extra files, by path below it."""
    found = {}
    for name, data in wanted.items():
        path = generated / name
        if not path.is_file():
            found[name] = "missing"
        elif path.read_bytes() != data:
            found[name] = "stale"
    there = [*generated.glob("kernels/*.cu"), *generated.glob("manifest/*.json")]
    extra = sorted({path.relative_to(generated).as_posix() for path in there} - set(wanted))
    return found | dict.fromkeys(extra, "not in the catalogue")


@dataclass(frozen=True)
class Built:
    """What `build` made: every row and image, and which files below generated/ it changed and how they were."""

    rows: tuple[Row, ...]
    images: tuple[Image, ...]
    changed: dict[str, str]

    def listing(self) -> list[dict[str, Any]]:
        """A row a kernel, with the most registers, local bytes and image bytes of any target."""
        return [
            {
                "id": row.id,
                "targets": len(row.targets),
                "registers": max(use["registers"] for t in row.targets.values() for use in t.usage.values()),
                "spills": max(use["local_bytes"] for t in row.targets.values() for use in t.usage.values()),
                "shared": max(target.dynamic_shared for target in row.targets.values()),
                "bytes": max(target.bytes for target in row.targets.values()),
                "seconds": round(sum(image.seconds for image in self.images if image.name == row.id), 2),
            }
            for row in self.rows
        ]


def build(
    *,
    check: bool = False,
    nvcc: str | None = None,
    workers: int = 0,
    track: Track = silent,
    catalogue: Sequence[KernelSpec] = CATALOGUE,
    generated: Path = GENERATED,
    build: Path = BUILD,
) -> Built:
    """Compile the catalogue for every target, and make generated/kernels and generated/manifest hold just that.

    Args:
        check: write nothing, and raise if what is committed is not what comes out.

    Raises:
        ToolchainError: the compiler is not the pinned version, or it refused a source.
        ImageError: a kernel spills, or, with `check`, generated/ is stale; the message names the files.
    """
    compiler = toolchain.find_compiler(nvcc)
    if compiler.version != toolchain.PINNED_VERSION:
        raise ToolchainError(
            f"the committed manifest is made with nvcc {toolchain.PINNED_VERSION}, found {compiler.version}: leave "
            f"--nvcc and NVCC out, or use `invoke generate`"
        )
    images = _compile(catalogue, TARGETS, compiler, workers, track, build / "cache")
    rows: list[Row] = []
    refused: list[str] = []
    for spec in catalogue:
        own = [made for made in images if made.name == spec.id]
        excluded = {target: spec.excluded(target) for target in TARGETS if spec.excluded(target)}
        try:
            rows.append(manifest.make_row(spec, render(spec), own, compiler, toolchain.flags(spec.family), excluded))
        except ImageError as error:
            refused.append(str(error))
    if refused:
        raise ImageError("\n".join(refused))
    wanted = expected(rows, {spec.id: render(spec) for spec in catalogue})
    changed = differences(wanted, generated)
    if check and changed:
        listed = "\n".join(f"generated/{name}: {how}" for name, how in changed.items())
        raise ImageError(f"generated/ is not what the templates emit: run `invoke build`\n{listed}")
    if not check:
        # Sources first and the index last, so that an interrupted build is found stale.
        for name in sorted(set(changed) & set(wanted), key=lambda name: (name.endswith(manifest.INDEX), name)):
            publish(generated / name, wanted[name])
        for name in set(changed) - set(wanted):
            (generated / name).unlink()
        kept = set()
        for made in images:
            path = image_path(made, build)
            _write_if_changed(path, made.data)
            kept.add(path)
        for path in set(build.glob("images/*/*")) - kept:
            path.unlink()
    return Built(tuple(sorted(rows, key=lambda row: row.id)), tuple(images), changed)


def clean(folders: Sequence[Path] = (BUILD, ROOT / "dist")) -> list[Path]:
    """Remove the ignored folders; returns those that were there."""
    there = [folder for folder in folders if folder.is_dir()]
    for folder in there:
        shutil.rmtree(folder)
    return there
