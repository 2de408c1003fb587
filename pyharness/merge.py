"""`invoke package --merge FILE`: proofs that someone made on another card with ssmvet, taken in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyharness import grades, manifest, package, toolchain
from pyharness.errors import ImageError
from pyharness.figures import device_slug

_FIELDS = {"kernel": str, "target": str, "cases": int, "worst": float, "registers": int, "driver": str, "date": str}


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ImageError(f"a file that ssmvet wrote was wanted, found nothing at {path}") from error
    except ValueError as error:
        raise ImageError(f"{path.name}: a file that ssmvet wrote was wanted, found {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("images"), dict) or not document["images"]:
        raise ImageError(f"{path.name}: proofs of images by sha256 were wanted, found none")
    for name in ("device", "target", "cuda"):
        if not isinstance(document.get(name), str) or not document[name]:
            raise ImageError(f"{path.name}: {name} was wanted, found {document.get(name)!r}")
    return document


def _check_image(sha256: str, image: Any, rows: dict[str, manifest.Row], name: str) -> None:
    """Check one proof against the manifest: only images of the catalogue are taken in."""
    for field, kind in _FIELDS.items():
        value = image.get(field) if isinstance(image, dict) else None
        whole = isinstance(value, int) and not isinstance(value, bool) and kind is float
        if not isinstance(value, kind) and not whole:
            raise ImageError(f"{name}: image {sha256}: {field} as {kind.__name__} was wanted, found {value!r}")
    if image["cases"] < 1 or not 0 <= image["worst"] <= 1:
        raise ImageError(
            f"{name}: {image['kernel']}: at least one case and an error within what is allowed were wanted, found "
            f"{image['cases']} cases and {image['worst']} of what is allowed"
        )
    times = image.get("microseconds", {})
    if not isinstance(times, dict) or not all(isinstance(us, int | float) and us > 0 for us in times.values()):
        raise ImageError(f"{name}: {image['kernel']}: microseconds by point, above 0, were wanted, found {times!r}")
    row = rows.get(image["kernel"])
    if row is None or image["target"] not in row.targets:
        raise ImageError(f"{name}: {image['kernel']} for {image['target']} is not an image of the manifest")
    # The manifest has the images of the first lane; of those of another it has the source that they were made from.
    if image.get("lane", package.first_lane()) == package.first_lane():
        what, wanted, found = "image", row.targets[image["target"]].sha256, sha256
    else:
        what, wanted, found = "source", row.source_sha256, str(image.get("source_sha256"))
    if wanted != found:
        raise ImageError(
            f"{name}: {image['kernel']} for {image['target']}: the {what} with sha256 {wanted} was wanted, found a "
            f"proof of {found}: make it with the ssmvet of a current package"
        )


def _stronger(kept: Mapping[str, Any] | None, found: Mapping[str, Any]) -> dict[str, Any]:
    """The proof of more cases, with the times of the one that was found."""
    if kept is None or kept["cases"] <= found["cases"]:
        return dict(found)
    times = {name: found[name] for name in ("microseconds",) if name in found}
    return {**kept, **times}


def merge(path: Path, folder: Path = grades.FOLDER, rows: Path = manifest.FOLDER) -> tuple[Path, int]:
    """Take a file of ssmvet into generated/vetting; gives the file that holds it now and how many images it proves.

    Of two proofs of an image on one device the one of more cases stays, with the newer times; all others are kept.

    Raises:
        ImageError: it is malformed, or proves an image that is not in the manifest; nothing is changed then.
    """
    document = _document(path)
    known = {row.id: row for row in manifest.read_all(rows)}
    for sha256, image in document["images"].items():
        _check_image(sha256, image, known, path.name)
    target = folder / f"{device_slug(document['device'])}.json"
    kept: dict[str, Any] = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
    if kept and kept["device"] != document["device"]:
        raise ImageError(f"{target.name} holds proofs of {kept['device']}, found some of {document['device']}")
    merged = kept | {name: document[name] for name in ("device", "target", "cuda")}
    tool, before = str(document.get("tool", "")), kept.get("images", {})
    merged["images"] = before | {
        sha256: _stronger(before.get(sha256), image | {"by": tool}) for sha256, image in document["images"].items()
    }
    grades.device_grades(merged)
    toolchain.publish_json(target, merged)
    return target, len(document["images"])
