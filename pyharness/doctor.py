"""What this machine has of what the project uses, and for each thing missing the command that brings it.

PyCUDA is built from source on the user's machine. Its build wants curand.h, cudaProfiler.h and a libcuda.so to link,
which only a full CUDA toolkit has; `install_pycuda` builds it without: no cuRAND, headers of PyPI's CUDA packages, and
the driver's own libcuda.so.1 under the name that the linker looks for.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyharness import gpus, toolchain
from pyharness.errors import DeviceError, ToolchainError

#: One command for all of PyPI's packages that the default set-up has.
SYNC = "uv sync"
INSTALL_PYCUDA = "uv run invoke doctor --install-pycuda"
_PYCUDA = "pycuda==2026.1"
# The profiler's header is one that PyCUDA's sources include.
_PCI = Path("/sys/bus/pci/devices")
_CUDA_PACKAGES = ("cuda-bindings==13.0.*", "nvidia-cuda-profiler-api==13.0.*")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        state: "ok", "missing", or "not needed".
        found: what is there, or why it is not needed.
        cure: the command that brings it; empty if nothing is missing.
    """

    name: str
    state: str
    found: str
    cure: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


def version(distribution: str) -> str:
    """The installed version of a Python package, or an empty string."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _program(name: str, *arguments: str) -> str:
    """What a program says of its version, or an empty string where there is none."""
    beside = Path(sys.executable).with_name(name)
    where = str(beside) if beside.is_file() else shutil.which(name)
    if where is None:
        return ""
    done = subprocess.run([where, *arguments], text=True, capture_output=True, check=False, timeout=60)
    lines = (done.stdout or done.stderr).strip().splitlines()
    return lines[0] if lines and done.returncode == 0 else ""


def _nvcc() -> Finding:
    try:
        compiler = toolchain.find_compiler()
    except ToolchainError as error:
        return Finding("nvcc", "missing", str(error), SYNC)
    origin = "pinned, from PyPI" if compiler.pinned else f"{compiler.nvcc}, asked for by NVCC"
    return Finding("nvcc", "ok", f"{compiler.version} ({origin})")


def _tool(name: str, said: str, cure: str) -> Finding:
    return Finding(name, "ok", said) if said else Finding(name, "missing", "not found", cure)


def pci_gpus(folder: Path = _PCI) -> int:
    """How many NVIDIA display or compute devices the PCI bus has, whether or not there is a driver for them."""
    count = 0
    for device in folder.glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


def _package(distribution: str, present: bool) -> Finding:
    found = version(distribution)
    if found:
        return Finding(distribution, "ok", found)
    if not present:
        return Finding(distribution, "not needed", "no GPU can be used here")
    return Finding(distribution, "missing", "not found", INSTALL_PYCUDA)


def examine() -> list[Finding]:
    """Look for everything that some command of the project uses."""
    driver, on_bus = gpus.driver(), pci_gpus()
    wanted = toolchain.MIN_DRIVER[int(toolchain.PINNED_VERSION.split(".")[0])]
    unseen = f"{on_bus} NVIDIA GPU{'s' if on_bus > 1 else ''} on the PCI bus: {driver.problem}"
    cure = f"install an NVIDIA driver {wanted} or newer; in a container, start it with its GPUs"
    findings = [
        Finding("python", "ok", sys.version.split()[0]),
        _tool("g++", _program("g++", "--version"), "apt-get install g++"),
        _tool("gcc", _program("gcc", "--version"), "apt-get install gcc"),  # what cgo calls
        _nvcc(),
        _tool("clang-format", _program("clang-format", "--version"), SYNC),
        _tool("go", _program("go", "version"), SYNC),
    ]
    if driver.version or driver.cuda:
        found = f"{driver.version or 'version unknown'}, CUDA up to {driver.cuda or 'unknown'}"
        branch = driver.version.split(".")[0]
        if branch.isdigit() and int(branch) < int(wanted):
            upgrade = f"install an NVIDIA driver {wanted} or newer"
            findings.append(Finding("driver", "missing", f"{found}: older than {wanted}", upgrade))
        else:
            findings.append(Finding("driver", "ok", found))
    elif on_bus:
        findings.append(Finding("driver", "missing", unseen, cure))
    else:
        findings.append(Finding("driver", "not needed", driver.problem or "there is no GPU here"))
    if driver.gpus:
        findings += [Finding("GPU", "ok", f"{gpu.name}, target {gpu.target}") for gpu in driver.gpus]
    elif on_bus:
        findings.append(Finding("GPU", "missing", unseen, cure))
    else:
        findings.append(Finding("GPU", "not needed", f"{driver.problem}: kernels run in the emulator"))
    return [*findings, _package("pycuda", bool(driver.gpus)), _package("cuda-bindings", bool(driver.gpus))]


def _libcuda() -> Path:
    """Where the driver's libcuda.so.1 lies."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError("the NVIDIA driver's libcuda.so.1 was wanted to build PyCUDA, found none") from error
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        match = re.search(r"(/\S*libcuda\.so\S*)$", line)
        if match:
            return Path(match[1])
    raise DeviceError("libcuda.so.1 is loaded and has no file: install PyCUDA by hand with a full CUDA toolkit")


def install_pycuda(folder: Path = toolchain.ROOT / "build" / "pycuda", libcuda: Path | None = None) -> None:
    """Build and install PyCUDA and cuda-bindings into the Python that runs this, without a CUDA toolkit.

    Raises:
        DeviceError: there is no NVIDIA driver to link with.
        ToolchainError: uv is not there, or the build failed; its output went to the terminal.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise ToolchainError("uv was wanted to install PyCUDA, found none on PATH: pip install uv")
    libraries = folder / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    link = libraries / "libcuda.so"
    link.unlink(missing_ok=True)
    link.symlink_to(libcuda or _libcuda())
    include, *_ = toolchain.cuda_include_dirs()
    # PyCUDA's set-up reads its options from this file in the home folder and from nowhere else that uv lets through.
    options = {
        "CUDA_ENABLE_CURAND": False,
        "CUDA_INC_DIR": [str(include)],
        "CUDA_ROOT": str(include.parent),
        "CUDADRV_LIB_DIR": [str(libraries)],
    }
    text = "".join(f"{name} = {value!r}\n" for name, value in options.items())
    (folder / ".aksetup-defaults.py").write_text(text, encoding="utf-8")
    environment = os.environ | {"HOME": str(folder), "UV_CACHE_DIR": str(folder / "cache")}
    for packages in (_CUDA_PACKAGES, (_PYCUDA,)):
        command = [uv, "pip", "install", "--python", sys.executable, *packages]
        if subprocess.run(command, env=environment, check=False).returncode:
            raise ToolchainError(f"{' '.join(packages)} was to be installed, uv failed: see its messages above")
