"""The kernels that are built, proven and shipped by default."""

from __future__ import annotations

from pyharness.families import RecurrentSpec
from pyharness.families.recurrent import LAYOUTS
from pyharness.spec import KernelSpec

_MEASURED = 128  # the d_state at which every layout is kept and measured

_RECURRENT: tuple[KernelSpec, ...] = (
    *(RecurrentSpec(d_state=_MEASURED, layout=layout) for layout in LAYOUTS if layout != "generic"),
    # Few tokens: small blocks, many at once.
    RecurrentSpec(d_state=_MEASURED, lanes=16, rows=8, warps=1, chunk=2),
    *(RecurrentSpec(d_state=_MEASURED, lanes=32, rows=8, warps=1, chunk=2, io=io) for io in ("bf16", "f16")),
    *(RecurrentSpec(d_state=n) for n in (16, 64, 100, 256, 1024)),
    *(RecurrentSpec(d_state=n, io=io) for n in (64, 128, 256) for io in ("bf16", "f16")),
    *(RecurrentSpec(d_state=0, layout="generic", io=io) for io in ("f32", "bf16", "f16")),
)

CATALOGUE: tuple[KernelSpec, ...] = _RECURRENT
