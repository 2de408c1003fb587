"""Tables made from stored figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyharness.errors import SsmError
from pyharness.report import device_slug, listing, readme_table, write_readme


def row(kernel: str, point: str, median: float, **ceilings: float) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "point": point,
        "us": {"median": median, "low": median - 1, "high": median + 1},
        "ceilings": ceilings,
        "ratio": median / ceilings["us"],
        "registers": 100,
        "error": 0.25,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    def point(job: str, sequences: int, tokens: int) -> dict[str, Any]:
        return {"job": job, "sequences": sequences, "tokens": tokens, "io": "f32"}

    document = {
        "device": "NVIDIA H200",
        "driver": "580.1",
        "compiler": "13.0.88",
        "date": "2026-01-02",
        "points": {"decode_16x1_f32": point("decode", 16, 1), "prefill_1x4096_f32": point("prefill", 1, 4096)},
        "rows": [
            row("slow", "prefill_1x4096_f32", 400.0, bytes=40.0, fma=200.0, us=200.0),
            row("fast", "prefill_1x4096_f32", 300.0, bytes=40.0, fma=200.0, us=200.0),
            row("fast", "decode_16x1_f32", 22.0, slots=20.0, contiguous=19.0, us=20.0),
        ],
    }
    path = tmp_path / "bench" / "nvidia-h200" / "recurrent.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return tmp_path / "bench"


def test_the_table_shows_each_figure_beside_its_ceiling(folder: Path) -> None:
    lines = readme_table("recurrent", folder).splitlines()
    assert lines[0].startswith("NVIDIA H200, driver 580.1, nvcc 13.0.88, 2026-01-02.")
    assert lines[2] == "| f32 | prefill 1 x 4096 | decode 16 x 1 |"
    assert "| `slow` | 400.0 (2.00x) |  |" in lines
    assert "| `fast` | 300.0 (1.50x) | 22.0 (1.10x) |" in lines
    assert "| ceiling: the states read and written, in slot order |  | 20.0 |" in lines
    assert "| ceiling: three FP32 instructions a state element and token | 200.0 |  |" in lines


def test_the_readme_gets_the_table_between_its_markers_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- bench:recurrent -->\nold\n<!-- /bench:recurrent -->\nb\n", encoding="utf-8")
    assert write_readme("recurrent", readme, folder)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("a\n<!-- bench:recurrent -->\nNVIDIA H200")
    assert text.endswith("|\n<!-- /bench:recurrent -->\nb\n")
    assert "old" not in text
    assert not write_readme("recurrent", readme, folder)


def test_missing_markers_and_missing_figures_are_errors(folder: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no markers\n", encoding="utf-8")
    with pytest.raises(SsmError, match="<!-- bench:recurrent -->"):
        write_readme("recurrent", readme, folder)
    with pytest.raises(SsmError, match="invoke bench"):
        readme_table("update", folder)


def test_a_kernel_that_was_not_timed_is_listed_with_its_reason() -> None:
    timed = row("fast", "decode_16x1_f32", 22.0, slots=20.0, us=20.0)
    lines = listing([timed, {"kernel": "bad", "point": "decode_16x1_f32", "failed": "it is\nwrong"}])
    assert (lines[0]["us"], lines[0]["ceiling"], lines[0]["ratio"]) == ("22.00", "20.00", "1.10")
    assert (lines[1]["us"], lines[1]["note"]) == ("-", "it is wrong")
    assert lines[0].keys() == lines[1].keys()


def test_a_device_names_its_folder() -> None:
    assert device_slug("NVIDIA RTX PRO 6000 (Blackwell)") == "nvidia-rtx-pro-6000-blackwell"
