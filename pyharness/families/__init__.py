"""The kernel families, one module each."""

from __future__ import annotations

from pyharness.families.recurrent import RecurrentSpec
from pyharness.spec import KernelSpec

FAMILIES: dict[str, type[KernelSpec]] = {RecurrentSpec.family: RecurrentSpec}

__all__ = ["FAMILIES", "RecurrentSpec"]
