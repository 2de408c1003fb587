"""The kernel families, one module each."""

from __future__ import annotations

from pyharness.families.recurrent import RecurrentSpec
from pyharness.families.ssd import SsdSpec
from pyharness.families.update import UpdateSpec
from pyharness.spec import KernelSpec

FAMILIES: dict[str, type[KernelSpec]] = {kind.family: kind for kind in (RecurrentSpec, UpdateSpec, SsdSpec)}

__all__ = ["FAMILIES", "RecurrentSpec", "SsdSpec", "UpdateSpec"]
