"""What a kernel is: its fields, id, symbols, validity, shared memory and launch geometry.

A `KernelSpec` is frozen and valid: constructing one that cannot exist raises `NoKernel` with the reason. Families
live in `pyharness.families`, one subclass each.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pyharness.errors import NoKernel

#: Storage types by their short names, with their size in bytes.
DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1}
IO_DTYPES = ("f32", "bf16", "f16")

#: Most dynamic shared memory a block may ask for, in bytes, by target.
SHARED_LIMIT = {
    "sm_75": 64 * 1024,
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "compute_80": 99 * 1024,
}
#: Every target that a release carries an image for, in listing order; compute_80 is PTX.
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120", "compute_80")
#: A portable kernel stays within this much shared memory, in bytes.
PORTABLE_SHARED = 99 * 1024
MAX_GRID_X = 2**31 - 1

_PARTS = (
    ("n", "d_state"),
    ("p", "head_dim"),
    ("l", "lanes"),
    ("r", "rows"),
    ("w", "warps"),
    ("c", "chunk"),
    ("s", "sequences"),
    ("t", "segments"),
)


def power_of_two_at_least(value: int) -> int:
    """The smallest power of two that is no smaller than a positive number."""
    return 1 << (value - 1).bit_length()


@dataclass(frozen=True)
class Geometry:
    """The sizes of a problem that decide a launch: upper bounds where a plan serves smaller batches.

    `longest` is the tokens of the longest sequence that is not padding, or -1 where a plan does not know it.
    `per_column_a` says that A is [heads, d_state]. `checkpoint_step` divides every number of tokens behind which,
    before a sequence's end, a checkpoint is stored: 0 where there are none.
    """

    tokens: int
    sequences: int
    heads: int
    head_dim: int
    groups: int
    d_state: int
    longest: int = -1
    per_column_a: bool = False
    checkpoint_step: int = 0


def rows_grid(geometry: Geometry, rows: int) -> tuple[int, int, int]:
    """The grid of the rule "rows": a block a (sequence, head, run of rows), at least one sequence's."""
    blocks = max(geometry.sequences, 1) * geometry.heads * -(-geometry.head_dim // rows)
    return (min(blocks, MAX_GRID_X), 1, 1)


def head_runs(geometry: Geometry, heads: int) -> int:
    """Runs of up to `heads` heads of one group, in all groups."""
    return geometry.groups * -(-(geometry.heads // geometry.groups) // heads)


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a plan: symbol, grid and block in blocks and threads, dynamic shared memory in bytes.

    `overlaps` says that it may start before the launch before it has ended: each of its blocks waits itself for that.
    """

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    overlaps: bool = False


@dataclass(frozen=True)
class Plan:
    """How a kernel runs a geometry: launches in order, workspace bytes, and the run-time lanes, rows and chunk."""

    launches: tuple[Launch, ...]
    workspace_bytes: int = 0
    lanes: int = 0
    rows: int = 0
    chunk: int = 0


@dataclass(frozen=True)
class Launchable:
    """What a grid rule knows of a kernel: entries in launch order, threads and dynamic shared bytes of a block."""

    entries: tuple[str, ...]
    threads: int
    shared_bytes: int


def rows_plan(rule: Mapping[str, Any], kernel: Launchable, geometry: Geometry) -> Plan:
    """The rule "rows": one launch of a block a (sequence, head, run of `rows` rows)."""
    grid = rows_grid(geometry, max(int(rule["rows"]), 1))
    return Plan((Launch(kernel.entries[0], grid, (kernel.threads, 1, 1), kernel.shared_bytes),))


@dataclass(frozen=True, kw_only=True)
class KernelSpec(ABC):
    """One specialised kernel.

    Attributes:
        d_state: columns of the state; 0 where it is known only at run time.
        io: dtype of x, z, B, C, y: "f32", "bf16" or "f16".
        state: storage dtype of the state.
    """

    family: ClassVar[str]
    #: Raised whenever the same inputs give other bits than before.
    numerics_revision: ClassVar[int]

    d_state: int
    io: str = "f32"
    state: str = "f32"

    @property
    def id(self) -> str:
        """The readable id, `family_n128_l4_r32_c25_padded_f32_sf32`; parts that do not apply are left out."""
        parts = [self.family]
        for letter, name in _PARTS:
            value = getattr(self, name, 0)
            if value:
                parts.append(f"{letter}{value}")
        parts += [p for p in (getattr(self, "layout", ""), self.io, f"s{self.state}") if p]
        parts += [p for p in (getattr(self, "precision", ""), getattr(self, "exact", "").replace("_", "")) if p]
        return "_".join(parts)

    def symbol(self, entry: str = "") -> str:
        """The `extern "C"` name of an entry."""
        return f"ssm_{self.id}_{entry}" if entry else f"ssm_{self.id}"

    def _default(self, name: str, value: int) -> None:
        """Give a field that was left at 0 its default; for constructors only."""
        if getattr(self, name) == 0:
            object.__setattr__(self, name, value)

    @property
    def template(self) -> str:
        """Path of the template below templates/."""
        return f"kernels/{self.family}.cu.j2"

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, in bytes; the largest a launch may ask for where it is a run-time value."""

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads in a block; the largest where it is a run-time value."""

    @property
    @abstractmethod
    def grid_rule(self) -> dict[str, Any]:
        """The named rule by which a launch finds its grid, with its integers, as the manifest stores it."""

    @property
    def operand_error(self) -> float:
        """Relative norm of the error that rounding of what is multiplied may cause, beyond that of f32 arithmetic."""
        return 0.0

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest sequence that the kernel is for, 0 where any will do."""
        return 0

    @property
    def limits(self) -> dict[str, list[int]]:
        """The least and the greatest of each size that this kernel takes, as the manifest stores them.

        They say for Go and C what `refusal` says here. "longest" is the tokens of the longest sequence, "per_column_a"
        1 where A has a value for each column; "SIZE_multiple" names what SIZE has to be a multiple of. A size that is
        not named may have any value.
        """
        found = {"d_state": [self.d_state, self.d_state]}
        head_dim: int = getattr(self, "head_dim", 0)
        if head_dim:
            found["head_dim"] = [head_dim, head_dim]
        if self.most_tokens:
            found["longest"] = [0, self.most_tokens]
        return found

    @property
    def launchable(self) -> Launchable:
        """What a grid rule knows of this kernel."""
        return Launchable((self.symbol(),), self.threads, self.shared_bytes)

    @property
    def takes_defaults(self) -> bool:
        """Whether every field but d_state, io and state has its default: selection falls back on such a kernel."""
        try:
            return bool(self.d_state) and type(self)(d_state=self.d_state, io=self.io, state=self.state) == self
        except NoKernel:
            return False

    @abstractmethod
    def constants(self) -> dict[str, Any]:
        """What the template fills in: every value computed, none left to Jinja."""

    def plan(self, geometry: Geometry) -> Plan:
        """Launches for a geometry.

        Raises:
            NoKernel: the geometry is not one that this kernel takes.
        """
        reason = self.refusal(geometry)
        if reason:
            raise NoKernel(f"{self.id}: {reason}")
        return self._plan(geometry)

    @abstractmethod
    def _plan(self, geometry: Geometry) -> Plan:
        """`plan` for a geometry that this kernel takes, by the rule that `grid_rule` names."""

    @abstractmethod
    def refusal(self, geometry: Geometry) -> str:
        """Why this kernel cannot run a geometry, or an empty string."""

    def excluded(self, target: str) -> str:
        """Why there is no image of this kernel for a target, or an empty string."""
        exact: str = getattr(self, "exact", "")
        if exact != target and (exact or target.endswith("a")):
            return "only kernels that need an exact target are built for one"
        if target == "sm_75" and "bf16" in (self.io, self.state):
            return "sm_75 has no bf16 arithmetic"
        if self.shared_bytes > SHARED_LIMIT[target]:
            return f"needs {self.shared_bytes} bytes of shared memory, {target} allows {SHARED_LIMIT[target]}"
        return ""

    def image_target(self, target: str) -> str:
        """The target of the image that a device of some target loads: its exact one where the kernel is made for it."""
        exact: str = getattr(self, "exact", "")
        return exact if exact == f"{target}a" else target

    def targets(self) -> tuple[str, ...]:
        """Targets that this kernel has an image for."""
        return tuple(target for target in TARGETS if not self.excluded(target))

    def fields(self) -> dict[str, Any]:
        """The fields that the constructor takes, as plain values."""
        return dataclasses.asdict(self)


@functools.lru_cache(maxsize=4096)
def parse_id(text: str) -> KernelSpec:
    """The spec behind an id.

    Raises:
        NoKernel: the text is not an id, or names a spec that cannot exist.
    """
    from pyharness.families import FAMILIES

    words = text.split("_")
    if words[0] not in FAMILIES:
        raise NoKernel(f"kernel id {text!r}: family must be one of {', '.join(FAMILIES)}, found {words[0]!r}")
    family = FAMILIES[words[0]]
    names = {field.name for field in dataclasses.fields(family)}
    values: dict[str, Any] = {"d_state": 0}
    letters = dict(_PARTS)
    for word in words[1:]:
        number = re.fullmatch(r"([a-z])(\d+)", word)
        if number and number[1] in letters:
            values[letters[number[1]]] = int(number[2])
        elif word in IO_DTYPES:
            values["io"] = word
        elif word[0] == "s" and word[1:] in DTYPE_BYTES:
            values["state"] = word[1:]
        elif word.startswith("sm") and "exact" in names:
            values["exact"] = word.replace("sm", "sm_")
        else:
            values["layout" if "layout" in names and "layout" not in values else "precision"] = word
    unknown = sorted(set(values) - names)
    if unknown:
        raise NoKernel(f"kernel id {text!r}: {words[0]} kernels have no {', '.join(unknown)}")
    spec = family(**values)
    if spec.id != text:
        raise NoKernel(f"kernel id {text!r} is not in its normal form, which is {spec.id!r}")
    return spec
