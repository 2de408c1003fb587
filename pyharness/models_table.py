"""The scan's share of a whole model, from the figures that examples/share_of_scan.py stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyharness.figures import EARLIER, dates, days, kernel_cell
from pyharness.markdown import wrapped

#: The name of the stored file.
SUITE = "models"
_MAMBA = "linear_attention"
#: How the table names scans.
_SCANS = {"padded": "`padded`, before", "triton": "mamba-ssm", "ours": "ours"}


#: What the figures of one table have in common.
_OF_ONE_TABLE = ("device", "driver", "compiler", "torch", "transformers", "protocol", "model", "dtype", "layers")


def joined(stored: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """What a run timed, and of what is stored the timings that it has not, where one table may have both.

    Every timing says on which date it was taken.
    """
    known = stored if all(stored.get(name) == part[name] for name in _OF_ONE_TABLE) else {"points": {}, "timings": []}
    dated = [{"date": document["date"]} | row for document in (known, part) for row in document["timings"]]
    timings = {(row["point"], row.get("part", ""), row.get("scan", "")): row for row in dated}

    def place(key: tuple[str, str, str]) -> tuple[str, bool, int]:
        point, kind, scan = key
        return point, not kind, list(_SCANS).index(scan) if scan else 0

    return dict(part) | {
        "points": known["points"] | part["points"],
        "timings": [timings[key] for key in sorted(timings, key=place)],
    }


def rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row a point and scan that was timed, prompts first.

    Each has point, scan and kernel; scan_us and layer_us, of one layer of Mamba-2; scans_us, of the scans of all such
    layers; others_us, of all that is no such layer; total_us, of the whole stack; share, of the scans in it, 0 to 1;
    and tokens_per_second.
    """
    layers = document["layers"]
    found = []
    # Prompts first, then by how many sequences.
    order = sorted(document["points"].items(), key=lambda item: (-item[1]["tokens"], item[1]["sequences"]))
    for name, point in order:
        parts = {row["part"]: row["us"] for row in document["timings"] if row["point"] == name and "part" in row}
        others = sum(layers.get(part, 1) * us for part, us in parts.items())
        for row in document["timings"]:
            if row["point"] != name or "scan" not in row or "failed" in row:
                continue
            total = others + layers[_MAMBA] * row["us"]
            scans = layers[_MAMBA] * row["scan_us"]
            found.append(
                {
                    "point": name,
                    "scan": row["scan"],
                    "kernel": row["kernel"],
                    EARLIER: row.get(EARLIER, False),
                    "scan_us": row["scan_us"],
                    "scans_us": scans,
                    "layer_us": row["us"],
                    "others_us": others,
                    "total_us": total,
                    "share": scans / total,
                    "tokens_per_second": 1e6 * point["sequences"] * point["tokens"] / total,
                }
            )
    return found


def table(document: Mapping[str, Any]) -> str:
    """The rows as Markdown, with what they are of."""
    layers = document["layers"]
    when = days(dates(document, document["timings"]))
    prose = (
        f"{document['device']}, driver {document['driver']}, nvcc {document['compiler']}, torch {document['torch']}, "
        f"transformers {document['transformers']}, {when}. Layers of the size of {document['model']} as "
        f"transformers writes them, with random weights in {document['dtype']}, one layer after another so that all "
        f"weights are cold: {layers[_MAMBA]} x Mamba-2, {layers['moe']} x experts, {layers['full_attention']} x "
        "attention, and the logits of one token a sequence. Microseconds of one scan, of the scans of all layers, of "
        "one Mamba-2 layer with its scan, and of the whole stack, of which the scans have a share. Experts, attention "
        "and convolution are PyTorch's: in another engine the microseconds of the scans stay, the share does not."
    )
    head = ("step", "scan", "kernel", "1 scan", f"{layers[_MAMBA]} scans", "layer", "stack", "share", "tokens/s")
    lines = ["| " + " | ".join(head) + " |", "| --- | --- | --- |" + " ---: |" * 6]
    for row in rows(document):
        point = document["points"][row["point"]]
        step = f"prefill {point['sequences']} x {point['tokens']}"
        if point["tokens"] == 1:
            step = f"decode {point['sequences']} x 1 behind {point['context']}"
        cells = (
            step,
            _SCANS[row["scan"]],
            kernel_cell(row),
            f"{row['scan_us']:.1f}",
            f"{row['scans_us']:.0f}",
            f"{row['layer_us']:.1f}",
            f"{row['total_us']:.0f}",
            f"{100 * row['share']:.1f} %",
            f"{row['tokens_per_second']:.0f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    missing = [f"{r['point']}, {r['scan']}: {r['failed']}" for r in document["timings"] if "failed" in r]
    notes = [wrapped(f"Not run: {'; '.join(missing)}")] if missing else []
    return "\n\n".join([wrapped(prose), "\n".join(lines), *notes])
