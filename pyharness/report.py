"""Tables of what was measured: rows for the terminal, Markdown for the README, both from stored figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness import toolchain
from pyharness.errors import SsmError

BENCH = toolchain.ROOT / "generated" / "bench"
README = toolchain.ROOT / "README.md"


def device_slug(name: str) -> str:
    """The folder or file name of a device: "NVIDIA H200" is nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def stored_path(device: str, suite: str) -> Path:
    """Where the figures of a suite on a device are kept."""
    return BENCH / device_slug(device) / f"{suite}.json"


def stored(suite: str, folder: Path = BENCH) -> list[dict[str, Any]]:
    """Every stored document of a suite, by device.

    Raises:
        SsmError: there is none.
    """
    paths = sorted(folder.glob(f"*/{suite}.json"))
    if not paths:
        raise SsmError(f"figures of {suite!r} were wanted in {folder.name}/, found none: run invoke bench on a GPU")
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def readme_table(suite: str, folder: Path = BENCH) -> str:
    """The stored figures of a suite as Markdown: a table a device, a line a kernel, beside the ceilings.

    Raises:
        SsmError: nothing is stored.
    """
    return "\n\n".join(_device_table(document) for document in stored(suite, folder))


def _device_table(document: Mapping[str, Any]) -> str:
    by_io: dict[str, list[str]] = {}
    for name, point in document["points"].items():
        by_io.setdefault(point["io"], []).append(name)
    device = f"{document['device']}, driver {document['driver']}, nvcc {document['compiler']}, {document['date']}"
    parts = [f"{device}. Microseconds; in brackets the time as a multiple of the ceiling."]
    for io, names in sorted(by_io.items(), key=lambda item: item[0] != "f32"):
        parts.append(_io_table(document, io, sorted(names, reverse=True)))
    return "\n\n".join(parts)


def _io_table(document: Mapping[str, Any], io: str, names: Sequence[str]) -> str:
    rows = [row for row in document["rows"] if row["point"] in names]
    lines = [f"| {io} | " + " | ".join(_heading(document["points"][name]) for name in names) + " |"]
    lines.append("| --- |" + " ---: |" * len(names))
    ceilings = {row["point"]: row["ceilings"] for row in rows}
    for kind in dict.fromkeys(kind for name in names for kind in ceilings[name] if kind != "us"):
        cells = [f"{ceilings[name][kind]:.1f}" if kind in ceilings[name] else "" for name in names]
        lines.append(f"| ceiling: {_CEILINGS[kind]} | " + " | ".join(cells) + " |")
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        found = {row["point"]: row for row in rows if row["kernel"] == kernel}
        cells = [f"{found[n]['us']['median']:.1f} ({found[n]['ratio']:.2f}x)" if n in found else "" for n in names]
        lines.append(f"| `{kernel}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


_CEILINGS = {
    "slots": "the states read and written, in slot order",
    "contiguous": "the same bytes in one range",
    "bytes": "the bytes that must move, as a copy",
    "fma": "three FP32 instructions a state element and token",
}


def _heading(point: Mapping[str, Any]) -> str:
    return f"{point['job']} {point['sequences']} x {point['tokens']}"


def write_readme(suite: str, path: Path = README, folder: Path = BENCH) -> bool:
    """Put the table between the README's `<!-- bench:SUITE -->` and `<!-- /bench:SUITE -->`; whether that changed it.

    Raises:
        SsmError: nothing is stored, or the README has not the two markers.
    """
    text = path.read_text(encoding="utf-8")
    first, last = f"<!-- bench:{suite} -->", f"<!-- /bench:{suite} -->"
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise SsmError(f"{path.name}: the lines {first} and {last} were wanted, found {text.count(first)} of the first")
    changed = f"{before}{first}\n{readme_table(suite, folder)}\n{last}{after}"
    if changed != text:
        toolchain.publish(path, changed.encode())
    return changed != text


def listing(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows as `pyharness.listing.table` prints them."""
    lines = []
    for row in rows:
        us, failed = row.get("us"), row.get("failed", "")
        lines.append(
            {
                "point": row["point"],
                "kernel": row["kernel"],
                "us": f"{us['median']:.2f}" if us else "-",
                "spread": f"{us['low']:.2f}..{us['high']:.2f}" if us else "-",
                "ceiling": f"{row['ceilings']['us']:.2f}" if us else "-",
                "ratio": f"{row['ratio']:.2f}" if us else "-",
                "registers": str(row["registers"]) if us else "-",
                "note": " ".join(failed.split())[:160] if failed else f"error {row['error']:.2f} of what is allowed",
            }
        )
    return lines
