"""`invoke package`: images with their proof, the selection table, the Go module and the C headers in one archive.

The archive is the Go module and the plain files at once: its root holds go.mod, the Go sources, `catalogue/` (manifest,
selection, proofs), `images/<lane>/<target>/<family>/`, `kernels/` (sources) and `include/` (C). package.json lists
every file with its sha256, package.sha256 that of package.json.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyharness import (
    archive,
    args,
    build,
    c_package,
    flat_vectors,
    go_module,
    golden,
    grades,
    manifest,
    select,
    toolchain,
)
from pyharness.catalogue import CATALOGUE
from pyharness.errors import ImageError, NoKernel, SsmError
from pyharness.manifest import Row
from pyharness.oracle import oracle
from pyharness.render import render
from pyharness.spec import TARGETS, KernelSpec
from pyharness.toolchain import ROOT, Compiler, Image, publish

DIST = ROOT / "dist"
NAME = "ssmscan"
INDEX, INDEX_SHA = "package.json", "package.sha256"
SCHEMA = 1
#: The default package stays within this many bytes.
MOST_BYTES = 32 * 2**20
#: sha256 of the layout of ScanArgs by the major version of a package, 0 and 1 being one. Another is an ABI break.
LAYOUTS = {1: "a90d526d609dcd5284770aa6fa180a53fc3c92680dd4f84df11f01859dceb3cd"}
#: How ssmvet is built: no path of this machine, no symbols.
VET_FLAGS = ("-trimpath", "-ldflags=-s -w")
_EXAMPLES = ROOT / "examples"


def layout_sha256() -> str:
    """sha256 of the layout of ScanArgs."""
    return hashlib.sha256(manifest.dump(args.layout())).hexdigest()


def default_version(pyproject: Path = ROOT / "pyproject.toml") -> str:
    """The project's version as Go writes it."""
    found = re.search(r'^version = "(.*)"$', pyproject.read_text(encoding="utf-8"), re.MULTILINE)
    return f"v{found[1]}" if found else "v0.0.0"


def lane_name(compiler: Compiler) -> str:
    """The lane of what a compiler makes: cuda13, by its major version."""
    return f"cuda{compiler.version.split('.')[0]}"


def first_lane() -> str:
    """The lane of the committed manifest's images."""
    return f"cuda{toolchain.PINNED_VERSION.split('.')[0]}"


@dataclass(frozen=True)
class Lane:
    """The images of one CUDA major version.

    Attributes:
        rows: by id.
        images: by id and target; those that are left out are not among them.
        left_out: by id and target, why.
    """

    compiler: Compiler
    rows: dict[str, Row]
    images: dict[tuple[str, str], Image]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def facts(self) -> dict[str, Any]:
        """What lanes.json says of it: a driver loads all cubins of its major version, but no PTX newer than itself."""
        major, minor = map(int, self.compiler.version.split(".")[:2])
        return {
            "cuda": 1000 * major,
            "ptx": 1000 * major + 10 * minor,
            "min_driver": self.compiler.min_driver,
            "compiler": self.compiler.version,
        }


@dataclass(frozen=True)
class Package:
    """What `package` made.

    Attributes:
        files: of the archive, by path.
        paths: what was written.
        left_out: by image, why it is not in the package.
        sizes: a row a family and target: images and bytes, and a row of the whole.
        grades: a row an image with its grade.
    """

    name: str
    files: dict[str, bytes]
    paths: tuple[Path, ...]
    left_out: dict[str, str]
    sizes: list[dict[str, Any]]
    grades: list[dict[str, Any]]


def _images(
    specs: Sequence[KernelSpec], names: Sequence[str], compiler: Compiler, workers: int, track: build.Track, cache: Path
) -> dict[tuple[str, str], Image]:
    jobs = [build.job(spec, target) for spec in specs for target in names if not spec.excluded(target)]
    label = f"images by nvcc {compiler.version}"
    with track(label, len(jobs)) as progress:
        made = toolchain.compile_many(
            jobs, compiler, workers=workers, cache=cache, done=lambda one: progress.step(f"{one.name} {one.target}")
        )
    return {(image.name, image.target): image for image in made}


def pinned_lane(
    specs: Sequence[KernelSpec], names: Sequence[str], workers: int, track: build.Track, cache: Path
) -> Lane:
    """The lane of the committed manifest: every image is the one that its row promises.

    Raises:
        ImageError: generated/ is not what comes out: run `invoke build`.
        ToolchainError: there is no compiler.
    """
    compiler = toolchain.find_compiler()
    if compiler.version != toolchain.PINNED_VERSION:
        raise ImageError(
            f"the package's first lane is made with nvcc {toolchain.PINNED_VERSION}, found {compiler.version}: "
            f"unset NVCC"
        )
    rows = {spec.id: manifest.read(spec.id) for spec in specs}
    images = _images(specs, names, compiler, workers, track, cache)
    for (kernel, target), image in images.items():
        manifest.check(rows[kernel], target, image.data)
    return Lane(compiler, rows, images)


def second_compiler(nvcc: str, targets: Sequence[str]) -> Compiler:
    """The compiler of a second lane.

    Raises:
        SsmError: it is of the first lane's major version.
        ToolchainError: there is no such compiler, or it does not know a target.
    """
    compiler = toolchain.find_compiler(nvcc)
    if compiler.version.split(".")[0] == toolchain.PINNED_VERSION.split(".")[0]:
        raise SsmError(
            f"--nvcc makes a second lane, for older drivers: an nvcc of another major version than "
            f"{toolchain.PINNED_VERSION} was wanted, such as 12.9, found {compiler.version}"
        )
    toolchain.check_targets(compiler, targets)
    return compiler


def second_lane(
    specs: Sequence[KernelSpec], names: Sequence[str], compiler: Compiler, workers: int, track: build.Track, cache: Path
) -> Lane:
    """A lane of another CUDA major version, for drivers that do not load the first; kernels that spill are left out.

    Raises:
        ToolchainError: the compiler refused a source.
    """
    images = _images(specs, names, compiler, workers, track, cache)
    rows: dict[str, Row] = {}
    left_out: dict[str, str] = {}
    for spec in specs:
        own = [image for (kernel, _), image in images.items() if kernel == spec.id]
        whole = [image for image in own if not toolchain.worst([image], "local_bytes")]
        spilled = {image.target: f"spills with nvcc {compiler.version}" for image in own if image not in whole}
        left_out |= {f"{spec.id} for {target} ({lane_name(compiler)})": why for target, why in spilled.items()}
        if not whole:
            continue
        excluded = {target: spec.excluded(target) for target in TARGETS if spec.excluded(target)} | spilled
        rows[spec.id] = manifest.make_row(spec, render(spec), whole, compiler, toolchain.flags(spec.family), excluded)
    kept = {key: image for key, image in images.items() if key[0] in rows and key[1] in rows[key[0]].targets}
    return Lane(compiler, rows, kept, left_out)


def graded(lane: Lane, proofs: grades.Proofs, include_unproven: bool) -> Lane:
    """A lane without the images that nothing proves, which are named with the command that proves them."""
    if include_unproven:
        return lane
    images: dict[tuple[str, str], Image] = {}
    left_out = dict(lane.left_out)
    for (kernel, target), image in lane.images.items():
        if proofs.grade(lane.rows[kernel], target).level == "unproven":
            left_out[f"{kernel} for {target} ({lane_name(lane.compiler)})"] = (
                "unproven: run `invoke vet --emulator` or, on a GPU, `invoke vet`; or pass --include-unproven"
            )
        else:
            images[kernel, target] = image
    rows = {kernel: row for kernel, row in lane.rows.items() if any(kernel == name for name, _ in images)}
    return Lane(lane.compiler, rows, images, left_out)


def image_path(lane: str, row: Row, target: str) -> str:
    """Where a package has an image."""
    return f"images/{lane}/{target}/{row.family}/{row.id}.{row.targets[target].kind}"


def _grade_document(grade: grades.Grade) -> dict[str, Any]:
    fields = {name: value for name, value in dataclasses.asdict(grade).items() if name != "level"}
    return fields if grade.level == "device" else {name: fields[name] for name in ("cases", "worst")}


def _catalogue(lanes: Mapping[str, Lane], proofs: grades.Proofs) -> dict[str, bytes]:
    images, sources = {}, {}
    files: dict[str, bytes] = {}
    for name, lane in lanes.items():
        files |= {f"{name}/manifest/{path}": data for path, data in manifest.files(list(lane.rows.values())).items()}
        for kernel, target in lane.images:
            row = lane.rows[kernel]
            grade = proofs.grade(row, target)
            if grade.level == "device":
                images[row.targets[target].sha256] = _grade_document(grade)
            if row.source_sha256 in proofs.sources:
                sources[row.source_sha256] = _grade_document(proofs.sources[row.source_sha256])
    table = select.table_document(select.committed_table())
    files["lanes.json"] = manifest.dump({name: lane.facts for name, lane in lanes.items()})
    files["proofs.json"] = manifest.dump({"images": images, "sources": sources})
    files["selection.json"] = manifest.dump(table)
    return {f"catalogue/{path}": data for path, data in files.items()}


def _image_files(lanes: Mapping[str, Lane], module: str) -> dict[str, bytes]:
    """The images, the Go package of each lane, target and family, and the lists that ssmvet and the example import."""
    files: dict[str, bytes] = {}
    kinds: dict[tuple[str, str, str], set[str]] = {}
    for name, lane in lanes.items():
        for (kernel, target), image in lane.images.items():
            row = lane.rows[kernel]
            files[image_path(name, row, target)] = image.data
            kinds.setdefault((name, target, row.family), set()).add(image.kind)
    packages = {}
    for (name, target, family), endings in kinds.items():
        folder = f"images/{name}/{target}/{family}"
        files[f"{folder}/images.go"] = go_module.images_package(module, name, target, family, endings)
        packages[folder] = f"{name}_{target}_{family}"
    files["cmd/ssmvet/images.go"] = go_module.every_image(module, packages)
    cubins = {path: used for path, used in packages.items() if "/compute_" not in path}
    files["examples/go/images.go"] = go_module.every_image(module, cubins)
    return files


def _kernel_files(lanes: Mapping[str, Lane], proofs: grades.Proofs) -> dict[str, bytes]:
    """Sources with their launchers, and the C headers."""
    files: dict[str, bytes] = {}
    for row in {kernel: row for lane in lanes.values() for kernel, row in lane.rows.items()}.values():
        files[f"kernels/{row.id}.cu"] = render(row.kernel).encode()
        files[f"kernels/{row.id}.launch.cu"] = c_package.launcher(row)
    shipped = {
        (name, kernel): [target for target in TARGETS if (kernel, target) in lane.images]
        for name, lane in lanes.items()
        for kernel in lane.rows
    }
    headers = c_package.headers() | {
        "ssmscan_tables.h": c_package.tables(
            {name: lane.facts for name, lane in lanes.items()},
            {name: lane.rows for name, lane in lanes.items()},
            shipped,
            select.committed_table(),
            proofs,
        )
    }
    return files | {f"include/{name}": data for name, data in headers.items()}


def _golden_files() -> dict[str, bytes]:
    return {
        f"ssmtest/testdata/{vector.name}.golden": golden.encode(vector, oracle(vector.problem))
        for vector in golden.vectors(golden.SMALL_D_STATE)
    }


def _example_files(module: str) -> dict[str, bytes]:
    """The examples, with the flat vectors that the one in C reads."""
    found = {}
    for path in sorted(path for folder in ("c", "go") for path in (_EXAMPLES / folder).rglob("*")):
        if path.is_file():
            text = path.read_text(encoding="utf-8").replace(go_module.PLACEHOLDER, module)
            found[f"examples/{path.relative_to(_EXAMPLES).as_posix()}"] = go_module.licensed(path.name, text).encode()
    for vector in (*golden.vectors(golden.SMALL_D_STATE, ("f32",)), *map(golden.prompt, flat_vectors.IO)):
        found[f"examples/c/vectors/{vector.name}.flat"] = flat_vectors.encode(vector)
    return found


def _index(name: str, module: str, version: str, lanes: Mapping[str, Lane], files: Mapping[str, bytes]) -> bytes:
    return manifest.dump(
        {
            "schema": SCHEMA,
            "name": name,
            "module": module,
            "version": version,
            "args_bytes": args.SCAN_ARGS.itemsize,
            "args_sha256": layout_sha256(),
            "lanes": {lane: made.facts for lane, made in lanes.items()},
            "files": {
                path: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for path, data in files.items()
            },
        }
    )


def check_abi(version: str) -> None:
    """Check that the layout of ScanArgs is the one of a package's major version.

    Raises:
        SsmError: it is another: an ABI break is a new major version.
    """
    major = max(int(version.removeprefix("v").split(".")[0]), 1)
    if LAYOUTS.get(major) != layout_sha256():
        known = ", ".join(f"v{number}" for number, sha in LAYOUTS.items() if sha == layout_sha256()) or "none"
        raise SsmError(
            f"--version {version}: the layout of ScanArgs is not that of major version {major} but of {known}: "
            f"an ABI break is a new major version, added to LAYOUTS in pyharness/package.py"
        )


def contents(module: str, version: str, lanes: Mapping[str, Lane], proofs: grades.Proofs) -> dict[str, bytes]:
    """Every file of a package by path, package.json first.

    Raises:
        SsmError: the module path, the version or the ABI is malformed.
    """
    go_module.check_names(module, version)
    check_abi(version)
    files = go_module.sources(module)
    files |= _catalogue(lanes, proofs) | _image_files(lanes, module) | _kernel_files(lanes, proofs)
    files |= _golden_files() | _example_files(module)
    files["LICENSE"] = (ROOT / "LICENSE").read_bytes()
    page = (ROOT / "docs" / "embedding.md").read_text(encoding="utf-8").replace(go_module.PLACEHOLDER, module)
    files["README.md"] = go_module.licensed("README.md", page).encode()
    files = dict(sorted(files.items()))
    index = _index(f"{NAME}-{version}", module, version, lanes, files)
    first = {INDEX: index, INDEX_SHA: f"{hashlib.sha256(index).hexdigest()}  {INDEX}\n".encode()}
    return first | files


def sizes(lanes: Mapping[str, Lane]) -> list[dict[str, Any]]:
    """A row a lane, family and target: images and their bytes."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for name, lane in lanes.items():
        for target in TARGETS:
            for (kernel, made_for), image in lane.images.items():
                if made_for == target:
                    found.setdefault((name, lane.rows[kernel].family, target), []).append(len(image.data))
    return [
        {"lane": lane, "family": family, "target": target, "images": len(each), "bytes": sum(each)}
        for (lane, family, target), each in found.items()
    ]


def _escaped(module: str) -> str:
    """A module path in a proxy's tree: capital letters as an exclamation mark and a small one."""
    return re.sub(r"[A-Z]", lambda letter: f"!{letter[0].lower()}", module)


def _publish(dist: Path, name: str, module: str, version: str, files: Mapping[str, bytes]) -> list[Path]:
    """Write the archive and the proxy's tree; the list of versions comes last."""
    proxy = dist / "goproxy" / _escaped(module) / "@v"
    info = json.dumps({"Version": version}).encode()
    versions = sorted({path.stem for path in proxy.glob("*.info")} | {version})
    wanted = {
        dist / f"{name}.tar.gz": archive.pack(files, name),
        proxy / f"{version}.zip": archive.module_zip(files, module, version),
        proxy / f"{version}.mod": files["go.mod"],
        proxy / f"{version}.info": info,
        proxy / "list": "".join(f"{one}\n" for one in versions).encode(),
    }
    for path, data in wanted.items():
        publish(path, data)
    return list(wanted)


def write_tree(files: Mapping[str, bytes], folder: Path) -> Path:
    """Files as a folder; what was in it is removed."""
    if folder.exists():
        shutil.rmtree(folder)
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def build_vet(files: Mapping[str, bytes]) -> bytes:
    """The binary ssmvet of a package, which needs libc alone and, to do more than say so, a GPU.

    Raises:
        ToolchainError: go or gcc is missing or refused the sources.
    """
    with tempfile.TemporaryDirectory(prefix="ssm-") as name:
        folder = write_tree(files, Path(name) / "package")
        golden.run_go(["build", *VET_FLAGS, "-tags", "cuda", "-o", "ssmvet", "./cmd/ssmvet"], folder, cgo=True)
        return (folder / "ssmvet").read_bytes()


def package(
    arch: str = "",
    family: str = "",
    module: str = go_module.PLACEHOLDER,
    version: str = "",
    *,
    nvcc: str = "",
    include_unproven: bool = False,
    vet_binary: bool = True,
    workers: int = 0,
    track: build.Track = build.silent,
    catalogue: Sequence[KernelSpec] = CATALOGUE,
    dist: Path = DIST,
) -> Package:
    """Make the archive, the file tree of a Go module proxy, and the binary ssmvet.

    Args:
        arch: targets, comma-separated; all by default.
        family: families, comma-separated; all by default.
        module: path of the Go module.
        version: of the package, v1.2.3; the project's by default.
        nvcc: of another CUDA major version: makes a second lane, for older drivers.
        include_unproven: also images that nothing proves.
        vet_binary: also build ssmvet.
        workers: compilers at a time; 0 is one for each core.
        track: shows progress.
        catalogue: the kernels.
        dist: where to write. Nothing is written before everything is made.

    Raises:
        SsmError: an option is malformed, generated/ is stale, a tool is missing, or the package is too large.
    """
    version = version or default_version()
    go_module.check_names(module, version)
    check_abi(version)
    names = build.targets(arch) if arch else TARGETS
    families = [word.strip() for word in family.split(",") if word.strip()]
    specs = [spec for spec in catalogue if not families or spec.family in families]
    missing = sorted(set(families) - {spec.family for spec in catalogue})
    if missing or not specs:
        known = ", ".join(sorted({spec.family for spec in catalogue}))
        raise NoKernel(f"--family must name some of {known}, found {', '.join(missing) or repr(family)}")
    cache = toolchain.CACHE
    other = second_compiler(nvcc, names) if nvcc else None  # refused before anything is compiled
    made = [pinned_lane(specs, names, workers, track, cache)]
    if other is not None:
        made.append(second_lane(specs, names, other, workers, track, cache))
    proofs = grades.stored()
    made = [graded(lane, proofs, include_unproven) for lane in made]
    lanes = {lane_name(lane.compiler): lane for lane in made if lane.images}
    left_out = {what: why for lane in made for what, why in lane.left_out.items()}
    if not lanes:
        raise NoKernel("nothing to pack\n" + "\n".join(f"{what}: {why}" for what, why in left_out.items()))
    files = contents(module, version, lanes, proofs)
    name = f"{NAME}-{version}"
    packed = len(archive.pack(files, name))
    if packed > MOST_BYTES:
        raise SsmError(
            f"a package of at most {MOST_BYTES} bytes was wanted, found {packed}: name fewer targets with --arch or "
            f"fewer families with --family"
        )
    binary = build_vet(files) if vet_binary else b""
    paths = _publish(dist, name, module, version, files)
    if vet_binary:
        publish(dist / "ssmvet", binary)
        (dist / "ssmvet").chmod(0o755)
        paths.append(dist / "ssmvet")
    table = sizes(lanes)
    images = sum(row["images"] for row in table)
    table.append(
        {"lane": "all", "family": "", "target": "", "images": images, "bytes": sum(row["bytes"] for row in table)}
    )
    table.append({"lane": "archive", "family": "", "target": "", "images": images, "bytes": packed})
    marked = [
        {"kernel": kernel, "target": target, "lane": lane, "grade": str(proofs.grade(made_lane.rows[kernel], target))}
        for lane, made_lane in lanes.items()
        for kernel, target in made_lane.images
    ]
    return Package(name, files, tuple(paths), left_out, table, marked)
