"""transformers' own Mamba models with this project's kernels in the place of their scans, beside the scans they had.

    python examples/transformers_models.py [--models mamba2 nemotron_h falcon_mamba] [--steps 64] [--store]

Models have the widths of published ones, a few of their layers, and random weights. Each reads a prompt and then
decodes tokens that are given to it, once with every scan:

    torch    transformers' own PyTorch code, in f32: what the others are held against, with the same weights
    triton   mamba-ssm's Triton kernels, where they are installed (of FalconMamba's prompt PyTorch's, as that scan is
             compiled there)
    ours     pyharness.torch, with the kernels that selection picks
    split    the same with `ssd` for prompts of Mamba-2 in f32, whose operands are split in two of bf16
    none     scans that remember nothing, B being zero: how much of the logits hangs on the states at all

In f32 logits of ours must be those of torch to 1e-4 in relative norm; in bf16 no further from them than triton's are,
by a tenth. With --store the figures go to generated/bench/<device>/logits.json, and docs/torch.md shows them. Needs an
NVIDIA GPU, torch and transformers.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
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
from pyharness import build, figures, gpus, logits_table, readme_tables, toolchain
from pyharness.device import image_target
from pyharness.errors import SsmError
from pyharness.families import SsdSpec
from pyharness.peers import mamba_module
from pyharness.spec import parse_id

DEVICE = "cuda"
#: What each dtype is run with. Triton's scans of f32 multiply in tf32: nothing to compare with.
SCANS = {"bf16": ("triton", "ours"), "f32": ("ours", "split", "torch", "none")}
#: The chunk with which Triton's scan of prompts is fastest at these sizes; any gives the same result.
TRITON_CHUNK = 256
#: mamba-ssm's modules of the scans that are Triton's.
TRITON_MODULES = {"selective_state_update": "selective_state_update", "mamba_chunk_scan_combined": "ssd_combined"}
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


def scan_functions(model: Model, scan: str, kernels: Mapping[str, str] | None = None) -> dict[str, Callable[..., Any]]:
    """The scans of a model by their names in its module; `kernels` are those of ours, by the names of scans here.

    Raises:
        DeviceError: mamba-ssm is not installed.
    """
    own = {name: inspect.unwrap(getattr(model.modeling, name)) for name in model.scans.values()}
    if scan == "torch":
        return {name: adapted(function) for name, function in own.items()}
    if scan == "none":
        return {name: forgetful(function) for name, function in own.items()}
    if scan == "ours":
        chosen = kernels or {}
        return {
            name: functools.partial(adapted(getattr(ours, called)), kernel=chosen.get(called))
            for called, name in model.scans.items()
        }
    theirs = {
        name: getattr(mamba_module(TRITON_MODULES[called]), called)
        for called, name in model.scans.items()
        if called in TRITON_MODULES
    }
    found = {name: adapted(function) for name, function in (own | theirs).items()}
    chunked = model.scans.get("mamba_chunk_scan_combined")
    return found | ({chunked: _in_chunks(found[chunked], TRITON_CHUNK)} if chunked else {})


def _in_chunks(function: Callable[..., Any], tokens: int) -> Callable[..., Any]:
    return lambda *arguments, **options: function(*arguments, **(options | {"chunk_size": tokens}))


def launched_since(before: Mapping[str, int]) -> list[dict[str, Any]]:
    """Our kernels that were launched since a count of them, most often first, each with the image that ran."""
    counts = Counter(ours.calls.launched) - Counter(before)
    capability, device = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    found = []
    for kernel, _ in counts.most_common():
        spec = parse_id(kernel)
        image = build.image(spec, image_target(spec, capability, device))
        found.append({"kernel": kernel, "image": {"target": image.target, "sha256": image.sha256}})
    return found


def header(suite: str, protocol: str) -> dict[str, Any]:
    """What a document of figures says of its run. It has no rows of kernels by themselves, which selection reads."""
    return {
        "suite": suite,
        "device": torch.cuda.get_device_name(),
        "driver": gpus.driver().version,
        "compiler": toolchain.find_compiler().version,
        "torch": torch.__version__,
        "transformers": importlib.import_module("transformers").__version__,
        "date": gpus.today(),
        "protocol": protocol,
        "rows": [],
    }


def store(document: Mapping[str, Any]) -> None:
    """Put a document in its place in generated/bench, and bring the page that shows it in line."""
    toolchain.publish_json(figures.stored_path(document["device"], document["suite"]), document)
    readme_tables.write_page(document["suite"])


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


def build_network(model: Model, dtype: torch.dtype, seed: int = 0) -> Any:
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


def compare(name: str, model: Model, prompt: int, steps: int) -> list[dict[str, Any]]:
    """A row a dtype and scan: how far its logits are from PyTorch's in f32."""
    network = build_network(model, torch.bfloat16)
    generator = torch.Generator(DEVICE).manual_seed(1)
    tokens = torch.randint(0, model.sizes["vocab_size"], (1, prompt + steps), generator=generator, device=DEVICE)
    found: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}
    rows: list[dict[str, Any]] = []
    for dtype, scans in SCANS.items():
        if dtype == "f32":
            # The same weights: those that bf16 has.
            network.float()
        for scan in scans:
            kernels = {"mamba_chunk_scan_combined": SsdSpec.family} if scan == "split" else {}
            if not kernels.keys() <= model.scans.keys():
                continue
            row: dict[str, Any] = {"model": name, "like": model.like, "dtype": dtype, "scan": scan}
            before = Counter(ours.calls.launched)
            try:
                with scanning(model, scan_functions(model, "ours" if scan == "split" else scan, kernels)):
                    found[dtype, scan] = logits(network, tokens, prompt)
            except (SsmError, ImportError) as error:
                row["failed"] = str(error)
            row["kernels"] = launched_since(before)
            rows.append(row)
    truth = found["f32", "torch"]
    for row in rows:
        if "failed" not in row:
            both = zip(found[row["dtype"], row["scan"]], truth, strict=True)
            row["prefill"], row["decode"] = (distance(one, wanted) for one, wanted in both)
    return rows


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the rows of one model, if anything."""
    name = rows[0]["model"]
    by = {(row["dtype"], row["scan"]): row for row in rows}
    mine = [row for row in rows if row["scan"] in ("ours", "split")]
    wrong = [f"{name} {row['dtype']} {row['scan']}: {row['failed']}" for row in mine if "failed" in row]
    for stage in ("prefill", "decode"):
        without = by["f32", "none"].get(stage, 0.0)
        if not without > LEAST_SHARE:
            wrong.append(f"{name} {stage}: {without:.1e} from PyTorch's logits without states: too near")
        for row in mine:
            far, theirs = row.get(stage, 0.0), by["bf16", "triton"].get(stage)
            if row["dtype"] == "f32" and not far < F32_TOLERANCE:
                wrong.append(
                    f"{name} f32 {row['scan']} {stage}: {far:.1e} from PyTorch's logits, wanted {F32_TOLERANCE:g}"
                )
            if row["dtype"] == "bf16" and theirs is not None and not far < BF16_FACTOR * theirs:
                wrong.append(f"{name} bf16 {stage}: {far:.1e} from f32, triton's are {theirs:.1e}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens that are decoded")
    parser.add_argument("--store", action="store_true", help="keep the figures and bring docs/torch.md in line")
    options = parser.parse_args()
    if options.store and set(options.models) != set(MODELS):
        parser.error("--store wants all models: leave --models out")
    document = header(logits_table.SUITE, "examples/transformers_models.py, random weights and tokens, one GPU")
    document |= {"prompt": options.prompt, "steps": options.steps, "comparisons": []}
    wrong = []
    print(f"{document['device']}, torch {document['torch']}; relative norm of logits less PyTorch's in f32")
    for name in options.models:
        of_model = compare(name, MODELS[name], options.prompt, options.steps)
        document["comparisons"] += of_model
        wrong += verdicts(of_model)
        print(f"{name} ({MODELS[name].like}), {options.prompt} tokens of prompt, {options.steps} decoded")
        for row in of_model:
            distances = row.get("failed") or f"prefill {row['prefill']:.2e}  decode {row['decode']:.2e}"
            kernels = " ".join(one["kernel"] for one in row["kernels"])
            print(f"  {row['dtype']:4}  {row['scan']:6}  {distances}  {kernels}", flush=True)
        torch.cuda.empty_cache()
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    if options.store and not wrong:
        store(document)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
