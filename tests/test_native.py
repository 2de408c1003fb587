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
    spec = RecurrentSpec(d_state=128)
    few = functools.partial(package.package, catalogue=(spec,), include_unproven=True)
    monkeypatch.setattr(package, "package", few)
    monkeypatch.setattr(native, "LAUNCHED", (spec.id,))
    # The standard library as the other tests have it, so that go compiles it once.
    monkeypatch.setattr(package, "VET_FLAGS", ())
    made = native.build(tmp_path / "gpu", "sm_90")
    names = ["ssmvet", "ssmscan.test", "stack", "example.test", "scan", f"launched-{spec.id}"]
    assert [path.name for path in made] == names
    assert all(os.access(path, os.X_OK) and path.read_bytes()[:4] == b"\x7fELF" for path in made)
    images = list((tmp_path / "gpu" / "images").rglob("*.cubin"))
    assert [path.stem for path in images] == [spec.id]
    assert list((tmp_path / "gpu" / "testdata").iterdir())


def test_a_launcher_of_a_kernel_that_is_not_packed_is_asked_for_in_vain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, other = RecurrentSpec(d_state=128), RecurrentSpec(d_state=16).id
    few = functools.partial(package.package, catalogue=(spec,), include_unproven=True, vet_binary=False)
    monkeypatch.setattr(package, "package", few)
    monkeypatch.setattr(native, "LAUNCHED", (spec.id, other))
    with pytest.raises(SsmError, match=f"^{other} was wanted in the package, found unproven"):
        native.build(tmp_path / "gpu", "sm_90")
    assert not (tmp_path / "gpu").exists()


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
    lanes = {"cuda12": {"compiler": "12.4.131", "date": "2026-01-01", "passed": 69, "cases": 500}}
    native.keep(stored(tmp_path / "lanes", lanes=lanes), bench, page)
    native.keep(stored(tmp_path / "proved", checks=CHECKS), bench, page)
    (tmp_path / "proved" / "ssmscan.test.txt").write_text(
        "=== RUN TestA\n--- PASS: TestA (0.01s)\n    cuda.go:1: noise\n"
    )
    native.keep(tmp_path / "proved", bench, page)
    assert (bench / "a-card" / "native-tests.txt").read_text() == "--- PASS: TestA (0.01s)\n"
    devices = {"goroutines": {"devices": 2, "kernels": 67, "goroutines": 8, "c": 58}}
    times = devices | {"benchmarks": native.benchmarks(BENCH), "stack": native.stack_figures(STACK), "beside": BESIDE}
    path = native.keep(stored(tmp_path / "timed", **times), bench, page)
    assert path == bench / "a-card" / "native.json"
    assert json.loads(path.read_text()) == DEVICE | times | {"checks": CHECKS, "lanes": lanes}
    text = page.read_text()
    assert text.startswith("before\n<!-- native -->\nA card, driver 580.1, nvcc 13.0.88, 2026-01-02.\n")
    assert "| CPU of a launch beyond cuLaunchKernel itself | 1.25 us | 3 us |" in text
    assert "| opening the 21 kernels of `update`, hashes checked, for the first time | 41 ms | 200 ms |" in text
    assert "| `ssd_a` | prefill_1x4096 | 101.50 | 100.00 | 1.015 |" in text
    assert "prefill 585142 tokens/s, decode 32508 tokens/s" in text
    assert "Passed there: 32 launch tests with golden vectors, 9 runs of the C example, 15 images of `ssd` by" in text
    assert "On 2 of these cards at once, in one process: 8 goroutines that each had a launch in flight on both" in text
    assert "\nLane `cuda12`, made by nvcc 12.4.131: 69 images passed 500 cases of ssmvet there on 2026-01-01.\n" in text
    assert native.refreshed(text, bench) == text
    # Stored beside the benches, it is no problem that selection could take an entry from.
    assert select.refreshed_table(select.Table(), bench).entries == ()


def test_a_part_that_failed_is_not_stored(tmp_path: Path) -> None:
    wrong = ({"failed": {"stack": "no"}}, {"checks": {"c": {"failed": "no"}}}, {"lanes": {"cuda12": {"failed": "no"}}})
    for number, parts in enumerate(wrong):
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


def machine(folder: Path, devices: int = 2) -> Path:
    """A folder of `native build` whose binaries print what the real ones do; ssmvet fails for ssd."""
    passed = "--- PASS: Test{}OnTwoDevicesAtOnce/{} (0.01s)"
    two = [passed.format("Goroutines", "#00"), passed.format("EveryKernel", "a"), passed.format("EveryKernel", "b")]
    few = ["--- SKIP: TestGoroutinesOnTwoDevicesAtOnce (0.00s)", "    want two devices, have 1"]
    scripts = {
        "ssmscan.test": "echo '--- PASS: TestA (0.00s)'; echo '--- SKIP: TestB (0.00s)'",
        "example.test": "\n".join(f"echo '{line}'" for line in (two if devices > 1 else few)),
        "scan": 'for each in "$@"; do case $each in *.flat) echo "ok $each";; esac; done; echo "$CUDA_VISIBLE_DEVICES"',
        "ssmvet": '[ "$3" = ssd ] && echo "one image failed" && exit 1\n'
        'echo \'{"images": {"1": {"cases": 3}, "2": {"cases": 4}}}\' > "$5"',
    }
    scripts |= {f"launched-{kernel}": scripts["scan"] for kernel in native.LAUNCHED}
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    lanes = {"cuda12": {"compiler": "12.4.131"}, "cuda13": {"compiler": "13.0.88"}}
    for path, content in {"catalogue/lanes.json": json.dumps(lanes), "examples/c/vectors/one.flat": ""}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(content)
    return folder


def test_proofs_are_counted_by_test_family_and_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "document", lambda parts: dict(parts))
    found = native.prove(machine(tmp_path), tmp_path / "out")
    assert found["checks"]["golden"] == {"passed": 1, "skipped": 1}
    assert found["checks"]["c"] == {"passed": 1}
    assert found["checks"]["launchers"] == {"passed": 4, "kernels": 4}
    assert found["checks"]["ssmvet update"] == {"passed": 2, "cases": 7}
    assert "one image failed" in found["checks"]["ssmvet ssd"]["failed"]
    assert found["lanes"].keys() == {"cuda12"}
    assert found["lanes"]["cuda12"].items() >= {"compiler": "12.4.131", "passed": 2, "cases": 7}.items()
    assert json.loads((tmp_path / "out" / "native.json").read_text()) == found


@pytest.mark.parametrize(
    ("devices", "found"), [(2, {"devices": 2, "kernels": 2, "goroutines": 1, "c": 1}), (1, {"devices": 1})]
)
def test_two_devices_are_used_where_there_are_two(
    devices: int, found: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert native._devices(machine(tmp_path, devices), tmp_path / "out") == found
    if devices == 2:
        assert (tmp_path / "out" / "scan-devices.txt").read_text() == "ok examples/c/vectors/one.flat\n\n"


def test_what_is_timed_is_what_is_selected_and_recurrent() -> None:
    kernels = native.timed(select.Device("NVIDIA H200", "sm_90"))
    assert set(kernels) == set(native.POINTS)
    assert set(native.LAUNCHED) <= set(manifest.ids())
    assert {spec.id for specs in kernels.values() for spec in specs} <= set(manifest.ids())
    for specs in kernels.values():
        assert {spec.io for spec in specs if spec.family == "recurrent"} == {"f32", "bf16"}
        assert len({spec.id for spec in specs}) == len(specs)
    families = {name: {spec.family for spec in specs} for name, specs in kernels.items()}
    assert families == {"prefill_1x4096": {"recurrent", "ssd"}, "decode_16x1": {"recurrent", "update"}}


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
