"""The kernels that are built, proven and shipped by default."""

from __future__ import annotations

from pyharness.families import RecurrentSpec, SelectiveSpec, SsdSpec, UpdateSpec
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

_UPDATE: tuple[KernelSpec, ...] = (
    # Of any head_dim.
    *(UpdateSpec(d_state=_MEASURED, io=io) for io in ("f32", "bf16")),
    *(UpdateSpec(d_state=n, io="bf16") for n in (64, 256)),
    UpdateSpec(d_state=16),
    *(UpdateSpec(d_state=_MEASURED, io="bf16", state=state) for state in ("bf16", "f16", "i8")),
    # The commonest decode, 64 rows a head: 32 and 16 lanes a row, 1 and 2 warps a block.
    *(
        UpdateSpec(d_state=_MEASURED, head_dim=64, io="bf16", lanes=lanes, rows=rows, warps=warps)
        for lanes, rows, warps in ((32, 4, 1), (32, 8, 2), (16, 8, 1), (16, 16, 2))
    ),
    # Drafts.
    UpdateSpec(d_state=_MEASURED, head_dim=64, io="bf16", lanes=16, rows=8, warps=1, chunk=4),
    UpdateSpec(d_state=_MEASURED, head_dim=64),
    UpdateSpec(d_state=_MEASURED, head_dim=80, io="bf16", rows=4, warps=1),
    UpdateSpec(d_state=64, head_dim=64, io="bf16", rows=8, warps=1),
    UpdateSpec(d_state=256, head_dim=64, io="bf16", rows=4, warps=1),
    # States of 16 and 8 bits; of 8 for small and for large batches.
    *(UpdateSpec(d_state=_MEASURED, head_dim=64, io="bf16", state=state, rows=8, warps=1) for state in ("bf16", "f16")),
    UpdateSpec(d_state=_MEASURED, head_dim=64, io="f16", state="f16", rows=8, warps=1),
    *(UpdateSpec(d_state=_MEASURED, head_dim=64, io="bf16", state="i8", rows=rows, warps=1) for rows in (8, 32)),
)

_MAMBA1 = 16  # the d_state of nearly every Mamba-1 model

_SELECTIVE: tuple[KernelSpec, ...] = (
    *(SelectiveSpec(d_state=_MAMBA1, io=io) for io in ("f32", "bf16", "f16")),
    # More warps that take turns for few channels, fewer for many sequences.
    *(SelectiveSpec(d_state=_MAMBA1, io="bf16", warps=warps) for warps in (16, 4)),
    *(SelectiveSpec(d_state=_MAMBA1, io=io, chunk=1) for io in ("f32", "bf16", "f16")),
    # One sequence, the channels dealt out to four warps.
    SelectiveSpec(d_state=_MAMBA1, io="bf16", rows=32, warps=4, chunk=1, sequences=1),
)

_SSD: tuple[KernelSpec, ...] = (
    # Hopper: two heads a block, each in two warp groups; whole, for many sequences, and cut in time, the more the fewer
    # heads there are to fill a device.
    *(
        SsdSpec(d_state=n, io="bf16", warps=16, segments=segments, exact="sm_90a")
        for n, cuts in ((_MEASURED, (1, 2, 4, 5, 8, 16)), (64, (1, 2, 4)))
        for segments in cuts
    ),
    *(SsdSpec(d_state=_MEASURED, io="f16", warps=16, segments=segments, exact="sm_90a") for segments in (1, 4)),
    # A head of 80 rows a block, and half a head of 128 with 256 columns: whole, and cut in time for few sequences.
    *(SsdSpec(d_state=_MEASURED, head_dim=80, io="bf16", segments=segments, exact="sm_90a") for segments in (1, 2)),
    *(
        SsdSpec(d_state=256, head_dim=128, io="bf16", warps=12, segments=segments, exact="sm_90a")
        for segments in (1, 2)
    ),
    # Portable: within 99 KiB of shared memory, but for the large blocks of sm_90 and sm_100.
    *(SsdSpec(d_state=_MEASURED, io="bf16", rows=16, warps=4, segments=segments) for segments in (1, 8)),
    SsdSpec(d_state=_MEASURED, io="bf16", rows=32, warps=8, segments=8),
    SsdSpec(d_state=_MEASURED, io="f16", rows=16, warps=4, segments=8),
    SsdSpec(d_state=64, io="bf16", rows=16, warps=4, segments=8),
    SsdSpec(d_state=_MEASURED, head_dim=80, io="bf16", rows=16, warps=5, segments=8),
    SsdSpec(d_state=256, head_dim=128, io="bf16", rows=16, warps=8, chunk=32, segments=8),
    # f32, as sums of two bf16 operands and rounded to tf32.
    SsdSpec(d_state=_MEASURED, rows=32, warps=8, segments=8),
    SsdSpec(d_state=_MEASURED, rows=16, warps=8, segments=4),
    *(SsdSpec(d_state=_MEASURED, rows=16, warps=4, chunk=chunk, segments=8) for chunk in (32, 64)),
    SsdSpec(d_state=_MEASURED, rows=32, warps=4, chunk=32, segments=8, precision="tf32"),
)

CATALOGUE: tuple[KernelSpec, ...] = _RECURRENT + _UPDATE + _SELECTIVE + _SSD
