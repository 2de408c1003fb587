"""Parts of Markdown pages that a command writes: wrapped prose, and what stands between two markers."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

from pyharness import toolchain
from pyharness.errors import SsmError

_WIDTH = 120


def wrapped(prose: str, indent: str = "") -> str:
    """A paragraph in lines of at most 120 characters, all but the first indented; an id is never broken."""
    return textwrap.fill(prose, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def between(text: str, name: str, content: str, page: str = "README.md") -> str:
    """A text with other content between its lines `<!-- NAME -->` and `<!-- /NAME -->`.

    Raises:
        SsmError: it has not these lines; the message names the page.
    """
    first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, found, rest = text.partition(first)
    _, ended, after = rest.partition(last)
    if not found or not ended:
        raise SsmError(f"{page}: the lines {first} and {last} were wanted, found {text.count(first)} of the first")
    return f"{before}{first}\n{content}\n{last}{after}"


def refresh(page: Path, refreshed: Callable[[str], str]) -> bool:
    """Bring a page in line by what gives its text as it should be from what it is; whether that changed it."""
    text = page.read_text(encoding="utf-8")
    changed = refreshed(text)
    if changed != text:
        toolchain.publish(page, changed.encode())
    return changed != text
