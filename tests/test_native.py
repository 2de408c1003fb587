"""Figures of the native paths: what the binaries print is read whole, failures stay failures, and the page shows it."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from pyharness import figures, manifest, native, package, select
from pyharness.errors import SsmError
from pyharness.families import RecurrentSpec

BENCH = """goos: linux
cpu: a CPU
BenchmarkCUDASSMScanPrefill4096-16    \t     700\t    287000 ns/op\t123456.78 MB/s
BenchmarkCUDASSMScanLaunch-16         \t       9\t  1200000 ns/op\t      1250 ns-added/launch\t      3500 ns/launch
BenchmarkCUDASSMScanOpen/update-16    \t      12\t  30000000 ns/op\t        41.2 first-ms\t        21.0 kernels
PASS
"""
STACK = """NVIDIA H200 (sm_90): 67 kernels loaded in 150ms, after 80ms for the context
prefill: 16 x 4096 tokens through 23 layers in 112ms: 585142 tokens/s
decode: 256 steps of 16 sequences in 126ms: 32508 tokens/s, 4.56 us of CPU a launch
 47.1 % prefill ssd_a (measured for this problem on NVIDIA H200; proven on NVIDIA H200)
 52.9 % decode update_b (measured for this problem on NVIDIA H200; proven on NVIDIA H200)
rows of the last layer against float64: relative error 3.0e-06 of 3.3e-05
"""
DEVICE = {"suite": "native", "device": "A card", "driver": "580.1", "compiler": "13.0.88", "date": "2026-01-02"}
CHECKS = {"golden": {"passed": 32, "skipped": 0}, "c": {"passed": 9}, "ssmvet ssd": {"passed": 15, "cases": 73}}
BESIDE = [{"kernel": "ssd_a", "point": "prefill_1x4096", "go_us": 101.5, "pycuda_us": 100.0, "ratio": 1.015}]


def test_a_folder_for_a_gpu_machine_has_every_binary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(package.package, catalogue=(RecurrentSpec(d_state=128),), include_unproven=True)
    monkeypatch.setattr(package, "package", few)
    # The standard library as the other tests have it, so that go compiles it once.
    monkeypatch.setattr(package, "VET_FLAGS", ())
    made = native.build(tmp_path / "gpu", "sm_90")
    assert [path.name for path in made] == ["ssmvet", "ssmscan.test", "stack", "example.test", "scan"]
    assert all(os.access(path, os.X_OK) and path.read_bytes()[:4] == b"\x7fELF" for path in made)
    images = list((tmp_path / "gpu" / "images").rglob("*.cubin"))
    assert [path.stem for path in images] == [RecurrentSpec(d_state=128).id]
    assert list((tmp_path / "gpu" / "testdata").iterdir())


def test_benchmarks_and_the_stack_are_read_as_they_print() -> None:
    found = native.benchmarks(BENCH)
    assert found["CUDASSMScanLaunch"] == {"ns/op": 1.2e6, "ns-added/launch": 1250.0, "ns/launch": 3500.0}
    assert found["CUDASSMScanPrefill4096"]["MB/s"] == 123456.78
    assert found["CUDASSMScanOpen/update"]["first-ms"] == 41.2
    stack = native.stack_figures(STACK)
    assert stack["tokens_per_second"] == {"prefill": 585142.0, "decode": 32508.0}
    assert stack["launch_us"] == 4.56
    assert [(one["percent"], one["kernel"]) for one in stack["shares"]] == [(47.1, "ssd_a"), (52.9, "update_b")]
    assert stack["error"] == "3.0e-06 of 3.3e-05"


def test_output_without_the_figures_is_an_error_and_not_an_empty_table() -> None:
    with pytest.raises(SsmError, match="that of a launch among them, found:\nPASS"):
        native.benchmarks("PASS\n")
    with pytest.raises(SsmError, match="was to print rates"):
        native.stack_figures(STACK.replace("tokens/s", "tokens"))


def stored(out: Path, **parts: Any) -> Path:
    out.mkdir(parents=True)
    (out / "native.json").write_text(json.dumps(DEVICE | parts))
    return out


def test_parts_are_stored_together_and_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- native -->\nold\n<!-- /native -->\nafter\n")
    bench = tmp_path / "bench"
    native.keep(stored(tmp_path / "proved", checks=CHECKS), bench, page)
    (tmp_path / "proved" / "ssmscan.test.txt").write_text(
        "=== RUN TestA\n--- PASS: TestA (0.01s)\n    cuda.go:1: noise\n"
    )
    native.keep(tmp_path / "proved", bench, page)
    assert (bench / "a-card" / "native-tests.txt").read_text() == "--- PASS: TestA (0.01s)\n"
    devices = {"goroutines": {"devices": 2}}
    times = devices | {"benchmarks": native.benchmarks(BENCH), "stack": native.stack_figures(STACK), "beside": BESIDE}
    path = native.keep(stored(tmp_path / "timed", **times), bench, page)
    assert path == bench / "a-card" / "native.json"
    assert json.loads(path.read_text()) == DEVICE | times | {"checks": CHECKS}
    text = page.read_text()
    assert text.startswith("before\n<!-- native -->\nA card, driver 580.1, nvcc 13.0.88, 2026-01-02.\n")
    assert "| CPU of a launch beyond cuLaunchKernel itself | 1.25 us | 3 us |" in text
    assert "| opening the 21 kernels of `update`, hashes checked, for the first time | 41 ms | 200 ms |" in text
    assert "| `ssd_a` | prefill_1x4096 | 101.50 | 100.00 | 1.015 |" in text
    assert "prefill 585142 tokens/s, decode 32508 tokens/s" in text
    assert (
        "Passed there: 32 launch tests with golden vectors, 9 runs of the C example, goroutines on 2 devices at" in text
    )
    assert native.refreshed(text, bench) == text
    # Stored beside the benches, it is no problem that selection could take an entry from.
    assert select.refreshed_table(select.Table(), bench).entries == ()


def test_a_part_that_failed_is_not_stored(tmp_path: Path) -> None:
    for number, parts in enumerate(({"failed": {"stack": "no"}}, {"checks": {"c": {"failed": "no"}}})):
        out = stored(tmp_path / str(number), **parts)
        with pytest.raises(SsmError, match="of which no part failed were wanted, found .*no"):
            native.keep(out, tmp_path / "bench", tmp_path / "page.md")
    with pytest.raises(SsmError, match="found no such file"):
        native.keep(tmp_path / "absent")
    assert not (tmp_path / "bench").exists()


def test_a_binary_that_fails_or_hangs_is_an_error_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SsmError, match="ended with 3:\nit broke"):
        native.run(["sh", "-c", "echo it broke; exit 3"], tmp_path, tmp_path / "out", "name")
    assert (tmp_path / "out" / "name.txt").read_text() == "it broke\n"
    monkeypatch.setattr(native, "LIMIT", 0.2)
    with pytest.raises(SsmError, match=r"did not end in 0\.2 seconds:\nbegun"):
        native.run(["sh", "-c", "echo begun; exec sleep 9"], tmp_path, tmp_path / "out", "name")


def test_what_is_timed_is_what_is_selected_and_recurrent() -> None:
    kernels = native.timed(select.Device("NVIDIA H200", "sm_90"))
    assert {spec.id for spec in kernels} <= set(manifest.ids())
    jobs = {(native.job_of(spec), spec.io, spec.family == "recurrent") for spec in kernels}
    assert jobs >= {(job, io, True) for job in ("prefill", "decode") for io in ("f32", "bf16")}
    assert {spec.family for spec in kernels} >= {"recurrent", "update", "ssd"}


def test_the_page_shows_what_is_stored() -> None:
    text = native.PAGE.read_text(encoding="utf-8")
    hint = "docs/embedding.md is stale: run `python -m pyharness.native store OUT`"
    assert native.refreshed(text) == text, hint


def test_the_stored_figures_are_within_what_was_wanted() -> None:
    for found in figures.stored(native.SUITE):
        assert found["benchmarks"]["CUDASSMScanLaunch"]["ns-added/launch"] <= 1e3 * native.MOST_ADDED_US
        openings = [one["first-ms"] for name, one in found["benchmarks"].items() if "Open/" in name]
        assert len(openings) == 4
        assert max(openings) <= native.MOST_OPENING_MS
        assert len(found["beside"]) >= 6
        assert max(row["ratio"] for row in found["beside"]) <= native.MOST_RATIO
