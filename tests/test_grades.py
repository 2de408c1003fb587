"""Grades: what proves an image, that a changed byte loses its proof, and what selection tells of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pyharness import emulator_proof, explain, grades, manifest, select
from pyharness.errors import DeviceError, ImageError, NoKernel
from pyharness.families import RecurrentSpec, UpdateSpec
from pyharness.render import render
from pyharness.select import Device, Features
from pyharness.spec import Geometry

ROW = manifest.read(RecurrentSpec(d_state=128).id)
FEATURES = Features(Geometry(4096, 1, 64, 64, 8, 128), "f32", "f32")


def _document(device: str, date: str, **images: str) -> dict[str, Any]:
    proven = {"cases": 3, "worst": 0.5, "driver": "580.1", "date": date}
    return {"device": device, "images": {sha: proven | {"kernel": kernel} for kernel, sha in images.items()}}


def _stored(folder: Path, **documents: dict[str, Any]) -> grades.Proofs:
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return grades.stored(folder)


def test_an_image_is_proven_by_its_hash_then_by_its_source(tmp_path: Path) -> None:
    sha = ROW.targets["sm_90"].sha256
    source = {"sources": {ROW.source_sha256: {"kernel": ROW.id, "cases": 2, "worst": 0.1}}}
    one, two = _document("One", "2026-01-02", a=sha), _document("Two", "2026-01-03", a=sha)
    proofs = _stored(tmp_path, emulator=source, one=one, two=two)
    assert str(proofs.grade(ROW, "sm_90")) == "proven on Two, driver 580.1, 2026-01-03"
    assert proofs.grade(ROW, "sm_80") == grades.Grade("emulator", cases=2, worst=0.1)
    changed = dict(ROW.targets) | {"sm_90": replace(ROW.targets["sm_90"], sha256="0" * 64)}
    assert proofs.grade(replace(ROW, targets=changed), "sm_90").level == "emulator"
    assert proofs.grade(replace(ROW, targets=changed, source_sha256="1" * 64), "sm_90").level == "unproven"
    with pytest.raises(ImageError, match="an image for sm_75 was wanted"):
        proofs.grade(ROW, "sm_75")


def test_a_malformed_proof_is_refused(tmp_path: Path) -> None:
    (tmp_path / "card.json").write_text('{"device": "A card", "images": {"00": {"cases": 1}}}')
    with pytest.raises(ImageError, match="without 'driver'"):
        grades.stored(tmp_path)
    (tmp_path / "card.json").write_text("{")
    with pytest.raises(ImageError, match=r"card\.json was to hold proofs as JSON"):
        grades.stored(tmp_path)


def test_the_emulator_proves_a_source_once_and_drops_what_is_gone(tmp_path: Path) -> None:
    spec = RecurrentSpec(d_state=16)
    told: list[str] = []

    def run(*, again: bool = False) -> dict[str, Any]:
        return emulator_proof.vet_on_emulator(catalogue=(spec,), folder=tmp_path, again=again, progress=told.append)

    (tmp_path / grades.EMULATOR).write_text(
        json.dumps({"sources": {"gone": {"kernel": "gone", "cases": 1, "worst": 0}}})
    )
    (found,) = run()["sources"].values()
    assert found["kernel"] == spec.id
    assert found["cases"] == 4
    assert 0 < found["worst"] <= 1
    assert list(json.loads((tmp_path / grades.EMULATOR).read_text())["sources"]) == [
        manifest.source_sha256(render(spec))
    ]
    run()
    assert told == [spec.id]
    run(again=True)
    assert told == [spec.id] * 2
    with pytest.raises(NoKernel, match="family 'woven' has no kernel in the catalogue; on offer: recurrent"):
        emulator_proof.vet_on_emulator("woven", catalogue=(spec,), folder=tmp_path)


def test_a_wrong_source_is_not_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RecurrentSpec(d_state=16, layout="block")
    right = emulator_proof.run_emulator
    # The results of a scan of other inputs.
    monkeypatch.setattr(
        emulator_proof, "run_emulator", lambda p, s, seed: right(replace(p, A=p.A * 1.001), s, seed=seed)
    )
    with pytest.raises(DeviceError, match=f"1 of 1 kernels failed on the emulator:\n{spec.id}: "):
        emulator_proof.vet_on_emulator(catalogue=(spec,), folder=tmp_path)
    assert json.loads((tmp_path / grades.EMULATOR).read_text()) == {"sources": {}}


def test_every_current_proof_of_the_emulator_is_of_the_catalogue() -> None:
    sources = {row.source_sha256: row.id for row in manifest.read_all()}
    document = json.loads((grades.FOLDER / grades.EMULATOR).read_text())
    kept = {sha: found for sha, found in document["sources"].items() if sha in sources}
    assert kept, "run `invoke vet --emulator`"
    for sha, found in kept.items():
        assert found["kernel"] == sources[sha]
        assert found["cases"] >= 2
        assert found["worst"] <= 1


# What `invoke select --explain` tells.


def _table(monkeypatch: pytest.MonkeyPatch, *entries: select.Entry) -> None:
    monkeypatch.setattr(select, "committed_table", lambda: select.Table(entries))


ENTRY = select.Entry(
    "A card", "sm_90", "recurrent", 64, 64, 128, 8, "f32", "f32", 64, 4096, ROW.id, 500.0, "reported"
)  # fmt: skip


def test_an_explanation_has_grade_time_and_runners_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _table(monkeypatch, ENTRY)
    point = {"sequences": 1, "tokens": 4096, "heads": 64, "head_dim": 64, "d_state": 128, "groups": 8}
    slow, slower, slowest, last = (
        RecurrentSpec(d_state=128, layout=name).id for name in ("padded", "slices", "interleaved", "block")
    )
    far, update = RecurrentSpec(d_state=128, chunk=3).id, UpdateSpec(d_state=128).id
    times = (
        (ROW.id, 500.0),
        (slow, 900.0),
        (slower, 950.0),
        (far, 400.0),
        (slowest, 999.0),
        (update, 2e3),
        (last, 2e4),
    )
    rows = [{"point": "p", "kernel": kernel, "us": {"median": us}} for kernel, us in times]
    rows += [{"point": "other", "kernel": slow, "us": {"median": 1.0}}, {"point": "p", "kernel": last, "failed": "x"}]
    rows += [{"point": "p", "kernel": "another package", "peer": True, "us": {"median": 1.0}}]
    rows += [{"point": "p", "kernel": slowest, "order": "ascending", "us": {"median": 1.0}}]
    points = {"p": point | {"io": "f32", "state": "f32"}}
    document = {"device": "A card", "target": "sm_90", "points": points, "rows": rows}
    points["other"] = points["p"] | {"tokens": 7}
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "recurrent.json").write_text(json.dumps(document))
    told = explain.explain(FEATURES, Device("A card", "sm_90"), benches=tmp_path)
    assert told.target == "sm_90"
    assert told.grade == grades.stored().grade(ROW, "sm_90")
    assert told.microseconds == 500.0
    # The three that come next, and the first of each other family.
    assert [one.id for one in told.runners_up] == [far, slow, slower, update]
    refused = [one.refused for one in told.runners_up]
    assert refused[0] == "it is not in the catalogue and runs by its full id alone"
    assert refused[1:3] == ["", ""]
    assert "4096" in refused[3], "update is for short sequences"
    text = "\n".join(told.lines())
    assert "reported for this problem on A card" in text
    assert f"runner-up: {far}, 400.0 us (not taken: it is not in the catalogue" in text
    assert "expected time: 500.0 us for 1 sequences, 4096 tokens, 64 heads x 64 on A card (reported)" in text
    assert f"grade: {told.grade}" in text
    json.dumps(told.document())


def test_an_explanation_without_a_device_grades_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    _table(monkeypatch)
    told = explain.explain(FEATURES)
    assert (told.target, told.microseconds, told.runners_up) == ("", 0.0, ())
    assert told.lines()[-1] == "expected time: not known, nothing was measured"


def test_an_invariant_choice_looks_at_the_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = replace(ENTRY, batch_heads=1024, tokens=16, kernel=RecurrentSpec(d_state=128, layout="block").id)
    _table(monkeypatch, ENTRY, decode)
    card = Device("A card", "sm_90")
    for tokens, sequences, longest, wanted in (
        (4096, 1, -1, ENTRY),
        (9, 1, -1, ENTRY),
        (512, 64, -1, decode),
        (512, 64, 9, ENTRY),
        (1, 1, -1, decode),
    ):
        geometry = replace(FEATURES.geometry, tokens=tokens, sequences=sequences, longest=longest)
        told = explain.explain(replace(FEATURES, geometry=geometry), card, invariant=True)
        assert (told.selection.id, told.selection.steps) == (wanted.kernel, ())


@pytest.mark.parametrize(
    ("target", "wanted"),
    [("sm_90", "sm_90"), ("sm_87", "sm_86"), ("sm_103", "sm_100"), ("sm_121", "sm_120"), ("sm_70", "compute_80")],
)
def test_the_image_of_a_device_is_its_own_or_of_a_lower_minor_or_ptx(target: str, wanted: str) -> None:
    assert explain.image_target(ROW, Device("", target)) == wanted


def test_the_image_of_a_kernel_for_an_exact_target_is_that_of_the_device() -> None:
    exact = next(row for row in manifest.read_all() if set(row.targets) == {"sm_90a"})
    assert explain.image_target(exact, Device("", "sm_90")) == "sm_90a"
    assert explain.image_target(exact, Device("", "sm_100")) == ""
