"""The `update` family: decode, 1 to 8 tokens a sequence, the state read once and written once, f32 FMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pyharness.errors import NoKernel
from pyharness.spec import (
    DTYPE_BYTES,
    IO_DTYPES,
    Geometry,
    KernelSpec,
    Plan,
    power_of_two_at_least,
    rows_plan,
)

STATE_DTYPES = ("f32", "bf16", "f16", "i8")
#: The longest sequence that a launch is planned for; the kernel itself takes any length.
MAX_TOKENS = 8
MAX_D_STATE = 1024
MAX_HEAD_DIM = 1024
#: Most state elements of a lane, and most pieces of one row.
MAX_ELEMENTS = 128
MAX_PIECES = 16
MAX_WARPS = 8
_ACCESS_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class UpdateSpec(KernelSpec):
    """An update kernel; fields left at 0 take their defaults.

    A row's columns are dealt out to its lanes as pieces of 16 bytes of state: 4 columns in f32, 8 in 16 bits, 16 in 8.

    Attributes:
        head_dim: rows of a head where the kernel is made for one number, else 0.
        lanes: lanes of a warp that share one row's columns; by default one piece a lane.
        rows: head_dim rows of one block; with lanes and warps it fixes the rows of a lane.
        warps: warps of a block.
        chunk: tokens of a sequence that are asked for at once: 1, 2, 4 or 8. A step of one token does not depend on it.

    Raises:
        NoKernel: the combination cannot exist; the message gives the reason.
    """

    family: ClassVar[str] = "update"
    numerics_revision: ClassVar[int] = 2

    head_dim: int = 0
    lanes: int = 0
    rows: int = 0
    warps: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if self.state in STATE_DTYPES and 1 <= self.d_state <= MAX_D_STATE:
            self._fill()
        reason = self._invalid()
        if reason:
            raise NoKernel(f"no update kernel with {self.fields()}: {reason}")

    def _fill(self) -> None:
        self._default("lanes", min(32, power_of_two_at_least(-(-self.d_state // self.piece))))
        self._default("warps", 2)
        self._default("chunk", 1)
        if self.lanes > 0 and self.warps > 0:
            tile = min(4, self.lanes, max(1, 32 // self.slice))
            self._default("rows", 32 * self.warps // self.lanes * (1 << (tile.bit_length() - 1)))

    def _invalid(self) -> str:
        if self.io not in IO_DTYPES:
            return f"io must be one of {', '.join(IO_DTYPES)}, found {self.io!r}"
        if self.state not in STATE_DTYPES:
            return f"state must be one of {', '.join(STATE_DTYPES)}, found {self.state!r}"
        if not 1 <= self.d_state <= MAX_D_STATE:
            return f"d_state must be 1 to {MAX_D_STATE}, found {self.d_state}"
        if not 0 <= self.head_dim <= MAX_HEAD_DIM:
            return f"head_dim must be 1 to {MAX_HEAD_DIM}, or 0 for any, found {self.head_dim}"
        if self.lanes not in (1, 2, 4, 8, 16, 32):
            return f"lanes must be a power of two from 1 to 32, found {self.lanes}"
        if not 1 <= self.warps <= MAX_WARPS:
            return f"warps must be 1 to {MAX_WARPS}, found {self.warps}"
        if self.chunk not in (1, 2, 4, 8):
            return f"chunk must be 1, 2, 4 or 8 tokens, found {self.chunk}"
        if self.pieces > MAX_PIECES:
            return f"a lane may own at most {MAX_PIECES} pieces of a row, found {self.pieces}: use more lanes"
        if self.row_tile not in (1, 2, 4, 8) or self.row_tile * self.threads != self.rows * self.lanes:
            return (
                f"a lane must own 1, 2, 4 or 8 rows: rows * lanes / (32 * warps) is "
                f"{self.rows * self.lanes}/{self.threads}"
            )
        if self.row_tile > self.lanes:
            return f"a lane may own at most as many rows as share it, {self.lanes}, found {self.row_tile}"
        if self.row_tile * self.slice > MAX_ELEMENTS:
            return f"a lane must own at most {MAX_ELEMENTS} elements, found {self.row_tile * self.slice}"
        return ""

    @property
    def piece(self) -> int:
        """Columns of a 16-byte access to the state."""
        return _ACCESS_BYTES // DTYPE_BYTES[self.state]

    @property
    def pieces(self) -> int:
        """Pieces of one row that a lane owns, the last ones partly empty."""
        return -(-self.d_state // (self.piece * self.lanes))

    @property
    def slice(self) -> int:
        """Columns of one row that a lane owns."""
        return self.pieces * self.piece

    @property
    def row_tile(self) -> int:
        """Rows that a lane owns."""
        return self.rows * self.lanes // self.threads

    @property
    def together(self) -> int:
        """Rows of a lane whose state is held in f32 at once where a sequence has several tokens."""
        # Of 16 bits, whose stochastic rounding takes registers too, fewer.
        return max(1, min(self.row_tile, (8 if self.state in ("bf16", "f16") else 16) // self.slice))

    @property
    def most_tokens(self) -> int:
        return MAX_TOKENS

    @property
    def blocks(self) -> int:
        """Blocks whose registers must fit a multiprocessor."""
        # The most warps that measured fastest and for which nvcc spills nothing on any target.
        specialised = self.head_dim and self.head_dim % self.rows == 0
        elements = self.row_tile * self.slice
        if self.state == "i8":
            warps = (20 if specialised else 16) if elements <= 64 else 16
        elif DTYPE_BYTES[self.state] < 4:
            warps = (24 if specialised else 20) if elements <= 32 else 16
        elif self.chunk > 2 and specialised and elements <= 32:
            warps = 20
        elif self.chunk > 2 or elements + 2 * self.slice > 24:
            warps = 16
        else:
            most = 28 if self.io == "f32" else 32
            warps = most if specialised else 24 if self.d_state > 64 else 20
        return max(1, warps // self.warps)

    @property
    def newer_blocks(self) -> int:
        """The same from sm_100 on, for which the compiler takes more registers."""
        if self.row_tile * self.slice > 64:
            return self.blocks * 3 // 4
        return self.blocks * 7 // 8 if self.blocks * self.warps == 32 else self.blocks

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def grid_rule(self) -> dict[str, Any]:
        return {"rule": "rows", "rows": self.rows}

    def constants(self) -> dict[str, Any]:
        return {"spec": self}

    def refusal(self, geometry: Geometry) -> str:
        if geometry.d_state != self.d_state:
            return f"specialised on d_state {self.d_state}, found {geometry.d_state}"
        if self.head_dim and geometry.head_dim != self.head_dim:
            return f"specialised on head_dim {self.head_dim}, found {geometry.head_dim}"
        if geometry.longest > MAX_TOKENS:
            return f"for sequences of at most {MAX_TOKENS} tokens, found one of {geometry.longest}"
        if geometry.longest < 0 and geometry.tokens > MAX_TOKENS * max(geometry.sequences, 1):
            return (
                f"for sequences of at most {MAX_TOKENS} tokens, found {geometry.tokens} tokens in "
                f"{geometry.sequences} sequences"
            )
        return ""

    def _plan(self, geometry: Geometry) -> Plan:
        return rows_plan(self.grid_rule, self.launchable, geometry)
