"""The size table of the default package: what is stored is what the manifest has, and the page shows it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pyharness import grades, manifest, package, package_sizes
from pyharness.errors import SsmError
from pyharness.families import RecurrentSpec, UpdateSpec

SPECS = (RecurrentSpec(d_state=128), RecurrentSpec(d_state=16), UpdateSpec(d_state=128))
HINT = "run `invoke package`, which stores what it weighs and writes it into docs/embedding.md"


def test_what_is_stored_is_what_the_manifest_and_the_proofs_have() -> None:
    assert package_sizes.read()["images"] == package_sizes.wanted(), HINT


def test_the_default_package_is_within_its_limit() -> None:
    stored = package_sizes.read()
    assert 0 < stored["archive_mb"] * 1e6 <= package.MOST_BYTES
    assert stored["archive_mb"] * 1e6 < sum(row["bytes"] for row in stored["images"])


def test_the_page_shows_what_is_stored() -> None:
    text = package_sizes.PAGE.read_text(encoding="utf-8")
    assert package_sizes.refreshed(text) == text, HINT


def test_a_package_weighs_what_was_told_before_it_was_made(tmp_path: Path) -> None:
    made = package.package("sm_90", catalogue=SPECS[:2], dist=tmp_path / "dist", vet_binary=False)
    told = [row for row in package_sizes.wanted(SPECS[:2]) if row["target"] == "sm_90"]
    (ssmvet := tmp_path / "dist" / "ssmvet").write_bytes(b"x" * 1_249_000)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- package -->\n<!-- /package -->\nafter\n")
    package_sizes.keep(replace(made, paths=(*made.paths, ssmvet)), tmp_path / "package.json", page)
    stored = json.loads((tmp_path / "package.json").read_text())
    assert stored["images"] == told
    assert sum(row["bytes"] for row in told) == sum(len(made.files[name]) for name in made.files if ".cubin" in name)
    assert stored["ssmvet_mb"] == 1.2
    (archive,) = (path for path in made.paths if path.name.endswith(".tar.gz"))
    assert abs(stored["archive_mb"] - archive.stat().st_size / 1e6) <= 0.05
    text = page.read_text()
    assert text.startswith("before\n<!-- package -->\n| target | `recurrent` | all |\n")
    assert f"| sm_90 | 2: {told[0]['bytes'] / 1e6:.2f} MB | 2: {told[0]['bytes'] / 1e6:.2f} MB |" in text
    assert "of 33.6 allowed" in text
    assert package_sizes.refreshed(text, tmp_path / "package.json") == text


def test_images_that_nothing_proves_have_no_weight() -> None:
    rows = [manifest.read(spec.id) for spec in SPECS]
    assert package_sizes.wanted(SPECS, proofs=grades.Proofs({}, {})) == []
    only = grades.Proofs({rows[2].targets["sm_86"].sha256: (grades.Grade("device", device="A card"),)}, {})
    size = rows[2].targets["sm_86"].bytes
    assert package_sizes.wanted(SPECS, proofs=only) == [
        {"target": "sm_86", "family": "update", "images": 1, "bytes": size}
    ]


def test_nothing_stored_says_what_stores_it(tmp_path: Path) -> None:
    with pytest.raises(SsmError, match=r"package.json was wanted, found no such file: run `invoke package`"):
        package_sizes.read(tmp_path / "package.json")
