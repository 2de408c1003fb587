"""Hardware counters: what ncu prints as rows, what is stored as a page. Running ncu is tests/gpu's."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from pyharness import counters, manifest
from pyharness.counters import PAGE, Run, rows_of, store, tables
from pyharness.errors import NoKernel, SsmError
from pyharness.markdown import between

UPDATE = "update_n128_p64_l32_r4_w1_c1_bf16_sf32"
POINT = "decode_1x1_16_heads_bf16_packed"
LAUNCHES = [
    {"kernel": "k", "point": POINT, "image": "aa", "entry": "ssm_k_gather"},
    {"kernel": "k", "point": POINT, "image": "aa", "entry": "ssm_k_walk"},
]


def printed(**changes: str) -> str:
    """As ncu writes it: what it says itself, then names, units and a line a launch."""
    stalls = {f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": "0.125" for name in counters._STALLS}
    values = {"ID": "0", "Kernel Name": "ssm_k_gather"} | dict.fromkeys(counters._COUNTERS.values(), "1,000") | stalls
    values |= {"dram__bytes_read.sum": "524,288", "smsp__issue_active.avg.pct_of_peak_sustained_active": "12.345"}
    second = values | {"ID": "1", "Kernel Name": "ssm_k_walk"} | changes
    out = io.StringIO()
    writer = csv.DictWriter(out, values, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerow(dict.fromkeys(values, ""))
    writer.writerow(values)
    writer.writerow({name: second[name] for name in values})
    return "==PROF== Connected to process 1\n" + out.getvalue()


def test_each_launch_is_a_row_of_numbers() -> None:
    first, second = rows_of(printed(), LAUNCHES)
    assert first["entry"] == "ssm_k_gather"
    assert (first["read"], first["written"], first["issue_active"]) == (524288, 1000, 12.35)
    assert first["stalls"]["long_scoreboard"] == 0.125
    assert second["image"] == "aa"


def test_other_launches_and_missing_counters_are_refused() -> None:
    with pytest.raises(SsmError, match="ssm_k_walk were wanted, found ssm_k_gather, ssm_other"):
        rows_of(printed(**{"Kernel Name": "ssm_other"}), LAUNCHES)
    with pytest.raises(SsmError, match="found none"):
        rows_of("==PROF== No kernels were profiled", LAUNCHES)
    with pytest.raises(SsmError, match=r"gpu__time_duration\.sum was wanted, found n/a"):
        rows_of(printed(**{"gpu__time_duration.sum": "n/a"}), LAUNCHES)


def test_what_is_stored_is_replaced_by_kernel_and_point(tmp_path: Path) -> None:
    about = {"device": "NVIDIA H200", "driver": "580"}
    rows = [row | {"date": "2026-01-01"} for row in rows_of(printed(), LAUNCHES)]
    store(rows, about, tmp_path)
    other = [row | {"kernel": "other", "date": "2026-01-02"} for row in rows]
    path = store(other, about, tmp_path)
    store([row | {"read": 7_000_000} for row in rows], about, tmp_path)
    held = json.loads(path.read_text())["rows"]
    assert [(row["kernel"], row["read"]) for row in held] == [("k", 7_000_000)] * 2 + [("other", 524288)] * 2
    assert "| 7.00 | 0.00 | 1000 % | 12 % |" in tables(tmp_path)


def test_a_run_names_a_point_and_a_kernel_or_takes_the_fastest() -> None:
    assert Run.parse(f"{POINT}:{UPDATE}").kernel == UPDATE
    assert Run.parse(POINT).kernel.startswith("update_")
    with pytest.raises(NoKernel):
        Run.parse("decode_3x3")


def test_a_machine_without_ncu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SsmError, match="ncu was wanted, found none"):
        counters.count([Run.parse(f"{POINT}:{UPDATE}")])


def test_the_page_shows_what_is_stored() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert between(text, "counters", tables(), PAGE.name) == text, "run python -m pyharness.counters --page"


def test_stored_counters_are_of_images_in_the_manifest() -> None:
    for path in counters.FOLDER.glob("*.json"):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            images = {image.sha256 for image in manifest.read(row["kernel"]).targets.values()}
            assert row["image"] in images, f"{row['kernel']}: its image has changed since it was counted: count again"
