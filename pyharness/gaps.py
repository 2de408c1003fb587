"""What the stored figures of a suite lack: points that were not measured, and peers that did not run at some or any."""

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
            reasons = dict.fromkeys(_short(row["failed"]) for row in rows)
            found[name] = "; ".join(reasons)
    return found


def ran_nowhere(document: Mapping[str, Any]) -> dict[str, str]:
    """Kernels that have a time at no point, each with the reason."""
    ran = {row["kernel"] for row in document["rows"] if "us" in row}
    return {row["kernel"]: row["failed"] for row in document["rows"] if "failed" in row and row["kernel"] not in ran}


def left_out(document: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    """By point and reason the peers that did not run there, but elsewhere, where another one did."""
    nowhere = ran_nowhere(document)
    found: dict[tuple[str, str], list[str]] = {}
    for row in document["rows"]:
        if "failed" in row and row["kernel"] not in nowhere and best_peer(timed_at(document, row["point"])) is not None:
            found.setdefault((row["point"], _short(row["failed"])), []).append(row["kernel"])
    return found


def _short(reason: str) -> str:
    """The first sentence, without the name of an exception."""
    return reason.partition(": ")[2].partition(". ")[0] if reason.partition(":")[0].isidentifier() else reason


def sentences(document: Mapping[str, Any]) -> list[str]:
    """What is missing in words, a sentence a kind and reason; nothing where nothing is."""
    found = [f"Not run at any point: {kernel}: {why}" for kernel, why in ran_nowhere(document).items()]
    missing = unmeasured(document)
    found += [f"Not measured: {', '.join(f'`{name}`' for name in missing)}."] if missing else []
    by_reason: dict[str, list[str]] = {}
    for name, reason in without_peer(document).items():
        by_reason.setdefault(reason, []).append(f"`{name}`")
    for reason, names in by_reason.items():
        where = ", ".join(names)
        found.append(
            f"No other package ran at {where}: {reason}." if reason else f"No other package was timed at {where}."
        )
    by_peers: dict[tuple[str, str], list[str]] = {}
    for (name, reason), peers in left_out(document).items():
        by_peers.setdefault((" and ".join(peers), reason), []).append(f"`{name}`")
    for (peers_, reason), names in by_peers.items():
        found.append(f"{peers_} did not run at {', '.join(names)}: {reason}.")
    return found
