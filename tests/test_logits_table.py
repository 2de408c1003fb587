"""What the stored comparisons of logits say, from hand-worked ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pyharness import logits_table, readme_tables

IMAGE = {"target": "sm_90", "sha256": "0" * 64}


def row(dtype: str, scan: str, prefill: float, decode: float, *kernels: str, model: str = "one") -> dict[str, Any]:
    named = [{"kernel": name, "image": IMAGE} for name in kernels]
    about = {"model": model, "like": f"Model {model}", "dtype": dtype, "scan": scan, "kernels": named}
    return about | {"prefill": prefill, "decode": decode}


DOCUMENT: dict[str, Any] = {
    "suite": "logits",
    "device": "NVIDIA H200",
    "driver": "580",
    "compiler": "13.0.88",
    "torch": "2",
    "transformers": "5",
    "date": "2026-01-01",
    "protocol": "a script",
    "prompt": 30,
    "steps": 8,
    "rows": [],
    "comparisons": [
        row("bf16", "triton", 0.02, 0.03),
        row("bf16", "ours", 0.021, 0.031, "a", "b"),
        row("f32", "ours", 1e-6, 2e-6, "c"),
        row("f32", "split", 4e-5, 5e-5, "c", "d"),
        row("f32", "torch", 0, 0),
        row("f32", "none", 1.5, 0.5),
        {k: v for k, v in row("bf16", "triton", 0, 0, model="two").items() if k not in ("prefill", "decode")}
        | {"failed": "mamba-ssm is not installed"},
        row("bf16", "ours", 0.04, 0.05, "e", model="two"),
    ],
}


def test_a_line_a_model_and_what_did_not_run() -> None:
    lines = logits_table.table(DOCUMENT).splitlines()
    assert (
        "| Model one | 2.0e-02 / 3.0e-02 | 2.1e-02 / 3.1e-02 | 1.0e-06 / 2.0e-06 | 4.0e-05 / 5.0e-05 "
        "| 1.5e+00 / 5.0e-01 |"
    ) in lines
    assert "| Model two | - | 4.0e-02 / 5.0e-02 | - | - | - |" in lines
    text = " ".join(lines)
    assert "of a prompt of 30 tokens / of 8 tokens decoded after it." in text
    assert "Kernels of ours that ran: `a`, `b`, `c`, `d`, `e`." in text
    assert text.endswith("Not run: Model two, bf16, mamba-ssm: mamba-ssm is not installed.")


def test_the_page_takes_the_table_from_what_is_stored(tmp_path: Path) -> None:
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    (folder / "logits.json").write_text(json.dumps(DOCUMENT), encoding="utf-8")
    page = tmp_path / "torch.md"
    page.write_text("before\n<!-- bench:logits -->\nold\n<!-- /bench:logits -->\nafter\n", encoding="utf-8")
    assert readme_tables.page_of("logits").name == "torch.md"
    assert readme_tables.write_page("logits", page, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- bench:logits -->\nNVIDIA H200, driver 580")
    assert text.endswith("\n<!-- /bench:logits -->\nafter\n")
    assert "| Model one | 2.0e-02" in text
    assert not readme_tables.write_page("logits", page, tmp_path)
