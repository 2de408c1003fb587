"""Kernels that stand for every family in tests: small chunks, columns that fill no lane evenly, several types."""

from __future__ import annotations

from pyharness.families import FAMILIES
from pyharness.spec import KernelSpec, parse_id
from pyharness.variants import variants

#: d_state and head_dim that are tried in turn: a family takes the first for which it has a kernel.
SIZES = ((38, 3), (64, 64), (16, 1))
TYPES = (("f32", "f32"), ("bf16", "f32"), ("f16", "bf16"), ("f32", "i8"))
#: A chunk that is no power of two, for kernels that can take it.
CHUNK = 5
#: Of `ssd`: one launch and two; one head a block and two; one tile of rows a warp and two; head_dim 80; every
#: precision; the warp-group products of sm_90a.
SSD_IDS = (
    "ssd_n32_p32_r32_w2_c32_t1_bf16_sf32",
    "ssd_n16_p32_r16_w4_c32_t3_bf16_sbf16",
    "ssd_n16_p80_r16_w5_c32_t2_f16_sf32",
    "ssd_n32_p32_r16_w4_c32_t3_f32_sf32_split",
    "ssd_n16_p16_r16_w1_c64_t2_f32_sf32_tf32",
    "ssd_n64_p64_r16_w16_c64_t2_bf16_sf32_sm90a",
)


def stand_ins(family: str) -> tuple[KernelSpec, ...]:
    """Every layout and configuration of a family in f32, and its default in the other types that it has.

    `ssd` has other ways to multiply for other types: its kernels are chosen by hand.
    """
    if family == "ssd":
        return tuple(map(parse_id, SSD_IDS))
    found: list[KernelSpec] = []
    for io, state in TYPES:
        made = next(filter(None, (variants(family, n, io, state, head_dim=p, chunk=CHUNK) for n, p in SIZES)), ())
        found += made if (io, state) == ("f32", "f32") else made[:1]
    return tuple(found)


EVERY_KERNEL = tuple(spec for family in FAMILIES for spec in stand_ins(family))
EVERY_ID = [spec.id for spec in EVERY_KERNEL]
