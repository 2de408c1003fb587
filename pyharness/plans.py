"""Plans from manifest rows: how Go and C find grids, blocks, shared memory and workspace, stated once for Python.

A row names a rule and its integers (`Row.grid`). A rule is one function beside its family, by which the family's specs
plan too, one in templates/go/plan.go and one in templates/c/ssm_plan.h, all of the same name;
templates/go/testdata/vectors.json holds them together. A family whose plan no rule makes adds one in all three places
and to the vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyharness.errors import ImageError
from pyharness.families.recurrent import padded_rows_plan
from pyharness.families.selective import channels_plan
from pyharness.families.ssd import segments_plan
from pyharness.manifest import Row
from pyharness.spec import Geometry, Launchable, Plan, rows_plan

Rule = Callable[[Mapping[str, Any], Launchable, Geometry], Plan]


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
