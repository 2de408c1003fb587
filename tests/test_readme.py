"""What is stored fits together: README, figures, proofs and manifest; each failure names the command that mends it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pyharness import drift, manifest, readme_tables
from pyharness.readme_tables import between
from pyharness.toolchain import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
VETTING = ROOT / "generated" / "vetting" / "nvidia-h200.json"
DOCS = ("operation", "reading", "adding", "update", "selective", "recurrent", "proof", "embedding")
BENCHES = sorted((ROOT / "generated" / "bench").glob("*/*.json"))
#: Figures that another page shows, which has a test of its own: docs/embedding.md.
SHOWN_ELSEWHERE = {"native", "tune"}


def _stored(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("suite", sorted({path.stem for path in BENCHES} - SHOWN_ELSEWHERE))
def test_the_readme_shows_what_is_stored(suite: str) -> None:
    cure = f"README.md is stale: run invoke bench --readme --family {suite}"
    assert readme_tables.refreshed_readme(README, suite) == README, cure


def test_the_readme_shows_what_storage_costs() -> None:
    assert between(README, "drift", drift.readme_table()) == README, "run python -m pyharness.drift --store"
    kept = {row["storage"]: row for row in _stored(drift.FOLDER / f"{drift.STORES}.json")["rows"]}
    for found in drift.study():
        one = kept[found.storage]
        assert (found.y, found.state) == pytest.approx((one["y"], one["state"]), rel=0.05), found.storage


def test_the_sample_listing_is_that_of_the_manifest() -> None:
    block = README.partition("<!-- listing -->")[2].partition("<!-- /listing -->")[0]
    header, *lines = (line.split() for line in block.strip().strip("`").strip().splitlines())
    assert lines
    for line in lines:
        shown = dict(zip(header, line, strict=True))
        image = manifest.read(shown["id"]).targets[shown["target"]]
        (usage,) = image.usage.values()
        found = (usage["registers"], usage["local_bytes"], image.bytes)
        assert (int(shown["registers"]), int(shown["spills"]), int(shown["bytes"])) == found, (
            "README.md is stale: run invoke bench --readme"
        )


def test_every_image_for_the_h200_is_proven_on_it() -> None:
    proven = _stored(VETTING)["images"]
    rows = manifest.read_all()
    unproven = [row.id for row in rows if "sm_90" in row.targets and row.targets["sm_90"].sha256 not in proven]
    assert unproven == [], "run invoke vet on an H200"
    named = {proof["kernel"] for proof in proven.values()}
    assert {row.id for row in rows} <= named, "run invoke vet on an H200"


@pytest.mark.parametrize("path", BENCHES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_measured_images_are_those_of_the_manifest(path: Path) -> None:
    document = _stored(path)
    cure = f"run invoke bench --family {document['suite']} on {document['device']}"
    known = {row.id: {target: image.sha256 for target, image in row.targets.items()} for row in manifest.read_all()}
    for row in document.get("rows", ()):
        if "image" in row:
            assert known.get(row["kernel"], {}).get(row["image"]["target"]) == row["image"]["sha256"], (
                f"{row['kernel']}: {cure}"
            )


def test_images_that_go_launched_are_those_of_the_manifest() -> None:
    shown = VETTING.with_name("nvidia-h200-go.txt").read_text(encoding="utf-8")
    for kernel, target, prefix in re.findall(r"(\w+) for (\w+): \d+ bytes, sha256 ([0-9a-f]+)", shown):
        assert manifest.read(kernel).targets[target].sha256.startswith(prefix), (
            f"{kernel}: run invoke go --arch {target}, run the binary it names on an H200, and store what it prints"
        )


def test_there_are_stored_benches() -> None:
    assert BENCHES, "run invoke bench on a GPU"


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", *(f"docs/{name}.md" for name in DOCS)])
def test_prose_is_wrapped(name: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []
