"""Kernels that stand for every family in tests: small chunks, columns that fill no lane evenly, several types."""

from __future__ import annotations

from pyharness.spec import KernelSpec
from pyharness.variants import REPLAYED, variants

#: d_state and head_dim that are tried in turn: a family takes the first for which it has a kernel.
SIZES = ((38, 3), (64, 64), (16, 1))
TYPES = (("f32", "f32"), ("bf16", "f32"), ("f16", "bf16"), ("f32", "i8"))
#: A chunk that is no power of two, for kernels that can take it.
CHUNK = 5


def stand_ins(family: str) -> tuple[KernelSpec, ...]:
    """Every layout and configuration of a family in f32, and its default in the other types that it has."""
    found: list[KernelSpec] = []
    for io, state in TYPES:
        made = next(filter(None, (variants(family, n, io, state, head_dim=p, chunk=CHUNK) for n, p in SIZES)), ())
        found += made if (io, state) == ("f32", "f32") else made[:1]
    return tuple(found)


EVERY_KERNEL = tuple(spec for family in REPLAYED for spec in stand_ins(family))
EVERY_ID = [spec.id for spec in EVERY_KERNEL]
