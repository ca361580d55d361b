"""Open the tensors of one layer as views, slice them for a tensor-parallel rank, and check what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_mk.quant import Fp8Block, QuantTensor
from moe_mk.weights.completeness import some
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotWeights, narrow_columns, narrow_rows
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights, LoadFacts
from moe_mk.weights.names import Convention, Part, Role
from moe_mk.weights.scan import Progress, count_bad_scales, count_non_finite
from moe_mk.weights.source import TensorSource


@dataclass
class LayerReader:
    """Opens the tensors of one layer, keeps account of what was opened, and checks it."""

    source: TensorSource
    prefix: str
    convention: Convention
    spec: LayerSpec
    tp_rank: int
    tp_size: int
    names: dict[str, None] = field(default_factory=dict)
    values: list[tuple[str, Tensor]] = field(default_factory=list)
    scales: list[tuple[str, Tensor]] = field(default_factory=list)

    def layer(self, owned: Sequence[int], layer: int) -> LayerWeights:
        """Open everything."""
        # The small ones are copied: a view would carry the mapped file along wherever the weights are copied to.
        gate_EH = self._vector(Part(Role.ROUTER)).clone()
        bias_E = self._vector(Part(Role.BIAS)).to(torch.float32, copy=True) if self.spec.has_gate_bias else None
        shared = self._mlp(Role.SHARED, None) if self.spec.num_shared_experts else None
        slots = {e: self._mlp(Role.EXPERT, e) for e in dict.fromkeys(owned)}
        facts = LoadFacts(
            self.source.where, layer, self.prefix, self.convention.name, tuple(owned), self.tp_rank, self.tp_size,
            sum(t.numel() * t.element_size() for _, t in (*self.values, *self.scales)), tuple(self.names),
        )  # fmt: skip
        mapped = MappedExpertWeights(
            tuple(slots[e] for e in owned), self.spec.scheme, file_backed=self.source.file_backed
        )
        return LayerWeights(gate_EH, bias_E, shared, mapped, facts)

    def content_problems(self, on_progress: Progress | None) -> list[str]:
        """Read everything that was opened once and list NaN codes and broken scales."""
        power_of_two = isinstance(self.spec.scheme, Fp8Block) and self.spec.scheme.ue8m0
        broken, uneven = count_bad_scales(self.scales, power_of_two=power_of_two)
        wild = count_non_finite(self.values, threads=torch.get_num_threads(), on_progress=on_progress)
        told = (
            ("values are NaN or infinite", wild),
            ("scales are not finite and positive", broken),
            ("scales are no power of two, as UE8M0 needs,", uneven),
        )
        return [f"{sum(bad.values())} {what} in {len(bad)} tensors: {_counts(bad)}" for what, bad in told if bad]

    def _mlp(self, role: Role, expert: int | None) -> SlotWeights:
        width = self.spec.intermediate_size if role is Role.EXPERT else self.spec.shared_intermediate_size
        start, length = self.spec.slice_of(width, self.tp_rank, self.tp_size)
        if role is Role.EXPERT and self.convention.fused:
            gate_at, up_at = (0, width) if self.spec.gate_up_order == "gate_up" else (width, 0)
            gate_up = Part(role, "gate_up")
            gate = self._matrix(gate_up, 0, gate_at + start, length, row=expert)
            up = self._matrix(gate_up, 0, up_at + start, length, row=expert)
            return SlotWeights(gate, up, self._matrix(Part(role, "down"), 1, start, length, row=expert))
        gate, up = (self._matrix(Part(role, p, expert), 0, start, length) for p in ("gate", "up"))
        return SlotWeights(gate, up, self._matrix(Part(role, "down", expert), 1, start, length))

    def _matrix(self, part: Part, axis: int, start: int, length: int, row: int | None = None) -> QuantTensor:
        """A slice of a matrix along an axis; row picks the expert of a fused stack."""
        narrow = narrow_rows if axis == 0 else narrow_columns
        name, values = self._open(part, row)
        if not isinstance(self.spec.scheme, Fp8Block):
            q = narrow(QuantTensor(values, None, self.spec.scheme), start, length)
            self.values.append((name, q.values))
            return q
        scale_name, scales = self._open(replace(part, is_scale=True), row)
        q = narrow(QuantTensor(values, scales, self.spec.scheme), start, length)
        assert q.scales is not None
        self.values.append((name, q.values))
        self.scales.append((scale_name, q.scales))
        return replace(q, scales=q.scales.to(torch.float32).to(self.spec.scheme.scale_dtype))

    def _vector(self, part: Part) -> Tensor:
        name, tensor = self._open(part, None)
        self.values.append((name, tensor))
        return tensor

    def _open(self, part: Part, row: int | None) -> tuple[str, Tensor]:
        name = self.convention.spell(part)
        self.names[self.prefix + name] = None
        tensor = self.source.open(self.prefix + name)
        if row is None:
            self.source.read_ahead(self.prefix + name)
            return name, tensor
        num_bytes = tensor[row].numel() * tensor.element_size()
        self.source.read_ahead(self.prefix + name, row * num_bytes, num_bytes)
        return f"{name}[{row}]", tensor[row]


def _counts(bad: dict[str, int]) -> str:
    return some(f"{name} ({count})" for name, count in bad.items())
