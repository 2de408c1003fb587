"""How far logits of transformers' models are from PyTorch's, from what examples/transformers_models.py stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyharness.markdown import wrapped

#: The name of the stored file.
SUITE = "logits"
#: Columns by dtype and scan, as the script names them; what is held against itself has none.
COLUMNS = {
    ("bf16", "triton"): "bf16, mamba-ssm",
    ("bf16", "ours"): "bf16, ours",
    ("f32", "ours"): "f32, ours",
    ("f32", "split"): "f32, ours, `split`",
    ("f32", "none"): "f32, without states",
}


def by_model(document: Mapping[str, Any]) -> dict[str, dict[tuple[str, str], Mapping[str, Any]]]:
    """The comparisons of each model, by dtype and scan."""
    found: dict[str, dict[tuple[str, str], Mapping[str, Any]]] = {}
    for row in document["comparisons"]:
        found.setdefault(row["model"], {})[row["dtype"], row["scan"]] = row
    return found


def cells(rows: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[str]:
    """What a model's row says in each of COLUMNS: relative norms of prompt / decoded tokens, - where it did not run."""
    return [
        f"{row['prefill']:.1e} / {row['decode']:.1e}" if (row := rows.get(column)) and "prefill" in row else "-"
        for column in COLUMNS
    ]


def table(document: Mapping[str, Any]) -> str:
    """The comparisons as Markdown, a line a model, with what they are of and which kernels ran."""
    prose = (
        f"{document['device']}, driver {document['driver']}, nvcc {document['compiler']}, torch {document['torch']}, "
        f"transformers {document['transformers']}, {document['date']}. Relative norm of the difference of logits from "
        f"transformers' PyTorch code in f32 with the same weights, of a prompt of {document['prompt']} tokens / of "
        f"{document['steps']} tokens decoded after it."
    )
    lines = [f"| model, real widths | {' | '.join(COLUMNS.values())} |", "| --- |" + " ---: |" * len(COLUMNS)]
    missing = []
    for rows in by_model(document).values():
        like = next(iter(rows.values()))["like"]
        lines.append(f"| {like} | {' | '.join(cells(rows))} |")
        missing += [f"{like}, {COLUMNS[key]}: {row['failed']}" for key, row in rows.items() if "failed" in row]
    ran = dict.fromkeys(f"`{one['kernel']}`" for row in document["comparisons"] for one in row["kernels"])
    notes = [wrapped(f"Kernels of ours that ran: {', '.join(ran)}.")]
    notes += [wrapped(f"Not run: {'; '.join(missing)}.")] if missing else []
    return "\n\n".join([wrapped(prose), "\n".join(lines), *notes])
