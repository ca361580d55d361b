"""Recorders: the first call of a layer that a trigger picks, as a case file. Calls return what they returned before.

    fn = record(fn, "case.safetensors", experts, top_k=8)        # any callable of `laws.interface_of`
    fn = record_ggml(fn, "case.safetensors", experts)            # a graph of ggml's operators
    recorded = record_transformers(model, "cases", norm=1e4)     # hooks on every experts module
    recorded = record_vllm(model, "cases", checkpoint=name)      # in each rank: engine.apply_model; record_sglang
    case = joined([read_case(part) for part in parts])           # ranks of one call

A trigger is a row of the output with NaN, infinity, or a norm above `norm`; a norm of 0 picks the first call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_mk.config.moe import ModelConfig
from moe_mk.config.router import RouterConfig
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.integrations.hf.modules import facts_of, is_experts
from moe_mk.lab.judge.casefile import Case, write_case
from moe_mk.lab.testing.laws import interface_of
from moe_mk.quant.kinds import FORMATS, scheme_of_kind
from moe_mk.weights.expert_weights import ExpertWeights

MOST_TOKENS = 64
"""Tokens of a recorded case: those that the trigger picks, then the first others."""


@dataclass
class Recorder:
    """Writes one call to a file. norm: above which a row of the output is picked."""

    path: Path
    norm: float = math.inf
    most_tokens: int = MOST_TOKENS
    facts: dict[str, Any] = field(default_factory=dict)
    """Fields of `Case` that no call changes; stacks of all experts, of which those that were hit are written."""
    is_written: bool = False

    def see(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, y_TH: Tensor) -> None:
        """Write the call if it is the first that the trigger picks. ids_TK: below 0 or beyond all experts: none."""
        if self.is_written:
            return
        picked_T = ~(y_TH.detach().float().norm(dim=1) <= self.norm) if self.norm else y_TH.new_ones(len(y_TH)).bool()
        picked_T = _on_any_rank(picked_T)
        if not bool(picked_T.any()):
            return
        at = torch.argsort((~picked_T).int(), stable=True)[: self.most_tokens].sort().values
        x, ids, weights, y = (each.detach()[at].cpu().clone() for each in (x_TH, ids_TK, weights_TK, y_TH))
        ids = torch.where((ids >= 0) & (ids < self.facts["model"].num_experts), ids.long(), -1)
        router = RouterConfig(top_k=ids.shape[1], renormalize=False)
        known = self.facts | {"router": router, "tokens": at.cpu(), "num_tokens": len(x_TH)}
        write_case(self.path, with_hit_experts(Case(**known, x=x, y=y, topk_ids=ids, topk_weights=weights.float())))
        self.is_written = True


def _on_any_rank(picked_T: Tensor) -> Tensor:
    """The tokens that any rank of the process group picks, so that all ranks write the same ones."""
    group = torch.distributed
    if not (group.is_available() and group.is_initialized() and group.get_world_size() > 1):
        return picked_T
    counts_T = picked_T.int()
    group.all_reduce(counts_T)
    return counts_T > 0


def with_hit_experts(case: Case) -> Case:
    """The case with the weights of the experts that its tokens hit."""
    if case.experts is None or case.topk_ids is None:
        return case
    kept = torch.isin(case.experts, case.topk_ids).nonzero().flatten()
    kept = kept if len(kept) else kept.new_zeros(1)
    stacks = {name: t for name, t in case.tensors.items() if name == "experts" or name.startswith(("w13", "w2"))}
    stacks = {name: t for name, t in stacks.items() if not name.endswith("_out")}
    picked: dict[str, Any] = {name: _rows(t.detach(), kept).cpu() for name, t in stacks.items()}
    return replace(case, **picked)


def _rows(stack: Tensor, at: Tensor) -> Tensor:
    """Entries of a stack; torch 2.13 picks one-byte floats only as bytes."""
    at = at.to(stack.device)
    return stack.view(torch.uint8)[at].view(stack.dtype) if stack.element_size() == 1 else stack[at]


def facts_of_experts(experts: ExpertWeights, activation: str = "silu", **quant: Any) -> dict[str, Any]:
    """The fields of a case that stacked experts give. quant: further settings of `model.quant`."""
    slots, hidden, inner = experts.w2.shape
    kinds = [kind for kind in FORMATS if scheme_of_kind(kind) == experts.scheme]
    if not kinds:
        raise UnsupportedError(f"{experts.scheme.name} cannot be recorded", ["it is none of the types of model.quant"])
    model = ModelConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=slots, activation=activation,
        gated=experts.gated, quant={"weights": kinds[0], **quant},
    )  # fmt: skip
    found: dict[str, Any] = {"model": model, "experts": torch.arange(slots, dtype=torch.int64, device="cpu")}
    for name, q in (("w13", experts.w13), ("w2", experts.w2)):
        parts = {"": q.values, "_scale": q.scales, "_global_scale": q.global_scale, "_zeros": q.zeros}
        found |= {name + part: tensor for part, tensor in parts.items() if tensor is not None}
    return found


def record(
    fn: Callable[..., Tensor],
    path: Path | str,
    experts: ExpertWeights,
    *,
    norm: float = math.inf,
    activation_group: int = 0,
    **quant: Any,
) -> Callable[..., Tensor]:
    """The callable, which writes its first call with NaN, infinity or a norm above `norm`. fn: see `interface_of`.

    experts: what it computes with. quant: further settings of `model.quant`, such as activations="int8".
    activation_group: see `Case`.
    Raises ConfigError for an unknown interface, UnsupportedError for a format that has no name.
    """
    names = {
        "fused_experts": ("hidden_states", "topk_ids", "topk_weights"), "call": tuple(signature(fn).parameters)[:3]
    }.get(interface_of(fn), ("hidden_states", "top_k_index", "top_k_weights"))  # fmt: skip
    facts = facts_of_experts(experts, **quant) | {"activation_group": activation_group}
    recorder = Recorder(Path(path), norm, facts=facts)

    @wraps(fn)
    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        given = signature(fn).bind(*args, **kwargs).arguments
        x, ids, weights = (given[name].detach().clone() for name in names)  # a call may overwrite them
        y = fn(*args, **kwargs)
        recorder.see(x, ids, weights, y)
        return y

    return recorded


def record_ggml(
    fn: Callable[..., Tensor], path: Path | str, experts: ExpertWeights, *, norm: float = math.inf
) -> Callable[..., Tensor]:
    """`record` for a graph of ggml's operators (`mul_mat_id`): fn(x, ids, weights), with rows rounded as ggml does.

    Rows become Q8_K blocks of 256 columns for types with such blocks, Q8_0 blocks of 32 for others, and BF16 for BF16
    (ggml-cpu.c, `type_traits_cpu`: vec_dot_type).
    """
    block = experts.scheme.block
    return record(fn, path, experts, norm=norm, activation_group=0 if block is None else 256 if block[1] == 256 else 32)


def record_transformers(
    model: nn.Module, folder: Path | str, *, norm: float = math.inf, **quant: Any
) -> dict[str, Recorder]:
    """Hooks on every experts module of a transformers model; recorders by path, a file `<path>.safetensors` each.

    Raises UnsupportedError, which lists modules that the judge cannot replay, and where there is none.
    """
    recorders, reasons = dict[str, Recorder](), list[str]()
    for path, module in model.named_modules():
        if not is_experts(module):
            continue
        try:
            recorder = Recorder(Path(folder) / f"{path}.safetensors", norm, facts=_facts_of_module(path, module, quant))
        except UnsupportedError as problem:
            reasons.append(f"{path}: {problem}")
            continue

        def seen(_: nn.Module, args: Any, kwargs: Any, y: Tensor, recorder: Recorder = recorder) -> None:
            named = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), args, strict=False)) | kwargs
            x = named["hidden_states"].flatten(0, -2)
            recorder.see(x, named["top_k_index"], named["top_k_weights"], y.flatten(0, -2))

        module.register_forward_hook(seen, with_kwargs=True)
        recorders[path] = recorder
    if reasons or not recorders:
        raise UnsupportedError(f"{type(model).__name__} cannot be recorded", reasons or ["it has no experts modules"])
    return recorders


def _facts_of_module(path: str, module: nn.Module, quant: Mapping[str, Any]) -> dict[str, Any]:
    facts = facts_of(module)
    if facts.activation is None or facts.post_norm:
        raise UnsupportedError(f"{facts.name} cannot be replayed", [f"it has {each}" for each in facts.unsupported])
    first, block = "gate_up_proj" if facts.gated else "up_proj", getattr(module, "block_size", None)
    named = {"weights": facts.scheme.name} if facts.scheme.block is None else {"weights": "fp8_block", "block": block}
    config = ModelConfig(
        hidden_size=facts.hidden_size, moe_intermediate_size=facts.intermediate_size, num_experts=facts.num_experts,
        gated=facts.gated, quant={**named, **quant}, **facts.activation.settings(),
    )  # fmt: skip
    found: dict[str, Any] = {
        "model": config,
        "experts": torch.arange(facts.num_experts, dtype=torch.int64, device="cpu"),
    }
    for name, held in (("w13", first), ("w2", "down_proj")):
        for part, end in (("", ""), ("_scale", "_scale_inv"), ("_bias", "_bias")):
            if (tensor := getattr(module, held + end, None)) is not None and (part != "_bias" or facts.biased):
                found[name + part] = tensor.transpose(1, 2) if facts.transposed and not part else tensor
    return found | {"layer_name": path, "order": "interleaved" if facts.interleaved else "gate_up"}


def record_vllm(
    model: nn.Module, folder: str, *, checkpoint: str, activation: str = "silu", norm: float = math.inf, **quant: Any
) -> list[str]:
    """Record the routed experts of a model of vLLM (0.32) with enforce_eager in one rank; the files by layer.

    Engines repack weights at load, so cases name the checkpoint that has them. Each rank writes `<layer>.rank<n>`;
    `joined` makes one case of them. While ranks record, every call exchanges which tokens are picked.
    Raises UnsupportedError for a compiled model: its graph contains the layer and calls nothing that can be recorded.
    """
    compiled = [path for path, module in model.named_modules() if getattr(module, "do_not_compile", True) is False]
    if compiled:
        raise UnsupportedError(
            "a compiled model cannot be recorded", [f"{compiled[0] or 'the model'} is compiled; set enforce_eager=True"]
        )
    files = []
    for path, module in model.named_modules():
        if not hasattr(module, "forward_modular") or not hasattr(module, "w13_weight"):
            continue
        own, parallel = module.moe_config, module.moe_config.moe_parallel_config
        config = ModelConfig(
            hidden_size=own.hidden_dim, num_experts=own.num_experts, activation=activation, quant=quant,
            moe_intermediate_size=own.intermediate_size_per_partition * parallel.tp_size,
        )  # fmt: skip
        rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
        recorder = _of_rank(path, config, rank, Path(folder), checkpoint, norm)

        def forward(
            x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *rest: Any,
            own: Callable[..., Any] = module.forward_modular, recorder: Recorder = recorder, **more: Any,
        ) -> Any:  # fmt: skip
            before = x.clone()
            y = own(x, topk_weights, topk_ids, *rest, **more)
            recorder.see(before, topk_ids, topk_weights, y[-1] if isinstance(y, tuple) else y)
            return y

        module.forward_modular = forward
        files.append(str(recorder.path))
    return files


def _of_rank(path: str, config: ModelConfig, rank: int, folder: Path, checkpoint: str, norm: float) -> Recorder:
    """The recorder of an engine's layer in one rank; `<path>.rank<n>.safetensors`."""
    layer = next((int(part) for part in path.split(".") if part.isdecimal()), -1)
    facts = {"model": config, "checkpoint": checkpoint, "layer": layer, "layer_name": path}
    return Recorder(folder / f"{path}.rank{rank}.safetensors", norm, facts=facts)


def record_sglang(model: nn.Module, folder: str, *, checkpoint: str, norm: float = math.inf, **quant: Any) -> list[str]:
    """Record the FusedMoE layers of a model of SGLang (0.5.23) in one rank, as `record_vllm` does; the files by layer.

    Routing weights are recorded with the routed scaling factor where the layer applies it.
    """
    files = []
    for path, module in model.named_modules():
        own = getattr(module, "moe_runner_config", None)
        if own is None or not hasattr(module, "dispatcher"):
            continue
        config = ModelConfig(
            hidden_size=module.hidden_size, num_experts=module.num_experts, activation=own.activation, quant=quant,
            moe_intermediate_size=module.intermediate_size_per_partition * module.moe_tp_size,
            gated=own.is_gated,
        )  # fmt: skip
        rank = module.moe_ep_rank * module.moe_tp_size + module.moe_tp_rank
        recorder = _of_rank(path, config, rank, Path(folder), checkpoint, norm)

        def forward(
            hidden_states: Tensor, topk_output: Any, *rest: Any, own: Callable[..., Tensor] = module.forward,
            recorder: Recorder = recorder, factor: float = own.routed_scaling_factor or 1.0, **more: Any,
        ) -> Tensor:  # fmt: skip
            before = hidden_states.clone()
            y = own(hidden_states, topk_output, *rest, **more)
            recorder.see(before, topk_output.topk_ids, topk_output.topk_weights * factor, y)
            return y

        module.forward = forward
        files.append(str(recorder.path))
    return files


def joined(parts: Sequence[Case], *, tp: int = 1, ep: int = 1, expert_map: Tensor | None = None) -> Case:
    """One case of the files of all ranks, in order of rank; its output is their sum.

    expert_map: (ep, E), the local slot of each logical expert. Raises ConfigError if the files are of several calls.
    """
    first = parts[0]
    same = all(torch.equal(each.x, first.x) and each.positions == first.positions for each in parts)
    if len(parts) != tp * ep or not same:
        raise ConfigError(f"{len(parts)} cases are not those of {tp * ep} ranks in one call; tokens must be equal")
    rank_out = torch.stack([each.y for each in parts])
    return replace(
        first, tp=tp, ep=ep, rank_out=rank_out, expert_map=expert_map, y=rank_out.double().sum(0).to(first.y.dtype)
    )
