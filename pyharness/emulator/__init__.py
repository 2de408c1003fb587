"""Runs emitted CUDA kernels on the CPU, strictly: `run` raises `EmulatorError` when a kernel breaks a rule.

An emitted `.cu` is compiled unchanged by g++ against `cuda_emulator.h` and linked with `runtime.cpp`, which runs the
threads of a launch as fibers and checks every memory access that the thread-sanitizer instrumentation of g++ reports.
See `Finding` for what is checked, `memory.h` for how, and `cuda_emulator.h` for what kernels may call.
"""

from pyharness.emulator.buffers import EmulatorBuffer
from pyharness.emulator.findings import Finding
from pyharness.emulator.launch import EmulatorLaunch, EmulatorReport, run

__all__ = ["EmulatorBuffer", "EmulatorLaunch", "EmulatorReport", "Finding", "run"]
