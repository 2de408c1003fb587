"""The kernel families, one module each."""

from __future__ import annotations

from pyharness.families.recurrent import RecurrentSpec
from pyharness.families.selective import SelectiveSpec
from pyharness.families.ssd import SsdSpec
from pyharness.families.update import UpdateSpec
from pyharness.spec import KernelSpec

FAMILIES: dict[str, type[KernelSpec]] = {
    kind.family: kind for kind in (RecurrentSpec, UpdateSpec, SsdSpec, SelectiveSpec)
}

__all__ = ["FAMILIES", "RecurrentSpec", "SelectiveSpec", "SsdSpec", "UpdateSpec"]
