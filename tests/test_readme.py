"""What is stored fits together: README, figures, proofs and manifest; each failure names the command that mends it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pyharness import drift, figures, history, manifest, readme_tables
from pyharness.markdown import between
from pyharness.toolchain import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
VETTING = ROOT / "generated" / "vetting" / "nvidia-h200.json"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCHES = sorted((ROOT / "generated" / "bench").glob("*/*.json"))
#: Figures that another page shows, which has a test of its own: docs/embedding.md.
SHOWN_ELSEWHERE = {"native", "tune"}
#: What measures figures that are no suite's of invoke bench.
COMMANDS = {
    "models": "run python examples/share_of_scan.py --store",
    "logits": "run python examples/transformers_models.py --store",
}


def _stored(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("suite", sorted({path.stem for path in BENCHES} - SHOWN_ELSEWHERE))
def test_the_pages_show_what_is_stored(suite: str) -> None:
    page = readme_tables.page_of(suite)
    text = page.read_text(encoding="utf-8")
    cure = f"{page.name} is stale: run invoke bench --readme"
    assert readme_tables.refreshed_page(text, suite, page=page.name) == text, cure


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
def test_measured_images_are_those_of_the_manifest_or_marked(path: Path) -> None:
    measured = list(history.images(_stored(path)))
    assert measured or path.stem in SHOWN_ELSEWHERE, "no image is named"
    for named in measured:
        assert named.get(figures.EARLIER, False) == history.is_earlier(named), "run invoke bench --readme"


@pytest.mark.parametrize("suite", ["models", "logits"])
def test_figures_of_whole_models_name_the_image_of_every_kernel_of_ours(suite: str) -> None:
    for path in (path for path in BENCHES if path.stem == suite):
        document = _stored(path)
        rows = [row for row in document.get("timings", document.get("comparisons")) if "scan" in row]
        mine = [row for row in rows if row["scan"] in ("ours", "padded", "split")]
        assert mine
        assert all(list(history.images(row)) for row in mine)
        assert not [row for row in rows if row not in mine and list(history.images(row))]


def test_images_that_go_launched_are_those_of_the_manifest() -> None:
    shown = VETTING.with_name("nvidia-h200-go.txt").read_text(encoding="utf-8")
    for kernel, target, prefix in re.findall(r"(\w+) for (\w+): \d+ bytes, sha256 ([0-9a-f]+)", shown):
        assert manifest.read(kernel).targets[target].sha256.startswith(prefix), (
            f"{kernel}: run invoke go --arch {target}, run the binary it names on an H200, and store what it prints"
        )


def test_there_are_stored_benches() -> None:
    assert BENCHES, "run invoke bench on a GPU"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == []
