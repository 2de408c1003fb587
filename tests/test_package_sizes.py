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
HINT = (
    "run `python -m pyharness.package_sizes`, which stores what the images weigh and writes it into docs/embedding.md"
)


def test_what_is_stored_is_what_the_manifest_and_the_proofs_have() -> None:
    assert package_sizes.read()["images"] == package_sizes.wanted(), HINT


def test_the_default_package_is_within_its_limit() -> None:
    stored = package_sizes.read()
    archive, images = stored["archive"], stored["images"]
    assert 0 < archive["mb"] * 1e6 <= package.MOST_BYTES
    # An archive of about these images; where many are new, `invoke package` weighs one again.
    assert 0.9 < sum(row["bytes"] for row in images) / 1e6 / archive["images_mb"] < 1.1, "run `invoke package`"


def test_the_page_shows_what_is_stored() -> None:
    text = package_sizes.PAGE.read_text(encoding="utf-8")
    assert package_sizes.refreshed(text) == text, HINT


def test_a_package_weighs_what_was_told_before_it_was_made(tmp_path: Path) -> None:
    made = package.package("sm_90", catalogue=SPECS[:2], dist=tmp_path / "dist", vet_binary=False)
    told = [row for row in package_sizes.wanted(SPECS[:2]) if row["target"] == "sm_90"]
    (ssmvet := tmp_path / "dist" / "ssmvet").write_bytes(b"x" * 1_249_000)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- package -->\n<!-- /package -->\nafter\n")
    weighed = package_sizes.document(replace(made, paths=(*made.paths, ssmvet)))
    package_sizes.keep(weighed, tmp_path / "package.json", page)
    stored = json.loads((tmp_path / "package.json").read_text())
    assert stored["images"] == told
    assert sum(row["bytes"] for row in told) == sum(len(made.files[name]) for name in made.files if ".cubin" in name)
    assert (stored["archive"]["ssmvet_mb"], stored["archive"]["images"]) == (1.2, 2)
    (archive,) = (path for path in made.paths if path.name.endswith(".tar.gz"))
    assert abs(stored["archive"]["mb"] - archive.stat().st_size / 1e6) <= 0.05
    text = page.read_text()
    assert text.startswith("before\n<!-- package -->\n| target | `recurrent` | all |\n")
    assert f"| sm_90 | 2: {told[0]['bytes'] / 1e6:.2f} MB | 2: {told[0]['bytes'] / 1e6:.2f} MB |" in text
    assert "\nAn archive of 2 images, 0.1 MB of them, has " in text
    assert " MB of 33.6 allowed; `ssmvet` with them has 1.2 MB.\n" in text
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
