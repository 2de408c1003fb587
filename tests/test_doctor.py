"""The doctor: what it finds, and a command for each thing that is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pyharness import doctor, gpus, toolchain
from pyharness.errors import DeviceError, ToolchainError

H200 = gpus.Gpu("NVIDIA H200", 9, 0)


def _findings(
    monkeypatch: pytest.MonkeyPatch, driver: gpus.Driver, *installed: str, on_bus: int = 0
) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(doctor, "pci_gpus", lambda: on_bus)
    monkeypatch.setattr(gpus, "driver", lambda: driver)
    monkeypatch.setattr(doctor, "version", lambda name: "1.0" if name in installed else "")
    return {finding.name: finding for finding in doctor.examine()}


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
        ((11, 0), "compute_80"),
    ],
)
def test_a_gpu_is_served_by_its_major_version_at_the_same_or_a_lower_minor(
    capability: tuple[int, int], target: str
) -> None:
    assert gpus.target_for(*capability) == target


def test_a_machine_without_a_gpu_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _findings(monkeypatch, gpus.Driver(problem="no NVIDIA driver"))
    assert {name: finding.state for name, finding in found.items()} == {
        "python": "ok",
        "g++": "ok",
        "gcc": "ok",
        "nvcc": "ok",
        "clang-format": "ok",
        "go": "ok",
        "driver": "not needed",
        "GPU": "not needed",
        "pycuda": "not needed",
        "cuda-bindings": "not needed",
    }
    assert found["nvcc"].found == "13.0.88 (pinned, from PyPI)"
    assert "no NVIDIA driver" in found["GPU"].found
    assert not any(finding.cure for finding in found.values())


def test_a_gpu_without_pycuda_gets_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _findings(monkeypatch, gpus.Driver("580.65.06", "13.0", (H200,)), "cuda-bindings")
    assert (found["GPU"].state, found["GPU"].found) == ("ok", "NVIDIA H200, target sm_90")
    assert (found["driver"].state, found["cuda-bindings"].state) == ("ok", "ok")
    assert (found["pycuda"].state, found["pycuda"].cure) == ("missing", "uv run invoke doctor --install-pycuda")


def test_a_gpu_without_a_driver_lacks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _findings(monkeypatch, gpus.Driver(problem="no NVIDIA driver"), on_bus=2)
    for name in ("driver", "GPU"):
        assert (found[name].state, found[name].found) == ("missing", "2 NVIDIA GPUs on the PCI bus: no NVIDIA driver")
        assert found[name].cure.startswith("install an NVIDIA driver 580 or newer")
    assert found["pycuda"].state == "not needed"


def test_gpus_are_counted_on_the_pci_bus(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("compute", "0x10de", "0x030200"),
        ("display", "0x10de", "0x030000"),
        ("sound", "0x10de", "0x040300"),
        ("switch", "0x10de", "0x068000"),
        ("other", "0x8086", "0x030000"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    (tmp_path / "unreadable").mkdir()
    assert doctor.pci_gpus(tmp_path) == 2
    assert doctor.pci_gpus(tmp_path / "no such folder") == 0


def test_a_driver_older_than_the_images_need_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _findings(monkeypatch, gpus.Driver("570.86.10", "12.8", (H200,)))["driver"]
    assert (found.state, found.cure) == ("missing", "install an NVIDIA driver 580 or newer")
    assert "older than 580" in found.found


def test_what_is_missing_has_a_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(nvcc: str | None = None) -> toolchain.Compiler:
        raise ToolchainError("no compiler")

    monkeypatch.setattr(toolchain, "find_compiler", missing)
    monkeypatch.setattr(doctor, "_program", lambda *_: "")
    found = _findings(monkeypatch, gpus.Driver("580.65.06", "13.0", (H200,)))
    absent = {name: finding.cure for name, finding in found.items() if finding.state == "missing"}
    assert set(absent) == {"g++", "gcc", "nvcc", "clang-format", "go", "pycuda", "cuda-bindings"}
    assert all(absent.values())


def _uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> Path:
    """A stand-in for uv that writes down how it was called."""
    log = tmp_path / "uv.log"
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(f'#!/bin/sh\necho "HOME=$HOME $*" >> {log}\nexit {code}\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent), prepend=":")
    return log


def test_pycuda_is_built_without_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _uv(tmp_path, monkeypatch, 0)
    libcuda = tmp_path / "libcuda.so.1"
    libcuda.touch()
    for _ in range(2):
        doctor.install_pycuda(tmp_path / "pycuda", libcuda)
    first, second, *_ = log.read_text().splitlines()
    start = f"HOME={tmp_path / 'pycuda'} pip install --python {sys.executable} "
    assert first == start + "cuda-bindings==13.0.* nvidia-cuda-profiler-api==13.0.*"
    assert second == start + "pycuda==2026.1"
    options: dict[str, object] = {}
    exec((tmp_path / "pycuda" / ".aksetup-defaults.py").read_text(), options)  # as PyCUDA's set-up does
    assert options["CUDA_ENABLE_CURAND"] is False
    assert options["CUDA_INC_DIR"] == [str(toolchain.cuda_include_dirs()[0])]
    (folder,) = options["CUDADRV_LIB_DIR"]  # type: ignore[misc]
    assert (Path(folder) / "libcuda.so").resolve() == libcuda


def test_a_failed_build_of_pycuda_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _uv(tmp_path, monkeypatch, 3)
    with pytest.raises(ToolchainError, match="cuda-bindings.* was to be installed, uv failed"):
        doctor.install_pycuda(tmp_path / "pycuda", tmp_path / "libcuda.so.1")


def test_pycuda_without_a_driver_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _uv(tmp_path, monkeypatch, 0)

    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(doctor.ctypes, "CDLL", absent)
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1 was wanted to build PyCUDA, found none"):
        doctor.install_pycuda(tmp_path / "pycuda")
