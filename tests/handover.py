"""A state that prefill leaves, handed to decode, whatever runs the kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pyharness import ScanProblem, scan
from pyharness.cases import Options, Shape, draw
from pyharness.compare import f32_bounds, relative_norm
from pyharness.families import SsdSpec, UpdateSpec
from pyharness.oracle import oracle

_ROWS = ("x", "dt", "B", "C", "z")


def _tokens(problem: ScanProblem, first: int, last: int) -> dict[str, Any]:
    return {name: getattr(problem, name)[first:last] for name in _ROWS}


def assert_decode_goes_on(
    prefill: SsdSpec, decode: UpdateSpec, *, prompt: int, steps: int, heads: int, backend: str
) -> None:
    """Prefill of a prompt and decode of each token after it give the oracle's y and state of the whole.

    Each token and each head is held to the bound of prefill's operands, since y of decode is of the state that prefill
    rounded, and to one unit in the last place of its storage.
    """
    shape = Shape((prompt + steps,), heads, prefill.head_dim, prefill.d_state)
    whole = draw(51, shape, Options(io=prefill.io, z=True, dt_f32=True, slots="default"))
    truth = oracle(whole)
    problem = replace(whole, **_tokens(whole, 0, prompt))
    result = scan(problem, prefill.id, backend)
    y = [result.y]
    for t in range(prompt, prompt + steps):
        problem = replace(whole, **_tokens(whole, t, t + 1), state=result.state)
        result = scan(problem, decode.id, backend)
        y.append(result.y)
    found = np.concatenate(y).astype(np.float64)
    spacing = {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11}[prefill.io]
    bounds = f32_bounds(whole) + prefill.operand_error
    for head in range(heads):
        of_y = relative_norm(found[prompt:, head] - truth.y[prompt:, head], truth.y[prompt:, head])
        assert of_y <= bounds[head] + spacing, f"y of decode, head {head}: {of_y:.2e}"
        state = truth.states[0][head]
        of_state = relative_norm(result.state[0, head].astype(np.float64) - state, state)
        assert of_state <= bounds[head], f"state, head {head}: {of_state:.2e}"
