"""docs/proof.md: the stored results of the peers' suites, of GPU tests and of fuzzing, as its tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyharness import replay, suite, toolchain
from pyharness.errors import SsmError
from pyharness.fuzz import Tally
from pyharness.markdown import between, refresh
from pyharness.replay import Row

PAGE = toolchain.ROOT / "docs" / "proof.md"
GENERATED = toolchain.ROOT / "generated"
FUZZ = GENERATED / "fuzz"


def about_place(place: str, about: Mapping[str, Any]) -> str:
    """Where a table was made, in words."""
    if place == replay.EMULATOR:
        return "In the emulator, in reduced form:"
    return f"On a GPU, in full: {about['device']}, driver {about['driver']}, {about['date']}."


def peers_tables(folder: Path = replay.FOLDER) -> str:
    """The stored tables of the peers' suites as Markdown, the emulator's first.

    Raises:
        SsmError: none is stored.
    """
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != replay.EMULATOR, path.stem))
    if not paths:
        raise SsmError(f"results of the peers' suites were wanted in {folder.name}/, found none: run invoke peers")
    parts = []
    for path in paths:
        about = json.loads(path.read_text(encoding="utf-8"))["about"]
        parts += [about_place(path.stem, about), _peers_table(replay.read(path))]
    return "\n\n".join(parts)


def _peers_table(rows: Sequence[Row]) -> str:
    lines = [
        "| suite | family | cases | passed | no kernel | too tight | of the peer's tolerance | of ours |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        worst = (f"{row.worst:.2g}", f"{row.ours:.2g}") if row.ran else ("", "")
        cells = (row.suite, row.family, row.cases, row.passed, row.no_kernel, row.too_tight, *worst)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def fuzz_path(place: str, folder: Path = FUZZ) -> Path:
    """The file of the fuzzer's runs: of the emulator, or of a device by its slug."""
    return folder / f"{place}.json"


def store_fuzz(place: str, tally: Tally, folder: Path = FUZZ) -> None:
    """Add a run of the fuzzer to those that are stored."""
    path = fuzz_path(place, folder)
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    runs.append(
        {
            "seed": tally.seed,
            "minutes": tally.minutes,
            "families": {row["family"]: {k: v for k, v in row.items() if k != "family"} for row in tally.rows()},
            "repeated": tally.repeated,
            "left_out": tally.left_out,
        }
    )
    toolchain.publish_json(path, {"runs": runs})


def fuzz_table(folder: Path = FUZZ) -> str:
    """The stored runs of the fuzzer, added up by place and family, as Markdown.

    Raises:
        SsmError: none is stored.
    """
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != replay.EMULATOR, path.stem))
    if not paths:
        raise SsmError(f"runs of the fuzzer were wanted in {folder.name}/, found none: run invoke fuzz --store")
    lines = ["| where | family | problems | kernels | failures |", "| --- | --- | ---: | ---: | ---: |"]
    notes = []
    for path in paths:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
        sums: dict[str, Counter[str]] = {}
        for run in runs:
            for family, counts in run["families"].items():
                sums.setdefault(family, Counter()).update(counts)
        for family, counts in sorted(sums.items()):
            cells = (path.stem, family, counts["problems"], counts["kernels"], counts["failures"])
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        minutes, repeated = sum(run["minutes"] for run in runs), sum(run["repeated"] for run in runs)
        seeds = ", ".join(str(run["seed"]) for run in runs)
        notes.append(f"{path.stem}: {minutes:.0f} minutes, seeds {seeds}; {repeated} problems also in another order.")
    return "\n".join([*lines, "", *notes])


def refreshed(text: str, generated: Path = GENERATED) -> str:
    """The page with what is stored below a folder between its markers.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    text = between(text, "peers", peers_tables(generated / replay.FOLDER.name), PAGE.name)
    text = between(text, "gpu-tests", suite.gpu_table(generated / suite.FOLDER.name), PAGE.name)
    return between(text, "fuzz", fuzz_table(generated / FUZZ.name), PAGE.name)


def write_page(path: Path = PAGE, generated: Path = GENERATED) -> bool:
    """Bring the page in line with what is stored; whether that changed it.

    Raises:
        SsmError: nothing is stored, or the page has not the markers.
    """
    return refresh(path, lambda text: refreshed(text, generated))
