"""How far a stored state drifts over many decode steps, by how it is stored.

Each step resumes from what the last one stored, as an engine does. The truth is the float64 recurrence, which stores
nothing in between. `emulate` works the steps out in float64 with only the stores rounded, which is what storage costs
by itself; `decode` runs a kernel through `scan`.

    python -m pyharness.drift [--steps 1000] [--backend gpu] [--store]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyharness import figures, gpus, toolchain
from pyharness.compare import relative_norm
from pyharness.errors import exit_code
from pyharness.families import UpdateSpec
from pyharness.markdown import between, refresh
from pyharness.oracle import oracle, quantised
from pyharness.problem import DTYPES, ScanProblem
from pyharness.readme_tables import README
from pyharness.scan import scan

Float64 = NDArray[np.float64]
#: How a state may be stored; "+ stochastic" rounds to one of the two neighbours with a fresh draw each step.
STORAGE = ("f32", "bf16", "bf16 + stochastic", "f16", "f16 + stochastic", "i8", "i8 + stochastic")
FOLDER = toolchain.ROOT / "generated" / "drift"
#: Under which name errors of `emulate` are stored.
STORES = "stores"
_SHOWN = {"i8": "8 bits and a scale a row", "i8 + stochastic": "8 bits, stochastic"}
_MANTISSA = {"bf16": 8, "f16": 11}
_LEAST_QUANTUM = {"bf16": -133, "f16": -24}


@dataclass(frozen=True)
class Drift:
    """Errors of one way of storing, ||out - truth|| / ||truth||: of y over all steps, of the state after the last."""

    storage: str
    y: float
    state: float


@dataclass(frozen=True)
class Steps:
    """Inputs of many decode steps of one sequence, f64.

    Attributes:
        x, dt, B, C: [steps, heads, head_dim], [steps, heads], [steps, 1, d_state] twice.
        A: [heads].
        state: [heads, head_dim, d_state], what the first step starts from.
    """

    x: Float64
    dt: Float64
    A: Float64
    B: Float64
    C: Float64
    state: Float64


def draw_steps(steps: int, heads: int = 4, head_dim: int = 16, d_state: int = 128, seed: int = 0) -> Steps:
    """Steps with the range of dt and A of trained models: heads remember from tens to thousands of tokens."""
    rng = np.random.default_rng(seed)

    def f32(values: Float64) -> Float64:
        return values.astype(np.float32).astype(np.float64)

    return Steps(
        x=f32(rng.standard_normal((steps, heads, head_dim))),
        dt=f32(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), (steps, heads)))),
        A=f32(-np.exp(rng.uniform(np.log(0.05), np.log(8), heads))),
        B=f32(rng.standard_normal((steps, 1, d_state))),
        C=f32(rng.standard_normal((steps, 1, d_state))),
        state=np.zeros((heads, head_dim, d_state)),
    )


def problem_of(s: Steps, first: int, count: int, **pool: Any) -> ScanProblem:
    """Steps [first, first + count) as one sequence."""
    rows = slice(first, first + count)
    named = {name: getattr(s, name)[rows].astype(np.float32) for name in ("x", "dt", "B", "C")}
    return ScanProblem(**named, A=s.A.astype(np.float32), dt_softplus=False, **pool)


def truth(s: Steps) -> tuple[Float64, Float64]:
    """y [steps, heads, head_dim] and the last state, in float64 throughout."""
    result = oracle(problem_of(s, 0, len(s.x)))
    return result.y, result.states[0]


def _stochastic(values: Float64, kind: str, rng: np.random.Generator) -> Float64:
    """Values at one of their two neighbours of a 16-bit type, the nearer one more often."""
    _, exponents = np.frexp(values)
    quantum = np.ldexp(1.0, np.maximum(exponents - _MANTISSA[kind], _LEAST_QUANTUM[kind]))
    rounded: Float64 = np.floor(values / quantum + rng.uniform(size=values.shape)) * quantum
    return rounded


def stored(values: Float64, storage: str, rng: np.random.Generator) -> Float64:
    """What comes back of a state that was stored."""
    kind, _, stochastic = storage.partition(" + ")
    if kind == "i8":
        steps, scale = quantised(values)
        width = scale.astype(np.float64)[..., None]
        if stochastic:
            safe = np.where(width > 0, width, 1.0)
            return np.clip(np.floor(values / safe + rng.uniform(size=values.shape)), -127, 127) * width
        return steps * width
    if stochastic:
        return _stochastic(values, kind, rng)
    return values.astype(DTYPES[kind]).astype(np.float64)


def emulate(s: Steps, storage: str, seed: int = 1) -> tuple[Float64, Float64]:
    """y of every step and the last stored state, the arithmetic of a step exact and only its store rounded."""
    rng = np.random.default_rng(seed)
    state, y = s.state, np.zeros_like(s.x)
    for t in range(len(s.x)):
        decay = np.exp(s.dt[t] * s.A)[:, None, None]
        state = decay * state + (s.dt[t][:, None] * s.x[t])[..., None] * s.B[t]
        y[t] = state @ s.C[t, 0]
        state = stored(state, storage, rng)
    return y, state


def decode(s: Steps, storage: str, backend: str = "gpu") -> tuple[Float64, Float64]:
    """The same through the `update` kernel of that storage, a call a step; a call's pool is given to the next.

    Raises:
        DeviceError: there is no GPU for backend "gpu".
    """
    kind, _, stochastic = storage.partition(" + ")
    kernel = UpdateSpec(d_state=s.state.shape[-1], state=kind).id
    pool: NDArray[Any] = np.zeros((1, *s.state.shape), DTYPES[kind])
    scale = np.zeros(pool.shape[:3], np.float32) if kind == "i8" else None
    y = np.zeros_like(s.x)
    for t in range(len(s.x)):
        key = np.array([1, t], np.uint64) if stochastic else None
        problem = problem_of(s, t, 1, state=pool, state_scale=scale)
        result = scan(replace(problem, rounding_key=key), kernel, backend)
        y[t], pool, scale = result.y[0], result.state, result.state_scale
    last = pool[0].astype(np.float64)
    return y, last if scale is None else last * scale[0].astype(np.float64)[..., None]


def study(
    steps: int = 1000,
    storage: Sequence[str] = STORAGE,
    run: Callable[[Steps, str], tuple[Float64, Float64]] = emulate,
    drawn: Steps | None = None,
) -> list[Drift]:
    """Errors of each way of storing over some decode steps of one sequence.

    Args:
        steps: how many.
        storage: some of STORAGE.
        run: `emulate`, or `decode` with what it is to use.
        drawn: the steps; None draws them.
    """
    s = draw_steps(steps) if drawn is None else drawn
    y, state = truth(s)
    found = []
    for name in storage:
        got_y, got_state = run(s, name)
        found.append(Drift(name, relative_norm(got_y - y, y), relative_norm(got_state - state, state)))
    return found


# What is stored.


def store(place: str, found: Sequence[Drift], about: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Store the errors of a study: of STORES, or of a device by its slug."""
    toolchain.publish_json(folder / f"{place}.json", {"about": about, "rows": [vars(row) for row in found]})


def readme_table(folder: Path = FOLDER) -> str:
    """The stored errors as Markdown: a line a way of storing, beside `emulate` the kernels on each device."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != STORES, path.stem))
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    columns = [{row["storage"]: row for row in document["rows"]} for document in documents]
    heads = [document["about"].get("device", "only stores round") for document in documents]
    cells = [["stored as", *(f"{name}, {head}" for name in ("y", "state") for head in heads)]]
    cells.append(["---", *["---:"] * (len(cells[0]) - 1)])
    for storage in STORAGE:
        errors = [f"{column[storage][name]:.1e}" for name in ("y", "state") for column in columns]
        cells.append([_SHOWN.get(storage, storage.replace(" +", ",")), *errors])
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    runs = [
        f"{about['device']}: driver {about['driver']}, {about['date']}, {about['steps']} steps."
        for about in (document["about"] for document in documents)
        if "device" in about
    ]
    return "\n".join([*lines, *(["", *runs] if runs else [])])


def write_readme(path: Path = README, folder: Path = FOLDER) -> bool:
    """Bring the README in line with what is stored; whether that changed it."""
    return refresh(path, lambda text: between(text, "drift", readme_table(folder)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the errors of every way of storing and, where asked, store them."""
    from rich.console import Console

    from pyharness.listing import table

    parser = argparse.ArgumentParser(prog="python -m pyharness.drift", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--backend", choices=("gpu", "emulator"), help="run the kernels; by default only stores round")
    parser.add_argument("--store", action="store_true", help="keep the errors and show them in README.md")
    options = parser.parse_args(arguments)
    if options.store and options.backend == "emulator":
        parser.error("errors on a GPU or of stores alone were wanted, found --backend emulator: leave --store out")
    run = emulate if options.backend is None else lambda s, name: decode(s, name, options.backend)
    found = study(options.steps, run=run)
    rows = [{"storage": d.storage, "y": f"{d.y:.2e}", "state": f"{d.state:.2e}"} for d in found]
    Console(width=120, highlight=False).print(table(rows), markup=False)
    if options.store:
        run_on = gpus.about_run() if options.backend else {}
        place = figures.device_slug(run_on["device"]) if run_on else STORES
        store(place, found, {"steps": options.steps} | run_on)
        write_readme()
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
