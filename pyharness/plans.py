"""Plans from manifest rows: how Go and C find grids, blocks, shared memory and workspace, stated once for Python.

A row names a rule and its integers (`Row.grid`). A rule is one function here, one in templates/go/plan.go and one in
templates/c/ssm_plan.h, all of the same name; templates/go/testdata/vectors.json holds them together. A family whose
plan no rule makes adds one in all three places and to the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyharness.errors import ImageError
from pyharness.families.recurrent import padded_rows_plan
from pyharness.manifest import Row
from pyharness.spec import MAX_GRID_X, Geometry, Launch, Launchable, Plan, rows_plan

Rule = Callable[[Mapping[str, Any], Launchable, Geometry], Plan]


def _head_runs(geometry: Geometry, heads: int) -> int:
    """Runs of heads of one group: a block has one of them."""
    return geometry.groups * -(-(geometry.heads // geometry.groups) // heads)


def channels_plan(rule: Mapping[str, Any], kernel: Launchable, geometry: Geometry) -> Plan:
    """The rule "channels", for head_dim 1: a block a run of `rows` channels of one group and `sequences` sequences."""
    runs = _head_runs(geometry, rule["rows"])
    shares = -(-max(geometry.sequences, 1) // rule["sequences"])
    grid = (runs * min(shares, MAX_GRID_X // runs), 1, 1)
    return Plan((Launch(kernel.entries[0], grid, (kernel.threads, 1, 1), kernel.shared_bytes),))


def segments_plan(rule: Mapping[str, Any], kernel: Launchable, geometry: Geometry) -> Plan:
    """The rule "segments": sequences are cut in `segments` of whole chunks, a block has one and a run of heads.

    A run is `heads` heads of one group.

    With several segments the entry that ends in `_gather` comes first, on all segments but one and with
    `gather_threads` threads, and stores what the states become over each segment; then `_walk` runs all of them. The
    workspace is `state_bytes` for each head of each segment that the tokens can fill.
    """
    segments, chunk = rule["segments"], rule["chunk"]
    blocks = max(geometry.sequences, 1) * _head_runs(geometry, rule["heads"])
    by_name = {entry.rpartition("_")[2]: entry for entry in kernel.entries}
    steps = [("walk", segments, kernel.threads)]
    kept = 0
    if segments > 1:
        steps.insert(0, ("gather", segments - 1, rule.get("gather_threads") or kernel.threads))
        kept = min(geometry.sequences * segments, geometry.tokens // chunk + geometry.sequences)
    launches = tuple(
        Launch(by_name[name], (min(blocks * count, MAX_GRID_X), 1, 1), (threads, 1, 1), kernel.shared_bytes)
        for name, count, threads in steps
    )
    return Plan(launches, workspace_bytes=kept * geometry.heads * rule["state_bytes"])


RULES: dict[str, Rule] = {
    "rows": rows_plan,
    "padded_rows": padded_rows_plan,
    "channels": channels_plan,
    "segments": segments_plan,
}


def plan(row: Row, target: str, geometry: Geometry) -> Plan:
    """The launches of a kernel for upper bounds of a geometry, from its manifest row alone.

    `lanes`, `rows` and `chunk` of the plan are 0 where the kernel was compiled for them.

    Raises:
        ImageError: the row has no image for the target, or names a rule that is not known here.
    """
    if target not in row.targets:
        raise ImageError(f"{row.id}: an image for {target} was wanted, found {', '.join(row.targets)}")
    rule = row.grid.get("rule")
    if rule not in RULES:
        raise ImageError(f"{row.id}: a grid rule of {', '.join(RULES)} was wanted, found {rule!r}")
    kernel = Launchable(tuple(row.entries), row.block, row.targets[target].dynamic_shared)
    return RULES[rule](row.grid, kernel, geometry)
