"""Selective scans (Mamba-1, Mamba-2) as specialised, proven CUDA kernels.

Importing this package needs no GPU, driver or PyCUDA.
"""

from __future__ import annotations

from pyharness.errors import DeviceError, EmulatorError, ImageError, InvalidProblem, NoKernel, SsmError, ToolchainError
from pyharness.problem import ScanProblem
from pyharness.scan import ScanResult, scan

__all__ = [
    "DeviceError",
    "EmulatorError",
    "ImageError",
    "InvalidProblem",
    "NoKernel",
    "ScanProblem",
    "ScanResult",
    "SsmError",
    "ToolchainError",
    "scan",
]
