"""The GPUs of this machine, asked of the driver itself: no CUDA package is needed and no context is made."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone

from pyharness.spec import TARGETS

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Gpu:
    """One GPU: its name and compute capability."""

    name: str
    major: int
    minor: int

    @property
    def target(self) -> str:
        return target_for(self.major, self.minor)


@dataclass(frozen=True)
class Driver:
    """What the driver says.

    Attributes:
        version: "580.65.06", or empty where nvidia-smi does not tell.
        cuda: the newest CUDA it runs, "13.0", or empty.
        gpus: in the driver's order.
        problem: why there are no GPUs, or empty.
    """

    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


def target_for(major: int, minor: int) -> str:
    """The target whose image serves a compute capability: the same major version and at most its minor, else PTX."""
    portable = [target for target in TARGETS if target.startswith("sm_") and target[-1].isdigit()]
    numbers = sorted(int(target.removeprefix("sm_")) for target in portable)
    fitting = [number for number in numbers if number // 10 == major and number % 10 <= minor]
    return f"sm_{fitting[-1]}" if fitting else "compute_80"


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, text=True, capture_output=True, check=False, timeout=60)
    return done.stdout.split("\n")[0].strip() if done.returncode == 0 else ""


@functools.cache
def driver() -> Driver:
    """What the driver of this machine says."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(problem="no NVIDIA driver (libcuda.so.1 was not found)")
    status = cuda.cuInit(0)
    if status:
        reason = "the driver sees no GPU" if status == _NO_DEVICE else f"cuInit ended with CUDA error {status}"
        return Driver(_driver_version(), problem=reason)
    number = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(number))
    version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    cuda.cuDeviceGetCount(ctypes.byref(number))
    gpus = []
    for index in range(number.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        cuda.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        gpus.append(Gpu(name.value.decode(), major.value, minor.value))
    return Driver(_driver_version(), version, tuple(gpus), "" if gpus else "the driver sees no GPU")


def today() -> str:
    """The date that is stored of a run, of UTC, as 2026-11-30."""
    return datetime.now(timezone.utc).date().isoformat()


def about_run() -> dict[str, str]:
    """What is stored of a run on the first GPU, which is there: "device" (its name), "driver" and "date"."""
    found = driver()
    return {"device": found.gpus[0].name, "driver": found.version, "date": today()}
