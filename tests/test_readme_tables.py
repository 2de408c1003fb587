"""Tables made from stored figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyharness import manifest
from pyharness.errors import SsmError
from pyharness.families import RecurrentSpec
from pyharness.readme_tables import compile_time_sizes, goals, readme_table, sample_listing, write_page
from pyharness.toolchain import Compiler, Image, Usage

TILED, PADDED = RecurrentSpec(d_state=128).id, RecurrentSpec(d_state=128, layout="padded").id
GENERIC = RecurrentSpec(d_state=0, layout="generic").id


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
        shape = {"heads": 8, "head_dim": 16, "d_state": 32, "groups": 2, "io": "f32", "state": "f32"}
        return {"job": job, "sequences": sequences, "tokens": tokens, "resume": job == "decode", **shape}

    document = {
        "suite": "recurrent",
        "device": "NVIDIA H200",
        "driver": "580.1",
        "compiler": "13.0.88",
        "date": "2026-01-02",
        "points": {"decode_16x1_f32": point("decode", 16, 1), "prefill_1x4096_f32": point("prefill", 1, 4096)},
        "rows": [
            row(PADDED, "prefill_1x4096_f32", 400.0, bytes=40.0, fma=200.0, us=200.0),
            row(TILED, "prefill_1x4096_f32", 300.0, bytes=40.0, fma=200.0, us=200.0),
            row(TILED, "decode_16x1_f32", 22.0, slots=20.0, contiguous=19.0, us=20.0),
        ],
    }
    path = tmp_path / "bench" / "nvidia-h200" / "recurrent.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return tmp_path / "bench"


def test_the_table_shows_each_figure_beside_its_ceiling(folder: Path) -> None:
    lines = readme_table("recurrent", folder).splitlines()
    assert lines[0].startswith("NVIDIA H200, driver 580.1, nvcc 13.0.88, 2026-01-02.")
    head = lines.index("8 heads x 16 head_dim x 32 d_state, 2 groups, f32, state f32:")
    assert "cold" in lines[0]
    assert lines[head + 2] == "| f32 | prefill 1 x 4096, fresh | decode 16 x 1, resumed |"
    assert f"| `{PADDED}` | 400.0 (2.00x) |  |" in lines
    assert f"| `{TILED}` | 300.0 (1.50x) | 22.0 (1.10x) |" in lines
    assert "| ceiling: the states read and written, in slot order |  | 20.0 |" in lines
    assert "| ceiling: three FP32 instructions a state element and token | 200.0 |  |" in lines


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A manifest of two kernels, of which the sample listing shows one."""
    made = []
    for spec in (RecurrentSpec(d_state=128), RecurrentSpec(d_state=64)):
        image = Image(spec.id, "sm_90", "cubin", b"bytes", {spec.symbol(): Usage(40, 128, 0, 0, 0)}, "", 0.5)
        made.append(manifest.make_row(spec, "source", [image], Compiler(Path("nvcc"), "13.0.88", True), (), {}))
    (tmp_path / "manifest").mkdir()
    for name, data in manifest.files(made).items():
        (tmp_path / "manifest" / name).write_bytes(data)
    return tmp_path / "manifest"


def test_the_sample_listing_shows_rows_of_the_manifest(rows: Path) -> None:
    shared = RecurrentSpec(d_state=128).shared_bytes + 128
    numbers = {"registers": 40, "spills": 0, "shared": shared, "bytes": 5}
    assert sample_listing(rows) == [{"id": TILED, "target": "sm_90", **numbers}]


def test_the_readme_gets_what_is_stored_between_its_markers_and_nothing_else(
    folder: Path, rows: Path, tmp_path: Path
) -> None:
    readme = tmp_path / "README.md"
    listed = "<!-- listing -->\nold\n<!-- /listing -->"
    readme.write_text(
        f"a\n<!-- bench:recurrent -->\nold\n<!-- /bench:recurrent -->\nb\n{listed}\nc\n", encoding="utf-8"
    )
    assert write_page("recurrent", readme, folder, rows)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("a\n<!-- bench:recurrent -->\nNVIDIA H200")
    # What the suite has and the file has not is named.
    assert "Not measured: `prefill_1x4096_bf16`, `decode_16x1_bf16`.\n\nNo other package was timed at" in text
    assert ".\n<!-- /bench:recurrent -->\nb\n<!-- listing -->\n```\nid " in text
    assert text.endswith("\n```\n<!-- /listing -->\nc\n")
    assert "\nold\n" not in text
    assert not write_page("recurrent", readme, folder, rows)


def test_goals_stand_beside_what_is_reached(folder: Path) -> None:
    document = json.loads((folder / "nvidia-h200" / "recurrent.json").read_text(encoding="utf-8"))
    assert goals(document).endswith(
        "prefill 0.300 ms, reached; 1.3x as fast as `padded`, not reached; decode 10 % above its ceiling, reached."
    )
    document["rows"] = document["rows"][:2]
    assert goals(document) == "", "without decode there is nothing to say"


def test_peers_stand_in_the_table_and_not_among_the_goals(folder: Path) -> None:
    path = folder / "nvidia-h200" / "recurrent.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    before = goals(document)
    document["rows"].append(row("theirs (4, 1)", "decode_16x1_f32", 19.0, slots=20.0, us=20.0) | {"peer": True})
    assert goals(document) == before
    path.write_text(json.dumps(document), encoding="utf-8")
    assert "| theirs (4, 1) |  | 19.0 (0.95x) |" in readme_table("recurrent", folder).splitlines()


def test_what_compile_time_sizes_gain_is_worked_out(folder: Path) -> None:
    document = json.loads((folder / "nvidia-h200" / "recurrent.json").read_text(encoding="utf-8"))
    assert compile_time_sizes(document) == ""
    document["rows"] += [
        row(PADDED, "decode_16x1_f32", 60.0, slots=20.0, us=20.0),
        row(GENERIC, "decode_16x1_f32", 45.0, slots=20.0, us=20.0),
        row(GENERIC, "prefill_1x4096_f32", 600.0, fma=200.0, us=200.0),
    ]
    assert "1.50x the time of `padded` in prefill (600.0 for 400.0 us)" in compile_time_sizes(document)
    assert "0.75x the time of `padded` in decode (45.0 for 60.0 us)" in compile_time_sizes(document)


def test_mamba1_has_a_line_a_point_and_its_goals(tmp_path: Path) -> None:
    sizes = {"heads": 8192, "head_dim": 1, "d_state": 16, "groups": 1, "io": "bf16", "state": "f32"}
    points = {
        name: {"job": job, "sequences": sequences, "tokens": tokens, "resume": job == "decode", **sizes}
        for name, job, sequences, tokens in (
            ("long", "prefill", 1, 4096),
            ("few", "decode", 16, 1),
            ("many", "decode", 128, 1),
        )
    }
    states = {"slots": 36.0, "ascending": 35.0, "contiguous": 36.0, "moved": 40.0, "us": 40.0}
    rows = [
        row("slow", "long", 400.0, bytes=68.0, fma=69.0, exp=128.0, us=128.0),
        row("fast", "long", 320.0, bytes=68.0, fma=69.0, exp=128.0, us=128.0),
        row("theirs", "long", 480.0, us=128.0) | {"peer": True, "error_of_y": 1e-3},
        row("one", "few", 10.0, slots=6.0, moved=6.5, us=6.5),
        row("one", "many", 44.0, **states),
        row("triton (32, 4)", "many", 41.8, **states) | {"peer": True, "error_of_y": 1e-3},
        {"kernel": "missing", "point": "few", "peer": True, "failed": "it is not built"},
    ]
    document = {"device": "NVIDIA H200", "driver": "580.1", "compiler": "13.0.88", "date": "2026-01-02"}
    document["suite"] = "selective"
    path = tmp_path / "nvidia-h200" / "selective.json"
    path.parent.mkdir()
    path.write_text(json.dumps(document | {"points": points, "rows": rows}), encoding="utf-8")
    lines = readme_table("selective", tmp_path).splitlines()
    assert (
        "| prefill 1 x 4096, 8192 channels x 16, bf16 sf32 | exponentials 128.0, FP32 69.0, bytes 68.0 | "
        "320.00 (2.50x) | `fast` | 480.00 | theirs | 1.50 |"
    ) in lines
    assert (
        "| decode 16 x 1, 8192 channels x 16, bf16 sf32 | states 6.0, all bytes 6.5 | 10.00 (1.54x) | `one` | - | - "
        "| - |"
    ) in lines
    text = " ".join(lines)
    # 16 sequences have 8 MiB of states: no goal is set there.
    assert "prefill 1.5x as fast as the best peer: 1.50x at the least, reached;" in text
    assert "decode faster than the best peer: 0.95x at the least, not reached;" in text
    assert "from 64 MiB of states on: 10 % above it at the most, not reached." in text
    assert "Not run at any point: missing: it is not built" in text
    assert text.endswith("No other package ran at `few`: it is not built.")


def test_launches_have_a_line_a_kernel_and_the_reason_of_what_did_not_run(tmp_path: Path) -> None:
    def us(median: float) -> dict[str, float]:
        return {"median": median, "low": median, "high": median}

    document = {
        "device": "NVIDIA H200",
        "driver": "580.1",
        "compiler": "13.0.88",
        "date": "2026-01-02",
        "empty": {"node": us(1.1), "launch": us(2.5), "answer": us(7)},
        "rows": [
            {
                "kernel": "k",
                "family": "ssd",
                "launches": 2,
                "node": us(6),
                "plan": us(9),
                "launch": us(5),
                "answer": us(15),
            },
            {"kernel": "theirs", "family": "ssd", "peer": True, "node": us(20), "launch": us(90), "answer": us(120)},
            {"kernel": "absent", "family": "ssd", "peer": True, "failed": "it is not installed"},
        ],
    }
    path = tmp_path / "nvidia-h200" / "launch.json"
    path.parent.mkdir()
    path.write_text(json.dumps(document), encoding="utf-8")
    lines = readme_table("launch", tmp_path).splitlines()
    assert lines[-5:] == [
        "| an empty kernel | 1 | 1.10 | - | 2.50 | 7.00 |",
        "| `k` | 2 | 6.00 | 9.00 | 5.00 | 15.00 |",
        "| theirs | - | 20.00 | - | 90.00 | 120.00 |",
        "",
        "Not run: absent: it is not installed",
    ]


def test_missing_markers_and_missing_figures_are_errors(folder: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no markers\n", encoding="utf-8")
    with pytest.raises(SsmError, match="<!-- bench:recurrent -->"):
        write_page("recurrent", readme, folder)
    with pytest.raises(SsmError, match="invoke bench"):
        readme_table("update", folder)
