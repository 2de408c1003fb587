"""GPU tests: each is marked `gpu`, and skipped with what is missing where they cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyharness import device

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    here = [item for item in items if HERE in item.path.parents]
    missing = device.graphs_available() if here else ""
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {missing}"))
