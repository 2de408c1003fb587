"""What the stored figures of whole models say, from hand-worked ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from pyharness import models_table, readme_tables

#: Two layers of Mamba-2 and one of each other kind.
DOCUMENT: dict[str, Any] = {
    "suite": "models",
    "device": "NVIDIA H200",
    "driver": "580",
    "compiler": "13.0.88",
    "torch": "2",
    "transformers": "5",
    "date": "2026-01-01",
    "protocol": "p",
    "model": "a model",
    "dtype": "bf16",
    "layers": {"linear_attention": 2, "moe": 1, "full_attention": 1},
    "points": {
        "prefill_1x1000": {"sequences": 1, "tokens": 1000, "context": 50},
        "decode_4x1": {"sequences": 4, "tokens": 1, "context": 50},
    },
    "rows": [],
    "timings": [
        {"point": "prefill_1x1000", "part": "moe", "us": 100.0},
        {"point": "prefill_1x1000", "part": "full_attention", "us": 60.0},
        {"point": "prefill_1x1000", "part": "head", "us": 40.0},
        {"point": "prefill_1x1000", "scan": "padded", "kernel": "k", "scan_us": 300.0, "us": 400.0},
        {"point": "prefill_1x1000", "scan": "ours", "kernel": "k2", "scan_us": 50.0, "us": 150.0},
        {"point": "prefill_1x1000", "scan": "triton", "failed": "mamba-ssm is not installed"},
        {"point": "decode_4x1", "part": "head", "us": 10.0},
        {"point": "decode_4x1", "scan": "ours", "kernel": "k3", "scan_us": 5.0, "us": 20.0},
    ],
}


def test_shares_and_tokens_per_second_are_of_all_layers() -> None:
    padded, ours, decode = models_table.rows(DOCUMENT)
    # 100 + 60 + 40 and two layers of 400: two scans of 300 are 60 % of 1000 us.
    assert (padded["others_us"], padded["total_us"]) == (200.0, 1000.0)
    assert padded["share"] == pytest.approx(0.6)
    assert padded["tokens_per_second"] == pytest.approx(1e6)
    assert ours["total_us"] == 500.0
    assert ours["share"] == pytest.approx(0.2)
    # Four tokens in 10 + 2 x 20 us.
    assert decode["tokens_per_second"] == pytest.approx(80000)


def test_the_table_has_a_line_a_row_and_says_what_did_not_run() -> None:
    text = models_table.table(DOCUMENT)
    assert "| prefill 1 x 1000 | `padded`, before | `k` | 300.0 | 600 | 400.0 | 1000 | 60.0 % | 1000000 |" in text
    assert "| decode 4 x 1 behind 50 | ours | `k3` | 5.0 | 10 | 20.0 | 50 | 20.0 % | 80000 |" in text
    assert text.endswith("Not run: prefill_1x1000, triton: mamba-ssm is not installed")


def test_a_part_of_the_timings_takes_the_place_of_those_that_are_stored() -> None:
    timed = {"point": "prefill_1x1000", "scan": "ours", "kernel": "k4", "scan_us": 40.0, "us": 140.0}
    part = DOCUMENT | {"date": "2026-01-02", "timings": [timed]}
    found = models_table.joined(DOCUMENT, part)
    assert [row.get("kernel") or row.get("part") or row["failed"] for row in found["timings"]] == [
        *("head", "k3"),
        *("moe", "full_attention", "head", "k", "mamba-ssm is not installed", "k4"),
    ]
    assert {row["date"] for row in found["timings"] if row is not found["timings"][-1]} == {"2026-01-01"}
    assert found["timings"][-1] == timed | {"date": "2026-01-02"}
    assert "2026-01-01 to 2026-01-02. Layers" in models_table.table(found)
    # Under another driver they would be no one table.
    assert models_table.joined(DOCUMENT, part | {"driver": "590"})["timings"] == [timed | {"date": "2026-01-02"}]
    assert models_table.joined({}, part)["timings"] == [timed | {"date": "2026-01-02"}]


def test_the_readme_takes_the_table_from_what_is_stored(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    changed = copy.deepcopy(DOCUMENT)
    changed["timings"][4]["scan_us"] = 51.0
    (folder / "models.json").write_text(json.dumps(changed))
    assert "| ours | `k2` | 51.0 |" in readme_tables.readme_table("models", tmp_path)
