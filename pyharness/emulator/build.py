"""Compiles emitted kernels for the emulator, with a cache by content.

The cache holds one folder a toolchain (`base-<hash>`: header, its precompiled form, runtime object) and one a kernel
(`kernel-<hash>`: source and shared object). Folders are made elsewhere and published by a rename, so that processes
that share a cache never see half of one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyharness.errors import ToolchainError

_HERE = Path(__file__).parent
_RUNTIME = ("runtime.cpp", "memory.h", "fiber.h")
_HEADER = "cuda_emulator.h"
_COMMON = ("-std=c++20", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-w")
# The instrumentation (its hooks are ours) and what keeps f32 arithmetic as nvcc -fmad=false would have it.
_KERNEL = (
    "-O1",
    "-U_FORTIFY_SOURCE",  # a distribution's default: its memcpy would stand beside ours
    "-fno-tree-sra",  # keeps a float4 access one access, which is also fewer hooks
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fsanitize=thread",
    "-fsanitize=alignment",
    "--param=tsan-instrument-func-entry-exit=0",
    "--param=tsan-distinguish-volatile=1",
)
_RUNTIME_FLAGS = ("-O2", "-fno-exceptions", "-fno-rtti")


@dataclass(frozen=True)
class Built:
    """A kernel's shared object and the source it was compiled from."""

    library: Path
    source: Path


def default_cache() -> Path:
    """$XDG_CACHE_HOME/pyharness/emulator, or the same below ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pyharness" / "emulator"


def _machine_flags() -> tuple[str, ...]:
    """fmaf as one instruction where the processor has it; libm's call is exact too but many times slower."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    try:
        return ("-mfma",) if " fma " in Path("/proc/cpuinfo").read_text() else ()
    except OSError:
        return ()


@functools.cache
def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout


def _run(command: Sequence[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        first = "\n".join(done.stderr.splitlines()[:40])
        raise ToolchainError(f"the emulator's compile failed (exit {done.returncode}): {shlex.join(command)}\n{first}")


def _digest(parts: Sequence[bytes]) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(len(part).to_bytes(8, "little"))
        h.update(part)
    return h.hexdigest()[:32]


def _publish(folder: Path, make: Callable[[Path], None]) -> None:
    """Makes `folder` whole or not at all; another process may win the race to it."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="making-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        make(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def build(source: str, include_dirs: Sequence[Path], cache_dir: Path | None) -> Built:
    """Compiles `source` (CUDA C++) with g++, or finds it in the cache.

    Args:
        include_dirs: where cuda_bf16.h, cuda_fp16.h and vector_types.h are.

    Raises:
        ToolchainError: there is no g++, the headers are missing, or the source does not compile.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise ToolchainError("the emulator needs g++ 12 or newer and found none: install it, or set CXX")
    includes = [d.resolve() for d in include_dirs]
    bf16 = next((d / "cuda_bf16.h" for d in includes if (d / "cuda_bf16.h").is_file()), None)
    if bf16 is None:
        raise ToolchainError(
            f"cuda_bf16.h is in none of {[str(d) for d in includes]}: pass a CUDA toolkit's include folder, or install "
            "the wheels nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl"
        )
    cache = cache_dir if cache_dir is not None else default_cache()
    version = _version(compiler)
    kernel_flags = [*_COMMON, *_KERNEL, *_machine_flags(), *(f for d in includes for f in ("-isystem", str(d)))]
    texts = [(_HERE / name).read_bytes() for name in (_HEADER, *_RUNTIME)]
    key = _digest(
        [version, shlex.join(kernel_flags).encode(), shlex.join(_RUNTIME_FLAGS).encode(), bf16.read_bytes(), *texts]
    )
    base = cache.resolve() / f"base-{key}"

    def make_base(folder: Path) -> None:
        for name in (_HEADER, *_RUNTIME):
            shutil.copyfile(_HERE / name, folder / name)
        _run([compiler, *kernel_flags, "-x", "c++-header", _HEADER, "-o", f"{_HEADER}.gch"], folder)
        _run([compiler, *_COMMON, *_RUNTIME_FLAGS, "-c", "runtime.cpp", "-o", "runtime.o"], folder)

    _publish(base, make_base)
    kernel = cache.resolve() / f"kernel-{_digest([key.encode(), source.encode()])}"

    def make_kernel(folder: Path) -> None:
        (folder / "kernel.cu").write_text(source)
        compile_flags = [*kernel_flags, "-include", str(base / _HEADER), "-x", "c++"]
        _run([compiler, *compile_flags, "-c", "kernel.cu", "-o", "kernel.o"], folder)
        link = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "kernel.o", str(base / "runtime.o"), "-ldl"]
        _run([compiler, *link, "-o", "kernel.so"], folder)
        (folder / "kernel.o").unlink()

    _publish(kernel, make_kernel)
    return Built(kernel / "kernel.so", kernel / "kernel.cu")
