"""The page in a real browser, where there is one: what it asks for, what it says, whether all of it can be read."""

from __future__ import annotations

import html
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pyharness import report
from pyharness.report import pictures

BROWSER = pictures.browser()
pytestmark = pytest.mark.skipif(not BROWSER, reason="needs Chromium: apt install chromium")

#: Runs in a copy of the page, which is in a frame as wide as a screen; what it finds goes to the page around it.
_LOOK = """<script>
addEventListener('load', () => {
  const box = (of) => of.getBoundingClientRect();
  const cut = [];
  for (const plot of document.querySelectorAll('svg.plot')) {
    const [, , width, height] = plot.getAttribute('viewBox').split(' ').map(Number);
    for (const text of plot.querySelectorAll('text')) {
      const at = text.getBBox();
      if (at.x < -0.5 || at.y < -0.5 || at.x + at.width > width + 0.5 || at.y + at.height > height + 0.5)
        cut.push(plot.closest('figure').dataset.plot + ': ' + text.textContent);
    }
  }
  const style = getComputedStyle(document.body);
  const open = [...document.querySelectorAll('.scroll')].filter((one) => one.checkVisibility());
  parent.document.getElementById('found').textContent = JSON.stringify({
    width: innerWidth,
    pageWidth: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType('resource').map((entry) => entry.name),
    cut,
    plots: [...document.querySelectorAll('svg.plot')].map((plot) => [box(plot).width, box(plot).height]),
    letters: Math.min(...[...document.querySelectorAll('svg.plot text')].map((text) => box(text).height)),
    tables: open.map((one) => [box(one).width, one.clientWidth, one.scrollWidth]),
    paper: style.backgroundColor,
    ink: style.color,
  });
});
</script></head>"""


def looked_at(folder: Path, width: int, *options: str) -> tuple[dict[str, Any], str]:
    """What the page is like at a width, and what the browser logged."""
    inner = report.page().replace("</head>", _LOOK, 1)
    around = folder / "around.html"
    around.write_text(
        f'<!DOCTYPE html><link rel="icon" href="data:,"><pre id="found"></pre>'
        f'<iframe width="{width}" height="800" srcdoc="{html.escape(inner)}"></iframe>',
        encoding="utf-8",
    )
    told = ("--enable-logging=stderr", "--log-level=0", "--virtual-time-budget=10000")
    command = pictures.command(BROWSER, folder / "profile", *told, *options, "--dump-dom", around.as_uri())
    done = subprocess.run(command, text=True, capture_output=True, check=True, timeout=120)
    found = done.stdout.partition('<pre id="found">')[2].partition("</pre>")[0]
    return json.loads(html.unescape(found)), done.stderr


@pytest.mark.parametrize("width", [390, 1280])
def test_all_of_the_page_can_be_read(tmp_path: Path, width: int) -> None:
    found, log = looked_at(tmp_path, width)
    assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
    assert found["requests"] == []
    # A border of the frame is the browser's.
    assert abs(found["width"] - width) <= 20
    assert found["pageWidth"] <= found["width"], "the page does not scroll sideways"
    assert found["cut"] == [], "text reaches beyond its plot"
    assert found["plots"]
    assert all(0.85 * min(width, 400) - 32 < one[0] <= 560 and one[1] > 60 for one in found["plots"]), found["plots"]
    assert found["letters"] > 9, "letters of plots are as large as print"
    assert found["tables"]
    # Each is as wide as the page at most; what is wider scrolls inside.
    assert all(outer <= width for outer, _, _ in found["tables"])
    if width == 390:
        assert any(inner > shown for _, shown, inner in found["tables"])


def test_light_and_dark_follow_the_reader(tmp_path: Path) -> None:
    light, _ = looked_at(tmp_path, 800, "--blink-settings=preferredColorScheme=1")
    dark, _ = looked_at(tmp_path, 800, "--blink-settings=preferredColorScheme=0")
    assert (light["paper"], light["ink"]) == ("rgb(255, 255, 255)", "rgb(27, 31, 38)")
    assert (dark["paper"], dark["ink"]) == ("rgb(20, 23, 28)", "rgb(230, 232, 236)")


def test_the_kept_pictures_show_what_the_page_does() -> None:
    digest = (report.DOCS / pictures.DIGEST).read_text(encoding="utf-8").strip()
    assert digest == pictures.shown(report.page()), "run invoke bench --readme"


def test_pictures_are_made_of_a_page_and_only_when_it_shows_something_else(tmp_path: Path) -> None:
    page = "<style>@media (prefers-color-scheme: dark) { body { background: black } }</style><body>one"
    assert pictures.refresh(page, tmp_path)
    made = {name: (tmp_path / name).read_bytes() for name in pictures.SCREENS}
    assert len(set(made.values())) == len(made), "light, dark and the phone differ"
    assert not pictures.refresh(page + "</section>more", tmp_path), "what is further down is not in the pictures"
    assert pictures.refresh(page.replace("one", "two"), tmp_path)
    assert (tmp_path / "report-light.webp").read_bytes() != made["report-light.webp"]
