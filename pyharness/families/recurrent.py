"""The `recurrent` family: the recurrence token by token in its exact order, f32 FMA, state in registers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pyharness.errors import NoKernel
from pyharness.spec import (
    DTYPE_BYTES,
    IO_DTYPES,
    PORTABLE_SHARED,
    Geometry,
    KernelSpec,
    Launch,
    Launchable,
    Plan,
    power_of_two_at_least,
    rows_grid,
    rows_plan,
)

LAYOUTS = ("block", "slices", "interleaved", "padded", "swizzled", "tiled", "generic")
#: Layouts whose block stages tokens by chunk and gives one row to a group of lanes.
STAGED = ("slices", "interleaved", "padded", "swizzled", "generic")
MAX_D_STATE = 1024
MAX_SLICE = 64
MAX_CHUNK = 64
MAX_BLOCK_ELEMENTS = 8192
STAGING_BUDGET = 32 * 1024
MAX_BATCH = 8
MAX_WARPS = 8


def default_lanes(d_state: int) -> int:
    """The power of two that covers d_state at 32 columns a lane."""
    return min(32, power_of_two_at_least(-(-d_state // 32)))


def slice_columns(d_state: int, lanes: int) -> int:
    """Columns of a lane: ceil(d_state / lanes) rounded up to 4."""
    return 4 * -(-d_state // (4 * lanes))


def padded_columns(d_state: int, lanes: int, layout: str) -> int:
    """Floats that one token's B (or C) takes in shared memory."""
    columns = slice_columns(d_state, lanes) * lanes
    if layout in ("padded", "generic"):
        return columns + 4 * (-(-columns // 32))
    if layout == "swizzled":
        return -(-columns // 32) * 32
    return columns


def token_floats(d_state: int, lanes: int, rows: int, layout: str) -> int:
    """Floats of shared memory that staging one token takes: B, C, dt, and x of the block's rows."""
    return 2 * padded_columns(d_state, lanes, layout) + rows + 1


def default_chunk(d_state: int, lanes: int, rows: int, layout: str) -> int:
    """Tokens whose staging fits 32 KiB, at least 1 and at most 64."""
    return max(1, min(MAX_CHUNK, STAGING_BUDGET // (4 * token_floats(d_state, lanes, rows, layout))))


def padded_rows_plan(rule: Mapping[str, Any], kernel: Launchable, geometry: Geometry) -> Plan:
    """The rule "padded_rows": `rows_plan` with lanes, rows, chunk and shared memory found from d_state at run time.

    The lanes of a row are the power of two that covers d_state at `columns` a lane, at most 32; a block has `threads`
    threads and at most `rows` rows; a chunk is what fits `staging_bytes`, at most `chunk` tokens.
    """
    lanes = min(32, power_of_two_at_least(-(-geometry.d_state // rule["columns"])))
    rows = max(1, min(rule["rows"], rule["threads"] // lanes))
    token_bytes = 4 * token_floats(geometry.d_state, lanes, rows, "generic")
    chunk = max(1, min(rule["chunk"], rule["staging_bytes"] // token_bytes))
    shared = -(-chunk * token_bytes // 16) * 16
    launch = Launch(kernel.entries[0], rows_grid(geometry, rows), (rows * lanes, 1, 1), shared)
    return Plan((launch,), lanes=lanes, rows=rows, chunk=chunk)


@dataclass(frozen=True, kw_only=True)
class RecurrentSpec(KernelSpec):
    """A recurrent kernel; fields left at 0 take their defaults.

    Attributes:
        lanes: lanes of a warp that share one row's columns (not for `block`).
        rows: head_dim rows of one block.
        warps: warps of a block (`tiled` only: with lanes and rows it fixes the rows of a lane).
        chunk: tokens staged at a time.
        layout: one of LAYOUTS.

    Raises:
        NoKernel: the combination cannot exist; the message gives the reason.
    """

    family: ClassVar[str] = "recurrent"
    numerics_revision: ClassVar[int] = 1

    lanes: int = 0
    rows: int = 0
    warps: int = 0
    chunk: int = 0
    layout: str = "tiled"

    def __post_init__(self) -> None:
        self._fill()
        reason = self._invalid()
        if reason:
            raise NoKernel(f"no recurrent kernel with {self.fields()}: {reason}")

    def _fill(self) -> None:
        known = self.layout in LAYOUTS and self.io in IO_DTYPES and 1 <= self.d_state <= MAX_D_STATE
        if not known or self.layout in ("block", "generic"):
            return
        if self.layout == "tiled":
            self._default("lanes", min(32, power_of_two_at_least(-(-self.d_state // 4))))
            if self.lanes > 0:
                row_tile = min(4, self.lanes, max(1, 32 // self.slice))
                self._default("warps", min(MAX_WARPS, max(1, self.lanes // row_tile)))
                self._default("rows", 32 * self.warps // self.lanes * row_tile)
                self._default("chunk", self._longest_chunk())
            return
        self._default("lanes", default_lanes(self.d_state))
        if self.lanes > 0:
            self._default("rows", max(1, min(64, 128 // self.lanes)))
            self._default("chunk", default_chunk(self.d_state, self.lanes, self.rows, self.layout))

    def _invalid(self) -> str:
        if self.layout not in LAYOUTS:
            return f"layout must be one of {', '.join(LAYOUTS)}, found {self.layout!r}"
        if self.io not in IO_DTYPES:
            return f"io must be one of {', '.join(IO_DTYPES)}, found {self.io!r}"
        if self.state not in IO_DTYPES:
            return f"state must be one of {', '.join(IO_DTYPES)}, found {self.state!r}"
        if self.layout == "generic":
            if self.d_state or self.lanes or self.rows or self.chunk or self.warps:
                return "generic takes d_state, lanes, rows and chunk at run time"
            return ""
        if not 1 <= self.d_state <= MAX_D_STATE:
            return f"d_state must be 1 to {MAX_D_STATE}, found {self.d_state}"
        if self.layout == "block":
            if self.lanes or self.rows or self.chunk or self.warps:
                return "block gives a thread one column of one row: it has no lanes, rows, warps or chunk"
            return ""
        if self.lanes not in (1, 2, 4, 8, 16, 32):
            return f"lanes must be a power of two from 1 to 32, found {self.lanes}"
        if self.slice > MAX_SLICE:
            return f"a lane's slice must be at most {MAX_SLICE} columns, found {self.slice}: use more lanes"
        if not 1 <= self.chunk <= MAX_CHUNK:
            return f"chunk must be 1 to {MAX_CHUNK} tokens, found {self.chunk}"
        if self.rows < 1:
            return f"rows must be at least 1, found {self.rows}"
        if self.layout == "tiled":
            if not 1 <= self.warps <= MAX_WARPS:
                return f"warps must be 1 to {MAX_WARPS}, found {self.warps}"
            if self.row_tile not in (1, 2, 4, 8) or self.row_tile * 32 * self.warps != self.rows * self.lanes:
                return (
                    f"a lane must own 1, 2, 4 or 8 rows: rows * lanes / (32 * warps) is "
                    f"{self.rows * self.lanes}/{32 * self.warps}"
                )
            if self.chunk > self.threads:
                return f"a chunk may have at most a token a thread, {self.threads}, found {self.chunk}"
            if self.row_tile > self.lanes:
                return f"a lane may own at most as many rows as share it, {self.lanes}, found {self.row_tile}"
            if self.row_tile * self.slice > MAX_SLICE:
                return f"a lane must own at most {MAX_SLICE} elements, found {self.row_tile * self.slice}"
        else:
            if self.warps:
                return f"{self.layout} has no warps: rows and lanes fix the block"
            if self.threads % 32 or self.threads > 1024:
                return f"rows * lanes must be whole warps up to 1024 threads, found {self.threads}"
            if self.threads * self.slice > MAX_BLOCK_ELEMENTS:
                return (
                    f"a block may hold {MAX_BLOCK_ELEMENTS} state elements in registers, "
                    f"found {self.threads} threads of {self.slice}: use fewer rows"
                )
        if self.shared_bytes > PORTABLE_SHARED:
            return f"a block may use {PORTABLE_SHARED} bytes of shared memory, found {self.shared_bytes}"
        return ""

    @property
    def slice(self) -> int:
        """Columns of one row that a lane owns, the last lane's slice partly empty."""
        return MAX_SLICE if self.layout == "generic" else slice_columns(self.d_state, self.lanes)

    @property
    def row_tile(self) -> int:
        """Rows that a lane owns (`tiled`)."""
        return self.rows * self.lanes // (32 * self.warps)

    @property
    def blocks(self) -> int:
        """Blocks whose registers must fit a multiprocessor: without a number the compiler may spill to fit more."""
        warps = 16 if self.layout == "block" or (self.layout == "tiled" and self.few_tokens) else 8
        return max(1, 32 * warps // self.threads)

    @property
    def body(self) -> str:
        """The section of the template that holds this layout's kernel."""
        return "staged" if self.layout in STAGED else self.layout

    @property
    def batch(self) -> int:
        """Tokens whose y sums are reduced together over a row's lanes (`tiled`)."""
        most = 1 if self.few_tokens else min(MAX_BATCH, self.chunk, self.lanes // self.row_tile)
        return 1 << (most.bit_length() - 1)

    @property
    def few_tokens(self) -> bool:
        """Whether a chunk is so short that the kernel is made for decode: many small blocks at once (`tiled`)."""
        return self.chunk <= 4

    @property
    def threads(self) -> int:
        if self.layout == "block":
            return max(32, power_of_two_at_least(self.d_state))
        if self.layout == "generic":
            return 128
        return 32 * self.warps if self.layout == "tiled" else self.rows * self.lanes

    @property
    def shared_bytes(self) -> int:
        if self.layout == "block":
            return 4 * self.threads
        if self.layout == "generic":
            return 48 * 1024
        if self.layout == "tiled":
            return self._tiled_shared_bytes()
        floats = self.chunk * token_floats(self.d_state, self.lanes, self.rows, self.layout)
        if self.layout == "swizzled":
            floats = max(floats, self.rows * padded_columns(self.d_state, self.lanes, self.layout))
        return -(-4 * floats // 16) * 16

    def _tiled_shared_bytes(self) -> int:
        return self._tiled_token_bytes() * self.chunk + 2 * (self.threads // self.chunk * self.chunk) * 8

    def _tiled_token_bytes(self) -> int:
        """Shared memory of one token in both buffers and, for 16-bit io, widened."""
        io = DTYPE_BYTES[self.io]
        columns = self.slice * self.lanes
        return 2 * (2 * columns * io + -(-self.rows * io // 16) * 16) + (0 if self.io == "f32" else 2 * columns * 4)

    def _longest_chunk(self) -> int:
        """The most tokens, in whole batches, that shared memory, the block's threads and the longest chunk allow."""
        fits = (PORTABLE_SHARED - 2 * 8 * self.threads) // self._tiled_token_bytes()
        longest = max(1, min(MAX_CHUNK, self.threads, fits))
        return longest - longest % MAX_BATCH if longest > MAX_BATCH else longest

    @property
    def grid_rule(self) -> dict[str, Any]:
        if self.layout == "generic":
            return {
                "rule": "padded_rows",
                "columns": 32,
                "threads": self.threads,
                "rows": 64,
                "chunk": MAX_CHUNK,
                "staging_bytes": STAGING_BUDGET,
            }
        return {"rule": "rows", "rows": 1 if self.layout == "block" else self.rows}

    @property
    def limits(self) -> dict[str, list[int]]:
        return {"d_state": [1, MAX_D_STATE]} if self.layout == "generic" else super().limits

    def constants(self) -> dict[str, Any]:
        return {"spec": self}

    def refusal(self, geometry: Geometry) -> str:
        if self.layout == "generic":
            if geometry.d_state > MAX_D_STATE:
                return f"generic takes d_state up to {MAX_D_STATE}, found {geometry.d_state}"
        elif geometry.d_state != self.d_state:
            return f"specialised on d_state {self.d_state}, found {geometry.d_state}"
        return ""

    def _plan(self, geometry: Geometry) -> Plan:
        if self.layout == "generic":
            return padded_rows_plan(self.grid_rule, self.launchable, geometry)
        plan = rows_plan(self.grid_rule, self.launchable, geometry)
        return replace(plan, lanes=self.lanes, rows=self.rows, chunk=self.chunk)
