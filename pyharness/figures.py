"""Stored figures: where the timings of a device are kept, how they are read, and how a terminal lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness import toolchain
from pyharness.errors import SsmError
from pyharness.spec import DTYPE_BYTES, parse_id

BENCH = toolchain.ROOT / "generated" / "bench"


def device_slug(name: str) -> str:
    """The folder or file name of a device: "NVIDIA H200" is nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def stored_path(device: str, suite: str) -> Path:
    """Where the figures of a suite on a device are kept."""
    return BENCH / device_slug(device) / f"{suite}.json"


def has(suite: str, folder: Path | None = None) -> bool:
    """Whether figures of a suite are stored for any device."""
    return any((folder or BENCH).glob(f"*/{suite}.json"))


def stored(suite: str, folder: Path = BENCH) -> list[dict[str, Any]]:
    """Every stored document of a suite, by device.

    Raises:
        SsmError: there is none.
    """
    paths = sorted(folder.glob(f"*/{suite}.json"))
    if not paths:
        raise SsmError(f"figures of {suite!r} were wanted in {folder.name}/, found none: run invoke bench on a GPU")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def read(path: Path) -> dict[str, Any]:
    """The figures that a bench stored in a file.

    Raises:
        SsmError: they are not such figures.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = document["device"], document["suite"], [(row["point"], row["kernel"]) for row in document["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SsmError(f"{path.name}: figures that a bench stored were wanted, found none ({error!r})") from error
    return document


#: What marks a row that was timed with an earlier build of its kernel.
EARLIER = "earlier"
EARLIER_SIGN = "†"
EARLIER_TELLS = "timed with an earlier build of the kernel, whose bytes are others by now"


def earlier_sign(row: Mapping[str, Any]) -> str:
    """What stands behind the id of a row's kernel: a sign where it was timed with an earlier build, else nothing."""
    return f" {EARLIER_SIGN}" if row.get(EARLIER) else ""


def kernel_cell(row: Mapping[str, Any]) -> str:
    """The id of a row's kernel as Markdown, with the sign."""
    return f"`{row['kernel']}`{earlier_sign(row)}"


def is_peer(row: Mapping[str, Any]) -> bool:
    """Whether a row of a stored suite is of another package's kernel."""
    return bool(row.get("peer"))


def dates(document: Mapping[str, Any], rows: Iterable[Mapping[str, Any]] | None = None) -> tuple[str, ...]:
    """On which days rows of a document were measured, by default all of them; ascending."""
    found = {row.get("date", document["date"]) for row in (document.get("rows", ()) if rows is None else rows)}
    return tuple(sorted(found or {document["date"]}))


def days(found: Sequence[str]) -> str:
    """Ascending dates in words: one day, or the first to the last."""
    return " to ".join(dict.fromkeys((found[0], found[-1])))


def points(document: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The points of a document by name: those of one model together, by sequences and tokens."""

    def place(item: tuple[str, Mapping[str, Any]]) -> tuple[Any, ...]:
        sizes = ("job", "heads", "head_dim", "d_state", "groups", "io", "state", "sequences", "tokens")
        return tuple(item[1][size] for size in sizes)

    return sorted(document["points"].items(), key=place)


def timed_at(document: Mapping[str, Any], point: str) -> list[Mapping[str, Any]]:
    """The rows of a point that have a time."""
    return [row for row in document["rows"] if row["point"] == point and "us" in row]


def fastest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the lowest median, if there is any."""
    return min(rows, key=lambda row: row["us"]["median"], default=None)


def ours_of(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows of our kernels, sequences in their own order."""
    return [row for row in rows if not is_peer(row) and "order" not in row]


def fastest_of_ours(rows: Sequence[Mapping[str, Any]], family: str = "") -> Mapping[str, Any] | None:
    """Our fastest kernel, of a family or of all, sequences in their own order, f32 operands not rounded to tf32."""
    own = [(row, parse_id(row["kernel"])) for row in ours_of(rows)]
    return fastest(
        [row for row, spec in own if family in ("", spec.family) and getattr(spec, "precision", "") != "tf32"]
    )


def best_peer(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest kernel of another package."""
    return fastest([row for row in rows if is_peer(row)])


def state_mib(point: Mapping[str, Any]) -> float:
    """MiB of the states of a call."""
    elements = math.prod(point[size] for size in ("sequences", "heads", "head_dim", "d_state"))
    return float(elements * DTYPE_BYTES[point["state"]] / 2**20)


def listing(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as `pyharness.listing.table` prints them."""
    lines = []
    for row in rows:
        us = row.get("us")
        lines.append(
            {
                "point": row["point"],
                "kernel": ", ".join([row["kernel"], *([row["order"]] if "order" in row else [])]),
                "us": f"{us['median']:.2f}" if us else "-",
                "spread": f"{us['low']:.2f}..{us['high']:.2f}" if us else "-",
                "ceiling": f"{row['ceilings']['us']:.2f}" if us else "-",
                "ratio": f"{row['ratio']:.2f}" if us else "-",
                "registers": str(row.get("registers", "-")),
                "note": _note(row),
            }
        )
    return lines


def _note(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return " ".join(row["failed"].split())[:160]
    kinds = [(kind, row[f"error_of_{kind}"]) for kind in ("y", "state") if f"error_of_{kind}" in row]
    norms = ", ".join(f"relative error of {kind} {value:.1e}" for kind, value in kinds)
    if is_peer(row):
        return norms
    return ", ".join([f"error {row['error']:.2f} of what is allowed", *([norms] if norms else [])])
