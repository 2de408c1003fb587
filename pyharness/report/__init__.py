"""`invoke report`: one HTML page of what is stored in generated/, and the plots that the README shows.

The page needs nothing but itself: no script, no font, no request. It is made of committed files alone, so the same
files give the same page.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from pyharness import (
    counters,
    drift,
    gaps,
    grades,
    history,
    launch_cost,
    logits_table,
    manifest,
    models_table,
    replay,
    suites,
    toolchain,
)
from pyharness import suite as testing
from pyharness.errors import SsmError
from pyharness.figures import BENCH, dates, days, device_slug
from pyharness.manifest import Row
from pyharness.report import plots, svg, tables
from pyharness.report.plots import Plot
from pyharness.report.tables import Table

TEMPLATES = toolchain.ROOT / "templates" / "report"
PAGE = toolchain.ROOT / "dist" / "report.html"
DOCS = toolchain.ROOT / "docs"
#: How sections name suites, by the name of their file.
TITLES = {
    "recurrent": "recurrent alone, at the first kernel's two sizes",
    "update": "Decode of Mamba-2",
    "ssd": "Prefill of Mamba-2",
    "selective": "Mamba-1",
}


@dataclass(frozen=True)
class Source:
    """Where figures come from: device and software, dates, how they were taken, and their files."""

    where: str
    files: tuple[str, ...]
    protocol: str


@dataclass(frozen=True)
class Item:
    """A plot or a table with its source."""

    content: Plot | Table
    source: Source

    @property
    def is_plot(self) -> bool:
        return isinstance(self.content, Plot)


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    intro: str
    items: list[Item] = field(default_factory=list)

    def add(self, content: Plot | Table | None, source: Source) -> None:
        """Take in what there is figures for."""
        if content is not None:
            self.items.append(Item(content, source))


@dataclass(frozen=True)
class Stored:
    """What the page is made of.

    Attributes:
        rows: of the manifest.
        proofs: grades of images and sources.
        benches: by device, its documents by the name of their suite.
        vetted: the documents of proofs, by file name.
        native: figures of calls from Go, a document a device.
        models, logits: figures of whole models, likewise.
    """

    rows: list[Row]
    proofs: grades.Proofs
    benches: dict[str, dict[str, dict[str, Any]]]
    vetted: dict[str, dict[str, Any]]
    native: list[dict[str, Any]] = field(default_factory=list)
    models: list[dict[str, Any]] = field(default_factory=list)
    logits: list[dict[str, Any]] = field(default_factory=list)

    def of(self, device: str) -> str:
        """What a title says of a device, where there are several."""
        return f", {device}" if len(self.benches) > 1 else ""


def _named(path: Path) -> str:
    """A file as the repository names it."""
    return path.relative_to(toolchain.ROOT).as_posix()


def _json(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def read() -> Stored:
    """Everything that is stored.

    Raises:
        SsmError: there are no figures.
    """
    known = {suite.stored for suite in suites.SUITES}
    benches: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(BENCH.glob("*/*.json")):
        if path.stem in known:
            document = _json(path)
            benches.setdefault(document["device"], {})[path.stem] = document
    if not benches:
        raise SsmError(f"figures were wanted in {_named(BENCH)}, found none: run invoke bench on a GPU")
    vetted = {path.name: _json(path) for path in sorted(grades.FOLDER.glob("*.json")) if path.name != grades.EMULATOR}
    others = (
        [_json(path) for path in sorted(BENCH.glob(f"*/{name}.json"))]
        for name in ("native", models_table.SUITE, logits_table.SUITE)
    )
    return Stored(manifest.read_all(), grades.stored(), benches, vetted, *others)


#: What a source says of software, by the names that documents have for it.
_SOFTWARE = {"driver": "driver", "nvcc": "compiler", "torch": "torch", "transformers": "transformers"}


def source_of(documents: Sequence[Mapping[str, Any]], when: Iterable[str] = (), protocol: str = "") -> Source:
    """The source of figures of one device; `protocol` is that of documents that do not say theirs."""
    first = documents[0]
    found = sorted({*when} or {day for document in documents for day in dates(document)})
    versions = {name: sorted({one[key] for one in documents if key in one}) for name, key in _SOFTWARE.items()}
    software = [f"{name} {', '.join(seen)}" for name, seen in versions.items() if seen]
    where = ", ".join([first["device"], *software, days(found)])
    files = tuple(f"generated/bench/{device_slug(first['device'])}/{document['suite']}.json" for document in documents)
    return Source(where, files, "; ".join(dict.fromkeys(document.get("protocol", protocol) for document in documents)))


def _plot(section: Section, plot: Plot | None, documents: Sequence[Mapping[str, Any]]) -> None:
    if plot is not None:
        section.add(plot, source_of(documents, plot.dates))


def overview(stored: Stored) -> list[Section]:
    """Ours beside others, and under the roofs, a section a device."""
    sections = []
    for device, documents in stored.benches.items():
        timed = [documents[name] for name in TITLES if name in documents]
        section = Section(
            f"peers-{device_slug(device)}",
            f"Against other packages and the ceilings{stored.of(device)}",
            "Each package's fastest configuration at a point stands beside our fastest kernel there, over the same "
            "arrays in the same run. Losses are shown as wins are.",
        )
        _plot(section, plots.against_peers(plots.ratios(timed), TITLES), timed)
        _plot(section, plots.roofline(timed), timed)
        sections.append(section)
    return sections


def times(stored: Stored) -> list[Section]:
    """A section a suite and device: plots over tokens and batch, the best at each point, every timing."""
    sections = []
    for device, documents in stored.benches.items():
        for suite, title in TITLES.items():
            if suite not in documents:
                continue
            document = documents[suite]
            missing = " ".join(gaps.sentences(document)).replace("`", "")
            section = Section(f"time-{device_slug(device)}-{suite}", f"{title}{stored.of(device)}", missing)
            for varying in ("tokens", "sequences"):
                for number, run in enumerate(plots.lines_over(document, varying)):
                    name = f"{suite}-{varying}-{number}"
                    _plot(section, plots.over(document, run, varying, suite, name), [document])
                    above = plots.above_ceiling(document, run, varying, suite, f"{name}-above")
                    _plot(section, above, [document])
            section.add(tables.best_by_point(document), source_of([document]))
            section.add(tables.every_timing(document), source_of([document]))
            sections.append(section)
    return sections


def _error_sections(stored: Stored) -> list[Section]:
    sections = []
    for device, documents in stored.benches.items():
        section = Section(
            f"errors-{device_slug(device)}",
            f"Errors{stored.of(device)}",
            "The relative norm of y against the float64 oracle, of our fastest kernel and of the best peer, on the "
            "arrays that were timed. The tables of timings have the states' errors as well.",
        )
        for suite in TITLES:
            if suite in documents:
                _plot(section, plots.errors(documents[suite], TITLES[suite]), [documents[suite]])
        sections.append(section)
    files = sorted(drift.FOLDER.glob("*.json"))
    abouts = [about for about in (_json(path)["about"] for path in files) if "device" in about]
    if files and sections:
        where = "; ".join(f"{about['device']}, driver {about['driver']}, {about['date']}" for about in abouts)
        steps = "some decode steps of one sequence, against float64; python -m pyharness.drift --store"
        source = Source(where or "no device", tuple(map(_named, files)), steps)
        caption = "What storing a state costs over 1000 steps"
        sections[0].add(tables.of_markdown("drift", caption, "\n" + drift.readme_table()), source)
    return [section for section in sections if section.items]


def _compiled(rows: Sequence[Row], protocol: str) -> Source:
    compilers = sorted({row.compiler for row in rows})
    return Source(f"nvcc {', '.join(compilers)}, no device", (_named(manifest.FOLDER),), protocol)


def _catalogue(stored: Stored) -> Section:
    section = Section("catalogue", "The catalogue", "The kernels that are committed, proven and packed by default.")
    section.add(tables.catalogue(stored.rows), _compiled(stored.rows, "the committed manifest"))
    return section


def _proofs(stored: Stored) -> Section:
    section = Section(
        "proofs",
        "Proofs",
        "An image is proven on a device by its own sha256, else in the emulator by that of its source, else not.",
    )
    for name, document in stored.vetted.items():
        images = document["images"].values()
        proven = tuple(sorted({image["date"] for image in images}))
        drivers = ", ".join(sorted({image["driver"] for image in images}))
        where = f"{document['device']}, driver {drivers}, {days(proven)}"
        checks = "; ".join(f"{tool}: {verdict}" for tool, verdict in document.get("sanitizers", {}).items())
        protocol = "every case of pyharness/cases.py that a kernel takes, repeated, against the float64 oracle"
        source = Source(where, (f"generated/vetting/{name}",), "; ".join(filter(None, (protocol, checks))))
        found = [(image["kernel"], image["worst_case"], image["worst"]) for image in images if "worst_case" in image]
        section.add(plots.worst_of_proofs(found), source)
    files = tuple(_named(path) for path in sorted(grades.FOLDER.glob("*.json")))
    devices = ", ".join(document["device"] for document in stored.vetted.values())
    graded = Source(f"{devices} and the emulator", files, "invoke vet, invoke vet --emulator")
    section.add(tables.proofs(stored.rows, stored.proofs), graded)
    for path in sorted(replay.FOLDER.glob("*.json")):
        about = _json(path)["about"]
        where = ", ".join(str(about[name]) for name in ("device", "driver", "date") if name in about) or "the emulator"
        section.add(tables.replays(path.stem, replay.read(path)), Source(where, (_named(path),), "invoke peers"))
    paths = sorted(testing.FOLDER.glob("*.json"))
    if paths:
        ran = [file for path in paths for file in _json(path)["files"].values()]
        seen = (sorted({file[name] for file in ran}) for name in ("driver", "date"))
        where = ", ".join([*(_json(path)["device"] for path in paths), *(", ".join(each) for each in seen)])
        source = Source(where, tuple(map(_named, paths)), "invoke test --gpu --store, a file of tests a line")
        section.add(tables.of_markdown("gpu-tests", "Tests on a GPU", "\n" + testing.gpu_table()), source)
    return section


def _resources(stored: Stored) -> Section:
    section = Section(
        "resources",
        "Registers, shared memory, occupancy",
        "A kernel that would keep a thread's data in local memory is not built. Several blocks of few warps hide "
        "latency as well as many warps do, where each has enough loads under way.",
    )
    protocol = (
        "registers and shared memory as ptxas reports them; occupancy computed from them (pyharness/occupancy.py)"
    )
    targets = dict.fromkeys(document["target"] for one in stored.benches.values() for document in one.values())
    for target in targets:
        section.add(tables.resources(stored.rows, target), _compiled(stored.rows, protocol))
    return section


def _sizes(stored: Stored) -> Section:
    section = Section("sizes", "Size", "A package holds the targets and families that it is asked for.")
    source = _compiled(stored.rows, "bytes of cubins, and of PTX for compute_80")
    section.add(plots.sizes(stored.rows), source)
    section.add(tables.image_sizes(stored.rows), source)
    return section


def _counters() -> list[Section]:
    sections = []
    for path in sorted(counters.FOLDER.glob("*.json")):
        document = _json(path)
        device = document["about"]["device"]
        section = Section(
            f"counters-{device_slug(device)}",
            "What counters say",
            "Of one launch whose caches are empty: bytes that device memory moved; shares of what memory, issue slots, "
            "places for warps and tensor cores can do; cycles that a warp waits between instructions.",
        )
        seen = days(sorted({row["date"] for row in document["rows"]}))
        source = Source(
            f"{device}, driver {document['about']['driver']}, {seen}",
            (_named(path),),
            "python -m pyharness.counters, under ncu",
        )
        section.add(tables.of_markdown(f"counters-{device_slug(device)}", device, counters.table(document)), source)
        sections.append(section)
    return sections


def _launches(stored: Stored) -> list[Section]:
    sections = []
    for device, documents in stored.benches.items():
        if launch_cost.SUITE in documents:
            document = documents[launch_cost.SUITE]
            section = Section(
                f"launch-{device_slug(device)}",
                f"Launching{stored.of(device)}",
                "node: in a CUDA graph, on the device. plan, launch: on the host, from Python. answer: from the call "
                "until the result is there.",
            )
            section.add(tables.launches(document, launch_cost.KINDS), source_of([document]))
            sections.append(section)
    return sections


def _models(stored: Stored) -> list[Section]:
    sections = []
    for document in stored.models:
        device = document["device"]
        section = Section(
            f"models-{device_slug(device)}",
            f"In a whole model{stored.of(device)}",
            "Layers of a model's size with random weights. padded is the kernel that the project started from, triton "
            "mamba-ssm's. Experts and attention are PyTorch's: in another engine a scan's microseconds stay, its share "
            "does not.",
        )
        section.add(tables.models(document), source_of([document]))
        for compared in (one for one in stored.logits if one["device"] == device):
            section.add(tables.logits(compared), source_of([compared]))
        sections.append(section)
    return sections


def _native(stored: Stored) -> list[Section]:
    sections = []
    for document in stored.native:
        device = document["device"]
        section = Section(f"native-{device_slug(device)}", f"From Go{stored.of(device)}", "")
        source = source_of([document], protocol="python -m pyharness.native time: binaries made elsewhere, data cold")
        section.add(tables.native_times(document), source)
        section.add(tables.native_benchmarks(document), source)
        sections.append(section)
    return [section for section in sections if section.items]


def _history(stored: Stored) -> list[Section]:
    sections = []
    for device, documents in stored.benches.items():
        entries = history.read(device)
        if entries:
            section = Section(
                f"history-{device_slug(device)}",
                f"History{stored.of(device)}",
                "What a point took with earlier machine code.",
            )
            then = sorted(entry["date"] for entry in entries)
            now = source_of(
                [documents[name] for name in dict.fromkeys(e["suite"] for e in entries) if name in documents]
            )
            files = (_named(history.path_of(device)), *now.files)
            where = f"{device}, {days(then)}; now: {now.where}"
            section.add(tables.earlier(entries, documents), Source(where, files, now.protocol))
            sections.append(section)
    return sections


def sections(stored: Stored) -> list[Section]:
    """The whole page, in order."""
    return [
        *overview(stored),
        *times(stored),
        *_error_sections(stored),
        *_counters(),
        *_launches(stored),
        *_models(stored),
        *_native(stored),
        _proofs(stored),
        _resources(stored),
        _sizes(stored),
        _catalogue(stored),
        *_history(stored),
    ]


@dataclass(frozen=True)
class Fact:
    """A number at the head of the page and what it counts."""

    number: str
    what: str


def facts(stored: Stored) -> list[Fact]:
    """What the page comes to."""
    counts = tables.proof_counts(stored.rows, stored.proofs)
    images = sum(len(row.targets) for row in stored.rows)
    families = len({row.family for row in stored.rows})
    found = [
        Fact(str(len(stored.rows)), f"kernels of {families} families"),
        Fact(str(images), f"images: {counts['device']} proven on a device, {counts['emulator']} in the emulator alone"),
    ]
    for device, documents in stored.benches.items():
        beside = plots.ratios(document for name, document in documents.items() if name in TITLES)
        if beside:
            wins = sum(ratio.value >= 1 for ratio in beside)
            values = [ratio.value for ratio in beside]
            spread = f"from {min(values):.2f} to {max(values):.2f} times as fast"
            found.append(Fact(f"{wins} of {len(beside)}", f"points faster than the best peer on {device}; {spread}"))
    return found


def page(stored: Stored | None = None) -> str:
    """The page as HTML.

    Raises:
        SsmError: there are no figures.
    """
    known = stored or read()
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    style = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in ("plot.css", "page.css"))
    return environment.get_template("page.html.j2").render(
        style=style, sections=sections(known), facts=facts(known), devices=", ".join(known.benches)
    )


def write(path: Path = PAGE) -> Path:
    """Write the page; gives where it is.

    Raises:
        SsmError: there are no figures.
    """
    toolchain.publish(path, page().encode())
    return path


def readme_plots(stored: Stored | None = None) -> dict[str, str]:
    """The plots that the README shows, by file name in docs/: of the first device, as files of their own.

    Raises:
        SsmError: there are no figures.
    """
    known = stored or read()
    documents = next(iter(known.benches.values()))
    style = (TEMPLATES / "plot.css").read_text(encoding="utf-8")
    timed = [documents[name] for name in TITLES if name in documents]
    found = {"peers.svg": plots.against_peers(plots.ratios(timed), TITLES)}
    for run in plots.lines_over(documents["ssd"], "tokens")[:1] if "ssd" in documents else ():
        found["prefill.svg"] = plots.over(documents["ssd"], run, "tokens", "ssd", "prefill")
    return {name: svg.standalone(plot.drawing, style) for name, plot in found.items() if plot is not None}


def write_readme_plots(folder: Path = DOCS) -> bool:
    """Bring the README's plots in line with what is stored; whether that changed any.

    Raises:
        SsmError: there are no figures.
    """
    changed = False
    for name, text in readme_plots().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            toolchain.publish(path, text.encode())
            changed = True
    return changed
