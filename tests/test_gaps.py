"""What figures lack is named: points without a time of ours, points without one of a peer."""

from __future__ import annotations

from typing import Any

from pyharness import gaps
from pyharness.workload import MAMBA1

MEASURED, FAILED, ALONE, *REST = MAMBA1
US = {"median": 2.0, "low": 1.9, "high": 2.1}


def document(*rows: dict[str, Any]) -> dict[str, Any]:
    points = {point.name: point.stored() for point in (MEASURED, FAILED, ALONE, REST[0])}
    return {"suite": "selective", "points": points, "rows": list(rows)}


def test_points_are_named_with_the_reason() -> None:
    ours = [{"kernel": "k", "point": point.name, "us": US} for point in (MEASURED, FAILED, ALONE)]
    found = document(
        *ours,
        {"kernel": "theirs", "point": MEASURED.name, "peer": True, "us": US},
        {"kernel": "theirs, too", "point": MEASURED.name, "peer": True, "failed": "out of memory"},
        {"kernel": "theirs", "point": FAILED.name, "peer": True, "failed": "DeviceError: no i8 state"},
        {"kernel": "theirs, too", "point": FAILED.name, "peer": True, "failed": "DeviceError: no i8 state"},
        # A peer alone is no measurement of ours.
        {"kernel": "theirs", "point": REST[0].name, "peer": True, "us": US},
    )
    assert gaps.unmeasured(found) == [point.name for point in REST]
    assert gaps.without_peer(found) == {FAILED.name: "no i8 state", ALONE.name: ""}
    unmeasured = ", ".join(f"`{point.name}`" for point in REST)
    assert gaps.sentences(found) == [
        "Not run at any point: theirs, too: DeviceError: no i8 state",
        f"Not measured: {unmeasured}.",
        f"No other package ran at `{FAILED.name}`: no i8 state.",
        f"No other package was timed at `{ALONE.name}`.",
    ]


def test_peers_that_ran_elsewhere_are_named_where_they_did_not() -> None:
    both = [{"point": name, "peer": True} for name in (MEASURED.name, FAILED.name)]
    found = document(
        *({"kernel": "k", "point": point.name, "us": US} for point in (MEASURED, FAILED)),
        *({"kernel": "theirs"} | row | {"us": US} for row in both),
        {"kernel": "other a", "us": US} | both[0],
        {"kernel": "other a", "failed": "RuntimeError: build failed. Output: much more"} | both[1],
        {"kernel": "other b", "us": US} | both[0],
        {"kernel": "other b", "failed": "RuntimeError: build failed. Output: even more"} | both[1],
        *({"kernel": "absent", "failed": "DeviceError: absent is not installed"} | row for row in both),
    )
    first, _, last = gaps.sentences(found)
    assert first == "Not run at any point: absent: DeviceError: absent is not installed"
    assert last == f"other a and other b did not run at `{FAILED.name}`: build failed."


def test_a_whole_suite_lacks_nothing() -> None:
    rows = [
        {"kernel": name, "point": point.name, "us": US, "peer": name == "theirs"}
        for point in MAMBA1
        for name in ("k", "theirs")
    ]
    assert gaps.sentences(document(*rows) | {"points": {point.name: point.stored() for point in MAMBA1}}) == []


def test_suites_of_no_table_have_no_points_to_name() -> None:
    assert gaps.unmeasured({"suite": "launch", "points": {}, "rows": []}) == []
