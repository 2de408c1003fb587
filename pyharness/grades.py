"""Grades: how far an image is proven. A consumer sees the grade of every image and may demand one.

An image is proven on a device by its own sha256 (`invoke vet`, or `ssmvet` on a card without Python), else on the
emulator by the sha256 of the source that it was compiled from (`invoke vet --emulator`), else not at all. So a changed
byte loses the proof of its device, and a changed source loses both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyharness import toolchain
from pyharness.errors import ImageError
from pyharness.manifest import Row

FOLDER = toolchain.ROOT / "generated" / "vetting"
#: The proofs of sources; every other file of the folder holds those of the images of a device.
EMULATOR = "emulator.json"
#: From the strongest to the weakest.
LEVELS = ("device", "emulator", "unproven")


@dataclass(frozen=True)
class Grade:
    """How far one image is proven.

    Attributes:
        level: one of LEVELS.
        device, driver, date: where, with which driver branch and when; empty unless the level is "device".
        cases: problems that were held against the oracle.
        worst: the largest error over what is allowed.
    """

    level: str
    device: str = ""
    driver: str = ""
    date: str = ""
    cases: int = 0
    worst: float = 0.0

    def __str__(self) -> str:
        if self.level == "device":
            return f"proven on {self.device}, driver {self.driver}, {self.date}"
        return "proven on the emulator" if self.level == "emulator" else "unproven"


@dataclass(frozen=True)
class Proofs:
    """What is stored: grades by the sha256 of images and of sources."""

    images: Mapping[str, tuple[Grade, ...]]
    sources: Mapping[str, Grade]

    def grade(self, row: Row, target: str) -> Grade:
        """The grade of a kernel's image for a target; of several devices the latest proof.

        Raises:
            ImageError: the row has no image for the target.
        """
        if target not in row.targets:
            raise ImageError(f"{row.id}: an image for {target} was wanted, found {', '.join(row.targets)}")
        proven = self.images.get(row.targets[target].sha256, ())
        if proven:
            return max(proven, key=lambda grade: (grade.date, grade.device))
        return self.sources.get(row.source_sha256, Grade("unproven"))


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ImageError(f"{path.name} was to hold proofs as JSON, found {error}: run `invoke vet` again") from error
    if not isinstance(document, dict):
        raise ImageError(f"{path.name} was to hold proofs, found a {type(document).__name__}: run `invoke vet` again")
    return document


def device_grades(document: Mapping[str, Any]) -> dict[str, Grade]:
    """The grades by sha256 that the document of one device holds.

    Raises:
        ImageError: it is not such a document.
    """
    try:
        return {
            sha256: Grade(
                "device",
                document["device"],
                image["driver"],
                image["date"],
                int(image["cases"]),
                float(image["worst"]),
            )
            for sha256, image in document["images"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ImageError(f"a document of proofs of one device was wanted, found one without {error}") from error


def stored(folder: Path = FOLDER) -> Proofs:
    """Every proof that is kept.

    Raises:
        ImageError: a file is malformed.
    """
    images: dict[str, tuple[Grade, ...]] = {}
    sources: dict[str, Grade] = {}
    for path in sorted(folder.glob("*.json")):
        document = _read(path)
        if path.name == EMULATOR:
            sources = {
                sha256: Grade("emulator", cases=int(source["cases"]), worst=float(source["worst"]))
                for sha256, source in document["sources"].items()
            }
            continue
        for sha256, grade in device_grades(document).items():
            images[sha256] = (*images.get(sha256, ()), grade)
    return Proofs(images, sources)
