"""The `selective` family: Mamba-1, head_dim 1 and A for each (channel, column), prefill and decode, f32 FMA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pyharness.errors import NoKernel
from pyharness.spec import (
    DTYPE_BYTES,
    IO_DTYPES,
    MAX_GRID_X,
    PORTABLE_SHARED,
    Geometry,
    KernelSpec,
    Launch,
    Launchable,
    Plan,
    head_runs,
    power_of_two_at_least,
)

MAX_D_STATE = 256
#: Most state elements of a lane.
MAX_ELEMENTS = 64
MAX_WARPS = 16
MAX_TURN = 16
MAX_PIECES = 16
_ACCESS_BYTES = 16
#: Barriers of a block that have a number.
_BARRIERS = 16


def channels_plan(rule: Mapping[str, Any], kernel: Launchable, geometry: Geometry) -> Plan:
    """The rule "channels", for head_dim 1: a block a run of `rows` channels of one group and `sequences` sequences.

    There are blocks for one sequence at least, and whole runs of them, so that a block that goes on to another sequence
    keeps its channels.
    """
    runs = head_runs(geometry, rule["rows"])
    shares = -(-max(geometry.sequences, 1) // rule["sequences"])
    grid = (runs * min(shares, MAX_GRID_X // runs), 1, 1)
    return Plan((Launch(kernel.entries[0], grid, (kernel.threads, 1, 1), kernel.shared_bytes),))


@dataclass(frozen=True, kw_only=True)
class SelectiveSpec(KernelSpec):
    """A selective kernel; fields left at 0 take their defaults. A "row" is a channel, as head_dim is 1.

    Attributes:
        lanes: lanes of a warp that share a channel's columns.
        rows: channels of one block; it fixes the channels of a lane. Prefill: of each of its warps, which take turns.
        warps: warps of a block.
        chunk: of prefill, tokens of a warp's turn; 1: the kernel is made for decode.
        sequences: of decode, sequences that a block serves at once, dealt out to its warps; 0 for prefill, where a
            block serves one.

    Raises:
        NoKernel: the combination cannot exist; the message gives the reason.
    """

    family: ClassVar[str] = "selective"
    numerics_revision: ClassVar[int] = 1

    lanes: int = 0
    rows: int = 0
    warps: int = 0
    chunk: int = 0
    sequences: int = 0

    def __post_init__(self) -> None:
        if self.io in IO_DTYPES and self.state in IO_DTYPES and 1 <= self.d_state <= MAX_D_STATE:
            self._fill()
        reason = self._invalid()
        if reason:
            raise NoKernel(f"no selective kernel with {self.fields()}: {reason}")

    def _fill(self) -> None:
        columns = self.piece if self.decodes else 4
        whole = min(32, power_of_two_at_least(-(-self.d_state // columns)))
        if self.decodes:
            # A warp a sequence; A comes from the first-level cache for seven of eight.
            self._default("lanes", whole)
            self._default("sequences", self.warps or 8)
            self._default("warps", self.sequences)
        else:
            # A quad a lane: few registers, so that many warps take turns.
            self._default("lanes", whole)
            self._default("chunk", 4)
            if self.lanes > 0:
                self._default("warps", min(8, max(1, _BARRIERS // self.quads)))
        if self.lanes > 0 and self.warps > 0:
            tile = min(4, self.lanes) if self.decodes else 2 if self.quads == 1 else 1
            self._default("rows", self._lanes_of_rows // self.lanes * tile)

    def _invalid(self) -> str:
        if self.io not in IO_DTYPES:
            return f"io must be one of {', '.join(IO_DTYPES)}, found {self.io!r}"
        if self.state not in IO_DTYPES:
            return f"state must be one of {', '.join(IO_DTYPES)}, found {self.state!r}"
        if not 1 <= self.d_state <= MAX_D_STATE:
            return f"d_state must be 1 to {MAX_D_STATE}, found {self.d_state}"
        if self.lanes not in (1, 2, 4, 8, 16, 32):
            return f"lanes must be a power of two from 1 to 32, found {self.lanes}"
        if not 1 <= self.warps <= MAX_WARPS:
            return f"warps must be 1 to {MAX_WARPS}, found {self.warps}"
        if self.decodes and (self.sequences < 1 or max(self.warps, self.sequences) % min(self.warps, self.sequences)):
            return f"warps share out sequences, or sequences warps, evenly, found {self.warps} and {self.sequences}"
        if self.tile not in (1, 2, 4, 8) or self.tile * self._lanes_of_rows != self.rows * self.lanes:
            return (
                f"a lane must own 1, 2, 4 or 8 channels: rows * lanes / {self._lanes_of_rows} is "
                f"{self.rows * self.lanes}/{self._lanes_of_rows}"
            )
        if self.tile * self.slice > MAX_ELEMENTS:
            return f"a lane must own at most {MAX_ELEMENTS} elements, found {self.tile * self.slice}: use more lanes"
        if self.decodes:
            if self.tile > self.lanes:
                return f"a lane may own at most as many channels as lanes share them, {self.lanes}, found {self.tile}"
            if self.pieces > MAX_PIECES:
                return f"a lane may own at most {MAX_PIECES} pieces of a channel, found {self.pieces}: use more lanes"
            return ""
        if self.sequences:
            return f"sequences of a block are chosen for decode, where chunk is 1, found chunk {self.chunk}"
        if self.chunk not in (2, 4, 8, MAX_TURN):
            return f"chunk must be 1, or 2, 4, 8 or {MAX_TURN} tokens, found {self.chunk}"
        if self.warps > 1 and self.warps * self.quads > _BARRIERS:
            return (
                f"warps may wait for {_BARRIERS} quads in all, found {self.warps} warps of {self.quads}: use more lanes"
            )
        if self.shared_bytes > PORTABLE_SHARED:
            return f"a block may use {PORTABLE_SHARED} bytes of shared memory, found {self.shared_bytes}"
        return ""

    @property
    def decodes(self) -> bool:
        """Whether it is made for one or a few tokens a sequence."""
        return self.chunk == 1

    @property
    def round(self) -> int:
        """Tokens after which the turns come back to the same warp (prefill)."""
        return self.warps * self.chunk

    @property
    def body(self) -> str:
        """The section of the template that holds the kernel."""
        return "decode" if self.decodes else "prefill"

    @property
    def _lanes_of_rows(self) -> int:
        """Threads among which the channels of a block are dealt out."""
        return max(32, self.threads // self.sequences) if self.decodes else 32

    @property
    def tile(self) -> int:
        """Channels that a lane owns."""
        return self.rows * self.lanes // self._lanes_of_rows

    @property
    def piece(self) -> int:
        """Columns of a 16-byte access to the state (decode)."""
        return _ACCESS_BYTES // DTYPE_BYTES[self.state]

    @property
    def pieces(self) -> int:
        """Pieces of one channel that a lane owns, the last ones partly empty (decode)."""
        return -(-self.d_state // (self.piece * self.lanes))

    @property
    def quads(self) -> int:
        """Quads of columns of one channel that a lane owns (prefill)."""
        return -(-self.d_state // (4 * self.lanes))

    @property
    def slice(self) -> int:
        """Columns of one channel that a lane owns."""
        return self.pieces * self.piece if self.decodes else 4 * self.quads

    @property
    def blocks(self) -> int:
        """Blocks whose registers must fit a multiprocessor."""
        if self.decodes:
            # States, decays, and what is fetched of B and C, in words; the most warps for which nvcc spills nothing on
            # any target: f32 tokens and rounding a state take registers, too.
            together = max(1, self.sequences // self.warps)
            live = together * self.slice * (2 * self.tile + DTYPE_BYTES[self.io] // 2)
            wide, narrow = self.io == "f32", self.state != "f32"
            most = 16 if wide and narrow else 24 if wide or narrow or live > 36 else 32
            warps = 8 if live > 88 else 16 if live >= 48 else most
        else:
            # A quad of every token, A, the sums of the quads before, and what is fetched of B and C, in words.
            live = self.tile * (4 * self.chunk + self.slice + (self.quads - 1) * self.chunk)
            live += self.chunk * self.slice * self.lanes * DTYPE_BYTES[self.io] // 64
            # Of the smaller ones, those for which nvcc spills nothing: rounding a state takes registers, too.
            small = live <= 44 and self.lanes == 4 and self.state == "f32"
            warps = 16 if small else 12 if live <= 80 else 8
        return max(1, warps // self.warps)

    @property
    def older_blocks(self) -> int:
        """The same before sm_90, for which the compiler takes more registers (decode)."""
        return max(1, self.blocks * 3 // 4) if self.blocks * self.warps == 32 else self.blocks

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Of each warp that takes turns: B and C of one, a state, D and dt_bias; and the state that they hand on."""
        if self.decodes:
            return 0
        state = 32 * self.tile * self.slice
        return 4 * (self.warps * (2 * self.chunk * self.slice * self.lanes + state + 2 * 32 * self.tile) + state)

    @property
    def grid_rule(self) -> dict[str, Any]:
        return {"rule": "channels", "rows": self.rows, "sequences": self.sequences or 1}

    @property
    def limits(self) -> dict[str, list[int]]:
        return super().limits | {"head_dim": [1, 1]}

    def constants(self) -> dict[str, Any]:
        return {"spec": self}

    def refusal(self, geometry: Geometry) -> str:
        if geometry.head_dim != 1:
            return f"for Mamba-1, whose head_dim is 1, found {geometry.head_dim}"
        if geometry.d_state != self.d_state:
            return f"specialised on d_state {self.d_state}, found {geometry.d_state}"
        return ""

    def _plan(self, geometry: Geometry) -> Plan:
        plan = channels_plan(self.grid_rule, self.launchable, geometry)
        return replace(plan, rows=self.rows, chunk=self.round)
