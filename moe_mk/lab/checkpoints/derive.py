"""The equation of a MoE layer from its class: a small block is built, and what its tensors do is measured.

Tensors are recognised by their shapes, whatever their names. Experts are set so that a token's output shows the
activation, then so that it shows the routing weight of every expert; the settings that reproduce both are checked
against the block with random weights and tokens in f64. Built with transformers 5.23.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from moe_mk.config.base import read_mapping
from moe_mk.config.equation import MODULES, VECTORS, LayerEquation, TensorNames, TensorPart
from moe_mk.errors import MoEMKError, UnsupportedError, unless_signalled
from moe_mk.integrations.hf.model_classes import FAILURES, config_of, first_line, model_of
from moe_mk.integrations.hf.modules import WIDTH, Act, activation_of
from moe_mk.kernels.reference.activation import ACTIVATIONS, activation
from moe_mk.lab.checkpoints.block_tensors import (
    Tensors,
    is_block,
    names_of,
    part_in,
    parts_of,
    shapes_of,
    sizes_of,
    template_of,
    tensors_of_block,
)
from moe_mk.router.router import Router
from moe_mk.shapes import divisors_of
from moe_mk.weights.names import layer_of

TOKENS = 96
CLOSE = 1e-4
"""Of the largest routing weight: some gates compute in f32."""


def derive(path: str | os.PathLike[str], layer: int | None = None) -> LayerEquation:
    """The equation of the layers of a model. path: its config.json or folder. layer: None, the first with experts.

    Raises UnsupportedError for a class that transformers lacks or that cannot be built, and for a block that no
    settings describe, with what differs.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    stated = read_mapping(file)
    return derive_from(config_of(file), stated, layer)


def derive_from(config: PretrainedConfig, stated: Mapping[str, Any], layer: int | None = None) -> LayerEquation:
    """The equation of the layers of a configuration. stated: its config.json."""
    with torch.device("meta"):
        model = model_of(config)
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, block in model.named_modules():
        if (number := layer_of(f"{name}.")) is not None and is_block(block):
            found.setdefault(number, (name, block))  # a second decoder begins at 0 again
    title = f"{type(model).__name__} ({config.model_type})"
    if not found:
        raise UnsupportedError(
            f"no layer of {title} can be derived", ["none of its modules has experts and their router"]
        )
    at = min(found) if layer is None else layer
    if at not in found:
        raise UnsupportedError(f"layer {at} of {title} cannot be derived", [f"layers with experts: {sorted(found)}"])
    name, block = found[at]
    text = config.get_text_config()
    try:
        measured = Measured.of(block, text, at)
        settings = measured.settings()
    except unless_signalled(*FAILURES) as problem:
        if isinstance(problem, MoEMKError):
            raise
        raise UnsupportedError(f"{title} cannot be measured", [first_line(problem)]) from None
    same = [n for n, (_, other) in found.items() if type(other) is type(block) and shapes_of(other) == shapes_of(block)]
    keys = stated.get("text_config") if isinstance(stated.get("text_config"), Mapping) else stated
    assert isinstance(keys, Mapping)
    names = {text.attribute_map.get(key, key) for key in measured.read} | measured.read
    read = {key: value for key, value in keys.items() if key in names and type(value) in (int, float, bool, str)}
    return LayerEquation(
        model_type=str(keys.get("model_type", text.model_type)),
        derived_from=f"{type(block).__name__} of transformers {transformers.__version__}",
        config={key: value for key, value in read.items() if key not in ("model_type", "dtype", "torch_dtype")},
        layers=tuple(sorted(same)),
        model={"name": config.model_type, **settings["model"]},
        router=settings["router"],
        names=measured.names(model, name),
    )


@dataclass
class Measured:
    """A small block of a class, and the sizes of the real one."""

    block: nn.Module
    real: tuple[int, int, int, int]
    """Experts, hidden size, width of an expert, width of the shared experts."""
    read: set[str]
    """Attributes of the configuration that the block reads."""
    numbers: frozenset[int]
    """Whole numbers of the configuration."""
    parts: dict[str, list[Tensor]] = field(default_factory=dict)
    """What was found: the tensors of each of `equation.MODULES` and `VECTORS`, of one or of all experts."""

    @classmethod
    def of(cls, block: nn.Module, config: PretrainedConfig, number: int) -> Measured:
        """Build a small block of the class. config: of the real one."""
        sizes = sizes_of(block)
        assert sizes is not None
        num_experts, hidden = sizes
        real = next(tensors_of_block(block, num_experts, hidden))
        width = real.experts[0].down.shape[1]
        shared = 0 if real.shared is None else real.shared.down.shape[1]
        small_width = next(n for n in (24, 12, 16, 32, 48) if not {num_experts} & {n, 2 * n, 2 * n + 8})
        wanted = {width: small_width, hidden: 2 * small_width + 8}
        if shared not in (0, *wanted):
            wanted[shared] = small_width * (shared // width if shared % width == 0 else 1)
        small, read = copy.deepcopy(config), set[str]()
        for key, value in config.to_dict().items():
            is_count = num_experts in wanted and "experts" in key and "size" not in key
            if type(value) is int and value in wanted and not is_count:
                is_width = hidden == width and ("intermediate" in key or "ffn" in key)
                setattr(small, key, small_width if is_width else wanted[value])
        small._experts_implementation = "eager"
        small.__class__ = _recording(type(config), read)
        made = _built(type(block), small, number)
        numbers = frozenset(value for value in config.to_dict().values() if type(value) is int)
        return cls(made, (num_experts, hidden, width, shared), read, numbers)

    def run(self, x_TH: Tensor) -> Tensor:
        """(T, H) to (T, H)."""
        try:
            try:
                found = self.block(x_TH[None])
            except RuntimeError:  # it converts tokens to f32, and multiplies them with weights that it does not convert
                found = copy.deepcopy(self.block).float()(x_TH[None].float())
        except unless_signalled(*FAILURES) as problem:
            raise UnsupportedError("its block cannot be called with tokens alone", [first_line(problem)]) from None
        found = found[0] if isinstance(found, tuple) else found
        if not isinstance(found, Tensor) or found.numel() != x_TH.numel():
            raise UnsupportedError("its block does not return one tensor of the tokens' shape")
        return found.detach().reshape(x_TH.shape).double()

    @property
    def hints(self) -> set[int]:
        """Small numbers of the configuration."""
        return {value for value in self.numbers if value <= self.real[0]}

    @torch.no_grad()
    def settings(self) -> dict[str, Any]:
        """Keys of MoEConfig.model and .router. Raises UnsupportedError where none computes what the block does."""
        num_experts = self.real[0]
        sizes = sizes_of(self.block)
        if sizes is None or sizes[0] != num_experts:
            raise UnsupportedError("a small block of its class has other experts than the model")
        hidden, reasons = sizes[1], list[str]()
        for tensors in tensors_of_block(self.block, num_experts, hidden):
            act = self._activation(tensors, hidden)
            if act is None:
                reasons = reasons or ["the activation of its experts is none of those that are known"]
                continue
            routing, why = self._routing(tensors, act, hidden)
            if routing is None:
                reasons = [why]
                continue
            shared = self._shared(tensors, act, hidden)
            if isinstance(shared, str):
                reasons = [shared]
                continue
            self._check(tensors, act, shared, routing, hidden)
            self.parts = parts_of(tensors, routing.pop("vectors"))
            return {"model": self._model(tensors, act, shared), "router": routing}
        raise UnsupportedError("no equation that a layer computes is that of its block", reasons)

    @torch.no_grad()
    def names(self, model: nn.Module, path: str) -> TensorNames | None:
        """Where checkpoints of the model hold the tensors; None where they have the names of a known family.

        path: the block in the model. The tensors have other names and shapes there than in the module: those that
        save_pretrained writes. Raises UnsupportedError where one is not found.
        """
        draw = torch.Generator().manual_seed(19)
        for tensor in (*self.block.parameters(), *(t for each in self.parts.values() for t in each)):
            tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64, device="cpu"))
        held = {f"{path}.{key}": tensor for key, tensor in self.block.state_dict().items()}
        saved = revert_weight_conversion(model, held)  # type: ignore[arg-type]
        parts: dict[str, str | TensorPart] = {}
        for key, tensors in self.parts.items():
            first, last = (
                part_in(saved, each, at if "{e}" in key else None)
                for each, at in ((tensors[0], 0), (tensors[-1], len(tensors) - 1))
            )
            if first is None or last is None:
                raise UnsupportedError(f"{key} is in no tensor that save_pretrained writes", sorted(saved)[:8])
            template = template_of(first.tensor, last.tensor, len(tensors) - 1)
            whole = first.rows == "all" and not first.transposed and (("{e}" in template) == ("{e}" in key))
            module = template.removesuffix(".weight") if key in MODULES else template
            plain = whole and (key in VECTORS or template.endswith(".weight"))
            parts[key] = module if plain else TensorPart(tensor=template, rows=first.rows, transposed=first.transposed)
        return names_of(parts, path)

    def _model(self, tensors: Tensors, act: Act, shared: Act | None) -> dict[str, Any]:
        experts, hidden, width, shared_width = self.real
        model: dict[str, Any] = {
            "hidden_size": hidden,
            "moe_intermediate_size": width,
            "num_experts": experts,
            **_settings_of(act),
        }
        if tensors.experts[0].gate is None:
            model["gated"] = False
        if tensors.zeroed:
            model["expert_bias"] = True
        if tensors.shared is not None and shared is not None:
            model |= {
                "num_shared_experts": 1,
                "shared_intermediate_size": shared_width,
                "shared_gate": tensors.shared_gate is not None,
            }
            if shared != act:
                model |= {
                    f"shared_{key}": value for key, value in _settings_of(shared).items() if key != "swiglu_alpha"
                }
        return model

    def _zero(self, tensors: Tensors) -> None:
        """Set everything to 0, so that a test sees what it sets alone."""
        for tensor in (*self.block.parameters(), *tensors.vectors.values(), *tensors.zeroed):
            tensor.zero_()

    def _activation(self, tensors: Tensors, hidden: int) -> Act | None:
        """All experts alike, so that the output is the activation times the sum of the routing weights."""
        self._zero(tensors)
        width = tensors.experts[0].down.shape[1]
        one = torch.eye(width, dtype=torch.float64, device="cpu")
        gated = tensors.experts[0].gate is not None
        for mlp in tensors.experts:
            if mlp.gate is not None:
                mlp.gate[:, :width] = one
            mlp.up[:, width : 2 * width] = one
            mlp.down[:width] = one

        def raw(gate_up: Tensor, stretch: float = 1.0) -> Tensor:
            gate, up = (
                gate_up.double().chunk(2, -1) if gated else (torch.zeros_like(gate_up.double()), gate_up.double())
            )
            x = torch.zeros((gate.numel() // width, hidden), dtype=torch.float64, device="cpu")
            x[:, :width], x[:, width : 2 * width] = gate.reshape(-1, width) * stretch, up.reshape(-1, width) * stretch
            return self.run(x)[:, :width].reshape(gate.shape)

        def at(gate: float, up: float) -> float:
            row = torch.tensor(
                [[gate] * WIDTH + [up] * WIDTH if gated else [up] * WIDTH], dtype=torch.float64, device="cpu"
            )
            return float(raw(row)[0, 0])

        tiny = 1e-6
        sums = {at(tiny, 1.0) / (tiny / 2), at(tiny, 0.0) / (tiny / 2), at(1.0, 1.0), at(1.0, tiny) / (tiny / 2)}
        for total in sums:
            if total:
                found = activation_of(lambda p, s=total: (raw(p) / s).float(), gated=gated, device=torch.device("cpu"))  # type: ignore[misc]
                if found is not None:
                    return found
        return activation_of(lambda p: raw(p, 2.0).float(), gated=gated, device=torch.device("cpu"))

    def _routing(self, tensors: Tensors, act: Act, hidden: int) -> tuple[dict[str, Any] | None, str]:
        """Expert e writes its routing weight to a coordinate of its own; as many as there are at a time."""
        self._zero(tensors)
        draw = torch.Generator().manual_seed(11)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")

        x_TH, num_experts = random(TOKENS, hidden), len(tensors.experts)
        x_TH[:, -1] = 1.0
        tensors.router_EH.copy_(random(num_experts, hidden) * hidden**-0.5 * 1.5)
        for vector in tensors.vectors.values():
            vector.copy_((random(num_experts) * 0.2).reshape(vector.shape))
        for mlp in tensors.experts:
            mlp.up[:, -1] = 1.0
            if mlp.gate is not None:
                mlp.gate[:, -1] = 1.0
        one = torch.ones(1, dtype=torch.float64, device="cpu")
        unit = float(
            activation(
                act.name, None if tensors.experts[0].gate is None else one, one, alpha=act.alpha, limit=act.limit
            )
        )
        parts = []
        for start in range(0, num_experts, hidden):
            here = tensors.experts[start : start + hidden]
            for at, mlp in enumerate(here):
                mlp.down[at] = 1 / (mlp.down.shape[1] * unit)
            parts.append(self.run(x_TH)[:, : len(here)])
            for mlp in here:
                mlp.down.zero_()
        got_TE = torch.cat(parts, 1)
        counts = (got_TE.abs() > 1e-9).sum(1)
        if len(set(counts.tolist())) != 1:
            return None, f"its tokens have {int(counts.min())} to {int(counts.max())} experts"
        top_k, nearest, why = int(counts[0]), float("inf"), ""
        for settings, expected_TE in _routings(x_TH, tensors, top_k, got_TE, self.hints):
            scale = float((got_TE * expected_TE).sum() / expected_TE.square().sum())
            scale = float(f"{scale:.4g}") if abs(float(f"{scale:.4g}") - scale) < CLOSE * abs(scale) else scale
            off_TE = (got_TE - scale * expected_TE).abs()
            if scale > 0 and float(off_TE.max()) <= CLOSE * float(got_TE.abs().max()):
                return settings | {"routed_scaling_factor": scale}, ""
            w_TE = expected_TE if tensors.experts[0].gate is not None else None
            on_input_TE = activation(act.name, w_TE, expected_TE, alpha=act.alpha, limit=act.limit) / unit
            if top_k == 1 and torch.allclose(on_input_TE, got_TE, atol=CLOSE):
                return settings | {"routed_scaling_factor": 1.0, "weight_on_input": True}, ""
            if float(off_TE.mean()) < nearest:
                token, expert = divmod(int(off_TE.argmax()), num_experts)
                shown = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "vectors")
                ours, theirs = scale * float(expected_TE[token, expert]), float(got_TE[token, expert])
                nearest = float(off_TE.mean())
                why = (
                    f"its routing is none that is known; the nearest ({shown}, routed_scaling_factor={scale:.4g}) "
                    f"gives expert {expert} the weight {ours:.4g} for token {token}, the block {theirs:.4g}"
                )
        return None, why

    def _shared(self, tensors: Tensors, act: Act, hidden: int) -> Act | str | None:
        """The activation of the shared experts, or why there is none."""
        if tensors.shared is None:
            return None
        self._zero(tensors)
        draw = torch.Generator().manual_seed(13)
        for part in (tensors.shared.gate, tensors.shared.up, tensors.shared.down, tensors.shared_gate):
            if part is not None:
                part.copy_(
                    torch.randn(part.shape, generator=draw, dtype=torch.float64, device="cpu") * part.shape[1] ** -0.5
                )
        x_TH = 4 * torch.randn((TOKENS, hidden), generator=draw, dtype=torch.float64, device="cpu")
        got = self.run(x_TH)
        factor = 1.0 if tensors.shared_gate is None else torch.sigmoid(x_TH @ tensors.shared_gate.T)
        errors = {
            each: float((factor * tensors.shared(x_TH, each) - got).norm() / got.norm())
            for each in (act, *map(Act, ACTIVATIONS))
        }
        best = min(errors, key=lambda each: errors[each])
        return (
            best
            if errors[best] < CLOSE
            else f"its shared experts differ from {best.name} by {errors[best]:.1e} of their output"
        )

    def _check(self, tensors: Tensors, act: Act, shared: Act | None, routing: Mapping[str, Any], hidden: int) -> None:
        """Compare with the block on random weights and tokens."""
        draw = torch.Generator().manual_seed(17)
        for tensor in {id(t): t for t in (*self.block.parameters(), *tensors.vectors.values())}.values():
            tensor.copy_(
                torch.randn(tensor.shape, generator=draw, dtype=torch.float64, device="cpu") * tensor.shape[-1] ** -0.5
            )
        for tensor in tensors.zeroed:
            tensor.zero_()
        x_TH = torch.randn((TOKENS, hidden), generator=draw, dtype=torch.float64, device="cpu")
        weights_TE = (
            next(
                w
                for s, w in _routings(
                    x_TH, tensors, routing["top_k"], None, {routing["num_expert_group"], routing["topk_group"]}
                )
                if s.items() <= routing.items()
            )
            * routing["routed_scaling_factor"]
        )
        expected = torch.zeros_like(x_TH)
        for expert, mlp in enumerate(tensors.experts):
            w = weights_TE[:, expert : expert + 1]
            expected += mlp(x_TH * w, act) if routing.get("weight_on_input") else mlp(x_TH, act) * w
        if tensors.shared is not None and shared is not None:
            factor = 1.0 if tensors.shared_gate is None else torch.sigmoid(x_TH @ tensors.shared_gate.T)
            expected += factor * tensors.shared(x_TH, shared)
        got = self.run(x_TH)
        off_T = (expected - got).norm(dim=1) / got.norm(dim=1)
        if float(off_T.max()) > CLOSE:
            token = int(off_T.argmax())
            raise UnsupportedError(
                "its block computes something else than its parts",
                [f"the output of token {token} differs by {float(off_T[token]):.1e} of its size"],
            )


def _routings(
    x_TH: Tensor, tensors: Tensors, top_k: int, got_TE: Tensor | None, hints: set[int]
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Every routing of a layer without its scale, simple ones first.

    got_TE: leaves out groups that cannot be. hints: numbers of the configuration. Where as many groups as experts are
    kept, groups show in their scores alone, and are tried if the configuration has their numbers.
    """
    num_experts = len(tensors.experts)
    logits_TE = x_TH @ tensors.router_EH.T
    zero = torch.zeros(num_experts, dtype=torch.float32, device="cpu")
    vectors = {name: v.reshape(-1) for name, v in tensors.vectors.items()}
    uses: list[dict[str, str]] = [{}, *({"correction": v} for v in vectors), *({"logit": v} for v in vectors)]
    uses += [{"correction": a, "logit": b} for a in vectors for b in vectors if a != b]
    groups = [(1, 1)]
    for size in divisors_of(num_experts):
        count = num_experts // size
        if 1 < count and size > 1:
            touched = (
                1 if got_TE is None else int(((got_TE.abs() > 1e-9).view(len(got_TE), count, size).any(2)).sum(1).max())
            )
            groups += [
                (count, kept)
                for kept in range(touched, count)
                if kept * size >= top_k and (kept == touched < min(top_k, count) or {count, kept} <= hints)
            ]
    for (count, kept), use, scoring, renormalize, two_best in itertools.product(
        groups, uses, ("softmax", "sigmoid", "sqrtsoftplus"), (True, False), (False, True)
    ):
        if two_best and (count == 1 or "correction" in use):
            continue
        bias = vectors[use["correction"]].float() if "correction" in use else zero if two_best else None
        logits = (logits_TE + vectors[use["logit"]] if "logit" in use else logits_TE).float()
        router = Router(top_k, count, kept, scoring, renormalize)
        found = router(logits, bias)
        weights_TE = torch.zeros_like(logits_TE).scatter_(1, found.ids_TK.long(), found.weights_TK.double())
        settings: dict[str, Any] = {
            "top_k": top_k,
            "scoring_func": scoring,
            "renormalize": renormalize,
            "has_correction_bias": "correction" in use,
            "has_logit_bias": "logit" in use,
            "num_expert_group": count,
            "topk_group": kept,
        }
        settings["vectors"] = use
        yield settings | ({"group_score": "two_best"} if two_best else {}), weights_TE


def _settings_of(act: Act) -> dict[str, object]:
    """Keys of MoEConfig.model, the factor only of activations that have one."""
    has_factor = act.name in ("swiglu_oai", "situ")
    return {key: value for key, value in act.settings().items() if key != "swiglu_alpha" or has_factor}


def _built(cls: type[nn.Module], config: PretrainedConfig, number: int) -> nn.Module:
    """A block of a class in f64, as its decoder layer builds it."""
    given: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if name in ("config", "cfg", "configuration"):
            given[name] = config
        elif name in ("layer_idx", "layer_id", "layer_index", "layer"):
            given[name] = number
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            given[name] = getattr(config, name, config)
    try:
        made = cls(**given)
    except unless_signalled(*FAILURES) as problem:
        raise UnsupportedError(
            f"{cls.__name__} cannot be built from its configuration alone", [first_line(problem)]
        ) from None
    return made.double().eval()


def _recording(cls: type[PretrainedConfig], read: set[str]) -> type[PretrainedConfig]:
    """The class of a configuration that notes the names of attributes that are read."""

    def note(self: PretrainedConfig, name: str) -> Any:
        if not name.startswith("_"):
            read.add(name)
        return cls.__getattribute__(self, name)  # type: ignore[no-untyped-call]

    return type(cls.__name__, (cls,), {"__getattribute__": note})
