"""The manifest: one row a kernel that says what its images are, so that any of them can be checked before it runs.

generated/manifest/<id>.json holds a row and generated/manifest/index.json the sha256 of each row. Keys are sorted,
lines end in LF, and nothing in them depends on the machine or the hour: what is committed is what `invoke build`
makes anywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyharness import args
from pyharness.errors import ImageError
from pyharness.spec import KernelSpec, parse_id
from pyharness.toolchain import ROOT, Compiler, Image, Usage

FOLDER = ROOT / "generated" / "manifest"
INDEX = "index.json"
#: Raised when a reader of the old form could misread the new one.
SCHEMA = 1
_WIDTH = 120


@dataclass(frozen=True)
class TargetImage:
    """What the image of one target is.

    Attributes:
        kind: "cubin" or "ptx".
        bytes: its size.
        dynamic_shared: bytes that a launch asks for; the largest where a launch decides.
        usage: by symbol: registers a thread, static shared and local bytes; empty for PTX, whose driver decides.
    """

    kind: str
    bytes: int
    sha256: str
    dynamic_shared: int
    usage: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Row:
    """All that is known of one kernel before it runs.

    Attributes:
        spec: the fields that make the `KernelSpec`.
        entries: `extern "C"` symbols of a module.
        args_bytes: size of ScanArgs.
        args: name, offset and type of its fields, as `pyharness.args.layout` gives them.
        block: threads; the largest where a launch decides.
        grid: the named rule that makes a plan, with its integers: see `pyharness.plans`.
        limits: least and greatest of the sizes that it takes, as `KernelSpec.limits` has them.
        default: whether every field but d_state, io and state has its default, which selection falls back on.
        targets: by target, each of `pyharness.spec.TARGETS` that is not excluded.
        excluded: by target, why it has no image.
        compiler: version of nvcc.
        min_driver: first driver branch that loads the images.
        numerics_revision: raised whenever the same inputs give other bits.
    """

    id: str
    family: str
    spec: dict[str, Any]
    entries: list[str]
    args_bytes: int
    args: list[dict[str, int | str]]
    block: int
    grid: dict[str, Any]
    limits: dict[str, list[int]]
    default: bool
    targets: dict[str, TargetImage]
    excluded: dict[str, str]
    source_sha256: str
    compiler: str
    flags: list[str]
    min_driver: str
    numerics_revision: int
    schema: int = SCHEMA

    @property
    def kernel(self) -> KernelSpec:
        """The spec that this row describes."""
        return parse_id(self.id)


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "registers": usage.registers,
        "static_shared": usage.static_shared,
        "local_bytes": usage.local_bytes,
    }


def source_sha256(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def make_row(
    spec: KernelSpec,
    source: str,
    images: Sequence[Image],
    compiler: Compiler,
    flags: Sequence[str],
    excluded: Mapping[str, str],
) -> Row:
    """The row of a kernel from its images, one a target.

    Raises:
        ImageError: an image has other entries than the rest, or a thread keeps data in local memory.
    """
    entries: list[str] = []
    local: list[str] = []
    for image in images:
        if image.kind != "cubin":
            continue
        found = sorted(image.usage)
        if not found or any(not symbol.startswith(spec.symbol()) for symbol in found) or found != (entries or found):
            wanted = ", ".join(entries) or f"{spec.symbol()} and its entries"
            raise ImageError(
                f"{spec.id} for {image.target}: the entries {wanted} were wanted, found {', '.join(found)}"
            )
        entries = found
        local += [
            f"{use.local_bytes} bytes a thread at {use.registers} registers for {image.target}"
            for use in image.usage.values()
            if use.local_bytes
        ]
    if local:
        raise ImageError(
            f"{spec.id}: no local memory was wanted, found {', '.join(local)}: give a lane fewer elements or a block "
            f"fewer threads"
        )
    return Row(
        id=spec.id,
        family=spec.family,
        spec=spec.fields(),
        entries=entries,
        args_bytes=args.SCAN_ARGS.itemsize,
        args=args.layout(),
        block=spec.threads,
        grid=spec.grid_rule,
        limits=spec.limits,
        default=spec.takes_defaults,
        targets={
            image.target: TargetImage(
                image.kind,
                len(image.data),
                image.sha256,
                spec.shared_bytes,
                {symbol: _usage(usage) for symbol, usage in image.usage.items()},
            )
            for image in images
        },
        excluded=dict(excluded),
        source_sha256=source_sha256(source),
        compiler=compiler.version,
        flags=list(flags),
        min_driver=compiler.min_driver,
        numerics_revision=spec.numerics_revision,
    )


def _lines(value: Any, indent: str) -> str:
    """JSON with sorted keys where what holds no further container is one line if it fits, for a reviewer's eyes."""
    inner = indent + "  "
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    line = json.dumps(value, sort_keys=True)
    if not children or (len(inner + line) <= _WIDTH and not any(isinstance(child, dict | list) for child in children)):
        return line
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + _lines(child, inner) for child in value) + f"\n{indent}]"
    pairs = (f"{inner}{json.dumps(key)}: {_lines(value[key], inner)}" for key in sorted(value))
    return "{\n" + ",\n".join(pairs) + f"\n{indent}}}"


def dump(value: Any) -> bytes:
    """The bytes of a generated JSON file."""
    return (_lines(value, "") + "\n").encode()


def files(rows: Sequence[Row]) -> dict[str, bytes]:
    """The files of a manifest by name: each row, then the index."""
    made = {f"{row.id}.json": dump(dataclasses.asdict(row)) for row in sorted(rows, key=lambda row: row.id)}
    kernels = {name.removesuffix(".json"): hashlib.sha256(data).hexdigest() for name, data in made.items()}
    return made | {INDEX: dump({"kernels": kernels, "schema": SCHEMA})}


def _load(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        data = path.read_bytes()
        value = json.loads(data)
    except FileNotFoundError as error:
        raise ImageError(f"{path.name} was wanted in {path.parent}, found no such file: run `invoke build`") from error
    except ValueError as error:
        raise ImageError(f"{path} was to be JSON, found {error}: run `invoke build`") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        found = value.get("schema") if isinstance(value, dict) else type(value).__name__
        raise ImageError(f"{path}: schema {SCHEMA} was wanted, found {found}: run `invoke build`")
    return value, data


def ids(folder: Path = FOLDER) -> tuple[str, ...]:
    """Ids of the kernels in the manifest, sorted.

    Raises:
        ImageError: there is no index, or it is malformed.
    """
    return tuple(sorted(_load(folder / INDEX)[0]["kernels"]))


def read(kernel_id: str, folder: Path = FOLDER) -> Row:
    """The row of a kernel, checked against the index.

    Raises:
        ImageError: it is not there, is malformed, or is not the one that the index names.
    """
    kernels = _load(folder / INDEX)[0]["kernels"]
    if kernel_id not in kernels:
        raise ImageError(
            f"kernel {kernel_id!r} was wanted in the manifest, found {', '.join(sorted(kernels)) or 'none'}"
        )
    value, data = _load(folder / f"{kernel_id}.json")
    if hashlib.sha256(data).hexdigest() != kernels[kernel_id]:
        raise ImageError(f"{kernel_id}.json is not the row that {INDEX} names: run `invoke build`")
    try:
        targets = {target: TargetImage(**image) for target, image in value.pop("targets").items()}
        row = Row(targets=targets, **value)
    except (KeyError, TypeError, AttributeError) as error:
        raise ImageError(f"{kernel_id}.json is not a manifest row ({error}): run `invoke build`") from error
    if row.id != kernel_id:
        raise ImageError(f"{kernel_id}.json was to describe {kernel_id}, found {row.id}: run `invoke build`")
    return row


def read_all(folder: Path = FOLDER) -> list[Row]:
    """Every row, by id.

    Raises:
        ImageError: one is missing or malformed.
    """
    return [read(kernel_id, folder) for kernel_id in ids(folder)]


def image_sha256(kernel: str, target: str, folder: Path = FOLDER) -> str:
    """The sha256 of the image that is promised of a kernel for a target, empty where there is none."""
    image = read(kernel, folder).targets.get(target) if (folder / f"{kernel}.json").is_file() else None
    return image.sha256 if image else ""


def is_promised(kernel: str, image: Mapping[str, str] | None, folder: Path = FOLDER) -> bool:
    """Whether an image of a kernel, by its "target" and "sha256", is the one that is promised.

    One of which nothing is known counts as that.
    """
    return image is None or image_sha256(kernel, image["target"], folder) == image["sha256"]


def check(row: Row, target: str, data: bytes) -> None:
    """Check that some bytes are the image that a row promises for a target.

    Raises:
        ImageError: there is no such image, or its size or sha256 is another.
    """
    if target not in row.targets:
        reason = row.excluded.get(target, f"its targets are {', '.join(row.targets)}")
        raise ImageError(f"{row.id}: an image for {target} was wanted, found none: {reason}")
    image = row.targets[target]
    found = hashlib.sha256(data).hexdigest()
    if (len(data), found) != (image.bytes, image.sha256):
        raise ImageError(
            f"{row.id} for {target}: {image.bytes} bytes with sha256 {image.sha256} were wanted, found {len(data)} "
            f"bytes with {found}: compile it with nvcc {row.compiler}, or run `invoke build` if the change is meant"
        )
