"""How stored figures are named and listed."""

from __future__ import annotations

from pyharness.figures import device_slug, listing


def test_a_kernel_that_was_not_timed_is_listed_with_its_reason() -> None:
    us = {"median": 22.0, "low": 21.0, "high": 23.0}
    timed = {"kernel": "fast", "point": "decode_16x1_f32", "us": us, "ceilings": {"slots": 20.0, "us": 20.0}}
    timed |= {"ratio": 1.1, "registers": 100, "error": 0.25}
    lines = listing([timed, {"kernel": "bad", "point": "decode_16x1_f32", "failed": "it is\nwrong"}])
    assert (lines[0]["us"], lines[0]["ceiling"], lines[0]["ratio"]) == ("22.00", "20.00", "1.10")
    assert (lines[1]["us"], lines[1]["note"]) == ("-", "it is wrong")
    assert lines[0].keys() == lines[1].keys()


def test_a_device_names_its_folder() -> None:
    assert device_slug("NVIDIA RTX PRO 6000 (Blackwell)") == "nvidia-rtx-pro-6000-blackwell"
