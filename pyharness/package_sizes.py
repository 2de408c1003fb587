"""What the default package weighs: stored in generated/package.json, shown in docs/embedding.md.

`invoke package` stores and shows it. `python -m pyharness.package_sizes` does so of the images alone, which are in the
manifest, and keeps what the last archive weighed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness import grades, manifest, package, toolchain
from pyharness.catalogue import CATALOGUE
from pyharness.errors import SsmError
from pyharness.markdown import between, refresh
from pyharness.spec import TARGETS, KernelSpec

NAME = "package"
PATH = toolchain.ROOT / "generated" / "package.json"
PAGE = toolchain.ROOT / "docs" / "embedding.md"
_MB = 1e6


def wanted(
    catalogue: Sequence[KernelSpec] = CATALOGUE, folder: Path = manifest.FOLDER, proofs: grades.Proofs | None = None
) -> list[dict[str, Any]]:
    """Images and bytes by target and family, as the manifest and the proofs have them: nothing is compiled."""
    known = proofs or grades.stored()
    ids = {spec.id for spec in catalogue}
    rows = [row for row in manifest.read_all(folder) if row.id in ids]
    found = []
    for target in TARGETS:
        for family in dict.fromkeys(spec.family for spec in catalogue):
            packed = [
                row.targets[target].bytes
                for row in rows
                if row.family == family and target in row.targets and known.grade(row, target).level != "unproven"
            ]
            if packed:
                found.append({"target": target, "family": family, "images": len(packed), "bytes": sum(packed)})
    return found


def document(made: package.Package) -> dict[str, Any]:
    """What is stored of a package that was made."""
    weights = {path.name: path.stat().st_size for path in made.paths}
    images = [row for row in made.sizes if row["target"]]
    # Megabytes, not bytes: the archive holds the page that this is shown on.
    return {
        "images": [{name: row[name] for name in ("target", "family", "images", "bytes")} for row in images],
        "archive": {
            "mb": round(weights[f"{made.name}.tar.gz"] / _MB, 1),
            "ssmvet_mb": round(weights["ssmvet"] / _MB, 1),
            "images": sum(row["images"] for row in images),
            "images_mb": round(sum(row["bytes"] for row in images) / _MB, 1),
        },
    }


def page_table(stored: Mapping[str, Any]) -> str:
    """The stored sizes as Markdown: a row a target, a column a family."""
    cells = {(row["target"], row["family"]): row for row in stored["images"]}
    families = list(dict.fromkeys(row["family"] for row in stored["images"]))
    lines = [
        f"| target | {' | '.join(f'`{family}`' for family in families)} | all |",
        f"| --- | {' | '.join('---:' for _ in families)} | ---: |",
    ]
    for target in dict.fromkeys(row["target"] for row in stored["images"]):
        own = [cells[target, family] for family in families if (target, family) in cells]
        words = [_words([cells[target, family]]) if (target, family) in cells else "" for family in families]
        lines.append(f"| {target} | {' | '.join(words)} | {_words(own)} |")
    sums = [_words([row for row in stored["images"] if row["family"] == family]) for family in families]
    lines.append(f"| all | {' | '.join(sums)} | {_words(stored['images'])} |")
    archive = stored["archive"]
    return "\n".join(lines) + (
        f"\n\nAn archive of {archive['images']} images, {archive['images_mb']} MB of them, has {archive['mb']} MB of "
        f"{package.MOST_BYTES / _MB:.1f} allowed; `ssmvet` with them has {archive['ssmvet_mb']} MB."
    )


def _words(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(row['images'] for row in rows)}: {sum(row['bytes'] for row in rows) / _MB:.2f} MB"


def read(path: Path = PATH) -> dict[str, Any]:
    """What is stored.

    Raises:
        SsmError: nothing is.
    """
    if not path.is_file():
        raise SsmError(f"{path} was wanted, found no such file: run `invoke package`")
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return stored


def refreshed(text: str, path: Path = PATH) -> str:
    """The page with what is stored between its markers.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    return between(text, NAME, page_table(read(path)), PAGE.name)


def keep(stored: Mapping[str, Any], path: Path = PATH, page: Path = PAGE) -> None:
    """Store what a default package weighs, and bring the page in line."""
    toolchain.publish(path, manifest.dump(dict(stored)))
    refresh(page, lambda text: refreshed(text, path))


if __name__ == "__main__":
    keep(read() | {"images": wanted()})
