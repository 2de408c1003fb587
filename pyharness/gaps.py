"""What the stored figures of a suite lack: points that were not measured, and those at which no other package ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyharness.figures import best_peer, is_peer, ours_of, timed_at
from pyharness.measure import TABLES


def unmeasured(document: Mapping[str, Any]) -> list[str]:
    """Points of a suite at which no kernel of ours has a time, in the order of the suite."""
    return [point.name for point in TABLES.get(document["suite"], ()) if not ours_of(timed_at(document, point.name))]


def without_peer(document: Mapping[str, Any]) -> dict[str, str]:
    """Measured points at which no other package has a time, each with the reason; empty where none was asked."""
    found = {}
    for name in document["points"]:
        timed = timed_at(document, name)
        if ours_of(timed) and best_peer(timed) is None:
            rows = [row for row in document["rows"] if row["point"] == name and is_peer(row)]
            reasons = dict.fromkeys(row["failed"].removeprefix("DeviceError: ") for row in rows)
            found[name] = "; ".join(reasons)
    return found


def sentences(document: Mapping[str, Any]) -> list[str]:
    """What is missing in words, a sentence a kind and reason; nothing where nothing is."""
    missing = unmeasured(document)
    found = [f"Not measured: {', '.join(f'`{name}`' for name in missing)}."] if missing else []
    by_reason: dict[str, list[str]] = {}
    for name, reason in without_peer(document).items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    for reason, names in by_reason.items():
        found.append(f"No other package ran at {', '.join(names)}: {reason or 'none was timed there'}.")
    return found
