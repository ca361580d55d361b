"""`moe-mk trace replay CHECKPOINT`: what replaying recorded experts changes between two number formats of a model.

A rollout in one format generates tokens and records its experts; a trainer in another one evaluates the same tokens
with experts of its own, and with those of the rollout, weighed by its own logits. The Kullback-Leibler divergence of
the next token is what importance sampling has to correct. Source: Ma et al. 2025, arXiv 2510.11370.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.errors import UnsupportedError
from moe_mk.external.library import find
from moe_mk.files import read_json
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.inputs import draws, expect_checkpoint
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.layer.settings import config_of, router_of
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.tensor import QuantTensor
from moe_mk.router.replay import ReplayedTokens
from moe_mk.weights.gguf_source import open_source

if TYPE_CHECKING:
    from torch import nn

    from moe_mk.layer.gate import AnyRouter

PAIRS = (("fp8", "fp32"), ("fp8", "bf16"), ("bf16", "fp32"))
"""Formats of rollout and trainer. fp8: weights and activations of the experts, the rest in bf16."""
QUANTIZATION = "quantization_config"
DTYPES = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class ReplayOrder:
    """The settings of a measurement."""

    checkpoint: Path
    sequences: int = 8
    tokens: int = 128
    seed: int = 0


@dataclass(frozen=True)
class Divergence:
    """Of one pair of formats; KL(rollout || trainer) in nats per token, averaged over all tokens."""

    rollout: str
    trainer: str
    kl: float
    kl_replayed: float
    other_experts: float
    """The share of choices of the rollout that the trainer does not make."""


@torch.no_grad()
def measure(order: ReplayOrder) -> list[Divergence]:
    """Every pair of formats of an FP8 checkpoint. Raises LibraryMissing without transformers."""
    expect_checkpoint(order.checkpoint)
    find("transformers")
    router = router_of(config_of(order.checkpoint))
    from moe_mk.integrations.transformers import cpu_fp8

    with tempfile.TemporaryDirectory(prefix="moe-mk-") as folder, cpu_fp8():
        plain = _dequantized(order.checkpoint, Path(folder))
        models = {name: _loaded(order.checkpoint if name == "fp8" else plain, name) for name in DTYPES}
        return [_divergence(models, pair, router, order) for pair in PAIRS]


def _divergence(models: dict[str, Any], pair: tuple[str, str], router: AnyRouter, order: ReplayOrder) -> Divergence:
    rollout, trainer = pair
    tokens = _generated(models[rollout], order, draws(order.seed))
    theirs, recorded = _evaluated(models[rollout], tokens)
    ours, own = _evaluated(models[trainer], tokens)
    with _replaying(models[trainer], router, recorded):
        replayed, _ = _evaluated(models[trainer], tokens)
    same = [(one[:, :, None] == two[:, None, :]).any(-1).double() for one, two in zip(recorded, own, strict=True)]
    return Divergence(rollout, trainer, _kl(theirs, ours), _kl(theirs, replayed), 1.0 - float(torch.stack(same).mean()))


def replay(screen: Screen, order: ReplayOrder, *, as_json: bool) -> int:
    """Measure and print a table."""
    found = measure(order)
    if as_json:
        return print_json([asdict(each) for each in found])
    table = table_of(["rollout", "trainer", "other experts", "KL", "KL, replayed", "ratio"], ("rollout", "trainer"))
    for each in found:
        ratio = f"{each.kl_replayed / each.kl:.2f}" if each.kl else "-"
        shown = f"{100 * each.other_experts:.2f} %", f"{each.kl:.2e}", f"{each.kl_replayed:.2e}", ratio
        table.add_row(each.rollout, each.trainer, *shown)
    screen.console.print(table)
    return OK


def _dequantized(checkpoint: Path, folder: Path) -> Path:
    """Write a checkpoint in f32, as transformers loads it without the libraries of its FP8 quantizer."""
    source, tensors = open_source(checkpoint), dict[str, Tensor]()
    for name in source.names():
        if not name.endswith("_scale_inv"):
            values, scales = source.read(name), f"{name}_scale_inv"
            if scales in source.names():
                values = QuantTensor(values, source.read(scales), FP8_128x128).dequantize(torch.float32)
            tensors[name] = values.to(torch.float32).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    described = {key: value for key, value in read_json(checkpoint / "config.json").items() if key != QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def _loaded(checkpoint: Path, name: str) -> Any:
    from moe_mk.integrations.transformers import register

    transformers = find("transformers")
    find("transformers.utils").logging.disable_progress_bar()
    register(activations="checkpoint")
    experts = "moe_mk" if name == "fp8" else "eager"
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(checkpoint, dtype=DTYPES[name], experts_implementation=experts)
    if not gates_of(model):
        way = "its gates do not return logits, weights and ids; use DeepSeek-V3"
        raise UnsupportedError(f"replay in {type(model).__name__}", [way])
    return model.eval()


def gates_of(model: nn.Module) -> list[nn.Module]:
    """The gates that return logits, weights and ids, as those of DeepSeek-V3 in transformers 5."""
    return [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]


def _generated(model: Any, order: ReplayOrder, draw: torch.Generator) -> Tensor:
    """Tokens that the model draws after one random token."""
    size, new = (order.sequences, 1), order.tokens - 1
    tokens = torch.randint(1, model.config.vocab_size - 1, size, generator=draw, dtype=torch.int64, device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(order.seed)
        drawn: Tensor = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new,
            do_sample=True, top_k=0, pad_token_id=0,
        )  # fmt: skip
    return drawn


def _evaluated(model: Any, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of the next token in f64, and the ids of every gate."""
    ids: list[Tensor] = []
    hooks = [gate.register_forward_hook(lambda _, __, out: ids.append(out[2])) for gate in gates_of(model)]
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return logits.double().log_softmax(-1), ids


@contextmanager
def _replaying(model: nn.Module, router: AnyRouter, recorded: list[Tensor]) -> Iterator[None]:
    """Recorded experts in every gate, weighed by its own logits."""

    def hook(ids_TK: Tensor) -> Any:
        def replaced(_: nn.Module, __: object, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            weights_TK = ReplayedTokens.of(router, ids_TK, out[0].shape[-1])(out[0]).weights_TK
            return out[0], weights_TK.to(out[1].dtype), ids_TK

        return replaced

    with ExitStack() as stack:
        for gate, ids_TK in zip(gates_of(model), recorded, strict=True):
            stack.callback(gate.register_forward_hook(hook(ids_TK)).remove)
        yield


def _kl(theirs: Tensor, ours: Tensor) -> float:
    return float((theirs.exp() * (theirs - ours)).sum(-1).mean())
