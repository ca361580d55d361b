"""Facts about an experts module of transformers: sizes, layout, weights, and reasons against it.

Flags and parameter names as of `transformers.integrations.moe` and `.finegrained_fp8` of transformers 5.24. Shapes are
read from the parameters, never from attributes: under tensor parallelism those keep the global sizes.

The activation of a module is determined by a test, because its name and flags may be misleading.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from moe_mk.errors import UnsupportedError, unless_signalled
from moe_mk.kernels.reference.activation import ACTIVATIONS, activation
from moe_mk.quant.fp8 import Fp8Block, weight_scheme
from moe_mk.quant.plain import plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.weights.completeness import expect_not_transposed
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, SlotWeights, Weights
from moe_mk.weights.packed_layouts import FLOATS
from moe_mk.weights.scan import Contents
from moe_mk.weights.slices import gate_and_up

WIDTH = 96
"""Columns of a probe: of the gate, and of the up projection."""
SPREADS = (1.0, 8.0, 100.0, 3000.0)
"""Standard deviations of its rows, so that a clamp shows."""
FAR = 1e6
"""Beyond every limit of an activation."""
LOW = 1 / 16
"""A gate below every limit of an activation."""
_SILU_LOW = LOW / (1 + math.exp(-LOW))
CLOSE = 1e-5
"""Relative; two ways to write one activation differ by an ulp or two of f32."""


@dataclass(frozen=True)
class Act:
    """An activation with the parameters that `kernels.reference.activation` takes."""

    name: str
    alpha: float = 1.0
    limit: float | None = None

    def settings(self) -> dict[str, object]:
        """Return the settings as keys of `MoEConfig.model`."""
        limits = {"swiglu_limit": self.limit, "swiglu_alpha": self.alpha} if self.limit is not None else {}
        return {"activation": self.name, **limits}


def activation_of(compute: Callable[[Tensor], Tensor], *, gated: bool, device: torch.device) -> Act | None:
    """The activation that `compute` implements, or None if it is unknown.

    compute: (N, 2I) gate columns, then up columns, to (N, I); ungated (N, I) to (N, I).
    """
    probe = _probe(2 * WIDTH if gated else WIDTH, device)
    try:
        got, candidates = compute(probe.clone()), [Act(name) for name in ACTIVATIONS]
        candidates += _limited(compute, device) if gated else []
    except unless_signalled(
        RuntimeError, TypeError, ValueError, AttributeError
    ):  # it expects other shapes or dtypes: unknown
        return None
    gate, up = probe.chunk(2, dim=-1) if gated else (None, probe)
    for each in candidates:
        expected = activation(each.name, gate, up, alpha=each.alpha, limit=each.limit)
        if got.shape == expected.shape and torch.allclose(got.float(), expected, rtol=CLOSE, atol=CLOSE):
            return each
    return None


def _limited(compute: Callable[[Tensor], Tensor], device: torch.device) -> list[Act]:
    """The limited activations with the parameters that the function would have as one of them.

    Measured at a gate below the limits, and far beyond any. What is measured wrongly does not fit later.
    """
    pairs = [(LOW, 0.0), (LOW, 1.0), (LOW, FAR), (LOW, -FAR), (FAR, 1.0)]
    probe = torch.tensor(pairs, dtype=torch.float32, device=device).repeat_interleave(WIDTH, dim=1)
    none, one, most, least, widest = compute(probe)[:, 0].double().tolist()
    up = (most - least) / 2  # the limit times the factor of the gate
    found = []
    for name, factor in (("swiglu_limit", _SILU_LOW), ("silu_limit", _SILU_LOW), ("swiglu_oai", none)):
        limit = _rounded(up / factor) if factor else 0.0
        if 0 < limit < FAR / 2 and 0 < factor < LOW:
            alpha = _rounded(math.log(none / (LOW - none)) / LOW) if name == "swiglu_oai" else 1.0
            found.append(Act(name, alpha, limit))
    for limit in _soft_limits(up / one) if one else ():
        found.append(Act("situ", _rounded(widest / (limit * math.tanh(1 / limit))), limit))
    return found


def _soft_limits(ratio: float) -> list[float]:
    """The l with l / (l tanh(1 / l)) = ratio, by bisection, where there is one."""
    low, high = 1e-3, FAR
    if not 1 / math.tanh(1 / low) <= ratio <= 1 / math.tanh(1 / high):
        return []
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if 1 / math.tanh(1 / middle) < ratio else (low, middle)
    return [_rounded(low)]


def _rounded(value: float) -> float:
    """A parameter without the error of its measurement: published ones have at most four digits."""
    return float(f"{value:.4g}")


def _probe(columns: int, device: torch.device) -> Tensor:
    draw = torch.Generator("cpu").manual_seed(7)
    rows = [torch.randn((2, columns), generator=draw, dtype=torch.float32, device="cpu") * spread for spread in SPREADS]
    return torch.cat(rows).to(device)


PARAMETERS = (
    "gate_up_proj", "up_proj", "down_proj", "gate_up_proj_scale_inv", "up_proj_scale_inv", "down_proj_scale_inv",
    "gate_up_proj_bias", "up_proj_bias", "down_proj_bias",
)  # fmt: skip
"""Every tensor that an experts module may hold for its two GEMMs."""


@dataclass(frozen=True)
class ModuleFacts:
    """The properties of one experts module."""

    name: str
    """Of its class."""
    num_experts: int
    """On this rank."""
    hidden_size: int
    intermediate_size: int
    gated: bool
    transposed: bool
    """Whether weights are stored as (inputs, outputs)."""
    interleaved: bool
    """Whether gate and up columns alternate."""
    biased: bool
    post_norm: bool
    activation: Act | None
    """A known activation, or None: the module has a custom gate."""
    scheme: QuantScheme
    device: torch.device

    @property
    def canonical(self) -> bool:
        """Whether the module has neither unsupported features nor another layout or biases."""
        return not (self.transposed or self.interleaved or self.biased or self.unsupported)

    @property
    def unsupported(self) -> tuple[str, ...]:
        """The features that no registered experts backend computes."""
        layouts = {
            "transposed weights": self.transposed,
            "interleaved gate and up": self.interleaved,
            "biases": self.biased,
        }
        named = {"a norm after each expert": self.post_norm, "a custom gate": self.activation is None}
        if self.scheme.block is not None:  # with scales
            named = layouts | named
        return tuple(what for what, holds in named.items() if holds)


def is_experts(module: nn.Module | None) -> bool:
    """Whether transformers dispatches this module's forward by `experts_implementation`."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "down_proj")


def tensors_of(module: nn.Module) -> list[Tensor]:
    """The tensors that a forward pass reads, in a fixed order, without freed ones."""
    held = []
    for name in PARAMETERS:  # at every call: a comprehension is a frame of its own
        if (tensor := getattr(module, name, None)) is not None and tensor.device.type != "meta":
            held.append(tensor)
    return held


def free_weights(module: nn.Module) -> None:
    """Free the module's tensors: they keep their shapes on the meta device, and reading their values raises."""
    for name in PARAMETERS:
        held = module._parameters.get(name)
        if held is not None:
            empty = torch.empty_like(held, device="meta", requires_grad=False)
            module._parameters[name] = nn.Parameter(empty, requires_grad=False)


def refuse_until_loaded(module: nn.Module, path: str, where: object) -> None:
    """Let the experts of a model refuse calls and saving until `load_state_dict` fills all of their parameters.

    torch 2.13 multiplies by tensors on the meta device without an error, and by those of `to_empty` anyway.
    path: of the module in its model. where: the checkpoint that has its weights.
    """
    what = f"{path} ({type(module).__name__}) has no weights"
    remedy = f"call moe_mk.integrations.transformers.replace_experts(model, {str(where)!r}) first"

    def refuse(*_: object) -> None:
        raise UnsupportedError(what, [f"the model was built without its experts; {remedy}"])

    def loaded(own: nn.Module, keys: Any) -> None:
        lacks = any(key.rpartition(".")[2] in own._parameters for key in keys.missing_keys)
        if lacks or any(tensor.is_meta for tensor in own.parameters()):
            return
        for hooks in (own._forward_pre_hooks, own._state_dict_pre_hooks):
            for number in [number for number, hook in hooks.items() if hook is refuse]:
                del hooks[number]

    module.register_forward_pre_hook(refuse)
    module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(loaded)  # type: ignore[no-untyped-call]


def save_whole_or_nothing(model: nn.Module) -> None:
    """Let `save_pretrained` of a model refuse before it writes the configuration, which it does before the weights."""
    if hasattr(model, "save_pretrained"):
        # Bound: a copy of the model gets its own.
        object.__setattr__(model, "save_pretrained", MethodType(save_pretrained, model))


def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    """The method of the model's class, once `state_dict` has not refused."""
    if kwargs.get("state_dict") is None:
        model.state_dict()
    type(model).save_pretrained(model, *args, **kwargs)


def facts_of(module: nn.Module) -> ModuleFacts:
    """Describe a module; raises UnsupportedError with the class and everything unsupported."""
    reasons = reasons_against(module)
    if reasons:
        raise UnsupportedError(f"moe_mk cannot compute {type(module).__name__}", reasons)
    gated, transposed = bool(module.has_gate), bool(module.is_transposed)
    down = _tensor(module, "down_proj")
    inner, hidden = (down.shape[1], down.shape[2]) if transposed else (down.shape[2], down.shape[1])
    interleaved = gated and not bool(module.is_concatenated)

    def compute(x: Tensor) -> Tensor:
        if not gated:
            return module.act_fn(x)  # type: ignore[operator, no-any-return]
        both = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2) if interleaved else x
        return module._apply_gate(both)  # type: ignore[operator, no-any-return]

    return ModuleFacts(
        name=type(module).__name__,
        num_experts=down.shape[0],
        hidden_size=hidden,
        intermediate_size=inner,
        gated=gated,
        transposed=transposed,
        interleaved=interleaved,
        biased=bool(module.has_bias),
        post_norm=bool(getattr(module, "has_post_expert_norm", False)),
        activation=activation_of(compute, gated=gated, device=down.device),
        scheme=_scheme(module, down),
        device=down.device,
    )


def reasons_against(module: nn.Module) -> list[str]:
    """All unsupported features of a module; empty for all classes of transformers 5.24 in bf16."""
    first, down = (getattr(module, name, None) for name in (_first_name(module), "down_proj"))
    if not isinstance(first, Tensor) or not isinstance(down, Tensor):
        return [f"it has no {_first_name(module)} and down_proj"]
    gone = "its weights are on the meta device: not loaded yet, or freed by prepare(in_place=True); load the model"
    reasons = [gone] if down.device.type == "meta" else []
    if down.dtype is torch.float8_e4m3fn:
        return reasons + _fp8_reasons(module, first)
    if down.dtype not in FLOATS:
        what = "packed FP4" if down.dtype is torch.int8 else str(down.dtype)
        reasons.append(f"its weights are {what}; bf16, fp16, fp32 and FP8 e4m3 in blocks are read")
    return reasons


def _fp8_reasons(module: nn.Module, first: Tensor) -> list[str]:
    reasons, block, scheme = [], getattr(module, "block_size", None), getattr(module, "activation_scheme", "dynamic")
    if scheme != "dynamic":
        reasons.append(f"activation_scheme is {scheme!r}; only 'dynamic' is computed")
    if block is None:
        return [*reasons, "its FP8 weights have one scale a tensor; scales in blocks (weight_block_size) are read"]
    scales = _tensor(module, f"{_first_name(module)}_scale_inv")
    halves, rows = 2 if module.has_gate else 1, first.shape[1]
    wanted = halves * -(-rows // halves // block[0])
    if scales.shape[1] != wanted:
        reasons.append(f"{scales.shape[1]} rows of scales for {rows} rows in blocks of {block[0]}, expected {wanted}")
    return reasons


def weights_of(module: nn.Module, facts: ModuleFacts) -> Weights:
    """The module's experts as `Weights`, as views; (out, in) each, transposed ones by a view as well.

    Raises WeightError for FP8 experts with NaN codes or invalid scales.
    """
    names = _first_name(module), "down_proj"
    held = (_tensor(module, name) for name in names)
    first, down = (tensor.transpose(1, 2) if facts.transposed else tensor for tensor in held)
    expect_not_transposed(first, down, 2 if facts.gated else 1, names=names)
    if (facts.biased or facts.interleaved) and not facts.unsupported:
        biases = [_tensor(module, f"{name}_bias") if facts.biased else None for name in names]
        order = "interleaved" if facts.interleaved else "gate_up"
        return ExpertWeights.from_engine(
            first, down, order=order, gated=facts.gated, w13_bias=biases[0], w2_bias=biases[1]
        )
    is_fp8, contents = isinstance(facts.scheme, Fp8Block), Contents(stacked=True)
    scales = [_tensor(module, f"{name}_scale_inv") if is_fp8 else None for name in names]
    w13, w2 = QuantTensor(first, scales[0], facts.scheme), QuantTensor(down, scales[1], facts.scheme)
    if not is_fp8:
        return ExpertWeights(w13, w2, gated=facts.gated)
    for name, q, halves in zip(names, (w13, w2), (1 + facts.gated, 1), strict=True):
        contents.note(q, name, f"{name}_scale_inv", "", halves)
    contents.expect_valid(f"the experts of {facts.name} cannot be used")
    # Gate and up have separate scales: in a narrow expert both start a block.
    slots = []
    for e in range(facts.num_experts):
        gate, up = gate_and_up(w13[e], "gate_up") if facts.gated else (None, w13[e])
        slots.append(SlotWeights(gate, up, w2[e]))
    return MappedExpertWeights(tuple(slots), facts.scheme)


def _tensor(module: nn.Module, name: str) -> Tensor:
    held = getattr(module, name)
    assert isinstance(held, Tensor)
    return held.detach()


def _first_name(module: nn.Module) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _scheme(module: nn.Module, down: Tensor) -> QuantScheme:
    if down.dtype is not torch.float8_e4m3fn:
        return plain(down.dtype)
    scales = _tensor(module, "down_proj_scale_inv")
    rows, columns = module.block_size  # type: ignore[misc]
    return weight_scheme((int(rows), int(columns)), ue8m0=scales.dtype is torch.float8_e8m0fnu)
