"""The exceptions that pyharness raises, all below `SsmError`.

Every message says what was wanted, what was found, and what to do about it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyharness.emulator import Finding


class SsmError(Exception):
    """Base of every error that this package raises on purpose."""


def exit_code(program: Callable[[], int]) -> int:
    """What a program ends with; an `SsmError` is its user's: 1, and the message in place of a traceback."""
    try:
        return program()
    except SsmError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


class InvalidProblem(SsmError, ValueError):
    """An array or option of a `ScanProblem` is malformed; the message names it."""


class WrongShape(InvalidProblem, AssertionError):
    """An argument of a drop-in function has another shape than its fellows ask for: mamba-ssm asserts there."""


class Unsupported(SsmError, NotImplementedError):
    """A drop-in function was asked for what these kernels do not do, such as gradients."""


class NoKernel(SsmError, LookupError):
    """No kernel fits: the spec is invalid, or nothing in the catalogue takes the problem or the device."""


class ToolchainError(SsmError):
    """A compiler is missing, has the wrong version, or refused a source."""


class DeviceError(SsmError):
    """A GPU is missing, or a driver call, a load or a launch failed where it was checked."""


class ImageError(SsmError):
    """A cubin, PTX or manifest row is not what it claims to be."""


class EmulatorError(DeviceError):
    """The emulator saw a kernel break a rule.

    Attributes:
        findings: what was seen, first come first.
    """

    def __init__(self, message: str, findings: Sequence[Finding] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)
