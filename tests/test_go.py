"""The Go module: formatting, vet, tests without cgo, the skip without a GPU, and the whole test on a fake driver."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pyharness import args, golden
from pyharness.errors import NoKernel, ToolchainError
from pyharness.oracle import oracle
from tests.fake_cuda import build_driver

CONFORMING = {"registers": 40, "static_shared": 16, "local_bytes": 0}


@pytest.fixture(scope="module")
def go() -> str:
    return golden.find_go()  # a development dependency: without it these tests fail


def _fake_kernel(io: str) -> golden.StagedKernel:
    """A manifest row that fits templates/go/fakecuda, and its image."""
    kernel, image = f"recurrent_n32_r32_{io}_sf32", b"fake"
    row = {
        "schema": 1,
        "id": kernel,
        "spec": {"d_state": 32, "io": io, "state": "f32"},
        "entries": [f"ssm_{kernel}"],
        "args_bytes": args.SCAN_ARGS.itemsize,
        "args": args.layout(),
        "block": 128,
        "grid": {"rule": "rows", "rows": 32},
        "targets": {
            "sm_90": {
                "kind": "cubin",
                "bytes": len(image),
                "sha256": hashlib.sha256(image).hexdigest(),
                "dynamic_shared": 50000,
                "usage": {f"ssm_{kernel}": CONFORMING},
            }
        },
    }
    return golden.StagedKernel(row, image)


@pytest.fixture(scope="module")
def staged(go: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with kernels for the fake driver, and the test binary built from them."""
    folder = tmp_path_factory.mktemp("go") / "staged"
    golden.stage(folder, "sm_90", [_fake_kernel("f32"), _fake_kernel("bf16")])
    golden.build_go_test(folder)
    return folder


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that computes on the CPU."""
    return build_driver(tmp_path_factory.mktemp("driver"))


def _run(binary: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(binary), *options], env=environment, text=True, capture_output=True, check=False)


def test_sources_are_formatted(go: str) -> None:
    gofmt = Path(golden.run_go(["env", "GOROOT"], golden.SOURCES, cgo=False).strip()) / "bin" / "gofmt"
    found = subprocess.run([str(gofmt), "-l", "."], cwd=golden.SOURCES, text=True, capture_output=True, check=True)
    assert found.stdout == "", "run gofmt -w on these"


@pytest.mark.parametrize("tags", [(), ("-tags", "cuda")], ids=["pure", "cuda"])
def test_vet_is_clean(go: str, tags: tuple[str, ...]) -> None:
    golden.run_go(["vet", *tags, "./..."], golden.SOURCES, cgo=bool(tags))


def test_pure_part_tests_without_cgo(staged: Path) -> None:
    shown = golden.run_go(["test", "-v", "./..."], staged, cgo=False)
    assert "--- PASS: TestGoldenVectorsAreWhole" in shown
    assert "--- PASS: TestManifestRowsAgreeWithThisPackageAndTheirImages" in shown
    assert "SKIP" not in shown
    for io in ("f32", "bf16"):
        image = _fake_kernel(io).image
        assert f"_{io}_sf32 for sm_90: {len(image)} bytes, sha256 {hashlib.sha256(image).hexdigest()[:12]}\n" in shown


def test_tag_without_cgo_leaves_the_cuda_part_out(staged: Path) -> None:
    assert "--- PASS" in golden.run_go(["test", "-v", "-tags", "cuda", "."], staged, cgo=False)


def test_binary_links_libc_alone(staged: Path) -> None:
    shown = subprocess.run(["readelf", "-d", "ssmscan.test"], cwd=staged, text=True, capture_output=True, check=True)
    needed = {line.split("[")[1].rstrip("]") for line in shown.stdout.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "libresolv.so.2"}


def test_without_a_driver_gpu_tests_skip_and_name_the_error(staged: Path, tmp_path: Path) -> None:
    # A file that is no library stands in front of any real driver of this machine.
    (tmp_path / "libcuda.so.1").write_bytes(b"not a library")
    done = _run(staged / "ssmscan.test", "-test.v", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert "--- SKIP: TestKernelsPassTheGoldenVectors" in done.stdout
    assert "ErrNoCUDA" in done.stdout
    assert "cannot open libcuda.so.1" in done.stdout


def test_golden_vectors_pass_on_the_fake_driver(staged: Path, fake_driver: Path) -> None:
    done = _run(staged / "ssmscan.test", "-test.v", LD_LIBRARY_PATH=str(fake_driver))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIP" not in done.stdout
    for vector in golden.vectors(32):
        assert f"/{vector.name} (" in done.stdout


@pytest.mark.parametrize(
    ("name", "stale"),
    [("registers", {"registers": 41}), ("local bytes", {"local_bytes": 8})],
    ids=["registers", "local"],
)
def test_an_image_that_differs_from_its_row_is_refused(
    go: str, fake_driver: Path, tmp_path: Path, name: str, stale: dict[str, int]
) -> None:
    kernel = _fake_kernel("f32")
    symbol = kernel.row["entries"][0]
    kernel.row["targets"]["sm_90"]["usage"] = {symbol: CONFORMING | stale}
    folder = golden.stage(tmp_path / "go", "sm_90", [kernel])
    environment = {"LD_LIBRARY_PATH": str(fake_driver)}
    with pytest.raises(ToolchainError, match=f"{name}: want {next(iter(stale.values()))}, have"):
        golden.run_go(["test", "-tags", "cuda", "."], folder, cgo=True, environment=environment)


def test_a_row_with_another_layout_is_refused(staged: Path) -> None:
    # That the layout of NumPy itself passes is in test_pure_part_tests_without_cgo.
    kernel = _fake_kernel("f32")
    row = json.loads(json.dumps(kernel.row))
    row["args"][30]["offset"] += 4
    folder = golden.stage(staged.parent / "moved", "sm_90", [golden.StagedKernel(row, kernel.image)])
    with pytest.raises(ToolchainError, match=f"ScanArgs.{args.layout()[30]['name']}"):
        golden.run_go(["test", "."], folder, cgo=False)


def test_ptx_is_not_staged(tmp_path: Path) -> None:
    with pytest.raises(NoKernel, match="a target with a cubin was wanted .*, found compute_80"):
        golden.stage_go("compute_80", folder=tmp_path)


def test_vectors_are_the_same_for_a_seed_and_other_for_another() -> None:
    first, again, other = golden.vectors(32), golden.vectors(32), golden.vectors(32, seed=1)
    for a, b, c in zip(first, again, other, strict=True):
        encoded = golden.encode(a, oracle(a.problem))
        assert encoded == golden.encode(b, oracle(b.problem))
        assert encoded != golden.encode(c, oracle(c.problem))


def test_vector_files_hold_the_arrays_that_they_name() -> None:
    vector = next(v for v in golden.vectors(32) if v.name == "packed_n32_bf16")
    truth = oracle(vector.problem)
    file = golden.encode(vector, truth)
    length = int.from_bytes(file[8:16], "little")
    assert file[:8] == b"SSMGOLD1"
    assert (16 + length) % 64 == 0
    header, data = json.loads(file[16 : 16 + length]), file[16 + length :]
    for name in ("x", "B", "C"):
        view, want = header["arrays"][name], getattr(vector.problem, name)
        span = header["buffers"][view["buffer"]]
        raw = np.frombuffer(data, np.uint16, span["bytes"] // 2, span["offset"])[view["offset"] // 2 :]
        for t in range(vector.problem.tokens):
            row = raw[t * view["stride"] : t * view["stride"] + want[t].size]
            assert np.array_equal(row, want[t].reshape(-1).view(np.uint16))
    assert [header["arrays"][name]["buffer"] for name in ("x", "B", "C")] == ["x", "x", "x"]
    y = header["expect"]["y"]
    assert np.array_equal(np.frombuffer(data, "<f8", y["bytes"] // 8, y["offset"]), truth.y.reshape(-1))
