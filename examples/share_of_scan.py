"""The scan's share of a prompt and of a decode step in a stack of the size of Nemotron 3 Nano, before and after.

    python examples/share_of_scan.py [--store] [--points decode_1x1 ...] [--scans ours ...]

With --store each figure goes to generated/bench/<device>/models.json as it comes, beside those that are there and not
timed anew, and README.md shows them: a run that is cut short keeps what it timed.

One layer of each kind, as transformers writes it, is timed in bf16 with random weights, and multiplied by how often the
model has it: 23 of Mamba-2 (projections, convolution, gated norm, scan), 23 of experts, 6 of attention; then the last
norm and the logits of one token a sequence. The layers of Mamba are timed with each scan in turn:

    padded   this project's kernel of the layout `padded`, which an engine shipped before
    triton   mamba-ssm's Triton kernels
    ours     what selection picks

Everything is timed in CUDA graphs over several layers whose weights do not fit the L2 cache together, scans alone over
as many arguments as that takes: the median of five rounds. Experts, attention and convolution are PyTorch's; another
engine has others, so absolute microseconds a layer stand beside the shares. Needs an NVIDIA GPU, torch, transformers
and, for its rows, mamba-ssm.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from transformers_models import DEVICE, MODELS, NANO, header, launched_since, scan_functions, scanning, store

import pyharness.torch as ours
from pyharness import figures, toolchain
from pyharness.errors import SsmError
from pyharness.families import RecurrentSpec
from pyharness.models_table import SUITE, joined, table

#: How often the model has each layer; the pattern of all 52 is MEMEM*EMEMEM*EM...
LAYERS = {"linear_attention": 23, "moe": 23, "full_attention": 6}
POINTS = {"prefill_1x4096": (1, 4096), "decode_1x1": (1, 1), "decode_16x1": (16, 1)}
CONTEXT = 4096
#: Layers of one kind that a graph goes through.
COPIES = {"linear_attention": 4, "moe": 2, "full_attention": 4}
#: As many bytes as leave nothing in the L2 cache from one replay to the next.
COLD_BYTES = 192 * 2**20
ROUNDS, REPLAYS = 5, 20
NEMOTRON = MODELS["nemotron_h"]
PADDED = RecurrentSpec(d_state=NANO["ssm_state_size"], layout="padded", io="bf16").id
#: Of which package the scans of a layer are, and which kernel of ours is to be taken in place of what selection picks.
#: The one that searches for its best configurations, which takes longest, comes last.
SCANS = {"ours": ("ours", ""), "padded": ("ours", PADDED), "triton": ("triton", "")}


def timed(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one of some calls, which are captured in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / REPLAYS / len(calls))
    del graph
    return sorted(found)[ROUNDS // 2]


class Stack:
    """Layers of each kind with random weights, and what a step of them needs."""

    def __init__(self) -> None:
        transformers = importlib.import_module("transformers")
        kinds = [kind for kind, count in COPIES.items() for _ in range(count)]
        self.config = transformers.NemotronHConfig(**NANO, layers_block_type=kinds, experts_implementation="grouped_mm")
        self.config._attn_implementation = "sdpa"
        self._cache = transformers.DynamicCache
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(DEVICE):
                network = NEMOTRON.modeling.NemotronHForCausalLM(self.config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
        self.network = network
        for block in network.model.layers:
            if block.block_type == "linear_attention":
                # As engines keep them, for every scan: ours converts what is not f32 at each call.
                for parameter in (block.mixer.D, block.mixer.dt_bias):
                    parameter.data = parameter.data.float()
        self.blocks = {kind: [b for b in network.model.layers if b.block_type == kind] for kind in COPIES}

    def input(self, sequences: int, tokens: int, seed: int = 0) -> torch.Tensor:
        """What a layer is given, [sequences, tokens, hidden]."""
        generator = torch.Generator(DEVICE).manual_seed(seed)
        shape = (sequences, tokens, self.config.hidden_size)
        return torch.randn(shape, generator=generator, device=DEVICE).bfloat16()

    def calls(self, kind: str, sequences: int, tokens: int) -> list[Callable[[], Any]]:
        """One for each layer of a kind: a prompt from an empty cache, or a step behind CONTEXT tokens."""
        found: list[Callable[[], Any]] = []
        for index, block in enumerate(self.blocks[kind]):
            x = self.input(sequences, tokens, index)
            if kind == "moe":
                found.append(functools.partial(block, x))
            elif tokens > 1:
                found.append(functools.partial(self._prompt, block, x))
            else:
                cache = self._cache(config=self.config)
                # Of contents that do not matter, as long as they are numbers.
                block(self.input(sequences, CONTEXT if kind == "full_attention" else 8, index), past_key_values=cache)
                found.append(functools.partial(block, x, past_key_values=cache))
        return found

    def _prompt(self, block: Any, x: torch.Tensor) -> Any:
        return block(x, past_key_values=self._cache(config=self.config))

    def head(self, sequences: int) -> Callable[[], Any]:
        """The last norm, and the logits of one token a sequence."""
        x = self.input(sequences, 1)
        return lambda: self.network.lm_head(self.network.model.norm_f(x))


def scan_alone(stack: Stack, functions: dict[str, Callable[..., Any]], sequences: int, tokens: int) -> float:
    """Microseconds of one call of a scan with the arguments that a layer gives it, all of them cold."""
    kept: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []

    def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            kept.append((function, arguments, options))
            return function(*arguments, **options)

        return call

    layers = stack.calls("linear_attention", sequences, tokens)
    with scanning(NEMOTRON, {name: keeping(function) for name, function in functions.items()}):
        layers[0]()
    function, arguments, options = kept[-1]
    tensors = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
    nbytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    copies = max(4, min(128, -(-COLD_BYTES // nbytes)))

    def own(value: Any) -> Any:
        """A copy in memory of its own with the strides of the original, gaps and all."""
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage().clone()
        fresh = torch.empty(0, dtype=value.dtype, device=value.device)
        return fresh.set_(storage, value.storage_offset(), value.shape, value.stride())

    calls = [
        functools.partial(function, *map(own, arguments), **{name: own(value) for name, value in options.items()})
        for _ in range(copies)
    ]
    return timed(calls)


def experts(stack: Stack, sequences: int, tokens: int) -> tuple[float, str]:
    """Microseconds of a layer of experts, and by which of transformers' ways: the faster one where both will do."""
    found = []
    # The other one gathers the weights of each token's experts: of many tokens there is no room for them.
    for implementation in ("grouped_mm", "batched_mm") if tokens == 1 else ("grouped_mm",):
        stack.config._experts_implementation = implementation
        found.append((timed(stack.calls("moe", sequences, tokens)), implementation))
    return min(found)


@torch.inference_mode()
def timings(points: list[str], scans: list[str]) -> Iterator[dict[str, Any]]:
    """Rows of models.json as they come: what is no scan first, then one scan after the other."""
    stack = Stack()
    for point in points:
        sequences, tokens = POINTS[point]
        us, implementation = experts(stack, sequences, tokens)
        yield {"point": point, "part": "moe", "us": us, "implementation": implementation}
        us = timed(stack.calls("full_attention", sequences, tokens))
        yield {"point": point, "part": "full_attention", "us": us}
        yield {"point": point, "part": "head", "us": timed([stack.head(sequences)])}
    for scan in scans:
        package, kernel = SCANS[scan]
        for point in points:
            sequences, tokens = POINTS[point]
            row: dict[str, Any] = {"point": point, "scan": scan}
            before = Counter(ours.calls.launched)
            try:
                functions = scan_functions(NEMOTRON, package, dict.fromkeys(NEMOTRON.scans, kernel) if kernel else {})
                row["scan_us"] = scan_alone(stack, functions, sequences, tokens)
                with scanning(NEMOTRON, functions):
                    row["us"] = timed(stack.calls("linear_attention", sequences, tokens))
                # The prompt that fills a decode step's cache launches another kernel, less often.
                row |= next(iter(launched_since(before)), {"kernel": "mamba-ssm"})
            except (SsmError, ImportError) as error:
                row["failed"] = str(error)
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--points", nargs="+", choices=list(POINTS), default=list(POINTS))
    parser.add_argument("--scans", nargs="+", choices=list(SCANS), default=list(SCANS))
    parser.add_argument("--store", action="store_true", help="keep the figures and bring README.md in line")
    options = parser.parse_args()
    document = header(SUITE, "examples/share_of_scan.py: CUDA graphs of calls whose data are cold, median of 5 rounds")
    document |= {
        "model": "Nemotron 3 Nano 30B-A3B",
        "dtype": "bf16, but for D and dt_bias",
        "layers": LAYERS,
        "points": {name: {"sequences": s, "tokens": t, "context": CONTEXT} for name, (s, t) in POINTS.items()},
        "timings": [],
    }
    path = figures.stored_path(document["device"], SUITE)
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for row in timings(options.points, options.scans):
        print(row, flush=True)
        document["timings"].append(row)
        if options.store:
            toolchain.publish_json(path, joined(stored, document))
    if options.store:
        store(joined(stored, document))
    print(table(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
