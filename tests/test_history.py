"""Earlier figures: what is kept when newer ones take their place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyharness import figures, history
from pyharness.errors import SsmError


def row(kernel: str, us: float, image: str, **more: Any) -> dict[str, Any]:
    timing = {"median": us, "low": us, "high": us}
    about = {
        "kernel": kernel,
        "point": "decode",
        "us": timing,
        "ceilings": {"us": 8.0},
        "image": {"sha256": image * 64},
    }
    return about | more


def document(*rows: dict[str, Any], date: str = "2026-01-02") -> dict[str, Any]:
    about = {"suite": "update", "device": "NVIDIA H200", "driver": "580.1", "compiler": "13.0.88", "date": date}
    return about | {"points": {"decode": {}, "prefill": {}}, "rows": list(rows)}


def test_the_fastest_kernel_is_kept_where_other_machine_code_took_its_place() -> None:
    before = document(row("slow", 20, "a"), row("fast", 10, "b"), row("fast", 9, "c", order="ascending"))
    before["rows"].append(row("theirs", 5, "d", peer=True))
    (entry,) = history.replaced(before, document(row("fast", 9, "e"), date="2026-01-03"))
    assert entry == {
        "suite": "update",
        "point": "decode",
        "kernel": "fast",
        "image": "b" * 12,
        "us": 10,
        "ceiling": 8.0,
        "date": "2026-01-02",
        "driver": "580.1",
        "compiler": "13.0.88",
    }
    assert history.replaced(before, document(row("fast", 11, "b"))) == [], "the same bytes, measured again"
    assert history.replaced(before, document()) == [], "nothing took its place"
    older = document(row("fast", 10, "b", date="2025-12-31"))
    assert history.replaced(older, document(row("fast", 9, "e")))[0]["date"] == "2025-12-31"


def test_storing_keeps_what_is_replaced_once_and_in_order(tmp_path: Path) -> None:
    place, folder = tmp_path / "bench" / "update.json", tmp_path / "history"
    runs = [
        document(row("k", us, image), date=f"2026-01-0{day}")
        for day, (us, image) in enumerate([(12, "a"), (11, "b"), (12.1, "a"), (10, "c"), (10.1, "c")], 1)
    ]
    for run in runs:
        history.store(run, place, folder)
    assert json.loads(place.read_text(encoding="utf-8")) == runs[-1]
    entries = history.read("NVIDIA H200", folder)
    assert [(entry["date"], entry["us"]) for entry in entries] == [("2026-01-01", 12), ("2026-01-02", 11)]
    assert [path.name for path in folder.iterdir()] == ["nvidia-h200.json"]
    assert history.read("NVIDIA L4", folder) == []
    history.store(document(row("k", 3, "z")) | {"device": "NVIDIA L4"}, place, folder)
    assert history.read("NVIDIA H200", folder) == entries, "another device replaces nothing"


def test_figures_measured_elsewhere_are_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "BENCH", tmp_path / "bench")
    monkeypatch.setattr(history, "FOLDER", tmp_path / "history")
    brought = tmp_path / "brought.json"
    for number, image in enumerate("ab"):
        brought.write_text(json.dumps(document(row("k", 10 - number, image))), encoding="utf-8")
        assert history.main([str(brought)]) == 0
    stored = tmp_path / "bench" / "nvidia-h200" / "update.json"
    assert stored.read_text(encoding="utf-8").count('"median": 9') == 1
    assert [entry["us"] for entry in history.read("NVIDIA H200", tmp_path / "history")] == [10]
    for text in ("nonsense", "{}", json.dumps(document())):
        brought.write_text(text, encoding="utf-8")
        with pytest.raises(SsmError, match=r"brought.json: figures"):
            history.take(brought)
    assert stored.read_text(encoding="utf-8").count('"median": 9') == 1
