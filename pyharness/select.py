"""Selection: which kernel of the catalogue runs a problem.

The rule is meant to be stated again in Go and C, so it uses integers only. For a problem and a device:

1. *Filter.* Keep kernels of the catalogue that take the problem (`mismatch`), are of the family that was asked for, if
   any, and, where the device is known, have an image for its target and stay within its shared memory. Kernels that
   round f32 operands to `tf32` are never kept: they run by full id alone. Kernels that `split` f32 operands are kept
   only where their family was asked for, or by an entry of this very device (by name, in 2 and 3): the table has one
   only where it was measured to be faster than `recurrent`.
2. *Exact.* The table has an entry for each problem and family on a device. Of the entries of this device with the same
   heads, head_dim, d_state, groups, io, state, batch_heads and tokens, the one of the fewest microseconds.
3. *Nearest.* Else the entry of this device with the same d_state, io and state that is nearest by
   `distance` = |bits(batch_heads) - bits(batch_heads')| + |bits(tokens) - bits(tokens')|, where bits(v) is the number
   of binary digits of v (0 for 0; Go: bits.Len64, C: 64 - clzll), batch_heads is sequences * heads, and tokens counts
   all tokens of the call. Any entry of the same head_dim is nearer than one of another, whose fastest kernels may be
   for that head_dim alone. Of the entries for one problem only the fastest counts. Decode, sequences of at most 8
   tokens (on average, in an entry and where the longest is not known), takes entries of decode, and all else the
   others. What was reported and not measured here counts for its exact problem alone: it says nothing of kernels that
   came later.
4. *Same target.* Else 2 and 3 among entries of other devices of the same target; a device without a name starts here.
5. *Default.* Else the default of (d_state, io, state): the table's; then, for decode of heads of several rows, the
   kernel of `update` whose fields all take their defaults; then such a recurrent kernel; then the recurrent kernel with
   the smallest id.
6. *Generic.* Else `recurrent_generic_*` of the same io and state.

The `invariant` mode puts `invariant(problem)` in place of the problem, so that what is chosen, and with it every bit
of the result, depends on the geometry and on the sequence's own length alone, whatever else the batch holds.

Entries whose kernel was filtered out do not count. Ties, in microseconds or in distance, go to the smallest kernel id,
in byte order. Without a device the rule starts at 5. Every step below the first that was looked at is a step down, and
so is an exact entry that was passed over because the kernel of a faster one was filtered out: it is listed in the
result, with the reason, and logged once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pyharness import manifest, toolchain
from pyharness.errors import NoKernel
from pyharness.families import FAMILIES
from pyharness.problem import ScanProblem
from pyharness.spec import DTYPE_BYTES, IO_DTYPES, TARGETS, Geometry, KernelSpec, parse_id

SCHEMA_VERSION = 1
SOURCES = ("measured", "reported", "default")
#: A sequence of at most so many tokens is decode: a mixed batch is split there, and an invariant choice made.
DECODE_TOKENS = 8
#: Sequences of one token, and tokens of one sequence, for which an invariant choice is made.
INVARIANT_DECODE, INVARIANT_PREFILL = 16, 4096
#: Fields of an entry that say what was found; the others say for what.
_VALUES = ("target", "kernel", "microseconds", "source")
TABLE_PATH = Path(__file__).resolve().parents[1] / "generated" / "selection.json"
BENCHES = TABLE_PATH.parent / "bench"

#: Why a kernel of an entry or of the catalogue is not kept, besides what problem and device say.
_ABSENT = "it is not on offer here"
_TF32 = "it rounds f32 operands to tf32 and runs by its full id alone"
_SPLIT = "it splits f32 operands and was not measured to be faster than recurrent on this device"

_log = logging.getLogger(__name__)
_logged: set[tuple[str, tuple[str, ...]]] = set()


@dataclass(frozen=True)
class Device:
    """What selection knows of a GPU.

    Attributes:
        name: as the driver gives it; empty for any device of the target.
        shared_limit: opt-in shared memory of a block in bytes; 0 for that of the target.
    """

    name: str
    target: str
    shared_limit: int = 0


@dataclass(frozen=True)
class Features:
    """What selection knows of a problem; no array values, so that a plan can be made from upper bounds."""

    geometry: Geometry
    io: str
    state: str

    @classmethod
    def of(cls, problem: ScanProblem) -> Features:
        """The features of a problem."""
        return cls(problem.geometry, problem.io, problem.state_dtype)

    @property
    def batch_heads(self) -> int:
        """Sequences times heads: the independent work of a call."""
        return self.geometry.sequences * self.geometry.heads

    @property
    def decode(self) -> bool:
        """Whether every sequence is one of decode: by the longest, or by the average length where that is not known."""
        g = self.geometry
        return (g.longest if g.longest >= 0 else -(-g.tokens // max(g.sequences, 1))) <= DECODE_TOKENS

    def __str__(self) -> str:
        g = self.geometry
        return (
            f"heads {g.heads}, head_dim {g.head_dim}, d_state {g.d_state}, groups {g.groups}, io {self.io}, "
            f"state {self.state}, {g.sequences} sequences, {g.tokens} tokens"
        )


@dataclass(frozen=True)
class Entry:
    """One row of generated/selection.json: the kernel of a family that was best for a problem on a device.

    Attributes:
        source: "measured" here, "reported" by someone else, or "default" (set by hand).
        microseconds: time of one call, 0 where source is "default".
    """

    device: str
    target: str
    family: str
    heads: int
    head_dim: int
    d_state: int
    groups: int
    io: str
    state: str
    batch_heads: int
    tokens: int
    kernel: str
    microseconds: float
    source: str

    @property
    def decode(self) -> bool:
        """Whether it is for decode, by the average length."""
        return -(-self.tokens * self.heads // max(self.batch_heads, 1)) <= DECODE_TOKENS


@dataclass(frozen=True)
class Table:
    """generated/selection.json: entries, and the default kernel of (family, d_state, io, state)."""

    entries: tuple[Entry, ...] = ()
    defaults: tuple[tuple[str, int, str, str, str], ...] = ()


@dataclass(frozen=True)
class Selection:
    """A choice: the kernel's id, why it was taken, and every step down on the way to it."""

    id: str
    why: str
    steps: tuple[str, ...]


def bits(value: int) -> int:
    """Binary digits of a count: 0 for 0, floor(log2) + 1 above."""
    return value.bit_length()


def distance(features: Features, entry: Entry) -> int:
    """Octaves between a problem and an entry, over batch x heads and tokens."""
    batch = abs(bits(features.batch_heads) - bits(entry.batch_heads))
    return batch + abs(bits(features.geometry.tokens) - bits(entry.tokens))


def remoteness(features: Features, entry: Entry) -> tuple[bool, int]:
    """The order of entries for other problems: those of the same head_dim first, then by distance."""
    return entry.head_dim != features.geometry.head_dim, distance(features, entry)


def invariant(features: Features) -> Features:
    """What an invariant choice is made for: 16 sequences of 1 token for decode, 1 of 4096 for prefill."""
    g = features.geometry
    if features.decode:
        sizes: dict[str, Any] = {"sequences": INVARIANT_DECODE, "tokens": INVARIANT_DECODE, "longest": DECODE_TOKENS}
    else:
        sizes = {"sequences": 1, "tokens": INVARIANT_PREFILL, "longest": INVARIANT_PREFILL}
    return replace(features, geometry=replace(g, **sizes))


def mismatch(features: Features, spec: KernelSpec) -> str:
    """Why a kernel does not take a problem, or an empty string."""
    if spec.io != features.io:
        return f"its io is {spec.io}, the problem's is {features.io}"
    if spec.state != features.state:
        return f"its state is {spec.state}, the problem's is {features.state}"
    return spec.refusal(features.geometry)


def unusable(spec: KernelSpec, device: Device | None) -> str:
    """Why a kernel cannot run on a device, or an empty string."""
    if device is None:
        return ""
    if device.target not in TARGETS:
        return f"target {device.target} is not one of {', '.join(TARGETS)}"
    reason = spec.excluded(spec.image_target(device.target))
    if not reason and 0 < device.shared_limit < spec.shared_bytes:
        reason = f"needs {spec.shared_bytes} bytes of shared memory, {device.name} allows {device.shared_limit}"
    return reason


def checked(features: Features) -> Features:
    """Features that were typed in by hand, after a check.

    Raises:
        NoKernel: they are those of no problem; the message names the field.
    """
    g = features.geometry
    for name, least in (("tokens", 0), ("sequences", 1), ("heads", 1), ("head_dim", 1), ("groups", 1), ("d_state", 1)):
        if getattr(g, name) < least:
            raise NoKernel(f"{name} must be at least {least}, found {getattr(g, name)}")
    if g.heads % g.groups:
        raise NoKernel(f"groups must divide heads, found {g.groups} groups and {g.heads} heads")
    for name, value, known in (("io", features.io, IO_DTYPES), ("state", features.state, tuple(DTYPE_BYTES))):
        if value not in known:
            raise NoKernel(f"{name} must be one of {', '.join(known)}, found {value!r}")
    return features


def named_device(name: str = "", target: str = "", table: Table | None = None) -> Device | None:
    """A device that need not be here, by its name, its target, or both; None if neither is given.

    Args:
        name: as the driver gives it or some words of it, in any case: "H200" is NVIDIA H200 where that was measured.
        target: such as sm_90; needed for a device that was not measured.
        table: None for the committed one.

    Raises:
        NoKernel: no such target, or a name that alone does not tell the target.
    """
    if target and target not in TARGETS:
        raise NoKernel(f"the target must be one of {', '.join(TARGETS)}, found {target!r}")
    if not name:
        return Device("", target) if target else None
    entries = (committed_table() if table is None else table).entries
    measured = sorted({(entry.device, entry.target) for entry in entries})
    words = set(_words(name))
    found = [one for one in measured if words and words <= set(_words(one[0])) and target in ("", one[1])]
    found = [one for one in found if _words(one[0]) == _words(name)] or found
    if len(found) == 1:
        return Device(*found[0])
    if target:
        return Device(name, target)
    known = ", ".join(device for device, _ in found or measured) or "none"
    raise NoKernel(f"the device must be one that was measured, of {known}, or have its target told, found {name!r}")


def _words(name: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in name.lower()).split()


def catalogue_ids() -> tuple[str, ...]:
    """Ids that can be selected: those of the committed manifest, else those of `pyharness.catalogue`."""
    if (manifest.FOLDER / manifest.INDEX).exists():
        return manifest.ids()
    from pyharness.catalogue import CATALOGUE

    return tuple(spec.id for spec in CATALOGUE)


@lru_cache(maxsize=1)
def committed_table() -> Table:
    """The committed selection table; an empty one before anything was tuned."""
    if not TABLE_PATH.exists():
        return Table()
    return parse_table(json.loads(TABLE_PATH.read_text(encoding="utf-8")))


def parse_table(document: Mapping[str, Any]) -> Table:
    """Read the document of selection.json.

    Raises:
        ValueError: another version, an unknown source, or two entries for one problem and family on one device.
    """
    if document.get("version") != SCHEMA_VERSION:
        raise ValueError(f"selection.json: version must be {SCHEMA_VERSION}, found {document.get('version')!r}")
    entries = []
    seen = set()
    for row in document["entries"]:
        values = dict(row)
        entry = Entry(**values.pop("geometry"), **values)
        if entry.source not in SOURCES:
            raise ValueError(f"selection.json: source must be one of {', '.join(SOURCES)}, found {entry.source!r}")
        if _key(entry) in seen:
            raise ValueError(f"selection.json: two entries for {_key(entry)}: keep the faster one")
        seen.add(_key(entry))
        entries.append(entry)
    defaults = [(d["family"], d["d_state"], d["io"], d["state"], d["kernel"]) for d in document["defaults"]]
    return Table(tuple(entries), tuple(defaults))


def table_document(table: Table) -> dict[str, Any]:
    """The document of selection.json for a table, entries in a fixed order."""
    geometry = ("heads", "head_dim", "d_state", "groups")
    rows = []
    for entry in table.entries:
        row: dict[str, Any] = {name: value for name, value in vars(entry).items() if name not in geometry}
        row["geometry"] = {name: getattr(entry, name) for name in geometry}
        rows.append(row)
    rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
    names = ("family", "d_state", "io", "state", "kernel")
    defaults = [dict(zip(names, row, strict=True)) for row in sorted(table.defaults)]
    return {"version": SCHEMA_VERSION, "entries": rows, "defaults": defaults}


def measured_entries(documents: Iterable[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """The fastest kernel of each family for each problem of stored benches (`generated/bench/<device>/<suite>.json`).

    Kernels of the catalogue count, in the order of the sequences: a list of slots in ascending order is the caller's.
    Those that round f32 operands to tf32 do not: they are never selected. One that splits them counts where it was
    faster than `recurrent`.
    """
    known = set(catalogue_ids())
    fastest: dict[tuple[Any, ...], Entry] = {}
    for entry in timings(documents):
        if entry.kernel not in known or _precision(parse_id(entry.kernel)) == "tf32":
            continue
        best = fastest.setdefault(_key(entry), entry)
        if _speed(entry) < _speed(best):
            fastest[_key(entry)] = entry
    beside = {key: fastest.get(_key(replace(entry, family="recurrent"))) for key, entry in fastest.items()}
    return tuple(entry for key, entry in fastest.items() if not _split_for_nothing(entry, beside[key]))


def timings(documents: Iterable[Mapping[str, Any]]) -> Iterator[Entry]:
    """Every timing of our kernels in stored benches as an entry: in the order of the sequences, not of the slots.

    Of a kernel that was timed at a problem with the bytes that the manifest has, timings of other bytes do not count.
    """
    found = list(_timings(documents))
    renewed = {(_key(entry), entry.kernel) for entry, current in found if current}
    return (entry for entry, current in found if current or (_key(entry), entry.kernel) not in renewed)


def _timings(documents: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Entry, bool]]:
    """Timings, and whether each is of the bytes that the manifest has."""
    for document in documents:
        # Suites without points are not of problems, and those of whole models have no rows.
        for row in document.get("rows", ()) if "points" in document else ():
            point = document["points"].get(row.get("point"))
            if point is None or "us" not in row or "order" in row or row.get("peer"):
                continue
            entry = Entry(
                device=document["device"],
                target=document["target"],
                family=parse_id(row["kernel"]).family,
                batch_heads=point["sequences"] * point["heads"],
                tokens=sum(point.get("lengths", ())) or point["sequences"] * point["tokens"],
                kernel=row["kernel"],
                microseconds=row["us"]["median"],
                source="measured",
                **{size: point[size] for size in ("heads", "head_dim", "d_state", "groups", "io", "state")},
            )
            yield entry, manifest.is_promised(entry.kernel, row.get("image"))


def same_problem(one: Entry, other: Entry) -> bool:
    """Whether two entries are for one problem on one device, whatever their families."""
    return _key(replace(one, family=other.family)) == _key(other)


def stored_benches(benches: Path = BENCHES) -> list[dict[str, Any]]:
    """The documents of all stored benches."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(benches.glob("*/*.json"))]


def _key(entry: Entry) -> tuple[Any, ...]:
    """What an entry is for: problem, family and device."""
    return tuple(value for name, value in vars(entry).items() if name not in _VALUES)


def _speed(entry: Entry) -> tuple[float, str]:
    """The order of entries for one problem: the fastest first."""
    return entry.microseconds, entry.kernel


def _split_for_nothing(entry: Entry, recurrent: Entry | None) -> bool:
    """Whether a kernel splits f32 operands without being faster than `recurrent` on the same device."""
    return _precision(parse_id(entry.kernel)) == "split" and (recurrent is None or _speed(recurrent) <= _speed(entry))


def refreshed_table(table: Table, benches: Path = BENCHES) -> Table:
    """A table whose measured entries are those of the stored benches; the others stay where nothing was measured."""
    measured = measured_entries(stored_benches(benches))
    known = {_key(entry) for entry in measured}
    kept = tuple(e for e in table.entries if e.source != "measured" and _key(e) not in known)
    return Table(kept + measured, table.defaults)


def refresh() -> None:
    """Bring generated/selection.json in line with the stored benches."""
    document = table_document(refreshed_table(committed_table()))
    toolchain.publish_json(TABLE_PATH, document)
    committed_table.cache_clear()


def choose(
    features: Features,
    device: Device | None = None,
    *,
    family: str | None = None,
    table: Table | None = None,
    ids: Iterable[str] | None = None,
) -> Selection:
    """Pick a kernel by the rule in the module's docstring.

    Args:
        features: the problem.
        device: the GPU; None where no device matters (the emulator).
        family: take only kernels of this family; None takes any.
        table: None for the committed one.
        ids: the catalogue; None for the committed one.

    Raises:
        NoKernel: nothing takes the problem; the message names what was wanted, what is on offer and what builds more.
    """
    wanted = [spec for spec in map(parse_id, catalogue_ids() if ids is None else ids) if family in (None, spec.family)]
    reasons = {spec.id: unfit(features, spec, device) for spec in wanted}
    fitting = {spec.id: spec for spec in wanted if not reasons[spec.id]}
    # Whether split operands are worth it depends on the device.
    anywhere = {name: spec for name, spec in fitting.items() if family is not None or _precision(spec) != "split"}
    source = committed_table() if table is None else table
    sizes = (features.geometry.d_state, features.io, features.state)
    alike = [e for e in source.entries if (e.d_state, e.io, e.state) == sizes and family in (None, e.family)]
    steps: list[str] = []
    found = _from_entries(features, device, alike, reasons, anywhere, steps)
    if found is None and anywhere:
        found = _default(features, device, anywhere, source.defaults, steps)
    if found is None:
        reasons |= dict.fromkeys(fitting, _SPLIT)
        raise NoKernel(_nothing(features, device, family, reasons))
    selection = Selection(*found, tuple(steps))
    if steps and (selection.id, selection.steps) not in _logged:
        _logged.add((selection.id, selection.steps))
        _log.warning("%s for %s: %s", selection.id, features, "; ".join(steps))
    return selection


def unfit(features: Features, spec: KernelSpec, device: Device | None) -> str:
    """Why a kernel is not kept for a problem, or an empty string."""
    return mismatch(features, spec) or unusable(spec, device) or (_TF32 if _precision(spec) == "tf32" else "")


def _precision(spec: KernelSpec) -> str:
    """How a kernel rounds f32 operands: "split", "tf32", or "" where it does not."""
    return str(getattr(spec, "precision", ""))


def _from_entries(
    features: Features,
    device: Device | None,
    alike: list[Entry],
    reasons: Mapping[str, str],
    anywhere: Mapping[str, KernelSpec],
    steps: list[str],
) -> tuple[str, str] | None:
    """Steps 2 to 4 of the rule, over the entries of the problem's types and of the family that was asked for.

    `reasons` says of each kernel on offer why it is not kept; `anywhere` are those that are kept on every device.
    """
    if device is None:
        return None
    sizes = (f"d_state {features.geometry.d_state}", features.io, features.state)
    own = [e for e in alike if e.device == device.name]
    kin = [e for e in alike if e.device != device.name and e.target == device.target]
    kin = [e for e in kin if e.kernel in anywhere or reasons.get(e.kernel, _ABSENT)]
    places = [(own, device.name), (kin, f"another {device.target} device")]
    for rows, where in places if device.name else [(kin, f"a {device.target} device")]:
        kept = [e for e in rows if reasons.get(e.kernel, _ABSENT) == ""]
        best = min((e for e in kept if _same_problem(features, e)), key=_speed, default=None)
        passed = "; ".join(
            f"{e.kernel}, {e.source} for these sizes, cannot run it: {reasons.get(e.kernel, _ABSENT)}"
            for e in rows
            if e not in kept and _same_problem(features, e) and (best is None or _speed(e) < _speed(best))
        )
        if best is not None:
            steps.extend([f"a faster kernel was passed over ({passed})"] if passed else [])
            return best.kernel, f"{best.source} for this problem on {best.device}"
        steps.append(f"no entry for this problem on {where}" + (f" ({passed})" if passed else ""))
        nearby = _fastest_of_each([e for e in kept if e.source != "reported" and e.decode == features.decode])
        if nearby:
            best = min(nearby, key=lambda e: (*remoteness(features, e), e.kernel))
            return best.kernel, f"{best.source} on {best.device} for the nearest problem, {_away(features, best)}"
        kind = "decode" if features.decode else "prefill"
        steps.append(f"no entry of {kind} with {', '.join(map(str, sizes))} on {where}")
    return None


def _away(features: Features, entry: Entry) -> str:
    other = f" and of head_dim {entry.head_dim}" if entry.head_dim != features.geometry.head_dim else ""
    return f"{distance(features, entry)} octaves away{other}"


def _fastest_of_each(entries: Iterable[Entry]) -> list[Entry]:
    """The fastest entry for each problem, whatever the device."""
    fastest: dict[tuple[int, ...], Entry] = {}
    for entry in sorted(entries, key=_speed):
        fastest.setdefault((entry.heads, entry.head_dim, entry.groups, entry.batch_heads, entry.tokens), entry)
    return list(fastest.values())


def _same_problem(features: Features, entry: Entry) -> bool:
    g = features.geometry
    return (g.heads, g.head_dim, g.groups, features.batch_heads, g.tokens) == (
        entry.heads,
        entry.head_dim,
        entry.groups,
        entry.batch_heads,
        entry.tokens,
    )


def _default(
    features: Features,
    device: Device | None,
    fitting: Mapping[str, KernelSpec],
    defaults: Iterable[tuple[str, int, str, str, str]],
    steps: list[str],
) -> tuple[str, str]:
    key = (features.geometry.d_state, features.io, features.state)
    named = sorted(row[4] for row in defaults if row[1:4] == key and row[4] in fitting)
    if named:
        return named[0], "the default for this d_state, io and state"
    special = [spec for spec in fitting.values() if spec.d_state]
    recurrent = sorted(spec.id for spec in special if spec.family == "recurrent")
    families = ("update", "recurrent") if features.decode and features.geometry.head_dim > 1 else ("recurrent",)
    for family in families:
        for spec in special:
            if spec.family == family and spec.takes_defaults:
                return spec.id, f"the {family} kernel with default fields: nothing is tuned for this problem"
    if recurrent:
        return recurrent[0], "the first recurrent kernel: nothing is tuned for this problem"
    steps.append(f"no recurrent kernel for d_state {key[0]}, io {key[1]}, state {key[2]}")
    if special:
        return min(spec.id for spec in special), "the only family on offer for this problem"
    steps.append(f"the generic kernel, which is slower: {_on_demand(features, device, 'recurrent')}")
    return min(fitting), "generic takes what no other kernel does"


def _nothing(features: Features, device: Device | None, family: str | None, reasons: Mapping[str, str]) -> str:
    told = [f"{name} ({reason})" for name, reason in reasons.items()]
    shown = "; ".join(told[:8]) + (f"; and {len(told) - 8} more" if len(told) > 8 else "")
    kind = f"{family} kernel" if family else "kernel"
    place = f" on {device.name or 'any device'} ({device.target})" if device else ""
    cure = _on_demand(features, device, family or "recurrent")
    return f"no {kind} of the catalogue runs {features}{place}. On offer: {shown or 'nothing'}. {cure}"


def _on_demand(features: Features, device: Device | None, family: str) -> str:
    """The command that makes a kernel for a problem and the id to run it by, or why there cannot be one."""
    if family not in FAMILIES:
        return f"There is no family {family!r}: families are {', '.join(FAMILIES)}"
    try:
        spec = FAMILIES[family](d_state=features.geometry.d_state, io=features.io, state=features.state)
    except NoKernel as error:
        return f"None can be generated: {str(error).rpartition('}: ')[2]}"
    reason = unusable(spec, device)
    if reason:
        return f"None can be generated: {reason}"
    options = [f"--dstate {spec.d_state}", *([f"--family {family}"] if family != "recurrent" else [])]
    options += [f"--{name} {value}" for name, value in (("io", spec.io), ("state", spec.state)) if value != "f32"]
    options += [f"--arch {device.target}"] if device else []
    return (
        f"`invoke generate {' '.join(options)}` makes a specialised one; it is never selected: name it by its full id, "
        f"{spec.id}"
    )
