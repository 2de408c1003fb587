"""The Go module: its sources from templates/go with the files that make a package of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pyharness.errors import SsmError
from pyharness.golden import SOURCES

#: The module path in templates/go, which a package replaces by its own.
PLACEHOLDER = "example.com/ssmscan"
#: Folders of templates/go that a package leaves out: tests that need what `invoke go` stages.
_LEFT_OUT = ("testdata", "fakecuda")
_SUFFIXES = (".go", ".c", ".h", ".md", ".mod")
_SEMVER = re.compile(r"v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?")
_MODULE = re.compile(r"[a-z0-9][a-z0-9.-]*\.[a-z]{2,}(/[A-Za-z0-9][A-Za-z0-9._~-]*)*")

_LICENSE_LINE = "SPDX-License-Identifier: Apache-2.0"
_SPDX = f"// {_LICENSE_LINE}\n\n"
#: How a file says its licence, by the end of its name; JSON has no comments, and images are what the compiler made.
_LICENSED = {".go": _SPDX, ".c": _SPDX, ".h": _SPDX, ".mod": _SPDX, ".md": f"<!-- {_LICENSE_LINE} -->\n\n"}


def check_names(module: str, version: str) -> None:
    """Check a module path and a version as Go wants them.

    Raises:
        SsmError: one is malformed, or the path lacks the suffix of its major version.
    """
    match = _SEMVER.fullmatch(version)
    if match is None:
        raise SsmError(f"--version must be of the form v1.2.3, found {version!r}")
    if _MODULE.fullmatch(module) is None:
        raise SsmError(f"--module must be a path such as github.com/someone/ssmscan, found {module!r}")
    suffix = re.search(r"/v(\d+)$", module)
    major = int(match[1])
    wanted = f"/v{major}" if major > 1 else ""
    if (suffix[0] if suffix else "") != wanted:
        raise SsmError(
            f"--module of version {version} must end in {wanted or 'no major version'}, found {module!r}: Go tells "
            f"major versions apart by the path"
        )


def sources(module: str = PLACEHOLDER, folder: Path = SOURCES) -> dict[str, bytes]:
    """The Go module's own files by path, as a package holds them: its module path, an SPDX line in each."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or name.parts[0] in _LEFT_OUT or path.suffix not in _SUFFIXES:
            continue
        if len(name.parts) == 1 and name.name.endswith("_test.go"):
            continue
        found[name.as_posix()] = licensed(
            name.name, path.read_text(encoding="utf-8").replace(PLACEHOLDER, module)
        ).encode()
    return found


def licensed(name: str, text: str) -> str:
    """A text with an SPDX line on top, where it has none and can have one."""
    return text if _LICENSE_LINE in text else _LICENSED.get(Path(name).suffix, "") + text


def images_package(module: str, lane: str, target: str, family: str, kinds: set[str]) -> bytes:
    """The source of the package that embeds the images of one family for one target."""
    patterns = " ".join(f"*.{kind}" for kind in sorted(kinds))
    return f"""{_SPDX}// Package {family} embeds the {family} kernels for {target} of lane {lane}.
package {family}

import (
	"embed"

	"{module}"
)

//go:embed {patterns}
var files embed.FS

// Images are what ssmscan.OpenImages and Device.Scanner take.
var Images = ssmscan.Images{{Lane: "{lane}", Target: "{target}", Family: "{family}", Files: files}}
""".encode()


def every_image(module: str, packages: Mapping[str, str]) -> bytes:
    """The source by which a main package embeds images: names that it imports them by, by path below the module."""
    imports = "\n".join(f'\t{name} "{module}/{path}"' for path, name in sorted(packages.items()))
    entries = "\n".join(f"\t{name}.Images," for _, name in sorted(packages.items()))
    return f"""{_SPDX}package main

import (
	"{module}"
{imports}
)

// everyImage is every image that this program can use: name only those of the targets and families that yours runs.
var everyImage = []ssmscan.Images{{
{entries}
}}
""".encode()
