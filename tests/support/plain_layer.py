"""A layer of any settings in f64, from the meaning of its configuration: the other side of the stateful test.

It calls nothing of the library. Settings are the sections "model" and "router" as a user writes them, with the defaults
that the documentation states; weights are the codes that this module draws, with their values in f64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.plain_formats import Draw, Stored, rounded

Scheme = tuple[str, float]
AS_IS: Scheme = ("plain", 0.0)
LETTERS = {"gate": "w1", "up": "w3", "down": "w2"}
LAYER_NAMES = {
    "router": "gate.weight", "bias": "gate.e_score_correction_bias", "logit_bias": "gate.bias",
    "table": "gate.tid2eid", "image_bias": "gate.e_score_correction_bias_vl",
    "shared_gate": "shared_expert_gate.weight", "latent_down": "fc1_latent_proj.weight",
    "latent_up": "fc2_latent_proj.weight", "latent_norm": "latent_norm.weight",
    "norm": "pre_feedforward_layernorm_2.weight", "router_norm": "router.scale", "factors": "router.per_expert_scale",
}  # fmt: skip
GGUF_NAMES = LAYER_NAMES | {
    "router": "ffn_gate_inp.weight", "bias": "exp_probs_b.bias", "logit_bias": "ffn_gate_inp.bias",
    "shared_gate": "ffn_gate_inp_shexp.weight",
}  # fmt: skip
WORDS = {
    "official": {"": "weight", "scale": "weight_scale_inv"},
    "mixtral": {"": "weight", "scale": "weight_scale_inv"},
    "scaled": {"": "weight", "scale": "weight_scale", "global": "weight_scale_2"},
    "compressed_tensors": {"": "weight_packed", "scale": "weight_scale", "zeros": "weight_zero_point",
                           "shape": "weight_shape"},
    "gptq": {"": "qweight", "scale": "scales", "zeros": "qzeros", "order": "g_idx"},
    "awq": {"": "qweight", "scale": "scales", "zeros": "qzeros"},
    "mlx": {"": "weight", "scale": "scales", "zeros": "biases"},
}  # fmt: skip
"""The last word of a tensor of a matrix, by the names of a checkpoint."""


@dataclass(frozen=True)
class Expert:
    """Matrices and biases of one expert, by projection, in f64."""

    matrices: Mapping[str, Tensor]
    biases: Mapping[str, Tensor]


@dataclass(frozen=True)
class Choice:
    """What the router does with some tokens."""

    weights_TE: Tensor
    """f64, of every scored expert; 0 for those that are not chosen."""
    chosen_TE: Tensor
    """bool."""
    select_TE: Tensor
    """f64, by which experts are selected, -inf where their group is not kept."""


class PlainLayer:
    """Weights drawn from a seed, the tensors of a checkpoint with them, and what the layer returns."""

    def __init__(self, settings: Mapping[str, Any], names: str, packing: str, *, seed: int, ordered: bool) -> None:
        """names: of the tensors. packing: of integers. ordered: GPTQ's columns of down by activation."""
        self.model, self.router, self.names, self.packing = settings["model"], settings["router"], names, packing
        self.quant: Mapping[str, Any] = self.model.get("quant", {})
        self.draw, self.tensors, self.ordered = Draw(seed), dict[str, Tensor](), ordered
        self.bytes_of_expert = 0
        """Of one expert without TP, as held: codes, scales, zero points and biases."""
        self._router_weights()
        self._experts()

    def _name(self, what: str) -> str:
        if self.packing == "gguf":
            return GGUF_NAMES[what]
        if self.names == "mixtral" and what in ("bias", "image_bias"):
            return LAYER_NAMES[what].removeprefix("gate.")
        return LAYER_NAMES[what]

    def _keep(self, what: str, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        stored = values.to(dtype)
        self.tensors[self._name(what)] = stored
        return stored.double()

    def _router_weights(self) -> None:
        draw, model, router = self.draw, self.model, self.router
        self.hidden: int = model["hidden_size"]
        self.count: int = model["num_experts"]
        self.scored: int = self.count + model.get("num_zero_experts", 0)
        # A gate in bf16 has the same values in every dtype of a layer.
        size = 2.0 * self.hidden**-0.5
        self.gate_EH = self._keep("router", draw.normal(self.scored, self.hidden) * size, torch.bfloat16)
        self.bias_E = self.logit_bias_E = self.factors_E = self.image_bias_E = None
        self.table_XK: Tensor | None = None
        if router.get("has_correction_bias"):
            fused = model.get("num_fused_shared_experts", 0)
            own = self._keep("bias", draw.normal(self.scored - fused * (draw.of.initial_seed() % 2)) * 0.3)
            self.bias_E = torch.cat((own, torch.zeros(self.scored - len(own))))  # fused ones have no effect
        if router.get("has_logit_bias"):
            self.logit_bias_E = self._keep("logit_bias", draw.normal(self.scored))
        if router.get("has_expert_scale"):
            self.factors_E = self._keep("factors", draw.near(1.0, self.count))
        if router.get("first_image_token") is not None:
            self.image_bias_E = self._keep("image_bias", draw.normal(self.scored) * 0.5)
        if vocabulary := router.get("hash_vocabulary"):
            order = torch.rand((vocabulary, self.count), generator=draw.of).argsort(1)
            self.table_XK = order[:, : router["top_k"]].contiguous()
            self.tensors[self._name("table")] = self.table_XK
        self.norm_H = self.router_norm_H = None
        if model.get("input_norm") is not None:
            self.norm_H = self._keep("norm", draw.near(1.0, self.hidden))
            self.router_norm_H = self._keep("router_norm", draw.near(1.0, self.hidden) * self.hidden**0.5)
        self.width: int = model.get("latent_size") or self.hidden
        if model.get("latent_size"):
            wide, narrow = draw.normal(self.width, self.hidden), draw.normal(self.hidden, self.width)
            self.down_LH = self._keep("latent_down", wide * self.hidden**-0.5, torch.bfloat16)
            self.up_HL = self._keep("latent_up", narrow * self.width**-0.5, torch.bfloat16)
            if model.get("latent_norm") is not None:
                self.latent_norm_L = self._keep("latent_norm", draw.near(1.0, self.width))

    # Matrices, and their names.

    def _experts(self) -> None:
        model, inner = self.model, self.model["moe_intermediate_size"]
        kind, down = self.quant.get("weights", "bf16"), self.quant.get("down") or self.quant.get("weights", "bf16")
        self.experts: list[Expert] = []
        made: list[dict[str, Stored]] = []
        for _ in range(self.count):
            made.append(self._mlp(kind, down, self.width, inner))
            biases = {}
            if model.get("expert_bias"):
                biases = {p: self.draw.normal(len(q.values)).float() * 0.4 for p, q in made[-1].items()}
            self.experts.append(
                Expert({p: q.values for p, q in made[-1].items()}, {p: b.double() for p, b in biases.items()})
            )
        self._name_experts(made)
        self.shared: Expert | None = None
        if model.get("num_shared_experts"):
            wide = model.get("shared_intermediate_size") or model["num_shared_experts"] * inner
            own = self.quant.get("shared", "same")
            kinds = (kind, down) if own == "same" else (own, own)
            parts = self._mlp(*kinds, self.hidden, wide)
            self.shared = Expert({p: q.values for p, q in parts.items()}, {})
            for p, q in parts.items():
                self._put("shared_experts", p, q, plain=own in ("bf16", "fp16", "fp32"))
            if model.get("shared_gate"):
                size = self.hidden**-0.5
                self.shared_gate_H = self._keep("shared_gate", self.draw.normal(1, self.hidden) * size)[0]
        self._count_bytes(made[0])

    def _mlp(self, kind: str, down: str, hidden: int, inner: int) -> dict[str, Stored]:
        block = self.model.get("quant", {}).get("block", (128, 128))[0]

        def drawn(which: str, rows: int, columns: int, *, order: bool = False) -> Stored:
            name = f"{which}_128" if block == 128 and which in ("fp8_block", "int8_block") else which
            name = "fp8_ue8m0" if which == "fp8_block" and self.quant.get("scale") == "ue8m0" else name
            return self.draw.matrix(name, rows, columns, self.packing, order)

        parts = {"gate": drawn(kind, inner, hidden)} if self.model.get("gated", True) else {}
        parts["up"] = drawn(kind, inner, hidden)
        return parts | {"down": drawn(down, hidden, inner, order=self.ordered)}

    def _put(self, folder: str, projection: str, q: Stored, *, plain: bool = False) -> None:
        """Name the tensors of one matrix of one expert, or of the shared ones."""
        if self.packing == "gguf":
            assert folder == "shared_experts"
            self.tensors[f"ffn_{projection}_shexp.weight"] = q.tensors[""]
            return
        words = WORDS.get(self.packing or self.names, WORDS["official"]) if not plain else {"": "weight"}
        word = LETTERS[projection] if self.names == "mixtral" else f"{projection}_proj"
        for extra, tensor in q.tensors.items():
            self.tensors[f"{folder}.{word}.{words[extra]}"] = tensor

    def _name_experts(self, made: list[dict[str, Stored]]) -> None:
        """Numbered tensors, or stacks of all experts."""
        projections = list(made[0])
        if self.packing == "gguf":
            for p in projections:
                self.tensors[f"ffn_{p}_exps.weight"] = torch.stack([each[p].tensors[""] for each in made])
                if self.experts[0].biases:
                    self.tensors[f"ffn_{p}_exps.bias"] = torch.stack([e.biases[p].float() for e in self.experts])
            return
        if self.names not in ("fused", "stacked"):
            for e, each in enumerate(made):
                for p, q in each.items():
                    self._put(f"experts.{e}", p, q)
                    if biases := self.experts[e].biases:
                        self.tensors[f"experts.{e}.{p}_proj.bias"] = biases[p].float()
            return
        for p in projections:
            for extra, suffix in (("", ""), ("scale", "_scale_inv")):
                if extra in made[0][p].tensors:
                    parts = [each[p].tensors[extra] for each in made]
                    self.tensors[f"experts.{p}_proj{suffix}"] = torch.stack(parts)
            if self.experts[0].biases:
                self.tensors[f"experts.{p}_proj_bias"] = torch.stack([e.biases[p].float() for e in self.experts])
        if self.names == "fused":
            for suffix in ("", "_scale_inv"):
                names = [f"experts.{p}_proj{suffix}" for p in ("gate", "up")]
                if names[0] in self.tensors:
                    gate, up = (self.tensors.pop(name) for name in names)
                    octets = [half.contiguous().view(torch.uint8) for half in (gate, up)]
                    self.tensors[f"experts.gate_up_proj{suffix}"] = torch.cat(octets, 1).view(gate.dtype)

    def _count_bytes(self, first: Mapping[str, Stored]) -> None:
        biases = sum(4 * bias.numel() for bias in self.experts[0].biases.values())
        self.bytes_of_expert = biases + sum(q.num_bytes for q in first.values())

    # The equation.

    def normalised(self, x_TH: Tensor, eps: float) -> Tensor:
        return x_TH / torch.sqrt(x_TH.pow(2).mean(1, keepdim=True) + eps)

    def inputs(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """What router and experts read, in the dtype of the tokens."""
        if self.norm_H is None:
            return x_TH, x_TH
        normal_TH = self.normalised(x_TH.double(), self.model["input_norm"])
        return normal_TH.to(x_TH.dtype), (normal_TH * self.norm_H).to(x_TH.dtype)

    def choose(self, x_TH: Tensor, token_ids_T: Tensor | None, coarse: torch.dtype | None) -> Choice:
        """coarse: what logits and scores are rounded to; None: to nothing."""
        router, top_k = self.router, self.router["top_k"]
        gate_EH = self.gate_EH
        if self.router_norm_H is not None:
            gate_EH = gate_EH * self.router_norm_H * self.hidden**-0.5
        logits_TE = self.inputs(x_TH)[0].double() @ gate_EH.T
        if self.logit_bias_E is not None:
            logits_TE = logits_TE + self.logit_bias_E
        if coarse is not None:
            logits_TE = logits_TE.to(coarse).double()
        kind = router.get("scoring_func", "softmax")
        scores_TE = self._scores(logits_TE, kind)
        if coarse is not None and kind in ("sigmoid", "sqrtsoftplus"):
            scores_TE = scores_TE.to(coarse).double()
        plain_TE = logits_TE if kind.startswith(("logit_", "masked_")) else scores_TE
        select_TE = plain_TE if self.bias_E is None else plain_TE + self.bias_E
        if self.image_bias_E is not None and token_ids_T is not None:
            images_TE = plain_TE + self.image_bias_E
            select_TE = torch.where((token_ids_T >= router["first_image_token"])[:, None], images_TE, select_TE)
        select_TE = self._within_groups(select_TE)
        fused = self.model.get("num_fused_shared_experts", 0)
        if fused:
            select_TE = torch.cat((select_TE[:, : self.count - fused], torch.full((len(x_TH), fused), 1e30)), 1)
        ids_TK = select_TE.argsort(dim=1, descending=True, stable=True)[:, :top_k]
        if self.table_XK is not None and token_ids_T is not None:
            text_T = token_ids_T < router.get("first_image_token", 10**9)
            ids_TK = torch.where(text_T[:, None], self.table_XK[token_ids_T * text_T], ids_TK)
        chosen_TE = torch.zeros_like(select_TE, dtype=torch.bool).scatter_(1, ids_TK, True)
        return Choice(self.weigh(scores_TE, chosen_TE), chosen_TE, select_TE)

    def weigh(self, scores_TE: Tensor, chosen_TE: Tensor) -> Tensor:
        weights_TE = scores_TE.masked_fill(~chosen_TE, 0.0)
        if self.router.get("renormalize", True):
            weights_TE = weights_TE / (weights_TE.sum(1, keepdim=True) + 1e-20)
        weights_TE = weights_TE * self.router.get("routed_scaling_factor", 1.0)
        return weights_TE if self.factors_E is None else weights_TE * self.factors_E

    def _scores(self, logits_TE: Tensor, kind: str) -> Tensor:
        kind = kind.removeprefix("logit_")
        if kind == "sigmoid":
            return 1 / (1 + torch.exp(-logits_TE))
        if kind == "softmax":
            powers = torch.exp(logits_TE - logits_TE.amax(1, keepdim=True))
            return powers / powers.sum(1, keepdim=True)
        if kind == "sqrtsoftplus":
            return torch.log1p(torch.exp(logits_TE)).sqrt()
        scores_TE = torch.zeros_like(logits_TE)
        for row, scores in zip(logits_TE.tolist(), scores_TE, strict=True):
            for e, high in enumerate(row):
                near = [low for low in row if low <= high and (high - low) <= 0.02 * max(abs(low), high)]
                scores[e] = 1 / sum(torch.exp(torch.tensor(low - high, dtype=torch.float64)) for low in near)
        return scores_TE

    def _within_groups(self, select_TE: Tensor) -> Tensor:
        groups, kept = self.router.get("num_expert_group", 1), self.router.get("topk_group", 1)
        if groups == kept or not len(select_TE):
            return select_TE
        two = self.bias_E is not None or self.image_bias_E is not None
        two = two or self.router.get("group_score", "auto") == "two_best"
        grouped = select_TE.view(len(select_TE), groups, -1)
        best = grouped.sort(2, descending=True).values[..., : 2 if two else 1].sum(2)
        order = best.argsort(dim=1, descending=True, stable=True)[:, :kept]
        keep = torch.zeros_like(best, dtype=torch.bool).scatter_(1, order, True)
        return grouped.masked_fill(~keep[..., None], -torch.inf).view_as(select_TE)

    def forward(
        self, x_TH: Tensor, weights_TE: Tensor, *, tokens: Scheme = AS_IS, hidden: Scheme = AS_IS,
        shared: tuple[Scheme, Scheme] | None = None, slices: int = 1,
    ) -> Tensor:  # fmt: skip
        """(T, H) in f64 with the weights of a choice. tokens, hidden: what rows are rounded to before the products.

        shared: the same of shared experts; None: they are not added. slices: of TP, which round hidden rows apart.
        """
        router_in_TH, in_TH = x_TH, self.inputs(x_TH)[1]
        y_TH = torch.zeros(len(x_TH), self.width, dtype=torch.float64)
        for e, expert in enumerate(self.experts):
            share_T = weights_TE[:, e]
            rows_TH, factor_T = in_TH, share_T
            if self.router.get("weight_on_input"):
                rows_TH = (in_TH.float() * share_T.float()[:, None]).to(x_TH.dtype)
                factor_T = (share_T != 0).double()
            at = torch.nonzero(factor_T).flatten()
            if len(at):
                rows = rows_TH[at].double()
                if self.model.get("latent_size"):
                    rows = (rows @ self.down_LH.T).to(x_TH.dtype).double()
                y_TH[at] += factor_T[at, None] * self._mlp_of(rows, expert, self.model, tokens, hidden, slices)
        if self.model.get("latent_size"):
            if (eps := self.model.get("latent_norm")) is not None:
                y_TH = self.normalised(y_TH, eps) * self.latent_norm_L
            y_TH = y_TH @ self.up_HL.T
        if self.scored > self.count and self.model.get("zero_expert_type", "identity") == "identity":
            y_TH = y_TH + weights_TE[:, self.count :].sum(1, keepdim=True) * router_in_TH.double()
        if self.shared is not None and shared is not None:
            own = dict(self.model)
            if own.get("shared_activation"):
                own |= {"activation": own["shared_activation"], "swiglu_limit": own.get("shared_swiglu_limit")}
            added_TH = self._mlp_of(x_TH.double(), self.shared, own, *shared, slices)
            if self.model.get("shared_gate"):
                added_TH = added_TH / (1 + torch.exp(-(x_TH.double() @ self.shared_gate_H)))[:, None]
            y_TH = y_TH + self.model.get("shared_scale", 1.0) * added_TH
        return y_TH

    def _mlp_of(
        self, x: Tensor, expert: Expert, model: Mapping[str, Any], tokens: Scheme, hidden: Scheme, slices: int
    ) -> Tensor:
        x = rounded(x, tokens) if tokens != AS_IS else x
        wide = {p: x @ matrix.T + expert.biases.get(p, 0.0) for p, matrix in expert.matrices.items() if p != "down"}
        h = activated(wide.get("gate"), wide["up"], model)
        if hidden != AS_IS:
            h = torch.cat([rounded(part, hidden) for part in h.chunk(slices, 1)], 1)
        return h @ expert.matrices["down"].T + expert.biases.get("down", 0.0)


def activated(gate: Tensor | None, up: Tensor, model: Mapping[str, Any]) -> Tensor:
    """The rows between the two products of an expert."""
    kind, limit = model.get("activation", "silu"), model.get("swiglu_limit")
    alpha = model.get("swiglu_alpha", 1.702)
    plain = {
        "silu": lambda v: v / (1 + torch.exp(-v)), "relu2": lambda v: v.clamp(min=0) ** 2,
        "gelu": lambda v: v * 0.5 * (1 + torch.erf(v * 0.5**0.5)),
        "gelu_tanh": lambda v: v * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (v + 0.044715 * v**3))),
    }  # fmt: skip
    if gate is None:
        return plain[kind](up)
    if kind in plain:
        return plain[kind](gate) * up
    silu = plain["silu"]
    if kind == "situ":
        soft = up if limit is None else limit * torch.tanh(up / limit)
        return soft * alpha * torch.tanh(gate / alpha) / (1 + torch.exp(-gate))
    capped = up.clamp(-limit, limit)
    if kind == "silu_limit":
        return silu(gate).clamp(max=limit) * capped
    if kind == "swiglu_oai":
        return gate.clamp(max=limit) / (1 + torch.exp(-alpha * gate.clamp(max=limit))) * (capped + 1)
    assert kind == "swiglu_limit"
    return silu(gate.clamp(max=limit)) * capped
