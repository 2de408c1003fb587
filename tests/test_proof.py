"""docs/proof.md shows what is stored; the tables by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from pyharness import proof, replay, suite, toolchain
from pyharness.errors import SsmError
from pyharness.fuzz import Failure, Tally
from pyharness.replay import Row

RECURRENT = "recurrent_n16_l4_r32_w1_c32_tiled_f32_sf32"


def tally(seed: int, problems: int, failures: int = 0) -> Tally:
    failed = [Failure(RECURRENT, "wrong", Path("f.npz"))] * failures
    return Tally("emulator", seed, 10.0, Counter(recurrent=problems), {RECURRENT}, 7, 1, failed)


def test_the_page_shows_what_is_stored() -> None:
    text = proof.PAGE.read_text(encoding="utf-8")
    assert proof.refreshed(text) == text, "docs/proof.md is stale: run invoke peers --page"


def test_runs_of_the_fuzzer_add_up_with_their_failures(tmp_path: Path) -> None:
    proof.store_fuzz("emulator", tally(1, 100, failures=2), tmp_path)
    proof.store_fuzz("emulator", tally(2, 50), tmp_path)
    table = proof.fuzz_table(tmp_path)
    assert "| emulator | recurrent | 150 | 2 | 2 |" in table
    assert "emulator: 20 minutes, seeds 1, 2; 14 problems also in another order." in table


def test_tables_stand_between_their_markers(tmp_path: Path) -> None:
    row = Row("vllm ssd", "recurrent", 4, 1, 2, 1, 0.123, "case on k", 0.05)
    nothing = Row("vllm ssd", "update", 4, 0, 3, 1, 0.0, "", 0.0)
    peers, fuzz = tmp_path / "peers", tmp_path / "fuzz"
    replay.store("nvidia-h200", [row], {"device": "NVIDIA H200", "driver": "580", "date": "2030-01-02"}, peers)
    replay.store("emulator", [row, nothing], {}, peers)
    proof.store_fuzz("emulator", tally(1, 100), fuzz)
    page = tmp_path / "page.md"
    tests = {"test_update": {"passed": 3, "failed": ["test_a"], "skipped": {"no": 2}, "date": "d", "driver": "580"}}
    toolchain.publish_json(tmp_path / "tests" / "nvidia-h200.json", {"device": "NVIDIA H200", "files": tests})
    empty = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in ("gpu-tests", "fuzz"))
    page.write_text(f"a\n<!-- peers -->\nold\n<!-- /peers -->\nb\n{empty}", encoding="utf-8")
    assert proof.write_page(page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("a\n<!-- peers -->\nIn the emulator, in reduced form:\n\n| suite |")
    assert (
        "| vllm ssd | recurrent | 4 | 1 | 2 | 1 | 0.12 | 0.05 |\n| vllm ssd | update | 4 | 0 | 3 | 1 |  |  |\n" in text
    )
    assert text.index("NVIDIA H200, driver 580, 2030-01-02") > text.index("In the emulator")
    assert "\nold\n" not in text
    assert (
        "| NVIDIA H200 | 580 | d | `test_update.py` | 3 | 1 | 2 |\n\n- failed: `test_a` of `test_update.py`\n" in text
    )
    assert not proof.write_page(page, tmp_path)


def test_missing_results_and_markers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SsmError, match="invoke peers"):
        proof.peers_tables(tmp_path)
    with pytest.raises(SsmError, match="invoke fuzz --store"):
        proof.fuzz_table(tmp_path)
    with pytest.raises(SsmError, match="invoke test --gpu --store"):
        suite.gpu_table(tmp_path)
    page = tmp_path / "page.md"
    page.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(SsmError, match="the lines <!-- peers -->"):
        proof.write_page(page)


def test_stored_files_are_sorted_and_end_in_a_newline() -> None:
    for path in (*replay.FOLDER.glob("*.json"), *proof.FUZZ.glob("*.json")):
        text = path.read_text(encoding="utf-8")
        assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"
