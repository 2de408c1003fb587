"""`invoke verify`: whether a package is whole: every byte, every image against its manifest row, and the ABI."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyharness import archive, args, manifest, package, select
from pyharness.errors import ImageError
from pyharness.manifest import Row, TargetImage


@dataclass(frozen=True)
class Verified:
    """A package that is whole: its name, and how many files, manifest rows and images were checked."""

    name: str
    files: int
    rows: int
    images: int


def _json(files: Mapping[str, bytes], name: str) -> Any:
    try:
        return json.loads(files[name])
    except (KeyError, ValueError) as error:
        raise ImageError(f"{name}: JSON was wanted, found {error}") from error


def _first_difference(index: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
    """The first file that is not what package.json says, or an empty string."""
    listed = index["files"]
    for name, want in listed.items():
        if name not in files:
            return f"{name}: a file of {want['bytes']} bytes was wanted, found none"
        data = files[name]
        found = hashlib.sha256(data).hexdigest()
        if (len(data), found) != (want["bytes"], want["sha256"]):
            wanted = f"{want['bytes']} bytes with sha256 {want['sha256']}"
            return f"{name}: {wanted} were wanted, found {len(data)} with {found}"
    extra = sorted(set(files) - set(listed) - {package.INDEX, package.INDEX_SHA})
    return f"{extra[0]}: a file that {package.INDEX} does not name" if extra else ""


def _index(files: Mapping[str, bytes]) -> dict[str, Any]:
    """package.json, checked against package.sha256."""
    if package.INDEX not in files or package.INDEX_SHA not in files:
        raise ImageError(f"{package.INDEX} and {package.INDEX_SHA} were wanted, found {len(files)} other files")
    sum_ = hashlib.sha256(files[package.INDEX]).hexdigest()
    if files[package.INDEX_SHA] != f"{sum_}  {package.INDEX}\n".encode():
        raise ImageError(f"{package.INDEX}: the sha256 of {package.INDEX_SHA} was wanted, found {sum_}")
    index = _json(files, package.INDEX)
    if not isinstance(index, dict) or index.get("schema") != package.SCHEMA:
        raise ImageError(
            f"{package.INDEX}: schema {package.SCHEMA} was wanted: use the project of the package's version"
        )
    return index


def _rows(files: Mapping[str, bytes], lane: str) -> list[Row]:
    folder = f"catalogue/{lane}/manifest"
    kernels = _json(files, f"{folder}/{manifest.INDEX}")["kernels"]
    rows = []
    for kernel, sha in kernels.items():
        name = f"{folder}/{kernel}.json"
        value = _json(files, name)
        if hashlib.sha256(files[name]).hexdigest() != sha:
            raise ImageError(f"{name} is not the row that {manifest.INDEX} names")
        targets = {target: TargetImage(**image) for target, image in value.pop("targets").items()}
        rows.append(Row(targets=targets, **value))
    return rows


def check(files: Mapping[str, bytes]) -> Verified:
    """Check the files of a package.

    Raises:
        ImageError: one is damaged, missing or extra, an image is not the one of its row, or the ABI is another; the
            message names it.
    """
    index = _index(files)
    different = _first_difference(index, files)
    if different:
        raise ImageError(different)
    if (index["args_bytes"], index["args_sha256"]) != (args.SCAN_ARGS.itemsize, package.layout_sha256()):
        raise ImageError(
            f"ABI: a ScanArgs of {args.SCAN_ARGS.itemsize} bytes and this project's layout was wanted, found another "
            f"of {index['args_bytes']}: use the project of the package's version"
        )
    rows = images = 0
    promised = set()
    for lane in index["lanes"]:
        for row in _rows(files, lane):
            rows += 1
            if row.args != args.layout():
                raise ImageError(f"{row.id}: its arguments are not laid out as ScanArgs")
            for target in row.targets:
                path = package.image_path(lane, row, target)
                promised.add(path)
                if path in files:
                    manifest.check(row, target, files[path])
                    images += 1
    stray = sorted(
        name for name in files if name.startswith("images/") and not name.endswith(".go") and name not in promised
    )
    if stray:
        raise ImageError(f"{stray[0]}: an image that no manifest row promises")
    try:
        select.parse_table(_json(files, "catalogue/selection.json"))
    except (ValueError, KeyError, TypeError) as error:
        raise ImageError(f"catalogue/selection.json: a selection table was wanted, found {error}") from error
    return Verified(index["name"], len(files), rows, images)


def _read_folder(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def verify(path: Path) -> Verified:
    """Check an archive of `invoke package`, or the folder that it was unpacked to.

    Raises:
        ImageError: it is not whole; the message names the first file that is damaged.
    """
    if path.is_dir():
        files, damage = _read_folder(path), ""
    elif path.is_file():
        files, _, damage = archive.unpack(path.read_bytes(), path.name)
    else:
        raise ImageError(f"an archive of `invoke package` or its folder was wanted, found nothing at {path}")
    if not damage:
        return check(files)
    try:
        check(files)
    except (ImageError, KeyError, TypeError) as error:
        raise ImageError(f"{path.name} is damaged ({damage}), first seen at {error}") from error
    raise ImageError(f"{path.name} is damaged: {damage}; the files in it are whole")
