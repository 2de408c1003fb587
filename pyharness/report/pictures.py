"""Pictures of the page as a browser shows it: its beginning in light, in dark and on a phone, kept in docs/.

They are made by Chromium where it is installed. Beside them lies the sha256 of what they show, so that a test tells
when the page has other figures by now.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pyharness import toolchain
from pyharness.errors import ToolchainError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_SECONDS = 120
#: What the pictures show, beside them.
DIGEST = "report.sha256"


@dataclass(frozen=True)
class Screen:
    """A width and height in units of CSS, and which of the two looks the reader prefers."""

    width: int
    height: int
    dark: bool = False


SCREENS = {
    "report-light.webp": Screen(1280, 1500),
    "report-dark.webp": Screen(1280, 1500, dark=True),
    "report-phone.webp": Screen(390, 1500),
}


def browser() -> str:
    """The path of Chromium; empty where there is none."""
    return next(filter(None, map(shutil.which, _NAMES)), "")


def command(program: str, profile: Path, *options: str) -> list[str]:
    """How Chromium is run without a window, with a profile of its own."""
    return [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", *options]


def shown(page: str) -> str:
    """The sha256 of what the pictures show of a page: all up to the end of its first section."""
    return hashlib.sha256(page.partition("</section>")[0].encode()).hexdigest()


def take(page: str, folder: Path) -> list[Path]:
    """Make every picture of a page in a folder, and put beside them what they show.

    Raises:
        ToolchainError: there is no Chromium, or it made no picture.
    """
    program = browser()
    if not program:
        raise ToolchainError(f"a browser for the pictures was wanted, found none of {', '.join(_NAMES)}: install one")
    paths = []
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "page.html"
        source.write_text(page, encoding="utf-8")
        for name, screen in SCREENS.items():
            picture = Path(scratch) / name
            options = [
                f"--window-size={screen.width},{screen.height}",
                f"--blink-settings=preferredColorScheme={0 if screen.dark else 1}",
                *("--hide-scrollbars", "--virtual-time-budget=5000", f"--screenshot={picture}"),
            ]
            run = [*command(program, Path(scratch) / "profile", *options), source.as_uri()]
            done = subprocess.run(run, text=True, capture_output=True, check=False, timeout=_SECONDS)
            if not picture.is_file():
                raise ToolchainError(f"{name}: a picture was wanted, found none: {done.stderr[-500:]}")
            paths.append(folder / name)
            toolchain.publish(paths[-1], picture.read_bytes())
    toolchain.publish(folder / DIGEST, f"{shown(page)}\n".encode())
    return paths


def refresh(page: str, folder: Path) -> bool:
    """Make the pictures anew if they show something else than a page does and there is a browser; whether it did.

    Raises:
        ToolchainError: the browser made no picture.
    """
    digest = folder / DIGEST
    if not browser() or (digest.is_file() and digest.read_text(encoding="utf-8").strip() == shown(page)):
        return False
    take(page, folder)
    return True
