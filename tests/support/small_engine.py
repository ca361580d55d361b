"""A small MoE layer in plain torch that is written like an engine's, with faults to inject, recorded as a case file.

It shares no code with the judge: weights are decoded here element by element, experts are looped over rank by rank in
bf16, and each fault is a branch where an engine would have it.
"""

from dataclasses import dataclass, field

import torch

from moe_mk.config import ModelConfig, RouterConfig
from moe_mk.lab.judge import Case
from moe_mk.quant.kinds import scheme_of_kind

E4M3 = torch.float8_e4m3fn
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Layer:
    """Settings and weights of a layer; `forward` computes it, with a fault if one is named."""

    kind: str = "bf16"
    tokens: int = 16
    hidden: int = 256
    inner: int = 256
    experts: int = 8
    top_k: int = 2
    tp: int = 1
    ep: int = 1
    shared: bool = False
    groups: int = 1
    bias: bool = True
    scoring: str = "sigmoid"
    factor: float = 2.5
    activation: str = "silu"
    limit: float | None = None
    quantised_rows: bool = False
    eplb: bool = False
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    expert_bias: bool = False
    model: ModelConfig = field(init=False)
    router: RouterConfig = field(init=False)

    def __post_init__(self):
        self.draw = torch.Generator().manual_seed(1000 + self.seed)
        activations = {"fp8_block": "fp8", "int8": "int8"}.get(self.kind, "none") if self.quantised_rows else "none"
        kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype] if self.kind == "bf16" else self.kind
        quant = {"weights": kind, "activations": activations}
        self.model = ModelConfig(
            hidden_size=self.hidden, moe_intermediate_size=self.inner, num_experts=self.experts,
            num_shared_experts=int(self.shared), activation=self.activation, swiglu_limit=self.limit, quant=quant,
            expert_bias=self.expert_bias,
        )  # fmt: skip
        self.router = RouterConfig(
            top_k=self.top_k, scoring_func=self.scoring, has_correction_bias=self.bias, num_expert_group=self.groups,
            topk_group=max(1, self.groups // 2), routed_scaling_factor=self.factor,
        )  # fmt: skip
        self.gate = self.normal(self.experts, self.hidden) * 2 * self.hidden**-0.5
        self.correction = self.normal(self.experts) * 0.2 if self.bias else None
        self.w13 = self.stored(self.experts, 2 * self.inner, self.hidden, 1.4)
        self.w2 = self.stored(self.experts, self.hidden, self.inner, 1.0)
        self.b13 = self.normal(self.experts, 2 * self.inner).to(self.dtype) if self.expert_bias else None
        self.b2 = self.normal(self.experts, self.hidden).to(self.dtype) if self.expert_bias else None
        self.s13 = self.stored(1, 2 * self.inner, self.hidden, 1.4) if self.shared else None
        self.s2 = self.stored(1, self.hidden, self.inner, 1.0) if self.shared else None
        self.physical = torch.randperm(self.experts, generator=self.draw) if self.eplb else None
        self.x = self.rows(self.tokens)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.draw)

    def rows(self, count):
        """Hidden states with a few outlying features, as real ones have."""
        x = self.normal(count, self.hidden)
        x[:, torch.randint(self.hidden, (3,), generator=self.draw)] *= 8.0
        return x.to(self.dtype)

    def stored(self, count, rows, columns, gain):
        """Weights of uneven magnitude, stored in the format: a dict of tensors."""
        w = self.normal(count, rows, columns) * gain * columns**-0.5
        size = (0.6 * self.normal(count, -(-rows // 64), -(-columns // 64))).exp()
        w *= size.repeat_interleave(64, 1)[:, :rows].repeat_interleave(64, 2)[:, :, :columns]
        if self.kind == "bf16":
            return {"values": w.to(self.dtype)}
        q = scheme_of_kind(self.kind).quantize(w)
        found = {"values": q.values, "scale": q.scales, "zeros": q.zeros}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def decode(self, stored, e, fault="", which="w13"):
        """The weights of one expert as f32."""
        v = stored["values"][e]
        if self.kind == "bf16":
            return v.float()
        if self.kind.startswith("q"):
            return scheme_of_kind(self.kind).dequantize(
                type(scheme_of_kind(self.kind).quantize(torch.zeros(1, 256)))(v, None, scheme_of_kind(self.kind)),
                torch.float32,
            )
        other = (e + 1) % self.experts if fault == "scale of another expert" else e
        s = stored["scale"][other].float()
        if fault == "scale dropped":
            s = torch.ones_like(s)
        if fault == "scale squared":
            s = s * s
        codes, (tall, wide) = v, s.shape
        if self.kind == "mxfp4" or self.kind.startswith("int4"):
            u = v.view(torch.uint8).int()
            codes = torch.stack([u & 15, u >> 4], -1).flatten(1)
        n, k = codes.shape
        if fault == "scale transposed":  # each projection has blocks of its own
            halves = 2 if which == "w13" else 1
            s = torch.cat([half.T.reshape(half.shape) for half in s.chunk(halves)])
        rows, columns = -(-n // tall), -(-k // wide)
        at = torch.arange(k) // columns
        if fault == "group of another size":
            at = (torch.arange(k) // (columns // 2)).clamp(max=wide - 1)
        s = s.repeat_interleave(rows, 0)[:n][:, at]
        if self.kind == "mxfp4":
            return FP4[codes.long()] * s
        if self.kind.startswith("int"):
            zero = 8.0 if self.kind.startswith("int4") else 128.0
            if "zeros" in stored:
                zero = stored["zeros"][e].float().repeat_interleave(columns, 1)[:, :k]
            if fault == "zero point off by one":
                zero = zero + 1
            return (codes.float() - zero) * s
        return codes.float() * s

    def case(self, fault="", record=(), **changes):
        """The call, recorded. record: names of intermediate tensors."""
        y, seen = self.forward(fault)
        fields = {
            "model": self.model, "router": self.router, "x": self.x, "y": y, "gate": self.gate,
            "router_logits": seen["router_logits"], "bias": self.correction, "topk_ids": seen["topk_ids"],
            "topk_weights": seen["topk_weights"], "tp": self.tp, "ep": self.ep, "experts": torch.arange(self.experts),
            "physical_to_logical": self.physical, "w13_bias": self.b13, "w2_bias": self.b2,
        }  # fmt: skip
        for name, stored in (("w13", self.w13), ("w2", self.w2), ("shared_w13", self.s13), ("shared_w2", self.s2)):
            for part, tensor in (stored or {}).items():
                fields[name if part == "values" else f"{name}_{part}"] = tensor
        return Case(**(fields | {name: seen[name] for name in record} | changes))

    def route(self, fault):
        logits = self.x.float() @ self.gate.T
        scores = logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self.correction is None else scores + self.correction
        if fault == "bias not used to choose":
            choice = scores
        if self.groups > 1 and fault != "groups ignored":
            grouped = choice.view(len(choice), self.groups, -1)
            best = grouped.topk(2 if self.bias else 1, -1).values.sum(-1).topk(self.groups // 2, -1).indices
            mask = torch.zeros(len(choice), self.groups).scatter(1, best, 1.0)
            choice = torch.where(mask.repeat_interleave(choice.shape[1] // self.groups, 1) > 0, choice, -torch.inf)
        ids = choice.topk(self.top_k, -1).indices
        weights = (choice if fault == "bias in the weights" else scores).gather(1, ids)
        if fault != "never renormalised":
            weights = weights / weights.sum(-1, keepdim=True)
        if fault == "renormalised twice":
            weights = weights.softmax(-1)
        if fault != "routed scaling missing":
            weights = weights * self.factor
        return logits, ids, weights

    def forward(self, fault=""):
        """The output in bf16, and what can be recorded."""
        dtype, x = self.dtype, self.x
        logits, ids, weights = self.route(fault)
        seen = {"router_logits": logits, "topk_ids": ids, "topk_weights": weights}
        inputs = x.roll(1, 0) if fault == "order of tokens, input" else x
        T, K, H, I = self.tokens, self.top_k, self.hidden, self.inner
        seen |= {
            name: torch.zeros(T, K, n, dtype=dtype) for name, n in (("w13_out", 2 * I), ("act_out", I), ("w2_out", H))
        }
        outputs = []
        for rank in range(self.ep):
            for slice_ in range(self.tp):
                y = torch.zeros(T, H, dtype=dtype)
                for t, k in torch.nonzero(ids >= 0).tolist():
                    e = int(ids[t, k])
                    if e * self.ep // self.experts == rank:
                        y[t] += self.expert(inputs[t], self.slot(e, fault), slice_, seen, (t, k), fault) * self.weight(
                            weights[t, k], fault
                        )
                if fault == "padding leaks" and slice_ == 0:  # rows of padding have index 0
                    for e in ids.unique().tolist():
                        if e * self.ep // self.experts == rank:
                            for _ in range(-int((ids == e).sum()) % 4):
                                y[0] += (self.expert(x[0], e, None, {}, None, "") * weights[0, 0]).to(dtype)
                outputs.append(y)
        if fault == "TP slice doubled":
            outputs[self.tp - 1] = outputs[self.tp - 1] * 2
        if fault == "TP slice missing":
            outputs = [y if at % self.tp else y * 0 for at, y in enumerate(outputs)]
        if fault == "EP rank missing":
            outputs = [y * 0 if at // self.tp == 1 else y for at, y in enumerate(outputs)]
        seen["rank_out"] = torch.stack(outputs)
        total = outputs[0].clone()
        for y in outputs[1:]:
            total = (total + y).to(dtype)
        total = self.misplaced(total, fault)
        seen["routed_out"] = total
        if self.shared:
            own = self.shared_output()
            times = {
                "shared experts missing": 0,
                "shared experts twice": 2,
                "shared experts per rank": self.tp * self.ep,
            }
            total = (total + own * times.get(fault, 1)).to(dtype)
            seen["shared_out"] = own
        return total, seen

    def slot(self, e, fault):
        """Whose weights are used for expert e."""
        local = self.experts // self.ep
        if fault == "experts shifted":
            return e // local * local + (e + 1) % local
        if fault == "physical ids for logical":
            return int(self.physical[e])
        return e

    def weight(self, w, fault):
        return (w * (self.factor if fault == "routed scaling twice" else 1.0)).to(self.dtype)

    def rounded(self, row):
        """A row in FP8 with scales of 128 columns, or as it is."""
        if not self.quantised_rows:
            return row.float()
        groups = row.float().view(-1, 128)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
        return ((groups / scale).to(E4M3).float() * scale).flatten()

    def act(self, g, u, fault):
        if self.limit is not None:
            g = g.clamp(-self.limit, self.limit) if fault == "clamp of the wrong side" else g.clamp(max=self.limit)
            u = u.clamp(-self.limit, self.limit)
        if fault == "activation of another family":
            return torch.nn.functional.gelu(g) * u
        if self.activation == "swiglu_oai":
            return g * torch.sigmoid(1.702 * g) * (u + 1)
        return g * torch.sigmoid(g) * u

    def expert(self, row, e, slice_, seen, at, fault):
        """One row in one expert, in one TP slice of it; None: in all of it."""
        dtype, part = self.dtype, ("scale", "zero", "group")
        of_weights = fault if fault.split(" of ")[0].startswith(part) and not fault.endswith("w2") else ""
        w13 = self.decode(self.w13, e, of_weights).to(dtype).float()
        w2 = self.decode(self.w2, e, fault[:-4] if fault.endswith(", w2") else "", "w2").to(dtype).float()
        if fault == "stale weight" and e == 2:
            w2 = self.decode(self.w2, 5).to(dtype).float()
        x = self.rounded(row)
        if fault == "K block skipped":
            x = torch.cat([x[:64], x[64:128] * 0, x[128:]])
        h = x @ w13.T
        if self.b13 is not None:
            h = h + self.b13[e].float()
        h = h.to(dtype).float()
        if fault == "gate and up swapped":
            h = torch.cat([h[self.inner :], h[: self.inner]])
        if fault == "interleaved for concatenated":
            h = torch.cat([h[0::2], h[1::2]])
        a = self.act(*h.chunk(2), fault).to(dtype)
        kept = self.rounded(a)
        if fault == "K block skipped, w2":
            kept = torch.cat([kept[:-64], kept[-64:] * 0])
        if slice_ is not None:
            step = self.inner // self.tp
            mask = torch.zeros(self.inner)
            mask[slice_ * step : (slice_ + 1) * step] = 1
            part_y = (kept * mask) @ w2.T
        else:
            part_y = kept @ w2.T
        if self.b2 is not None and slice_ in (0, None):
            part_y = part_y + self.b2[e].float()
        if at is not None and seen:
            seen["w13_out"][at], seen["act_out"][at] = h.to(dtype), a
            seen["w2_out"][at] += part_y.to(dtype)
        return part_y.to(dtype)

    def shared_output(self):
        w13, w2 = (
            self.decode(self.s13, 0).to(self.dtype).float(),
            self.decode(self.s2, 0, "", "w2").to(self.dtype).float(),
        )
        x = torch.stack([self.rounded(row) for row in self.x])
        h = (x @ w13.T).to(self.dtype).float()
        a = self.act(*h.chunk(2, -1), "").to(self.dtype)
        return (torch.stack([self.rounded(row) for row in a]) @ w2.T).to(self.dtype)

    def misplaced(self, y, fault):
        if fault == "order of tokens":
            return y[torch.tensor([1, 0, *range(3, self.tokens), 2])]
        if fault == "stale row":
            y = y.clone()
            y[5] = y[3]
        if fault == "tokens beyond a bucket's edge":
            y = y.clone()
            y[16 if self.tokens > 16 else 8 :] = 0
        return y
