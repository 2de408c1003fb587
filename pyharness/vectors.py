"""Shared vectors: what selection, plans and the check of a batch come to, for Python, Go and C alike.

templates/go/testdata/vectors.json holds a small catalogue of its own (so that it does not change with the committed
one), a selection table, and cases with their results, as Python has them. The Go tests read it; the C test is made from
it. `python -m pyharness.vectors` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pyharness import manifest, plans, toolchain
from pyharness.errors import InvalidProblem, NoKernel
from pyharness.families import RecurrentSpec, SsdSpec, UpdateSpec
from pyharness.problem import ScanProblem
from pyharness.select import Device, Entry, Features, Table, choose, invariant, table_document
from pyharness.spec import Geometry, KernelSpec

PATH = toolchain.ROOT / "templates" / "go" / "testdata" / "vectors.json"

_H200, _H100, _CARD = "NVIDIA H200", "NVIDIA H100", "A card"

#: The vectors' own catalogue: defaults, a second kernel of a d_state, decode with and without a head_dim, prompts in
#: each precision and for an exact target, generic.
SPECS: tuple[KernelSpec, ...] = (
    RecurrentSpec(d_state=128),
    RecurrentSpec(d_state=128, layout="padded"),
    RecurrentSpec(d_state=128, layout="block"),
    RecurrentSpec(d_state=128, io="bf16"),
    RecurrentSpec(d_state=64, layout="slices"),
    UpdateSpec(d_state=128),
    UpdateSpec(d_state=128, head_dim=64, io="bf16"),
    UpdateSpec(d_state=48, state="i8"),
    SsdSpec(d_state=128, io="bf16", segments=8, exact="sm_90a"),
    SsdSpec(d_state=128, io="bf16"),
    SsdSpec(d_state=128, precision="split", segments=8),
    SsdSpec(d_state=128, precision="tf32"),
    RecurrentSpec(d_state=0, layout="generic"),
)
_TILED, _PADDED, _BLOCK, _BF16, _SLICES, _UPDATE, _UPDATE_BF16 = (spec.id for spec in SPECS[:7])
_SSD_EXACT, _SSD, _SPLIT, _TF32 = (spec.id for spec in SPECS[8:12])


def row(spec: KernelSpec) -> manifest.Row:
    """The manifest row of a kernel of the vectors: images that are no machine code, for four targets."""
    compiler = toolchain.Compiler(toolchain.ROOT, toolchain.PINNED_VERSION, pinned=True)
    usage = {entry: toolchain.Usage(40, 0, 0, 0, 0) for entry in spec.launchable.entries}
    images = [
        toolchain.Image(spec.id, target, "cubin", f"{spec.id} for {target}".encode(), usage, "", 0.0)
        for target in ("sm_75", "sm_80", "sm_86", "sm_90", "sm_90a")
        if not spec.excluded(target)
    ]
    excluded = {target: spec.excluded(target) for target in ("sm_75",) if spec.excluded(target)}
    return manifest.make_row(spec, spec.id, images, compiler, toolchain.flags(spec.family), excluded)


def _entry(
    kernel: str,
    batch_heads: int,
    tokens: int,
    device: str = _H200,
    target: str = "sm_90",
    microseconds: float = 10.0,
    **other: Any,
) -> Entry:
    sizes: dict[str, Any] = {"heads": 64, "head_dim": 64, "d_state": 128, "groups": 8, "io": "f32", "state": "f32"}
    return Entry(
        device=device,
        target=target,
        family=kernel.split("_")[0],
        batch_heads=batch_heads,
        tokens=tokens,
        kernel=kernel,
        microseconds=microseconds,
        source="measured",
        **(sizes | other),
    )


TABLE = Table(
    (
        _entry(_TILED, 64, 4096),
        _entry(_PADDED, 1024, 512),
        _entry(_UPDATE, 1024, 16),
        _entry(_SLICES, 64, 512, device=_H100, d_state=64),
        _entry(_BLOCK, 16, 256, device=_CARD, target="sm_86", heads=16),
        _entry(_UPDATE_BF16, 1024, 16, io="bf16"),
        # As far as each other from one of the problems: the smaller id is taken.
        _entry(_TILED, 256, 1024, device=_H100),
        _entry(_PADDED, 64, 4096, device=_H100),
        # Several families for one problem: the fastest that fits; none that splits on a device that did not measure it.
        _entry(_SPLIT, 64, 4096, microseconds=5.5),
        _entry(_SPLIT, 512, 8192, microseconds=30.25),
        _entry(_BF16, 64, 4096, io="bf16", microseconds=55.0),
        _entry(_SSD_EXACT, 64, 4096, io="bf16", microseconds=9.5),
        _entry(_BF16, 64, 256, io="bf16", microseconds=4.0),
        _entry(_SSD, 64, 256, io="bf16", microseconds=4.0),
        _entry(_SSD, 64, 2048, device=_CARD, target="sm_86", io="bf16", microseconds=40.0),
        _entry(_BF16, 64, 2048, device=_CARD, target="sm_86", io="bf16", microseconds=41.0),
        # Of a head_dim of its own, far away: nearer than all others to problems of that head_dim.
        _entry(_TILED, 64, 2**20, head_dim=96),
        _entry(_PADDED, 16, 512, device=_H100, head_dim=96),
        # In no table that is measured: tf32 is passed over.
        _entry(_TF32, 128, 4096, microseconds=1.0),
        _entry(_TILED, 128, 4096, microseconds=2.0),
        # Taken for its exact problem alone.
        replace(_entry(_PADDED, 64, 2048, device="NVIDIA T4", target="sm_75"), source="reported"),
        replace(_entry(_PADDED, 64, 4096, device="Another card", target="sm_86"), source="reported"),
    ),
    (("recurrent", 64, "f32", "f32", _SLICES),),
)


def _features(
    tokens: int,
    sequences: int,
    d_state: int = 128,
    io: str = "f32",
    state: str = "f32",
    longest: int = -1,
    **other: int,
) -> Features:
    sizes: dict[str, Any] = {"heads": 64, "head_dim": 64, "groups": 8} | other
    return Features(Geometry(tokens, sequences, d_state=d_state, longest=longest, **sizes), io, state)


def _problems() -> Iterator[Features]:
    for tokens, sequences in (
        (4096, 1),
        (4095, 1),
        (1024, 1),
        (512, 16),
        (511, 16),
        (16, 16),
        (12, 12),
        (3, 1),
        (0, 1),
        (2**30, 4),
    ):
        yield _features(tokens, sequences)
    yield _features(16, 2, longest=9)
    yield _features(16, 16, heads=16, groups=2)
    yield _features(64, 8, io="bf16", longest=8)
    yield _features(64, 8, io="bf16", head_dim=80)
    yield _features(300, 1, d_state=64)
    yield _features(300, 1, d_state=77)
    yield _features(4, 4, d_state=48, state="i8")
    yield _features(40, 4, d_state=48, state="i8")
    yield _features(4, 4, d_state=1025)
    yield _features(4, 4, io="f16")
    for tokens, sequences in ((4096, 1), (2000, 1), (256, 1), (100, 1), (2048, 1)):
        yield _features(tokens, sequences, io="bf16")
    yield _features(4096, 1, io="bf16", head_dim=80)
    yield _features(512, 16, head_dim=96)
    yield _features(4096, 1, io="bf16", checkpoint_step=32)
    yield _features(4, 4, head_dim=1)
    yield _features(4096, 2)
    yield _features(8192, 8)


_DEVICES = (
    None,
    Device(_H200, "sm_90"),
    Device(_H100, "sm_90"),
    Device("", "sm_90"),
    Device(_CARD, "sm_86"),
    Device("Another card", "sm_86"),
    Device("NVIDIA T4", "sm_75"),
    Device(_H200, "sm_90", 40 * 1024),
)


def _selections() -> Iterator[dict[str, Any]]:
    ids = [spec.id for spec in SPECS]
    for features in _problems():
        for device in _DEVICES:
            for steady in (False, True):
                asked = invariant(features) if steady else features
                case: dict[str, Any] = {
                    "problem": vars(features.geometry) | {"io": features.io, "state": features.state},
                    "device": vars(device) if device else None,
                    "invariant": steady,
                }
                try:
                    chosen = choose(asked, device, table=TABLE, ids=ids)
                    yield case | {"id": chosen.id, "steps": len(chosen.steps)}
                except NoKernel:
                    yield case | {"id": "", "steps": 0}


def _plans(rows: Sequence[manifest.Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for d_state in (row.spec["d_state"],) if row.spec["d_state"] else (1, 77, 128, 1024):
            for tokens, sequences, heads, head_dim in (
                (4096, 1, 64, 64),
                (16, 16, 5, 33),
                (0, 0, 1, 1),
                (9, 2**31 - 1, 3, 7),
            ):
                groups = 8 if heads % 8 == 0 else 1
                geometry = Geometry(tokens, sequences, heads, head_dim, groups, d_state)
                target = "sm_90" if "sm_90" in row.targets else "sm_90a"
                plan = plans.plan(row, target, geometry)
                yield {
                    "id": row.id,
                    "target": target,
                    "geometry": vars(geometry),
                    "launches": [vars(launch) for launch in plan.launches],
                    "workspace_bytes": plan.workspace_bytes,
                    "lanes": plan.lanes,
                    "rows": plan.rows,
                    "chunk": plan.chunk,
                }


#: cu_seqlens, slots, fresh: what a batch over 12 tokens and 6 slots is given.
_BATCHES: tuple[tuple[list[int], list[int], list[int]], ...] = (
    ([0, 5, 6], [4, 0], [0, 1]),
    ([0, 5, 12], [4, 0], [1, 1]),
    ([0], [], []),
    ([0, 0, 3, 3], [1, 2, 3], [0, 0, 1]),
    ([0, 4, 8], [-1, -1], [0, 0]),
    ([0, 4, 8], [-1, 2], [1, 0]),
    ([1, 4, 8], [1, 2], [0, 0]),
    ([0, 4, 3], [1, 2], [0, 0]),
    ([0, 4, 13], [1, 2], [0, 0]),
    ([0, 4, -1], [1, 2], [0, 0]),
    ([0, 4, 8], [1, 6], [0, 0]),
    ([0, 4, 8], [1, 6], [0, 1]),
    ([0, 4, 8], [1, -2], [0, 0]),
    ([0, 4, 8], [3, 3], [0, 0]),
    ([0, 4, 8], [3, 3], [1, 1]),
    ([0, 4, 8], [3, 3], [0, 1]),
    ([0, 4, 8], [3], [0, 0]),
    ([0, 4, 8], [3, 2], [0]),
    ([0, 4], [3, 2], [0, 0]),
)


def plan_rows() -> Iterator[manifest.Row]:
    """Rows that are there for a plan alone: of the rules that no kernel of SPECS has."""
    base = row(SPECS[0])
    yield replace(base, id="channels", grid={"rule": "channels", "rows": 128, "sequences": 1})
    yield replace(base, id="channels_shared", grid={"rule": "channels", "rows": 96, "sequences": 4})
    sizes = {"rule": "segments", "heads": 3, "chunk": 64, "state_bytes": 32776}
    yield replace(base, id="segments_one", grid=sizes | {"segments": 1}, entries=["ssm_segments_one_walk"])
    entries = ["ssm_segments_gather", "ssm_segments_walk"]
    yield replace(base, id="segments", grid=sizes | {"segments": 8}, entries=entries)
    half = {"segments": 4, "gather_shared": 4096}
    yield replace(base, id="segments_half", grid=sizes | half, entries=entries)
    parts = {"segments": 2, "parts_of_head": 2, "gather_cuts": 3, "overlaps": 1}
    yield replace(base, id="segments_parts", grid=sizes | parts, entries=entries)


def _batches() -> Iterator[dict[str, Any]]:
    tokens, slots = 12, 6
    x = np.ones((tokens, 1, 1), np.float32)
    dt, A = np.ones((tokens, 1), np.float32), -np.ones(1, np.float32)
    for offsets, read, fresh in _BATCHES:
        field = ""
        try:
            ScanProblem(
                x,
                dt,
                A,
                x,
                x,
                cu_seqlens=np.array(offsets, np.int32),
                state=np.zeros((slots, 1, 1, 1), np.float32),
                read_slots=np.array(read, np.int32),
                resume=1 - np.array(fresh, np.uint8),
            )
        except InvalidProblem as error:
            named = re.match(r"\w+", str(error))
            field = named[0] if named else ""
        yield {
            "tokens": tokens,
            "slots": slots,
            "cu_seqlens": offsets,
            "read_slots": read,
            "fresh": fresh,
            "refused": field,
        }


def document() -> dict[str, Any]:
    """Vectors: rows, operand errors, table; cases of selection, plans and batches with what Python makes of each."""
    rows = [row(spec) for spec in SPECS]
    extra = list(plan_rows())
    return {
        "plan_rows": {one.id: {"grid": one.grid, "entries": one.entries} for one in extra},
        "rows": {name: data.decode() for name, data in manifest.files(rows).items()},
        "operand_errors": {spec.id: spec.operand_error for spec in SPECS},
        "table": table_document(TABLE),
        "selections": list(_selections()),
        "plans": list(_plans([*rows, *extra])),
        "batches": list(_batches()),
    }


def main() -> None:
    """Write the vectors."""
    toolchain.publish(PATH, manifest.dump(document()))


if __name__ == "__main__":
    main()
