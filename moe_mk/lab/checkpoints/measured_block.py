"""Measure a small block: the settings of the layer that it computes, and its tensors.

Tensors are recognised by their shapes, whatever their names. Experts are set so that a token's output shows the
activation, then so that it shows the routing weight of every expert; the settings that reproduce both are checked
against the block with random weights and tokens in f64. Built with transformers 5.24.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from moe_mk.config.equation import MODULES, VECTORS, TensorPart
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.modules import SPREADS, WIDTH, Act, activation_of
from moe_mk.kernels.reference.activation import ACTIVATIONS, activation
from moe_mk.lab.checkpoints.block_tensors import (
    Mlp,
    Tensors,
    part_in,
    parts_of,
    routings,
    sizes_of,
    template_of,
    tensors_of_block,
)
from moe_mk.lab.checkpoints.small_block import TOKENS, SmallBlocks, random, run

CLOSE = 1e-4
"""Of the largest routing weight: some gates compute in f32."""


class Measured:
    """A small block, and what was found of it."""

    def __init__(self, blocks: SmallBlocks) -> None:
        """Raises UnsupportedError where no block is built."""
        self.blocks, self.block, self.real = blocks, blocks.build(), blocks.real
        self.parts: dict[str, list[Tensor]] = {}
        """The tensors of each of `equation.MODULES` and `VECTORS`, of one or of all experts."""

    def run(self, x_TH: Tensor) -> Tensor:
        """(T, H) to (T, H)."""
        return run(self.block, x_TH)

    @torch.no_grad()
    def settings(self) -> dict[str, Any]:
        """Keys of MoEConfig.model and .router. Raises UnsupportedError where none computes what the block does."""
        sizes, reasons = sizes_of(self.block), list[str]()
        assert sizes is not None
        hidden = sizes.hidden
        for number, tensors in enumerate(tensors_of_block(self.block, sizes)):
            act = self._activation(tensors, tensors.experts, hidden) if 2 * tensors.width < tensors.reach else None
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
            _check(self.block, tensors, act, shared, routing, hidden)
            # A number that follows from the sizes of the block is another one in a block of other sizes.
            other = self.blocks.build(1)
            sizes = sizes_of(other)
            assert sizes is not None
            tensors_of_other = next(itertools.islice(tensors_of_block(other, sizes), number, None))
            _check(other, tensors_of_other, act, shared, routing, sizes.hidden)
            self.parts = parts_of(tensors, routing.pop("vectors"))
            model = self._model(tensors, act, shared, routing.pop("zero"))
            return {"model": model, "router": routing}
        raise UnsupportedError("no equation that a layer computes is that of its block", reasons)

    @torch.no_grad()
    def names(self, model: nn.Module, path: str) -> dict[str, str | TensorPart]:
        """The tensors of checkpoints of the model, by `equation.MODULES` and `VECTORS`.

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
            after = self.real.sizes.experts if key.startswith("shared_experts.{e}") else 0
            is_row = key in VECTORS and saved[first.tensor].ndim == 2
            turned = first.transposed or is_row
            whole = first.rows == "all" and not turned and (("{e}" in template) == ("{e}" in key))
            module = template.removesuffix(".weight") if key in MODULES else template
            plain = whole and (key in VECTORS or template.endswith(".weight")) and not after
            place = {"rows": first.rows, "transposed": turned, "first": after}
            parts[key] = module if plain else TensorPart.model_validate({"tensor": template, **place})
        return parts

    def _model(self, tensors: Tensors, act: Act, shared: Act | None, zero: str) -> dict[str, Any]:
        sizes = self.real.sizes
        model: dict[str, Any] = {
            "hidden_size": sizes.hidden,
            "moe_intermediate_size": self.real.width,
            "num_experts": sizes.experts + sizes.fused,
            **_settings_of(act),
        }
        if sizes.fused:
            model["num_fused_shared_experts"] = sizes.fused
        if sizes.zero:
            model |= {"num_zero_experts": sizes.zero, "zero_expert_type": zero}
        if tensors.latent is not None:
            model["latent_size"] = self.real.reach
        if tensors.experts[0].gate is None:
            model["gated"] = False
        if tensors.zeroed:
            model["expert_bias"] = True
        if tensors.shared is not None and shared is not None:
            model |= {
                "num_shared_experts": 1,
                "shared_intermediate_size": self.real.shared_width,
                "shared_gate": tensors.shared_gate is not None,
            }
            if shared != act:
                model |= {
                    f"shared_{key}": value for key, value in _settings_of(shared).items() if key != "swiglu_alpha"
                }
        return model

    def _zero(self, tensors: Tensors) -> None:
        """Set everything to 0, so that a test sees what it sets alone. Experts read the first values of a token."""
        for tensor in (*self.block.parameters(), *tensors.vectors.values(), *tensors.zeroed):
            tensor.zero_()
        for tensor in tensors.scales.values():
            tensor.fill_(1.0)
        for tensor in tensors.latent or ():
            tensor.copy_(torch.eye(*tensor.shape, dtype=torch.float64, device="cpu"))

    def _activation(self, tensors: Tensors, mlps: Sequence[Mlp], hidden: int) -> Act | None:
        """All experts alike, so that the output is the activation times the sum of the routing weights.

        mlps: these experts, or the shared ones; all others are 0.
        """
        self._zero(tensors)
        width, gated = tensors.width, mlps[0].gate is not None
        one = torch.eye(width, dtype=torch.float64, device="cpu")
        for mlp in mlps:
            if mlp.gate is not None:
                mlp.gate[:width, :width] = one
            mlp.up[:width, width : 2 * width] = one
            mlp.down[:width, :width] = one

        def raw(gate_up: Tensor, stretch: float = 1.0) -> Tensor:
            gate, up = (
                gate_up.double().chunk(2, -1) if gated else (torch.zeros_like(gate_up.double()), gate_up.double())
            )
            x = torch.zeros((gate.numel() // width, hidden), dtype=torch.float64, device="cpu")
            x[:, :width], x[:, width : 2 * width] = gate.reshape(-1, width) * stretch, up.reshape(-1, width) * stretch
            if tensors.sizes.zero:  # the others are chosen
                x[:, -1], tensors.router_EH[: tensors.sizes.experts, -1] = 1.0, 1.0
            return self.run(x)[:, :width].reshape(gate.shape)

        def at(gate: float, up: float) -> float:
            row = torch.tensor(
                [[gate] * WIDTH + [up] * WIDTH if gated else [up] * WIDTH], dtype=torch.float64, device="cpu"
            )
            return float(raw(row)[0, 0])

        tiny = 1e-6
        sums = {at(tiny, 1.0) / (tiny / 2), at(tiny, 0.0) / (tiny / 2), at(1.0, 1.0), at(1.0, tiny) / (tiny / 2)}
        sums.add(at(tiny, tiny) / (tiny * tiny / 2))
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

        x_TH, num_experts, zero = random(draw, TOKENS, hidden), len(tensors.experts), tensors.sizes.zero
        x_TH[:, tensors.reach - 1] = 1.0
        tensors.router_EH.copy_(random(draw, *tensors.router_EH.shape) * hidden**-0.5 * 1.5)
        for vector in tensors.vectors.values():
            vector.copy_((random(draw, vector.numel()) * 0.2).reshape(vector.shape))
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
        own_TH = self.run(x_TH) if zero else torch.zeros_like(x_TH)
        own_T = (own_TH * x_TH).sum(1) / x_TH.square().sum(1)
        if not torch.allclose(own_TH, own_T[:, None] * x_TH, atol=CLOSE):
            return None, "its experts without weights return something else than zeros or the layer's input"
        returned = zero if float(own_T.abs().max()) > 0 else 0

        def measured() -> Tensor:
            parts = []
            for start in range(0, num_experts, tensors.reach):
                here = tensors.experts[start : start + tensors.reach]
                for at, mlp in enumerate(here):
                    mlp.down[at] = 1 / (mlp.down.shape[1] * unit)
                parts.append((self.run(x_TH) - own_TH)[:, : len(here)])
                for mlp in here:
                    mlp.down.zero_()
            return torch.cat([*parts, own_T[:, None]] if returned else parts, 1)

        got_TE = measured()
        counts = (got_TE[:, :num_experts].abs() > 1e-9).sum(1)
        if not zero and len(set(counts.tolist())) != 1:
            return None, f"its tokens have {int(counts.min())} to {int(counts.max())} experts"
        most, nearest, why = int(counts.max()), float("inf"), ""
        found = (
            (routings(x_TH, tensors, k, None if zero else got_TE, self.blocks.hints)) for k in self.choices(most, zero)
        )
        for settings, all_TE in itertools.chain.from_iterable(found):
            zero_T1 = [all_TE[:, num_experts:].sum(1, keepdim=True)] if returned else []
            expected_TE = torch.cat([all_TE[:, :num_experts], *zero_T1], 1) if zero else all_TE
            scale = float((got_TE * expected_TE).sum() / expected_TE.square().sum())
            scale = float(f"{scale:.4g}") if abs(float(f"{scale:.4g}") - scale) < CLOSE * abs(scale) else scale
            off_TE = (got_TE - scale * expected_TE).abs()
            if scale > 0 and float(off_TE.max()) <= CLOSE * float(got_TE.abs().max()):
                found_settings = settings | {"routed_scaling_factor": scale, "zero": "identity" if returned else "drop"}
                return self._scaled(tensors, found_settings, got_TE, measured)
            w_TE = expected_TE if tensors.experts[0].gate is not None else None
            on_input_TE = activation(act.name, w_TE, expected_TE, alpha=act.alpha, limit=act.limit) / unit
            if most == 1 and torch.allclose(on_input_TE, got_TE, atol=CLOSE):
                return settings | {"routed_scaling_factor": 1.0, "weight_on_input": True, "zero": "drop"}, ""
            if float(off_TE.mean()) < nearest:
                token, expert = divmod(int(off_TE.argmax()), off_TE.shape[1])
                shown = ", ".join(f"{key}={value}" for key, value in settings.items() if key != "vectors")
                ours, theirs = scale * float(expected_TE[token, expert]), float(got_TE[token, expert])
                nearest = float(off_TE.mean())
                why = (
                    f"its routing is none that is known; the nearest ({shown}, routed_scaling_factor={scale:.4g}) "
                    f"gives expert {expert} the weight {ours:.4g} for token {token}, the block {theirs:.4g}"
                )
        return None, why

    def choices(self, most: int, zero: int) -> list[int]:
        """How many experts a token can have. most: the greatest number of experts with weights that one has."""
        return sorted({most, *(n for n in self.blocks.hints if most <= n <= 4 * most)}) if zero else [most]

    @staticmethod
    def _scaled(
        tensors: Tensors, settings: dict[str, Any], got_TE: Tensor, measured: Callable[[], Tensor]
    ) -> tuple[dict[str, Any] | None, str]:
        """The settings, with a tensor of one value that multiplies the routing weights where there is one."""
        for name, tensor in tensors.scales.items():
            tensor.fill_(2.0)
            doubled_TE = measured()
            tensor.fill_(1.0)
            if torch.allclose(doubled_TE, 2 * got_TE) and "scale" not in settings["vectors"]:
                settings["vectors"]["scale"], settings["has_expert_scale"] = name, True
            elif not torch.allclose(doubled_TE, got_TE):
                return None, f"{name} has another effect than a factor of the routing weights"
        return settings, ""

    def _shared(self, tensors: Tensors, act: Act, hidden: int) -> Act | str | None:
        """The activation of the shared experts, or why there is none."""
        if tensors.shared is None:
            return None
        own = self._activation(tensors, [tensors.shared], hidden) if tensors.shared_width >= tensors.width else None
        self._zero(tensors)
        draw = torch.Generator().manual_seed(13)
        for part in (tensors.shared.gate, tensors.shared.up, tensors.shared.down, tensors.shared_gate):
            if part is not None:
                part.copy_(random(draw, *part.shape) * part.shape[1] ** -0.5)
        x_TH = torch.cat([random(draw, TOKENS // 4, hidden) * spread for spread in SPREADS])
        got = self.run(x_TH)
        factor = 1.0 if tensors.shared_gate is None else torch.sigmoid(x_TH @ tensors.shared_gate.T)
        known = (*([] if own is None else [own]), act, *map(Act, ACTIVATIONS))
        errors = {each: float((factor * tensors.shared(x_TH, each) - got).norm() / got.norm()) for each in known}
        best = min(errors, key=lambda each: errors[each])
        return (
            best
            if errors[best] < CLOSE
            else f"its shared experts differ from {best.name} by {errors[best]:.1e} of their output"
        )


def _settings_of(act: Act) -> dict[str, object]:
    """Keys of MoEConfig.model, the factor only of activations that have one."""
    has_factor = act.name in ("swiglu_oai", "situ")
    return {key: value for key, value in act.settings().items() if key != "swiglu_alpha" or has_factor}


def _check(
    block: nn.Module, tensors: Tensors, act: Act, shared: Act | None, routing: Mapping[str, Any], hidden: int
) -> None:
    """Compare with a block on random tokens and weights, up to far beyond the limits of activations."""
    draw = torch.Generator().manual_seed(17)
    for tensor in {id(t): t for t in (*block.parameters(), *tensors.vectors.values())}.values():
        tensor.copy_(random(draw, *tensor.shape) * tensor.shape[-1] ** -0.5)
    for tensor in tensors.zeroed:
        tensor.zero_()
    for tensor in tensors.scales.values():
        tensor.fill_(1.5)
    x_TH = random(draw, TOKENS, hidden)
    groups, use = {routing["num_expert_group"], routing["topk_group"]}, routing["vectors"]
    like = {**routing, "vectors": {key: name for key, name in use.items() if name not in tensors.scales}}
    found = (w for s, w in routings(x_TH, tensors, routing["top_k"], None, groups) if s.items() <= like.items())
    weights_TE = next(found) * routing["routed_scaling_factor"] * (1.5 if like["vectors"] != use else 1.0)
    in_TR = x_TH if tensors.latent is None else x_TH @ tensors.latent[0].T
    mlps = [*tensors.experts, *([tensors.shared] if tensors.shared is not None else [])]
    for spread, before in zip(SPREADS, (1.0, *SPREADS), strict=False):
        for matrix in (m for mlp in mlps for m in (mlp.gate, mlp.up) if m is not None):
            matrix.mul_(spread / before)
        expected = torch.zeros_like(in_TR)
        for expert, mlp in enumerate(tensors.experts):
            w = weights_TE[:, expert : expert + 1]
            expected += mlp(in_TR * w, act) if routing.get("weight_on_input") else mlp(in_TR, act) * w
        expected = expected if tensors.latent is None else expected @ tensors.latent[1].T
        if routing["zero"] == "identity":
            expected = expected + weights_TE[:, len(tensors.experts) :].sum(1, keepdim=True) * x_TH
        if tensors.shared is not None and shared is not None:
            factor = 1.0 if tensors.shared_gate is None else torch.sigmoid(x_TH @ tensors.shared_gate.T)
            expected += factor * tensors.shared(x_TH, shared)
        got = run(block, x_TH)
        off_T = (expected - got).norm(dim=1) / got.norm(dim=1)
        if not float(off_T.max()) <= CLOSE:
            token = int(off_T.argmax())
            raise UnsupportedError(
                "its block computes something else than its parts",
                [f"the output of token {token} differs by {float(off_T[token]):.1e} of its size"],
            )
