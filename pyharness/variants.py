"""Which kernels of a family stand for it in a proof: its layouts and configurations for one d_state and storage.

A family that is not named here is stood for by the kernel with default fields, so a new one takes part from the day
it is in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyharness import build, toolchain
from pyharness.errors import NoKernel
from pyharness.families import FAMILIES
from pyharness.families.recurrent import LAYOUTS
from pyharness.spec import Geometry, KernelSpec

#: Fields beside d_state, io and state, of each kernel that stands for a family.
_FIELDS: dict[str, tuple[Mapping[str, Any], ...]] = {
    # The default first, then the other layouts.
    "recurrent": tuple({"layout": name} for name in sorted(LAYOUTS, key=lambda name: name != "tiled")),
    "update": ({}, {"chunk": 2}),
    # Prefill, and decode of one sequence a block and of several.
    "selective": ({}, {"chunk": 1}, {"chunk": 1, "sequences": 1}),
    # Whole sequences, sequences cut in time, the other precision of f32, the warp-group products of Hopper.
    "ssd": ({}, {"segments": 3}, {"precision": "tf32"}, {"exact": "sm_90a"}, {"exact": "sm_90a", "segments": 2}),
}


def variants(
    family: str, d_state: int, io: str = "f32", state: str = "f32", *, head_dim: int = 1, chunk: int = 0
) -> tuple[KernelSpec, ...]:
    """The kernels of a family for a d_state and storage types, the default first; none where it has no such kernel.

    Args:
        family: one of FAMILIES.
        d_state, io, state: what the kernels are made for.
        head_dim: rows of a head that the kernels have to take.
        chunk: tokens staged at a time, for kernels that can take it; others keep their own number.
    """
    made: dict[str, KernelSpec] = {}
    for fields in _FIELDS.get(family, ({},)):
        spec = _first_valid(family, head_dim, _choices(d_state, io, state, fields, head_dim, chunk))
        if spec is not None:
            made.setdefault(spec.id, spec)
    return tuple(made.values())


def _choices(
    d_state: int, io: str, state: str, fields: Mapping[str, Any], head_dim: int, chunk: int
) -> tuple[dict[str, Any], ...]:
    """What a constructor is tried with, in order."""
    base = {"d_state": 0 if fields.get("layout") == "generic" else d_state, "io": io, "state": state, **fields}
    whole = base | {"head_dim": head_dim}
    return (base | {"chunk": chunk}, whole | {"chunk": chunk}, base, whole) if chunk else (base, whole)


def _first_valid(family: str, head_dim: int, choices: tuple[dict[str, Any], ...]) -> KernelSpec | None:
    for values in choices:
        try:
            spec = FAMILIES[family](**values)
        except (NoKernel, TypeError):
            # TypeError: the family has no such field.
            continue
        if not spec.refusal(Geometry(1, 1, 1, head_dim, 1, spec.d_state or values["d_state"] or 1)):
            return spec
    return None


def launches_on(spec: KernelSpec, target: str) -> bool:
    """Whether a device of a target takes a kernel: it has an image, whose threads keep nothing in local memory.

    Raises:
        ToolchainError: it does not compile.
    """
    image = spec.image_target(target)
    return not spec.excluded(image) and not toolchain.worst([build.image(spec, image)], "local_bytes")
