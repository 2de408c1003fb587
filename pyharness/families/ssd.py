"""The `ssd` family: prefill as chunked matrix products on tensor cores (state space duality)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pyharness.errors import NoKernel
from pyharness.spec import (
    DTYPE_BYTES,
    IO_DTYPES,
    MAX_GRID_X,
    SHARED_LIMIT,
    Geometry,
    KernelSpec,
    Launch,
    Launchable,
    Plan,
    head_runs,
)

#: How f32 operands are multiplied; 16-bit ones are multiplied as they are.
PRECISIONS = ("split", "tf32")
CHUNKS = (32, 64, 128, 256)
MAX_SEGMENTS = 64
#: Relative norm of the error that rounding of operands may cause, in one head of one sequence: half a unit in the last
#: place of the operand for each rounding on a term's way through x, B, the state or a score, and C. With 16-bit io two
#: of these are rounded, the weighted x and the state or score; f32 io rounds all four. `split` drops the product of the
#: two small parts, 2^-16 of the whole.
OPERAND_ERROR = {"bf16": 2.0**-7, "f16": 2.0**-10, "tf32": 2.0**-9, "split": 2.0**-15}
_STATE_REGISTERS = 128
_MOST_SHARED = max(SHARED_LIMIT.values())
#: By warps of a block on Hopper: the launched share, times all threads, is what the others take in sum.
_REGISTERS = {12: (168, 232, 136)}
_TILE = 16
_GROUP_ROWS = 64
#: Rows of a head whose y a warp group sums at once, at most, and those that a larger head is walked in.
_MOST_ROWS = 96
_PART_ROWS = (64, 96, 80)
_WORD_BYTES = 4


def segments_plan(rule: Mapping[str, Any], kernel: Launchable, geometry: Geometry) -> Plan:
    """The rule "segments": sequences are cut in `segments` of whole chunks, a block has one and a run of heads.

    A run is `heads` heads of one group, or of parts of heads where each has `parts_of_head`. With several segments the
    entry that ends in `_gather` comes first, on all segments but one, each cut again in `gather_cuts` where they are
    named, with `gather_shared` bytes of shared memory where they are named, and stores what the states become over
    each; then `_walk` runs all segments, and may start before `_gather` has ended where `overlaps` is 1. The workspace
    is `state_bytes` for each head of each cut that the tokens can fill.
    """
    segments, chunk, cuts = rule["segments"], rule["chunk"], rule.get("gather_cuts", 1)
    walked = replace(geometry, heads=geometry.heads * rule.get("parts_of_head", 1))
    blocks = max(geometry.sequences, 1) * head_runs(walked, rule["heads"])
    by_name = {entry.rpartition("_")[2]: entry for entry in kernel.entries}
    steps = [("walk", segments, kernel.shared_bytes)]
    kept = 0
    if segments > 1:
        steps.insert(0, ("gather", (segments - 1) * cuts, rule.get("gather_shared") or kernel.shared_bytes))
        kept = min(geometry.sequences * segments * cuts, geometry.tokens // chunk + geometry.sequences)
    launches = tuple(
        Launch(
            by_name[name],
            (min(blocks * count, MAX_GRID_X), 1, 1),
            (kernel.threads, 1, 1),
            shared,
            overlaps=number > 0 and bool(rule.get("overlaps")),
        )
        for number, (name, count, shared) in enumerate(steps)
    )
    return Plan(launches, workspace_bytes=kept * geometry.heads * rule["state_bytes"])


@dataclass(frozen=True, kw_only=True)
class SsdSpec(KernelSpec):
    """A chunked kernel; fields left at 0 take their defaults.

    Attributes:
        head_dim: rows of a head, a multiple of 16.
        rows: rows of a head whose state one warp holds, a multiple of 16 that divides head_dim.
        warps: warps of a block: those of one head times the heads of a block.
        chunk: tokens whose products are taken together; states can be had behind each.
        segments: most parts that a sequence is cut into in time, walked at once; 1 walks it whole in one launch.
        precision: for f32 io, "split" (sums of two bf16 operands) or "tf32"; empty for 16-bit io.

    Raises:
        NoKernel: the combination cannot exist; the message gives the reason.
    """

    family: ClassVar[str] = "ssd"
    numerics_revision: ClassVar[int] = 3

    head_dim: int = 0
    rows: int = 0
    warps: int = 0
    chunk: int = 0
    segments: int = 0
    precision: str = ""
    exact: str = ""

    def __post_init__(self) -> None:
        if self.io == "f32" and not self.precision:
            object.__setattr__(self, "precision", PRECISIONS[0])
        self._default("head_dim", 64)
        self._default("chunk", 64)
        self._default("segments", 1)
        if self.d_state > 0 and self.head_dim > 0:
            self._default("rows", self._default_rows())
            if self.rows > 0:
                self._default("warps", self._default_warps())
        reason = self._invalid()
        if reason:
            raise NoKernel(f"no ssd kernel with {self.fields()}: {reason}")

    def _default_rows(self) -> int:
        """The most rows, up to 32, that divide head_dim and whose state fits a warp's registers."""
        if self.exact:
            return _TILE
        fits = [r for r in (32, 16) if self.head_dim % r == 0 and r * self.d_state <= 32 * _STATE_REGISTERS]
        return fits[0] if fits else _TILE

    def _default_warps(self) -> int:
        """Those of one head; on Hopper's own kernels as many warp groups that write y as carry a state."""
        if not self.exact:
            return max(1, self.head_dim // self.rows)
        return 8 * max(1, -(-self.part_rows // _GROUP_ROWS))

    def _invalid(self) -> str:
        if self.io not in IO_DTYPES:
            return f"io must be one of {', '.join(IO_DTYPES)}, found {self.io!r}"
        if self.state not in IO_DTYPES:
            return f"state must be one of {', '.join(IO_DTYPES)}, found {self.state!r}"
        if self.precision not in (PRECISIONS if self.io == "f32" else ("",)):
            wanted = " or ".join(PRECISIONS) if self.io == "f32" else "left out for 16-bit io"
            return f"precision must be {wanted}, found {self.precision!r}"
        if not 16 <= self.d_state <= 256 or self.d_state % _TILE:
            return f"d_state must be a multiple of 16 from 16 to 256, found {self.d_state}"
        if not 16 <= self.head_dim <= 256 or self.head_dim % _TILE:
            return f"head_dim must be a multiple of 16 from 16 to 256, found {self.head_dim}"
        if self.rows < _TILE or self.rows % _TILE or self.head_dim % self.rows:
            return f"rows must be a multiple of 16 that divides head_dim {self.head_dim}, found {self.rows}"
        if self.rows * self.d_state > 32 * _STATE_REGISTERS:
            return f"a warp holds at most 4096 state elements, found {self.rows} rows of {self.d_state}"
        each = 4 if self.exact else self.head_dim // self.rows
        if not 1 <= self.warps <= 16 or self.warps % each:
            of = "a warp group" if self.exact else "a head"
            return f"warps must be 1 to 16, a multiple of the {each} of {of}, found {self.warps}"
        if self.chunk not in CHUNKS:
            return f"chunk must be one of {', '.join(map(str, CHUNKS))} tokens, found {self.chunk}"
        pieces = self.d_state * DTYPE_BYTES[self.io] // 16
        if pieces > self.threads:
            return f"a block copies a token's row of {pieces} 16-byte pieces at once, found {self.threads} threads"
        if self.exact:
            reason = self._invalid_exact()
            if reason:
                return reason
        if not 1 <= self.segments <= MAX_SEGMENTS:
            return f"segments must be 1 to {MAX_SEGMENTS}, found {self.segments}"
        if self.shared_bytes > _MOST_SHARED:
            return f"a block may use {_MOST_SHARED} bytes of shared memory, found {self.shared_bytes}"
        return ""

    def _invalid_exact(self) -> str:
        if self.exact != "sm_90a":
            return f"the only exact target is sm_90a, found {self.exact!r}"
        if self.io == "f32" or self.chunk != _GROUP_ROWS or self.rows != _TILE:
            return (
                f"sm_90a takes 16-bit io, chunks of 64 tokens and 16 rows a warp, found {self.io}, {self.chunk}, "
                f"{self.rows}"
            )
        if self.d_state % _GROUP_ROWS:
            return f"sm_90a takes a d_state that is a multiple of 64, found {self.d_state}"
        if not self.part_rows:
            wanted = ", ".join(map(str, _PART_ROWS))
            return f"sm_90a takes a head_dim up to {_MOST_ROWS} or a multiple of {wanted}, found {self.head_dim}"
        if self.warps < 8 or self.carriers * self.rows < self.part_rows:
            return (
                f"sm_90a takes {self._default_warps()} warps or more for head_dim {self.head_dim}, found {self.warps}"
            )
        if self.d_state > 2 * _GROUP_ROWS and self.warps > 12:
            return f"a state of {self.d_state} columns fits the registers of 12 warps, found {self.warps}"
        return ""

    @property
    def part_rows(self) -> int:
        """Rows that are walked like a head of their own: all, or a part of a large one; 0 if it has no such part."""
        if not self.exact or self.head_dim <= _MOST_ROWS:
            return self.head_dim
        return next((rows for rows in _PART_ROWS if self.head_dim % rows == 0), 0)

    @property
    def parts_of_head(self) -> int:
        return self.head_dim // self.part_rows

    @property
    def carriers(self) -> int:
        """Warps that carry the state; on Hopper's own kernels others write y."""
        return self.warps // 8 * 4 if self.exact else self.warps

    @property
    def operand(self) -> str:
        """Type of what the tensor cores multiply."""
        return {"": self.io, "tf32": "f32", "split": "bf16"}[self.precision]

    @property
    def parts(self) -> int:
        """Operands that one value is the sum of."""
        return 2 if self.precision == "split" else 1

    @property
    def registers(self) -> tuple[int, int, int] | None:
        """Registers of a thread as launched, where it carries a state, and where it writes y; None: the same for all.

        A state of more than 128 columns takes 128 registers and more, which leaves too few of an even share.
        """
        return _REGISTERS.get(self.warps) if self.exact and self.d_state > 2 * _GROUP_ROWS else None

    @property
    def heads(self) -> int:
        """Heads of a block, or parts of them. In panels of 64 columns, several stand one behind another as they are."""
        if self.exact and self.part_rows % _GROUP_ROWS and _GROUP_ROWS % self.part_rows:
            return 1
        return self.carriers * self.rows // self.part_rows

    @property
    def stages(self) -> int:
        """Chunks in shared memory: more than one where others are copied during the work, which `split` cannot do."""
        if self.exact:
            return 3 if self._shared(3) <= _MOST_SHARED else 2
        return 2 if self.parts == 1 and self._shared(2) <= _MOST_SHARED else 1

    @property
    def gather_turns(self) -> bool:
        """Whether all warp groups of the first launch of two carry states: two share rows and take chunks in turns."""
        return bool(self.exact) and self.segments > 1 and self.part_rows == _GROUP_ROWS and not self.registers

    @property
    def overlaps(self) -> bool:
        """Whether the second of two launches may start before the first has ended: it waits itself where it has to."""
        return bool(self.exact) and self.segments > 1

    @property
    def own_places(self) -> bool:
        """Whether each of several warp groups that write y has one place for chunks, too few to bring one ahead."""
        return bool(self.exact) and self.stages == (self.warps - self.carriers) // 4

    @property
    def gather_cuts(self) -> int:
        """Cuts of a segment that the first of two launches walks at once: a block of half a head leaves few blocks."""
        return 2 if self.segments > 1 and self.registers else 1

    @property
    def gather_stages(self) -> int:
        """The same in the first of two launches, of each turn where there are several."""
        if self.gather_turns and self._gather_shared(3) > _MOST_SHARED:
            return 2
        return 3 if self.exact else self.stages

    def _gather_shared(self, stages: int) -> int:
        """Shared memory of the first launch where two turns have so many chunks each, and two batches of weights."""
        tokens = 2 * 2 * stages * self.chunk * (self.d_state + self._columns_of_x)
        weights = 2 * (self.warps // self.heads // 2 * 2) * self.heads * (self.chunk + 2) * _WORD_BYTES
        return self._before_panels + tokens + weights

    @property
    def together(self) -> int:
        """Tiles of 16 tokens whose y a warp sums at the same time."""
        state = self.rows * self.d_state // 32
        wanted = (96 if state <= 64 and self.warps <= 12 else 16 if self.warps > 12 else 32) // (self.rows // 2)
        if self.parts == 2 or self.precision == "tf32":
            wanted = min(wanted, 2)
        tiles = self.chunk // _TILE
        return max(n for n in (1, 2, 4) if n <= max(wanted, 1) and tiles % n == 0)

    @property
    def operand_error(self) -> float:
        return OPERAND_ERROR[self.precision or self.io]

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def blocks(self) -> int:
        """Blocks whose registers must fit a multiprocessor."""
        state = self.rows * self.d_state // 32
        return max(1, (8 if state > 64 or self.precision else 12) // self.warps)

    def _shared(self, stages: int) -> int:
        if self.exact:
            return self._panel_bytes(stages)
        operand = DTYPE_BYTES[self.operand]
        pad = 16 // operand
        tokens = 2 * (self.d_state + pad) + self.heads * self.head_dim + pad
        tiles = self.chunk // _TILE
        tile_words = 8 if self.precision else 4
        scores = self.heads * tiles * (tiles + 1) // 2 * 32 * tile_words * _WORD_BYTES
        return stages * self.parts * self.chunk * tokens * operand + scores + self._decay_bytes

    @property
    def _decay_bytes(self) -> int:
        """Shared memory of the decays of some chunks, what they are worked out from, and what a block works on."""
        decays = (3 if self.exact else 2) * self.heads * (5 * self.chunk + self.chunk // _TILE) * _WORD_BYTES
        return decays + (self.carriers * 3 + 15) * _WORD_BYTES

    def _panel_bytes(self, stages: int) -> int:
        """Shared memory where warp groups multiply: tokens of each stage, states, and rows of y, in 16 bits."""
        tokens = stages * self.chunk * (2 * self.d_state + self._columns_of_x)
        states = 2 * self.heads * self.part_rows * self.d_state
        rows = (self.warps - self.carriers) * _TILE * 32
        return 2 * (tokens + states + rows) + self._before_panels

    @property
    def _columns_of_x(self) -> int:
        """Columns of the panels that a token's x takes."""
        return -(-self.heads * self.part_rows // _GROUP_ROWS) * _GROUP_ROWS

    @property
    def _before_panels(self) -> int:
        """Decays and the rest, up to where panels may begin."""
        return -(-self._decay_bytes // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        return self._shared(self.stages)

    @property
    def gather_shared_bytes(self) -> int:
        """Shared memory of a block of the first of two launches, which has no C and no y."""
        if not self.exact:
            return self.shared_bytes
        if self.gather_turns:
            return self._gather_shared(self.gather_stages)
        return self._before_panels + 2 * self.gather_stages * self.chunk * (self.d_state + self._columns_of_x)

    @property
    def entries(self) -> tuple[tuple[str, int], ...]:
        """The launches in order: entry, and the segments of a sequence that it walks."""
        walk = (("walk", self.segments),)
        return (("gather", (self.segments - 1) * self.gather_cuts), *walk) if self.segments > 1 else walk

    @property
    def grid_rule(self) -> dict[str, Any]:
        return {
            "rule": "segments",
            "heads": self.heads,
            **({"parts_of_head": self.parts_of_head} if self.parts_of_head > 1 else {}),
            **({"gather_cuts": self.gather_cuts} if self.gather_cuts > 1 else {}),
            "chunk": self.chunk,
            "segments": self.segments,
            "state_bytes": self.state_bytes,
            "gather_shared": self.gather_shared_bytes,
            **({"overlaps": 1} if self.overlaps else {}),
        }

    @property
    def limits(self) -> dict[str, list[int]]:
        return super().limits | {"per_column_a": [0, 0], "checkpoint_step_multiple": [self.chunk, self.chunk]}

    @property
    def launchable(self) -> Launchable:
        return Launchable(tuple(self.symbol(entry) for entry, _ in self.entries), self.threads, self.shared_bytes)

    @property
    def state_bytes(self) -> int:
        """Workspace of one head's state and the exponent of its decay, one a part of it."""
        return 4 * self.head_dim * self.d_state + 8 * self.parts_of_head

    def constants(self) -> dict[str, Any]:
        return {"spec": self}

    def excluded(self, target: str) -> str:
        if target == "sm_75":
            return "sm_75 has no bf16 or tf32 products and no asynchronous copies"
        return super().excluded(target)

    def refusal(self, geometry: Geometry) -> str:
        if geometry.d_state != self.d_state:
            return f"specialised on d_state {self.d_state}, found {geometry.d_state}"
        if geometry.head_dim != self.head_dim:
            return f"specialised on head_dim {self.head_dim}, found {geometry.head_dim}"
        if geometry.per_column_a:
            return "one A a head is wanted (Mamba-2), found one a column (Mamba-1)"
        if geometry.checkpoint_step % self.chunk:
            return (
                f"states can be had behind every {self.chunk} tokens of a sequence and at its end, found "
                f"checkpoint_slots behind a multiple of {geometry.checkpoint_step} tokens: use the family `recurrent`"
            )
        return ""

    def _plan(self, geometry: Geometry) -> Plan:
        return replace(segments_plan(self.grid_rule, self.launchable, geometry), chunk=self.chunk)
