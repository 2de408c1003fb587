"""transformers' own Mamba models with this project's kernels in the place of their scans, beside the scans they had.

    python examples/transformers_models.py [--models mamba2 nemotron_h falcon_mamba] [--steps 64]

Models have the widths of published ones, a few of their layers, and random weights. Each reads a prompt and then
decodes tokens that are given to it, once with every scan:

    torch    transformers' own PyTorch code, in f32: what the others are held against, with the same weights
    triton   mamba-ssm's Triton kernels, where they are installed (of FalconMamba's prompt PyTorch's, as that scan is
             compiled there)
    ours     pyharness.torch
    none     scans that remember nothing, B being zero: how much of the logits hangs on the states at all

In f32 logits of ours must be those of torch to 1e-4 in relative norm; in bf16 no further from them than triton's are,
by a tenth. Needs an NVIDIA GPU, torch and transformers.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import pyharness.torch as ours
from pyharness.errors import SsmError
from pyharness.peers import mamba_module

DEVICE = "cuda"
F32_TOLERANCE = 1e-4
#: How far ours may be from f32 in bf16, as a multiple of what triton's are.
BF16_FACTOR = 1.1
#: How far logits must be from those of scans that remember nothing, or the comparison says nothing.
LEAST_SHARE = 10 * F32_TOLERANCE


@dataclass(frozen=True)
class Model:
    """One of transformers' models.

    Attributes:
        module, config, model: its module below transformers.models and the classes there.
        like: whose widths these are.
        sizes: of the configuration.
        scans: the names that its scans have in the module, by the names that they have here.
    """

    module: str
    config: str
    model: str
    like: str
    sizes: Mapping[str, Any]
    scans: Mapping[str, str]

    @property
    def modeling(self) -> Any:
        """The module that has the layers."""
        return importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")


_MAMBA2 = {
    "selective_state_update": "mamba2_selective_state_update",
    "mamba_chunk_scan_combined": "mamba2_chunk_scan",
}
_MAMBA1 = {"selective_state_update": "mamba_selective_state_update", "selective_scan_fn": "mamba_selective_scan"}
#: Nemotron 3 Nano, whose layers are mamba, experts and attention by these letters.
NANO = {
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "chunk_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
}
MODELS = {
    "mamba2": Model(
        "mamba2",
        "Mamba2Config",
        "Mamba2ForCausalLM",
        "Codestral Mamba 7B, 4 of 64 layers",
        # Any chunk_size gives the same result; 256 takes much memory in the PyTorch code.
        {"num_hidden_layers": 4, "vocab_size": 32768, "hidden_size": 4096, "num_heads": 128, "chunk_size": 128},
        _MAMBA2,
    ),
    "nemotron_h": Model(
        "nemotron_h",
        "NemotronHConfig",
        "NemotronHForCausalLM",
        "Nemotron 3 Nano 30B-A3B, layers MEMEM* of 52",
        NANO
        | {
            "layers_block_type": ["linear_attention", "moe"] * 2 + ["linear_attention", "full_attention"],
            # What PyTorch's experts cost in memory and time is no matter here.
            "experts_implementation": "eager",
        },
        _MAMBA2,
    ),
    "falcon_mamba": Model(
        "falcon_mamba",
        "FalconMambaConfig",
        "FalconMambaForCausalLM",
        "Falcon-Mamba 7B, 4 of 64 layers",
        {"num_hidden_layers": 4, "vocab_size": 65024, "hidden_size": 4096, "state_size": 16},
        _MAMBA1,
    ),
}


def adapted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A scan that leaves out what a model passes and it does not take."""
    taken = inspect.signature(function).parameters

    def call(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **{name: value for name, value in options.items() if name in taken})

    return call


def forgetful(function: Callable[..., Any]) -> Callable[..., Any]:
    """A scan whose B is zero: of y there is D x alone."""

    def call(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(function).bind(*arguments, **options)
        given.arguments["B"] = torch.zeros_like(given.arguments["B"])
        return function(*given.args, **given.kwargs)

    return call


def scan_functions(model: Model, scan: str, kernel: str | None = None) -> dict[str, Callable[..., Any]]:
    """The scans of a model by their names in its module; `kernel` is for ours of prompts of Mamba-2.

    Raises:
        DeviceError: mamba-ssm is not installed.
    """
    own = {name: inspect.unwrap(getattr(model.modeling, name)) for name in model.scans.values()}
    if scan == "torch":
        return {name: adapted(function) for name, function in own.items()}
    if scan == "none":
        return {name: forgetful(function) for name, function in own.items()}
    if scan == "ours":
        mine = {name: adapted(getattr(ours, called)) for called, name in model.scans.items()}
        chunked = model.scans.get("mamba_chunk_scan_combined")
        return mine | ({chunked: functools.partial(mine[chunked], kernel=kernel)} if chunked else {})
    modules = {"selective_state_update": "selective_state_update", "mamba_chunk_scan_combined": "ssd_combined"}
    theirs = {
        name: getattr(mamba_module(modules[called]), called)
        for called, name in model.scans.items()
        if called in modules
    }
    return {name: adapted(function) for name, function in (own | theirs).items()}


@contextmanager
def scanning(model: Model, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """The model's layers with some scans, by their names in its module."""
    module = model.modeling
    before = {name: getattr(module, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def build(model: Model, dtype: torch.dtype, seed: int = 0) -> Any:
    """The model on the GPU with random weights of a dtype."""
    torch.manual_seed(seed)
    config = getattr(importlib.import_module("transformers"), model.config)(**model.sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return getattr(model.modeling, model.model)(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def logits(network: Any, tokens: torch.Tensor, prompt: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every token of a prompt, and of every token after it, decoded one by one."""
    output = network(tokens[:, :prompt], use_cache=True)
    first, steps = output.logits.float(), []
    # Mamba's models call what they keep by another name.
    cached = "past_key_values" if getattr(output, "past_key_values", None) is not None else "cache_params"
    kept = getattr(output, cached)
    for position in range(prompt, tokens.shape[1]):
        output = network(tokens[:, position : position + 1], use_cache=True, **{cached: kept})
        steps.append(output.logits.float())
    return first, torch.cat(steps, dim=1)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative norm of the difference."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def compare(name: str, model: Model, prompt: int, steps: int, kernel: str | None) -> list[dict[str, Any]]:
    """A row a dtype and scan: how far its logits are from PyTorch's in f32."""
    network = build(model, torch.bfloat16)
    generator = torch.Generator(DEVICE).manual_seed(1)
    tokens = torch.randint(0, model.sizes["vocab_size"], (1, prompt + steps), generator=generator, device=DEVICE)
    found: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}
    kernels: dict[tuple[str, str], list[str]] = {}
    failed: dict[tuple[str, str], str] = {}
    for dtype in ("bf16", "f32"):
        if dtype == "f32":
            # The same weights: those that bf16 has.
            network.float()
        # triton's of f32 multiply in tf32: nothing to compare with.
        for scan in ("ours", "torch", "none") if dtype == "f32" else ("triton", "ours"):
            try:
                before = Counter(ours.calls.launched)
                with scanning(model, scan_functions(model, scan, kernel)):
                    found[dtype, scan] = logits(network, tokens, prompt)
                kernels[dtype, scan] = sorted(ours.calls.launched - before)
            except (SsmError, ImportError) as error:
                failed[dtype, scan] = str(error)
    truth = found["f32", "torch"]
    rows = []
    for dtype, scan in [*found, *failed]:
        row: dict[str, Any] = {"model": name, "like": model.like, "dtype": dtype, "scan": scan}
        if (dtype, scan) in failed:
            rows.append(row | {"failed": failed[dtype, scan]})
            continue
        prefill, decode = (distance(f, t) for f, t in zip(found[dtype, scan], truth, strict=True))
        row |= {"prefill": prefill, "decode": decode}
        if scan == "ours":
            row["kernels"] = kernels[dtype, scan]
        rows.append(row)
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the rows of one model, if anything."""
    by = {(row["dtype"], row["scan"]): row for row in rows}
    wrong = [f"{r['model']} {r['dtype']} ours: {r['failed']}" for r in rows if r["scan"] == "ours" and "failed" in r]
    for stage in ("prefill", "decode"):
        without = by.get(("f32", "none"), {}).get(stage, 0.0)
        if not without > LEAST_SHARE:
            wrong.append(f"{rows[0]['model']} {stage}: {without:.1e} from PyTorch's logits without states: too near")
        mine = by.get(("f32", "ours"), {}).get(stage)
        if mine is not None and not mine < F32_TOLERANCE:
            wrong.append(f"{rows[0]['model']} f32 {stage}: {mine:.1e} from PyTorch's logits, wanted {F32_TOLERANCE:g}")
        mine, theirs = (by.get(("bf16", scan), {}).get(stage) for scan in ("ours", "triton"))
        if mine is not None and theirs is not None and not mine < BF16_FACTOR * theirs:
            wrong.append(f"{rows[0]['model']} bf16 {stage}: {mine:.1e} from f32, triton's are {theirs:.1e}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens that are decoded")
    parser.add_argument("--kernel", help="of prompts of Mamba-2: a family or an id, in place of what selection picks")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    rows, wrong = [], []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; relative norm of logits less PyTorch's in f32")
    for name in options.models:
        of_model = compare(name, MODELS[name], options.prompt, options.steps, options.kernel)
        rows += of_model
        wrong += verdicts(of_model)
        print(f"{name} ({MODELS[name].like}), {options.prompt} tokens of prompt, {options.steps} decoded")
        for row in of_model:
            figures = row.get("failed") or f"prefill {row['prefill']:.2e}  decode {row['decode']:.2e}"
            print(f"  {row['dtype']:4}  {row['scan']:6}  {figures}  {' '.join(row.get('kernels', ()))}", flush=True)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
