"""The page of what is stored: whole, by itself, and with the figures of the files that it names."""

from __future__ import annotations

import copy
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from pyharness import figures, gaps, history, manifest, report
from pyharness.errors import SsmError, ToolchainError
from pyharness.report import pictures, plots, svg, tables
from pyharness.toolchain import ROOT
from pyharness.workload import Point

_VOID = {"meta", "link", "br", "hr", "img", "input"}


class Node:
    """An element: its tag, attributes, children and text."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        #: Elements and text in their order.
        self.inside: list[Node | str] = []

    @property
    def children(self) -> list[Node]:
        return [one for one in self.inside if isinstance(one, Node)]

    def all(self, tag: str = "", **wanted: str) -> list[Node]:
        """Elements below, of a tag and with attributes that contain words."""
        found = []
        for child in self.children:
            words = {key.rstrip("_").replace("_", "-"): value for key, value in wanted.items()}
            if tag in ("", child.tag) and all(v in child.attributes.get(k, "").split() for k, v in words.items()):
                found.append(child)
            found += child.all(tag, **wanted)
        return found

    @property
    def text(self) -> str:
        return "".join(one if isinstance(one, str) else one.text for one in self.inside)


class Page(HTMLParser):
    """Elements of a page; an end that closes another element, or none, is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = [Node("", {})]
        self.feed(text)
        self.close()
        assert [node.tag for node in self.open] == [""], "elements are left open"
        self.root = self.open[0]

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag}: an attribute stands twice"
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(node)
        if tag not in _VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


@pytest.fixture(scope="module")
def stored() -> report.Stored:
    return report.read()


@pytest.fixture(scope="module")
def text(stored: report.Stored) -> str:
    return report.page(stored)


@pytest.fixture(scope="module")
def page(text: str) -> Node:
    return Page(text).root


def table(page: Node, name: str) -> list[dict[str, str]]:
    """The rows of a table of the page by their titles."""
    (found,) = page.all("table", data_table=name)
    titles = [cell.text for cell in found.all("th")]
    rows = [[cell.text for cell in row.all("td")] for row in found.all("tr")[1:]]
    return [dict(zip(titles, row, strict=True)) for row in rows]


def documents(stored: report.Stored) -> list[dict[str, Any]]:
    return [doc for one in stored.benches.values() for name, doc in one.items() if name in report.TITLES]


# The page by itself.


def test_the_page_is_whole_and_its_links_lead_somewhere(page: Node) -> None:
    names = [node.attributes["id"] for node in page.all() if "id" in node.attributes]
    assert len(names) == len(set(names))
    links = [link.attributes["href"] for link in page.all("a")]
    assert links
    assert {link.removeprefix("#") for link in links} == {section.attributes["id"] for section in page.all("section")}


def test_the_page_asks_for_nothing(text: str, page: Node) -> None:
    for word in ("http:", "https:", "//cdn", "@import", "url(", "<script", "<iframe", "<img", "src="):
        assert word not in text, word
    assert [link.attributes["href"] for link in page.all("link")] == ["data:,"]


def test_the_same_files_give_the_same_page(stored: report.Stored, text: str) -> None:
    assert report.page() == text == report.page(stored)


def test_every_figure_says_where_it_comes_from(page: Node) -> None:
    sources = page.all("details", class_="source")
    assert len(sources) == len(page.all("table")) + len(page.all("figure"))
    for source in sources:
        (summary,) = source.all("summary")
        assert re.search(r"\d{4}-\d\d-\d\d|no device|emulator", summary.text), summary.text
        files = [code.text for code in source.all("code")]
        assert files
        assert all((ROOT / name).exists() for name in files), files
        assert len(source.text) > len(summary.text) + len(files[0]) + 20, "the protocol is told"


def test_every_suite_has_its_tables_and_the_families_their_plots(page: Node, stored: report.Stored) -> None:
    for document in documents(stored):
        assert len(table(page, f"best-{document['suite']}")) == len(document["points"])
        assert len(table(page, f"all-{document['suite']}")) == len(document["rows"])
    assert {"ratio", "roofline", "proofs", "sizes"} <= {figure.attributes["data-plot"] for figure in page.all("figure")}
    drawn = {figure.attributes["data-plot"] for figure in page.all("figure")}
    assert "update-sequences-0" in drawn, "time over batch"
    assert "ssd-tokens-0" in drawn, "time over tokens"
    assert all(len(figure.all("svg", role="img")) == 1 for figure in page.all("figure"))
    assert all(drawing.attributes["aria-label"] for drawing in page.all("svg"))


# Figures.


def test_marks_have_the_figures_of_the_files(page: Node, stored: report.Stored) -> None:
    known = {
        (row["point"], row["kernel"], str(row["us"]["median"]))
        for document in documents(stored)
        for row in document["rows"]
        if "us" in row
    }
    marks = [mark.attributes for mark in page.all("circle") if "data-us" in mark.attributes]
    assert len(marks) > 20
    for mark in marks:
        assert (mark["data-point"], mark["data-kernel"], f"{float(mark['data-us'])}") in known, mark


@pytest.mark.parametrize("name", ["update-sequences-0", "ssd-tokens-0", "roofline"])
def test_marks_stand_where_the_axes_say(page: Node, name: str) -> None:
    (figure,) = page.all("figure", data_plot=name)

    def read(ticks: list[Node], coordinate: str, shift: float, place: float) -> float:
        """The value at a place, between two ticks of a logarithmic axis."""
        at = [(float(t.attributes[coordinate]) - shift, math.log(float(t.attributes["data-value"]))) for t in ticks]
        (first, low), (last, high) = at[0], at[-1]
        return math.exp(low + (place - first) / (last - first) * (high - low))

    x, y = figure.all("text", class_="x"), figure.all("text", class_="y")
    x = [tick for tick in x if "data-value" in tick.attributes]
    marks = figure.all("circle")
    assert len(x) > 2
    assert len(y) > 2
    assert len(marks) > 5
    for mark in marks:
        a = mark.attributes
        # Coordinates are written to a hundredth of a unit.
        assert read(x, "x", 0, float(a["cx"])) == pytest.approx(float(a["data-x"]), rel=2e-3)
        assert read(y, "y", 3.5, float(a["cy"])) == pytest.approx(float(a["data-y"]), rel=2e-3)


def test_the_best_of_each_point_is_that_of_the_file(page: Node, stored: report.Stored) -> None:
    for document in documents(stored):
        shown = table(page, f"best-{document['suite']}")
        for line, (name, _) in zip(shown, figures.points(document), strict=True):
            rows = [row for row in document["rows"] if row["point"] == name and "us" in row]
            ours = [row for row in rows if not row.get("peer") and "order" not in row and "tf32" not in row["kernel"]]
            peers = [row["us"]["median"] for row in rows if row.get("peer")]
            best = min(row["us"]["median"] for row in ours)
            assert line["ours"] == f"{best:.2f}"
            assert line["best peer"] == (f"{min(peers):.2f}" if peers else "-")
            assert line["peer / ours"] == (f"{min(peers) / best:.2f}" if peers else "-")


def test_wins_and_losses_are_both_shown(page: Node, stored: report.Stored) -> None:
    (figure,) = page.all("figure", data_plot="ratio")
    shown = {mark.attributes["data-point"]: mark.attributes for mark in figure.all("circle")}
    expected, fastest = {}, {}
    for document in documents(stored):
        for name in document["points"]:
            rows = [row for row in document["rows"] if row["point"] == name and "us" in row and "order" not in row]
            ours = [r["us"]["median"] for r in rows if not r.get("peer") and "tf32" not in r["kernel"]]
            peers = [r["us"]["median"] for r in rows if r.get("peer")]
            # Two suites have a point in common: the family that is faster there is ours.
            if ours and peers and min(ours) < fastest.get(name, math.inf):
                fastest[name], expected[name] = min(ours), min(peers) / min(ours)
    assert {name: float(mark["data-x"]) for name, mark in shown.items()} == pytest.approx(expected, rel=1e-4)
    for name, ratio in expected.items():
        assert ("ours" in shown[name]["class"].split()) == (ratio >= 1), name
    won = sum(ratio >= 1 for ratio in expected.values())
    facts = [node.text for node in page.all("li")]
    assert any(f"{won} of {len(expected)} points faster than the best peer" in fact for fact in facts)


def test_a_peer_that_did_not_run_is_shown_with_its_reason(page: Node, stored: report.Stored) -> None:
    for document in documents(stored):
        shown = [line["did not run"] for line in table(page, f"all-{document['suite']}")]
        assert shown == [row.get("failed", "") for row in document["rows"]]


def test_points_that_lack_a_time_are_named(page: Node, stored: report.Stored) -> None:
    for device, benches in stored.benches.items():
        for suite in report.TITLES:
            if suite in benches:
                (section,) = page.all("section", id=f"time-{figures.device_slug(device)}-{suite}")
                told = "".join(node.text for node in section.all("p"))
                missing = gaps.unmeasured(benches[suite]) + list(gaps.without_peer(benches[suite]))
                assert all(name in told for name in missing)


def test_logits_are_those_of_the_file(page: Node, stored: report.Stored) -> None:
    (document,) = stored.logits
    shown = {line.pop("model"): line for line in table(page, "logits")}
    for row in document["comparisons"]:
        title = {"triton": "bf16, mamba-ssm", "split": "f32, ours, split", "none": "f32, without states"}.get(
            row["scan"]
        )
        title = title or {"ours": f"{row['dtype']}, ours"}.get(row["scan"])
        if title and "prefill" in row:
            assert shown[row["like"]][title] == f"{row['prefill']:.1e} / {row['decode']:.1e}"


def test_gpu_tests_counters_and_drift_are_those_of_their_files(page: Node) -> None:
    generated = ROOT / "generated"
    for path in (generated / "tests").glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        shown = {line["file"]: line for line in table(page, "gpu-tests") if line["GPU"] == document["device"]}
        assert {name: line["passed"] for name, line in shown.items()} == {
            f"{name}.py": str(found["passed"]) for name, found in document["files"].items()
        }
    for path in (generated / "counters").glob("*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        shown_rows = table(page, f"counters-{path.stem}")
        assert [line["read, MB"] for line in shown_rows] == [f"{row['read'] / 1e6:.2f}" for row in rows]
    stores = json.loads((generated / "drift" / "stores.json").read_text(encoding="utf-8"))["rows"]
    wanted = [f"{row['y']:.1e}" for row in stores]
    assert [line["y, only stores round"] for line in table(page, "drift")] == wanted


def test_every_image_is_shown_with_its_proof(page: Node, stored: report.Stored) -> None:
    shown = {line.pop("kernel"): line for line in table(page, "proofs-by-image")}
    assert set(shown) == {row.id for row in stored.rows}
    vetted = {sha for document in stored.vetted.values() for sha in document["images"]}
    for row in stored.rows:
        for target, said in shown[row.id].items():
            if target not in row.targets:
                assert said == "-"
            else:
                assert (said == "device") == (row.targets[target].sha256 in vetted)


def test_registers_and_sizes_are_those_of_the_manifest(page: Node, stored: report.Stored) -> None:
    rows = {row.id: row for row in stored.rows}
    for line in table(page, "resources-sm_90"):
        row = rows[line["kernel"]]
        image = row.targets[row.kernel.image_target("sm_90")]
        found = {usage["registers"] for usage in image.usage.values()}
        assert int(line["registers"]) in found
        assert line["spills"] == "0"
    shown = {line.pop("kernel"): line for line in table(page, "image-sizes")}
    total = shown.pop("all")
    for target, said in total.items():
        assert int(said) == sum(row.targets[target].bytes for row in stored.rows if target in row.targets)
    (figure,) = page.all("figure", data_plot="sizes")
    for target, said in total.items():
        parts = [part for part in figure.all("rect") if part.attributes["data-target"] == target]
        assert sum(float(part.attributes["data-value"]) for part in parts) == pytest.approx(int(said) / 2**20, rel=1e-4)


# Made figures.


def test_several_devices_are_told_apart(stored: report.Stored) -> None:
    (device, benches), *_ = stored.benches.items()
    other = {name: copy.deepcopy(document) | {"device": "NVIDIA L4"} for name, document in benches.items()}
    both = report.Stored(stored.rows, stored.proofs, {device: benches, "NVIDIA L4": other}, stored.vetted)
    titles = [section.title for section in report.sections(both)]
    assert len(titles) == len(set(titles))
    assert f"Decode of Mamba-2, {device}" in titles
    assert "Decode of Mamba-2, NVIDIA L4" in titles


def test_calls_from_go_are_shown_where_there_are_figures(stored: report.Stored) -> None:
    about = {"device": "NVIDIA L4", "driver": "580.1", "compiler": "13.0.88", "date": "2026-01-02", "suite": "native"}
    beside = [{"kernel": "ssd_a", "point": "prefill", "go_us": 101.5, "pycuda_us": 100.0, "ratio": 1.015}]
    launch = {"CUDASSMScanLaunch": {"ns/launch": 3500.0}}
    found = report.Stored(
        stored.rows, stored.proofs, stored.benches, stored.vetted, [about | {"beside": beside, "benchmarks": launch}]
    )
    (section,) = (one for one in report.sections(found) if one.name == "native-nvidia-l4")
    rows = [[cell.text for cell in row] for item in section.items for row in item.content.rows]  # type: ignore[union-attr]
    assert rows == [["prefill", "ssd_a", "101.50", "100.00", "1.015"], ["CUDASSMScanLaunch", "3500", "ns/launch"]]
    empty = report.Stored(stored.rows, stored.proofs, stored.benches, stored.vetted, [about])
    assert not [one for one in report.sections(empty) if one.name.startswith("native")]


def test_whole_models_are_shown_where_there_are_figures(stored: report.Stored) -> None:
    about = {"device": "NVIDIA L4", "driver": "580.1", "compiler": "13.0.88", "date": "2026-01-02", "model": "a model"}
    document = about | {
        "suite": "models",
        "protocol": "some calls",
        "torch": "2",
        "transformers": "5",
        "layers": {"linear_attention": 2},
        "points": {"one": {"sequences": 4, "tokens": 1, "context": 50}},
        "timings": [
            {"point": "one", "part": "head", "us": 10.0},
            {"point": "one", "scan": "ours", "kernel": "k", "scan_us": 5.0, "us": 20.0},
        ],
    }
    found = report.Stored(stored.rows, stored.proofs, stored.benches, stored.vetted, models=[document])
    (section,) = (one for one in report.sections(found) if one.name == "models-nvidia-l4")
    (rows,) = ([[cell.text for cell in row] for row in item.content.rows] for item in section.items)  # type: ignore[union-attr]
    # 10 and two layers of 20: two scans of 5 are 20 %, and 4 tokens in 50 us are 80000 a second.
    assert rows == [["decode 4 x 1", "ours", "k", "5.0", "10", "20.0", "10.0", "50.0", "20.0 %", "80000"]]


def test_earlier_figures_stand_beside_what_took_their_place(stored: report.Stored) -> None:
    benches = next(iter(stored.benches.values()))
    document = benches["update"]
    point = next(iter(document["points"]))
    rows = [row for row in document["rows"] if row["point"] == point]
    now = min(row["us"]["median"] for row in rows if "peer" not in row and "order" not in row)
    entry = {"suite": "update", "point": point, "kernel": "old", "us": 2 * now, "date": "2026-01-02"}
    lines = tables.earlier([entry, entry | {"suite": "gone"}], benches).rows
    assert [cell.text for cell in lines[0]][-1] == "2.00"
    assert lines[0][-1].kind == "won"
    assert [cell.text for cell in lines[1]][-3:] == ["-", "-", "-"]


def test_nothing_stored_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "BENCH", ROOT / "generated" / "nowhere")
    with pytest.raises(SsmError, match="found none: run invoke bench"):
        report.read()


def test_a_line_needs_points_that_differ_in_one_size_alone() -> None:
    base = {"job": "decode", "tokens": 1, "resume": True, "heads": 16, "io": "bf16"}
    points = {str(n): base | {"sequences": n} for n in (8, 1, 64)}
    points |= {"f32": base | {"sequences": 4, "io": "f32"}, "long": base | {"sequences": 2, "lengths": [1, 1]}}
    (run,) = plots.lines_over({"points": points}, "sequences")
    assert [point.sequences for point in run] == [1, 8, 64]
    assert plots.lines_over({"points": points}, "tokens") == []


def test_axes_count_what_the_points_have() -> None:
    def run(varying: str, **sizes: int) -> list[Point]:
        return [
            Point("prefill", **({"sequences": 1, "tokens": 1, "resume": False} | sizes | {varying: n})) for n in (1, 2)
        ]

    assert plots._counted(run("tokens"), "tokens") == "tokens of one sequence"
    assert plots._counted(run("tokens", sequences=8), "tokens") == "tokens of each of 8 sequences"
    assert plots._counted(run("sequences"), "sequences") == "sequences of one token each"
    assert plots._counted(run("sequences", tokens=1024), "sequences") == "sequences of 1024 tokens each"


def test_labels_keep_their_distance_and_their_order() -> None:
    assert svg._apart([10, 50, 90], 13, 0, 100) == [10, 50, 90]
    assert svg._apart([50, 48, 49], 13, 0, 100) == [74, 48, 61]
    assert svg._apart([99, 98], 13, 0, 100) == [100, 87]


def test_text_is_escaped() -> None:
    drawn = svg.element("text", {"data-what": 'a "b" <c>'}, "x < y & z")
    assert drawn == '<text data-what="a &#34;b&#34; &lt;c&gt;">x &lt; y &amp; z</text>'


# Looks.


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_of_every_colour_is_readable_in_both_modes() -> None:
    style = (report.TEMPLATES / "plot.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for mode in (light, dark):
        colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", mode))
        assert len(colours) == 10
        for name in ("ink", "muted", "ours", "peer", "third", "fourth", "fifth"):
            for ground in ("paper", "panel"):
                bright, dim = sorted((_luminance(colours[name]), _luminance(colours[ground])), reverse=True)
                # WCAG 2, AA.
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, f"{name} on {ground}"


# The README's plots.


def test_the_plots_of_the_readme_are_what_is_stored(stored: report.Stored) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = report.readme_plots(stored)
    assert set(made) == {"peers.svg", "prefill.svg"}
    for name, drawing in made.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == drawing, "run invoke bench --readme"
        assert f'src="docs/{name}"' in readme
        root = ElementTree.fromstring(drawing)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert "prefers-color-scheme: dark" in drawing
        assert "var(--ours)" in drawing
        assert re.findall(r"https?:[^\"]*", drawing) == ["http://www.w3.org/2000/svg"]


def test_the_kept_pictures_are_of_their_screens_and_small() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    total = 0
    for name, screen in pictures.SCREENS.items():
        data = (report.DOCS / name).read_bytes()
        total += len(data)
        # A WebP of the extended kind: 24 bits of width less 1, and of height.
        assert (data[:4], data[8:16]) == (b"RIFF", b"WEBPVP8X")
        size = [int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27)]
        assert size == [screen.width, screen.height]
        assert f"(docs/{name})" in readme
    assert total < 300_000


def test_pictures_without_a_browser_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="a browser for the pictures was wanted, found none of chromium"):
        pictures.take("a page", tmp_path)
    assert not pictures.refresh("a page", tmp_path)


def test_stored_history_is_of_stored_devices() -> None:
    for path in history.FOLDER.glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        assert path == history.path_of(document["device"])
        assert history.joined([], document["entries"]) == document["entries"], "in order, none twice"
        assert figures.device_slug(document["device"]) in {one.name for one in figures.BENCH.iterdir()}
    assert manifest.read_all()
