"""From a spec to the text of one self-contained `.cu`."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import jinja2

from pyharness.spec import KernelSpec

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"

_CUDA_TYPES = {"f32": "float", "bf16": "__nv_bfloat16", "f16": "__half", "i8": "int8_t"}


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.globals["helper"] = helper
    environment.globals["cuda_type"] = _CUDA_TYPES.__getitem__
    return environment


def helper(name: str) -> str:
    """The text of templates/ssm/<name>.cuh, as a template inlines it, and in it what that includes."""
    text = (TEMPLATES / "ssm" / f"{name}.cuh").read_text(encoding="utf-8").rstrip("\n") + "\n"
    return re.sub(r'^#include "(\w+)\.cuh"\n', lambda found: helper(found[1]), text, flags=re.MULTILINE)


def render(spec: KernelSpec) -> str:
    """The CUDA source of a spec: the same text on every machine, ending in one newline."""
    text = _environment().get_template(spec.template).render(spec.constants())
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", _aligned(text)).rstrip("\n") + "\n"


def _aligned(text: str) -> str:
    """The text with the comments of consecutive constants in one column, whatever the width of their values."""
    constant = re.compile(r"((?:constexpr|using) [^/]*;)  (// .*)")
    out: list[str] = []
    block: list[tuple[str, str]] = []
    for line in [*text.split("\n"), ""]:
        found = constant.fullmatch(line)
        if found:
            block.append((found[1], found[2]))
            continue
        width = max((len(code) for code, _ in block), default=0)
        out += [f"{code:{width}}  {comment}" for code, comment in block]
        block = []
        out.append(line)
    return "\n".join(out[:-1])
