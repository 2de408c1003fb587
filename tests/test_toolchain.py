"""The compiler: which one is used, that its output repeats, what it reports, and the cache."""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from pathlib import Path

import pytest

from pyharness import toolchain
from pyharness.errors import ToolchainError
from pyharness.toolchain import Compiler, Job, Usage

SOURCE = r"""
#include <cuda_bf16.h>
namespace { __device__ float twice(float v) { return v + v; } }
inline __device__ __noinline__ float half_of(float v) { return 0.5f * v; }
extern "C" __global__ void __launch_bounds__(128) ssm_first(const float* x, __nv_bfloat16* y, int n) {
  extern __shared__ float dynamic[];
  __shared__ float fixed[33];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  fixed[threadIdx.x % 33] = twice(x[i]);
  dynamic[threadIdx.x] = half_of(x[i]);
  __syncthreads();
  if (i < n) y[i] = __float2bfloat16(dynamic[threadIdx.x ^ 1] + fixed[(threadIdx.x + 1) % 33]);
}
"""
# An array that is indexed by data cannot live in registers.
SPILLING = r"""
extern "C" __global__ void ssm_local(const int* x, float* y) {
  float kept[64];
  for (int i = 0; i < 64; ++i) kept[x[i] & 63] = x[i];
  y[threadIdx.x] = kept[x[threadIdx.x] & 63];
}
"""
REFUSED = 'extern "C" __global__ void ssm_first() { undeclared(); }\n'


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return toolchain.find_compiler()


def job(source: str = SOURCE, target: str = "sm_90", name: str = "first") -> Job:
    return Job(name, source, target, toolchain.flags("recurrent"))


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_pinned_compiler_is_used_even_with_an_nvcc_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "nvcc", "echo 'release 13.1, V13.1.5'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("NVCC", raising=False)
    found = toolchain.find_compiler()
    assert (found.pinned, found.version, found.min_driver) == (True, "13.0.88", "580")


@pytest.mark.parametrize("by", ["argument", "environment", "name on PATH"])
def test_another_nvcc_is_used_when_asked_for(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = program(tmp_path / by / "nvcc", "echo 'Cuda compilation tools, release 12.9, V12.9.86'")
    monkeypatch.setenv("PATH", str(other.parent), prepend=":")
    monkeypatch.setenv("NVCC", {"argument": "", "environment": str(other), "name on PATH": "nvcc"}[by])
    toolchain._find_compiler.cache_clear()
    found = toolchain.find_compiler(str(other) if by == "argument" else None)
    toolchain._find_compiler.cache_clear()
    assert found == Compiler(other, "12.9.86", pinned=False)
    assert found.min_driver == "525"


@pytest.mark.parametrize(
    ("says", "wanted"),
    [
        ("echo 'release 12.3, V12.3.107'", "nvcc 12.4 or newer was wanted, found 12.3.107"),
        ("exit 3", "to name a version"),
    ],
)
def test_an_nvcc_that_cannot_serve_is_refused(says: str, wanted: str, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=wanted):
        toolchain.find_compiler(str(program(tmp_path / "nvcc", says)))


def test_a_target_that_an_nvcc_does_not_know_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    compiler = toolchain.find_compiler(str(program(tmp_path / "nvcc", "echo 'release 12.4, V12.4.131'")))
    jobs = [toolchain.Job("one", "", target, ()) for target in ("sm_90", "sm_120", "sm_100")]
    with pytest.raises(
        ToolchainError, match=r"nvcc 12.8 or newer was wanted for sm_100, sm_120, found 12.4.131: .*--arch"
    ):
        toolchain.compile_many(jobs, compiler, cache=tmp_path / "cache")
    toolchain.check_targets(compiler, ("sm_90", "sm_90a", "compute_80"))
    toolchain.check_targets(Compiler(compiler.nvcc, "12.8.61", pinned=False), ("sm_100", "sm_120"))


def test_an_nvcc_that_is_not_there_is_named() -> None:
    with pytest.raises(ToolchainError, match="'/nowhere/nvcc' was asked for, found no such program"):
        toolchain.find_compiler("/nowhere/nvcc")


def test_another_version_of_the_wheels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain.importlib.metadata, "version", lambda name: "13.1.0")
    with pytest.raises(
        ToolchainError, match=r"13\.0\.88 from PyPI was wanted, found nvidia-cuda-nvcc 13\.1\.0.*uv run"
    ):
        toolchain.cuda_include_dirs()


def test_headers_come_with_the_nvcc_that_is_asked_for_where_none_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = program(tmp_path / "bin" / "nvcc", "echo 'release 12.9, V12.9.86'")
    monkeypatch.setattr(toolchain, "_wheel_root", lambda: None)
    monkeypatch.setenv("NVCC", str(other))
    with pytest.raises(ToolchainError, match=r"cuda_runtime\.h was wanted in .*include, found none"):
        toolchain.cuda_include_dirs()
    for header in ("cuda_runtime.h", "cccl/cuda/std/version"):
        path = tmp_path / "include" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert toolchain.cuda_include_dirs() == [tmp_path / "include", tmp_path / "include" / "cccl"]
    monkeypatch.delenv("NVCC")
    with pytest.raises(ToolchainError, match="from PyPI was wanted"):
        toolchain.cuda_include_dirs()


def test_headers_serve_any_compiler() -> None:
    include, cccl = toolchain.cuda_include_dirs()
    assert (include / "cuda_fp16.h").is_file()
    assert (cccl / "cuda" / "std" / "cstdint").is_file()


def test_f32_families_are_compiled_without_contraction_and_no_image_has_line_numbers() -> None:
    assert "-fmad=false" in toolchain.flags("recurrent")
    assert "-fmad=false" in toolchain.flags("ssd"), "sums in two floats are undone by contraction"
    assert not {"-G", "-lineinfo"} & {*toolchain.flags("recurrent"), *toolchain.flags("ssd")}


def test_contraction_is_off(compiler: Compiler) -> None:
    source = 'extern "C" __global__ void ssm_first(float* y) { y[0] = y[1] * y[2] + y[3]; }\n'
    ptx = toolchain.compile_source(job(source, "compute_80"), compiler).data.decode()
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert "fma" not in ptx


def test_bytes_repeat_in_any_folder_and_whatever_the_environment(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = toolchain.compile_source(job(), compiler)
    elsewhere = tmp_path / "another folder with a longer name"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-G")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-lineinfo")
    second = toolchain.compile_source(job(name="second"), compiler)
    assert first.data == second.data
    assert b"kernel.cu" not in first.data
    assert str(tmp_path).encode() not in second.data
    assert not list(elsewhere.iterdir())


def test_names_that_depend_on_the_folder_are_refused(compiler: Compiler) -> None:
    with pytest.raises(ToolchainError, match=r"internal linkage.*make them `inline`"):
        toolchain.compile_source(job(SOURCE.replace("inline __device__", "static __device__")), compiler)


def test_usage_of_a_cubin_is_read(compiler: Compiler) -> None:
    image = toolchain.compile_source(job(), compiler)
    usage = image.usage["ssm_first"]
    assert (image.kind, set(image.usage)) == ("cubin", {"ssm_first"})
    assert usage.static_shared >= 33 * 4
    assert 8 <= usage.registers <= 64
    assert (usage.local_bytes, usage.spill_stores, usage.spill_loads) == (0, 0, 0)
    assert image.warnings == ""


def test_local_memory_shows(compiler: Compiler) -> None:
    image = toolchain.compile_source(job(SPILLING), compiler)
    assert image.usage["ssm_local"].local_bytes >= 256


def test_usage_is_read_entry_by_entry() -> None:
    log = (
        "ptxas info    : Compiling entry function 'a' for 'sm_90'\n"
        "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Used 64 registers, used 1 barriers, 144 bytes smem, 372 bytes cmem[0]\n"
        "ptxas info    : Compiling entry function 'b' for 'sm_90'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 10 registers\n"
    )
    assert toolchain.parse_usage(log) == {"a": Usage(64, 144, 16, 8, 12), "b": Usage(10, 0, 0, 0, 0)}


def test_a_report_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ToolchainError, match="what a uses"):
        toolchain.parse_usage("ptxas info : Compiling entry function 'a' for 'sm_90'\n all is well\n")


def test_compute_80_gives_ptx(compiler: Compiler) -> None:
    image = toolchain.compile_source(job(target="compute_80"), compiler)
    assert (image.kind, image.usage) == ("ptx", {})
    assert b".target sm_80" in image.data
    assert str(tempfile.gettempdir()).encode() not in image.data


def test_warnings_are_kept(compiler: Compiler) -> None:
    image = toolchain.compile_source(job(SPILLING.replace("{\n", "{\n  int unused;\n", 1)), compiler)
    assert "unused" in image.warnings


def test_a_refused_source_names_the_kernel_and_leaves_nothing(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"(?s)^first for sm_90: .*undeclared.*command: nvcc "):
        toolchain.compile_many([job(REFUSED)], compiler, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_compiled_twice(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [job(), job(target="compute_80")]
    seen: list[str] = []
    first = toolchain.compile_many(
        jobs, compiler, cache=tmp_path, workers=2, done=lambda image: seen.append(image.target)
    )
    assert sorted(seen) == ["compute_80", "sm_90"]

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", started)
    monkeypatch.setattr(subprocess, "Popen", started)
    toolchain._find_compiler.cache_clear()
    second = toolchain.compile_many(jobs, toolchain.find_compiler(), cache=tmp_path)
    assert [image.seconds for image in second] == [0.0, 0.0]
    assert [dataclasses.replace(image, seconds=0.0) for image in first] == second


@pytest.mark.parametrize("ending", ["image", "json"])
def test_a_damaged_cache_is_not_believed(ending: str, compiler: Compiler, tmp_path: Path) -> None:
    whole = toolchain.compile_cached(job(), compiler, tmp_path)
    (path,) = tmp_path.glob(f"*.{ending}")
    path.write_bytes(path.read_bytes()[:-3])
    assert toolchain.compile_cached(job(), compiler, tmp_path).data == whole.data


def test_all_that_decides_an_image_decides_its_key(compiler: Compiler) -> None:
    other = dataclasses.replace(compiler, version="13.0.89")
    jobs = [job(), job(SOURCE + "\n"), job(target="sm_86"), dataclasses.replace(job(), flags=("-O3",))]
    keys = [toolchain.cache_key(one, compiler) for one in jobs] + [toolchain.cache_key(job(), other)]
    assert len(set(keys)) == len(keys)
    assert toolchain.cache_key(job(name="renamed"), compiler) == keys[0]


def test_a_file_is_published_whole_or_not_at_all(tmp_path: Path) -> None:
    toolchain.publish(tmp_path / "new" / "file", b"text")
    assert (tmp_path / "new" / "file").read_bytes() == b"text"
    with pytest.raises(OSError, match="directory"):
        toolchain.publish(tmp_path / "new", b"text")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "file"]


def test_a_number_of_compilers_below_one_is_refused(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match="at least 1, found -1"):
        toolchain.compile_many([job()], compiler, cache=tmp_path, workers=-1)
