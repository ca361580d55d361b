"""`moe-mk demo hf`: a tiny FP8 DeepSeek-V3 in transformers, with experts of this library compared to its own."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_mk.errors import ConfigError
from moe_mk.external.library import find
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.inputs import draws, dtype_of
from moe_mk.lab.cli.screen import Screen
from moe_mk.registry import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

HOSTS = ("hf",)
PROMPTS = 2
PROMPT_LENGTH = 7
SAME = 1e-4
"""In f32 only the order of sums differs; if an ulp rounds an activation to the adjacent FP8 number, LIMIT applies."""
LIMIT = 0.1
"""Relative L2 of logits: five roundings to FP8 e4m3 of 2.6 % each, as squares, through two layers."""


@dataclass(frozen=True)
class DemoOrder:
    """The settings of a demonstration."""

    host: str
    tokens: int
    experts: str
    dtype: str
    keep: Path | None
    seed: int


def demo_hf(screen: Screen, order: DemoOrder, *, as_json: bool) -> int:
    """Write, load, generate, compare. Raises LibraryMissing without transformers."""
    if order.host not in HOSTS:
        raise ConfigError(f"unknown demonstration {order.host!r}{did_you_mean(order.host, HOSTS)}")
    find("transformers")
    facts = _shown(order)
    if as_json:
        print_json(facts)
    else:
        _show(screen, facts)
    return OK if facts["passed"] else MISMATCH


@torch.no_grad()
def _shown(order: DemoOrder) -> dict[str, Any]:
    from moe_mk.integrations.transformers import cpu_fp8, explain, register
    from moe_mk.lab.checkpoints.tiny_models import write_fp8_checkpoint

    transformers = find("transformers")
    find("transformers.utils").logging.disable_progress_bar()
    register(experts=order.experts, activations="checkpoint")
    place = nullcontext(str(order.keep)) if order.keep else tempfile.TemporaryDirectory(prefix="moe-mk-")
    with place as folder, cpu_fp8():
        write_fp8_checkpoint(folder, order.seed % 2**64)
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(folder, experts_implementation="moe_mk", dtype=dtype_of(order.dtype))
        draw = draws(order.seed)
        ids = torch.randint(1, 90, (PROMPTS, PROMPT_LENGTH), generator=draw, dtype=torch.int64, device="cpu")
        report = explain(model).as_dict()
        stored = sorted({str(p.dtype) for name, p in model.named_parameters() if name.endswith("experts.down_proj")})
        ours, mine = _generated(model, ids, order.tokens), model(ids).logits.float()
        model.set_experts_implementation("eager")
        theirs, eager = _generated(model, ids, order.tokens), model(ids).logits.float()
    error = float((mine - eager).norm() / eager.norm())
    equal = sum(a == b for one, other in zip(ours, theirs, strict=True) for a, b in zip(one, other, strict=True))
    return {
        "transformers": transformers.__version__,
        "checkpoint": str(order.keep) if order.keep else None,
        "dtype": order.dtype,
        "experts_stored_as": stored,
        "modules": report["modules"],
        "tokens": ours,
        "tokens_equal": equal,
        "tokens_total": PROMPTS * order.tokens,
        "logits_error": error,
        "logits_limit": LIMIT,
        "passed": error <= LIMIT and (error > SAME or ours == theirs),
    }


def _generated(model: Any, ids: Tensor, tokens: int) -> list[list[int]]:
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return [[int(token) for token in row] for row in made[:, ids.shape[1] :].tolist()]


def _show(screen: Screen, facts: dict[str, Any]) -> None:
    module, count = facts["modules"][0], len(facts["modules"])
    screen.fact("model", f"a random DeepSeek-V3 of {count} MoE layers, FP8 blocks of 128x128, written and loaded")
    stored = ", ".join(facts["experts_stored_as"])
    screen.fact(
        "experts", f"stored as {stored}; unmodified transformers {facts['transformers']} converts them to bf16 on a CPU"
    )
    screen.fact("backend", f"{module['backend']} ({module['because']}), tokens in {facts['dtype']}")
    for rival in module["others"]:
        why = "; ".join(reason["text"] for reason in rival["reasons"]) or f"{rival['cost_us']:,.0f} us (cost model)"
        screen.fact("", f"not {rival['experts']}: {why}")
    for number, row in enumerate(facts["tokens"]):
        screen.fact(f"prompt {number}", " ".join(map(str, row)))
    same = f"{facts['tokens_equal']} of {facts['tokens_total']} tokens equal to those of transformers' own experts"
    error = f"relative difference of logits {facts['logits_error']:.1e} (limit {facts['logits_limit']:g})"
    screen.fact("verify", f"{'PASS' if facts['passed'] else 'FAIL'}  {error}; {same}")
    if facts["dtype"] != "float32" and facts["tokens_equal"] < facts["tokens_total"]:
        screen.fact(
            "", f"logits of a random model are nearly equal, so that rounding to {facts['dtype']} changes the choice"
        )
        screen.fact("", "of tokens; --dtype float32 compares the tokens themselves")
