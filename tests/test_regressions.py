"""What counts as slower, and what the command says and does of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pyharness.errors import SsmError
from pyharness.regressions import changes, earlier, failing, percentage, report


def document(*rows: tuple[str, float, float, float], **more: Any) -> dict[str, Any]:
    """Figures of kernels: name, lowest, median and highest of the rounds."""
    made = [
        {"kernel": name, "point": "decode", "us": {"low": low, "median": median, "high": high}}
        | ({"peer": True} if name.startswith("peer") else {})
        for name, low, median, high in rows
    ]
    return {"suite": "update", "device": "NVIDIA H200", "rows": made} | more


BEFORE = document(
    ("steady", 9.9, 10.0, 10.2),
    ("worse", 9.9, 10.0, 10.2),
    ("better", 9.9, 10.0, 10.2),
    ("gone", 1.0, 1.0, 1.0),
)
NOW = document(
    ("steady", 10.1, 10.3, 10.4),
    ("worse", 10.6, 10.7, 10.8),
    ("better", 8.9, 9.0, 9.1),
    ("peer", 5.0, 5.0, 5.0),
    ("new", 2.0, 2.0, 2.0),
)


def test_slower_means_beyond_the_spread_of_both_runs() -> None:
    found = {change.kernel: change for change in changes(BEFORE, NOW)}
    assert set(found) == {"steady", "worse", "better"}, "what is in one of them alone is not compared"
    assert [name for name, change in found.items() if change.slower] == ["worse"]
    assert [name for name, change in found.items() if change.faster] == ["better"]
    assert found["worse"].growth == pytest.approx(0.07)
    # 10.3 is 3 % more than 10.0, but one of its rounds took 10.1 and one of the earlier ones 10.2.
    assert not found["steady"].slower


def test_the_report_names_what_changed_and_counts() -> None:
    lines = report(changes(BEFORE, NOW))
    assert lines == [
        "slower: decode worse: 10.00 -> 10.70 us (+7.0 %)",
        "faster: decode better: 10.00 -> 9.00 us (-10.0 %)",
        "3 of our timings compared, 1 slower beyond the spread, 1 faster, median change +3.0 %",
    ]
    assert report([]) == ["0 of our timings compared, 0 slower beyond the spread, 0 faster"]


def test_only_what_is_slower_by_more_than_the_share_fails_and_peers_never_do() -> None:
    found = changes(BEFORE, NOW)
    assert [change.kernel for change in failing(found, 0.05)] == ["worse"]
    assert failing(found, 0.08) == []
    slow_peer = changes(document(("peer", 1, 1, 1)), document(("peer", 2, 2, 2)))
    assert [change.slower for change in slow_peer] == [True]
    assert failing(slow_peer, 0.05) == []


def test_orders_of_visits_are_compared_with_their_like() -> None:
    before, now = document(("k", 1, 1, 1), ("k", 5, 5, 5)), document(("k", 2, 2, 2), ("k", 5, 5, 5))
    for one in (before, now):
        one["rows"][1]["order"] = "ascending"
    assert [(change.order, change.slower) for change in changes(before, now)] == [("", True), ("ascending", False)]
    assert str(changes(before, now)[1]) == "decode k, ascending: 5.00 -> 5.00 us (+0.0 %)"


def test_launches_are_compared_by_their_nodes() -> None:
    def launch(node: float, host: float) -> dict[str, Any]:
        row = {"kernel": "k", "point": "p", "node": {"median": node, "low": node, "high": node}}
        return document() | {"rows": [row | {"launch": {"median": host, "low": host, "high": host}}]}

    (change,) = changes(launch(2.5, 9), launch(3.5, 9))
    assert change.slower
    (change,) = changes(launch(2.5, 9), launch(2.5, 20))
    assert not change.slower


def test_figures_of_another_device_are_no_measure() -> None:
    with pytest.raises(SsmError, match="earlier figures of NVIDIA H200 were wanted to compare with, found NVIDIA L4"):
        changes(document(device="NVIDIA L4"), NOW)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("5", 0.05), (" 2.5 %", 0.025), ("0", 0)])
def test_a_percentage_is_read(text: str, share: float) -> None:
    assert percentage(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["five", "-1%", "nan", "inf", ""])
def test_what_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(SsmError, match=r"a percentage such as 5% was wanted, found "):
        percentage(text)


def test_earlier_figures_come_from_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "update.json").write_text(json.dumps(BEFORE), encoding="utf-8")
    assert earlier("update", str(tmp_path)) == earlier("update", str(tmp_path / "update.json")) == BEFORE
    with pytest.raises(SsmError, match="earlier figures of ssd were wanted to compare with, found nothing at .*ssd"):
        earlier("ssd", str(tmp_path))
    with pytest.raises(SsmError, match=r"update.json: figures of ssd were wanted .* found those of update"):
        earlier("ssd", str(tmp_path / "update.json"))
    (tmp_path / "ssd.json").write_text("[]", encoding="utf-8")
    with pytest.raises(SsmError, match=r"ssd.json: figures that a bench stored were wanted, found none"):
        earlier("ssd", str(tmp_path))
