"""What a point took before: the fastest kernel that other machine code has replaced since, kept by device.

generated/history/<device>.json grows by an entry a point when newer figures are stored whose fastest kernel has another
image. A repeated measurement of the same image is noise, not history, and leaves no entry.

    python -m pyharness.history FILE [FILE ...]

takes in files of figures that were measured elsewhere, as `pyharness.measure.bench` stores them: each goes to its place
in generated/bench. What was timed there with an earlier build of a kernel, whose bytes are others by now, stays until
it is timed again and is marked, by `invoke bench --readme`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness import build, figures, manifest, toolchain
from pyharness.errors import SsmError, exit_code
from pyharness.figures import EARLIER, device_slug, fastest, ours_of, stored_path, timed_at
from pyharness.spec import parse_id

FOLDER = toolchain.ROOT / "generated" / "history"


def replaced(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries of the points whose fastest kernel has other machine code, or is another, in newer figures."""
    entries = []
    for point in before["points"]:
        old, new = (fastest(ours_of(timed_at(document, point))) for document in (before, after))
        if old is None or new is None or old["image"]["sha256"] == new["image"]["sha256"]:
            continue
        entries.append(
            {
                "suite": before["suite"],
                "point": point,
                "kernel": old["kernel"],
                "image": old["image"]["sha256"][:12],
                "us": old["us"]["median"],
                "ceiling": old["ceilings"]["us"],
                "date": old.get("date", before["date"]),
                "driver": before["driver"],
                "compiler": before["compiler"],
            }
        )
    return entries


def joined(known: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Entries in the order of suite, point and date; an image that a point has an entry of gets no second one."""
    first: dict[tuple[str, ...], Mapping[str, Any]] = {}
    for entry in [*known, *new]:
        first.setdefault((entry["suite"], entry["point"], entry["image"]), entry)
    # sorted() is stable: what one day replaced stays in the order in which it did.
    return sorted(first.values(), key=lambda entry: (entry["suite"], entry["point"], entry["date"]))


def path_of(device: str, folder: Path | None = None) -> Path:
    """Where the history of a device is kept, by default in generated/history."""
    return (folder or FOLDER) / f"{device_slug(device)}.json"


def read(device: str, folder: Path | None = None) -> list[dict[str, Any]]:
    """The entries of a device; none where nothing was replaced yet."""
    path = path_of(device, folder)
    entries: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["entries"] if path.is_file() else []
    return entries


def remember(before: Mapping[str, Any], after: Mapping[str, Any], folder: Path | None = None) -> None:
    """Keep what newer figures of the same device replace."""
    known = read(before["device"], folder)
    entries = joined(known, replaced(before, after))
    if entries != known:
        document = {"device": before["device"], "entries": entries}
        toolchain.publish_json(path_of(before["device"], folder), document)


def store(
    document: Mapping[str, Any], path: Path, folder: Path | None = None, before: Mapping[str, Any] | None = None
) -> None:
    """Store figures, and keep what they replace: what the file has, or what a run that stores often found in it."""
    if before is None and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
    if before is not None and before["device"] == document["device"]:
        remember(before, document, folder)
    toolchain.publish_json(path, document)


def take(path: Path) -> Path:
    """Take in a file of figures that was measured elsewhere; gives its place in generated/bench.

    Raises:
        SsmError: it is not such a file.
    """
    document = figures.read(path)
    if not document["rows"]:
        raise SsmError(f"{path.name}: figures were wanted, found a document without rows")
    target = stored_path(document["device"], document["suite"])
    store(document, target)
    return target


def images(found: Any) -> Iterator[dict[str, Any]]:
    """Every part of a document, wherever in it, that names a kernel and its image."""
    if isinstance(found, dict) and {"kernel", "image"} <= found.keys():
        yield found
    elif isinstance(found, dict | list):
        for one in found.values() if isinstance(found, dict) else found:
            yield from images(one)


def is_earlier(named: Mapping[str, Any]) -> bool:
    """Whether what names a kernel and its image names another than the kernel is compiled to now.

    A kernel beside the catalogue is what its source compiles to, or nothing if there is no such kernel any more.
    """
    kernel, image = named["kernel"], named["image"]
    promised = manifest.image_sha256(kernel, image["target"])
    if not promised:
        try:
            promised = build.image(parse_id(kernel), image["target"]).sha256
        except SsmError:
            return True
    return bool(promised != image["sha256"])


def mark(document: dict[str, Any]) -> bool:
    """Mark what was timed with an earlier build, and nothing else; whether that changed the document."""
    before = json.dumps(document, sort_keys=True)
    for named in images(document):
        named.pop(EARLIER, None)
        if is_earlier(named):
            named[EARLIER] = True
    return json.dumps(document, sort_keys=True) != before


def mark_stored(folder: Path = figures.BENCH) -> list[str]:
    """Mark all stored figures; gives the suites that changed."""
    changed = []
    for path in sorted(folder.glob("*/*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if mark(document):
            toolchain.publish_json(path, document)
            changed.append(path.stem)
    return changed


def main(arguments: Sequence[str] | None = None) -> int:
    """Take in the files that are named."""
    parser = argparse.ArgumentParser(prog="python -m pyharness.history", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="figures that were measured elsewhere")
    for path in parser.parse_args(arguments).files:
        take(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
