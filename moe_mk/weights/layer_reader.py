"""Open the tensors of one layer as views, slice them for a tensor-parallel rank, and check their contents."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional

from moe_mk.config.equation import FUSED_SHARED_BIAS
from moe_mk.errors import CheckpointWarning, FallbackWarning, WeightError
from moe_mk.quant import WHOLE, BlockedScheme, Plain, QuantScheme, QuantTensor, plain
from moe_mk.quant.grouped import grouped
from moe_mk.weights.expert_weights import MappedExpertWeights, SlotBiases, SlotWeights
from moe_mk.weights.layer_spec import LayerSpec
from moe_mk.weights.layer_weights import LayerWeights, LoadFacts
from moe_mk.weights.names import Convention, Part, Role
from moe_mk.weights.packed_layouts import DECODED, IN_GGUF, WORD, Unpacked, decoded, of_gguf, unpack
from moe_mk.weights.scan import Contents, Progress
from moe_mk.weights.slices import gate_and_up, halves_of, narrow_columns, narrow_rows
from moe_mk.weights.source import Copies, TensorSource, in_memory


@dataclass
class LayerReader:
    """Opens and records the tensors of one layer, and checks their contents."""

    source: TensorSource
    prefix: str
    convention: Convention
    spec: LayerSpec
    tp_rank: int
    tp_size: int
    names: dict[str, None] = field(default_factory=dict)
    contents: Contents = field(default_factory=Contents)
    table: Tensor | None = None
    """The experts of every token of the vocabulary, once opened."""
    converted: set[tuple[torch.dtype, torch.dtype]] = field(default_factory=set)
    """The conversions between plain dtypes that were reported."""

    def layer(self, owned: Sequence[int], layer: int) -> LayerWeights:
        # Small tensors are copied. Experts stay views of their files until a backend reads them.
        gate_EH = self._vector(Part(Role.ROUTER)).clone()
        bias_E = self._numbers(Role.BIAS, self.spec.has_gate_bias)
        logit_bias_E = self._numbers(Role.LOGIT_BIAS, self.spec.has_logit_bias and self.convention.logit_bias)
        has_gate = self.spec.has_shared_gate
        shared_gate_H = self._vector(Part(Role.SHARED_GATE)).flatten().clone() if has_gate else None
        latent = None
        if self.spec.latent_size is not None:
            parts = ("down", "up", "norm") if self.spec.has_latent_norm else ("down", "up")
            latent = tuple(self._vector(Part(Role.LATENT, each)).clone() for each in parts)
        norm = None
        if self.spec.has_input_norm:
            norm = tuple(self._vector(Part(Role.INPUT_NORM, each)).clone() for each in ("experts", "router"))
        expert_scale_E = self._numbers(Role.EXPERT_SCALE, self.spec.has_expert_scale)
        if expert_scale_E is not None and expert_scale_E.numel() == 1:  # one factor of all
            expert_scale_E = expert_scale_E.expand(self.spec.num_experts).contiguous()
        by_image = self._numbers(Role.IMAGE_BIAS, self.spec.has_image_bias)
        if self.spec.num_fused_shared_experts:
            chosen_E = torch.zeros(len(gate_EH), dtype=torch.float32, device="cpu") if bias_E is None else bias_E
            bias_E, by_image = self._with_fused(chosen_E), None if by_image is None else self._with_fused(by_image)
        if self.spec.table is not None:
            self.table = self._read(Part(Role.TABLE), None)[1].clone()
            self.contents.codes += self.table.nbytes
        shared = self.mlp(None) if self.spec.num_shared_experts else None
        slots = {e: self.mlp(e) for e in dict.fromkeys(owned)}
        facts = LoadFacts(
            self.source.where, layer, self.prefix, self.convention.name, tuple(owned), self.tp_rank, self.tp_size,
            self.contents.num_bytes, tuple(self.names),
        )  # fmt: skip
        mapped = MappedExpertWeights(tuple(slots[e] for e in owned), self.spec.scheme)
        router = logit_bias_E, shared_gate_H, latent, norm, expert_scale_E, self.table, by_image
        return LayerWeights(gate_EH, bias_E, shared, mapped, facts, *router)

    def _with_fused(self, bias_E: Tensor) -> Tensor:
        """A bias for selection with which every token selects the fused shared experts, the last ones."""
        fused = self.spec.num_fused_shared_experts
        return functional.pad(bias_E[: self.spec.num_experts - fused], (0, fused), value=FUSED_SHARED_BIAS)

    def content_problems(self, on_progress: Progress | None) -> list[str]:
        """Read every opened tensor once and list NaN codes and invalid scales."""
        problems = self.contents.problems(on_progress)
        if self.table is not None:
            wrong = int(((self.table < -1) | (self.table >= self.spec.num_experts)).sum())
            name, experts = self.convention.spell(Part(Role.TABLE)), self.spec.num_experts
            problems[:0] = [f"{wrong} entries of {name} name experts outside [-1, {experts})"] if wrong else []
        return problems

    def mlp(self, expert: int | None) -> SlotWeights:
        """An expert; None: all shared experts as one MLP.

        Where packed columns of down are ordered by activation, so are rows of gate and up.
        """
        role = Role.SHARED if expert is None else Role.EXPERT
        width = self.spec.intermediate_size if role is Role.EXPERT else self.spec.shared_intermediate_size
        share = self.spec.slice_of(width, self.tp_rank, self.tp_size)
        found = {projection: self._whole(role, projection, expert) for projection in (*self.spec.wide, "down")}
        down_names, down = found.pop("down")
        halves = []
        for names, whole in found.values():
            if whole.order_K is not None:
                raise WeightError(
                    f"{names[0]}: columns are ordered by activation (desc_act), each expert by its own order, and "
                    "tokens are not permuted for each expert; quantise with desc_act = false or with static groups"
                )
            q = whole.q if down.order_K is None else whole.q.changed(in_memory)[down.order_K]
            halves.append(self._noted(narrow_rows(q, *share), names))
        has_biases = role is Role.EXPERT and self.spec.has_expert_bias
        biases = self._biases(expert, share, down.order_K) if has_biases else None
        down_HI = self._noted(narrow_columns(down.q, *share), down_names)
        return SlotWeights(halves[0] if self.spec.gated else None, halves[-1], down_HI, biases)

    def _whole(self, role: Role, projection: str, expert: int | None) -> tuple[tuple[str, str], Unpacked]:
        """A whole matrix in the layout of its scheme, and the names of its values and scales."""
        stacked = (self.convention.stacked or self.convention.fused) and role is Role.EXPERT
        row, scheme = expert if stacked else None, self.spec.scheme_of(role, projection)
        fused = stacked and self.convention.fused and projection != "down"
        part = Part(role, "gate_up" if fused else projection, None if stacked else expert)
        if not self.convention.packing:
            names, q = self._quantised(part, row)
            return names, Unpacked(gate_and_up(q, self._order)[projection == "up"] if fused else q)
        copies = Copies()
        if isinstance(scheme, Plain) and self.convention.packing != "gguf":
            part = replace(part, extra="plain") if self.convention.holds(role, "plain") else part
            name, values = self._open(part, row)
            return (name, ""), Unpacked(QuantTensor(values, None, scheme))
        if self.convention.packing == "gguf":
            name, rows = self._open(part, row)
            if fused:
                rows = rows.chunk(2)[projection == "up"]
            return (name, name), Unpacked(self._of_file(part, scheme, copies.of(rows)).changed(copies.back))
        present = self.source.names()
        kinds = {extra: replace(part, extra=extra) for extra in ("", "scale", "zeros", "shape", "order")}
        held = {
            extra: (name, copies.of(tensor))
            for extra, each in kinds.items()
            if self.convention.holds(role, extra) and self.prefix + self.convention.spell(each) in present
            for name, tensor in (self._open(each, row),)
        }
        packing = "gptq_v2" if self.spec.gptq_v2 else self.convention.packing
        found = unpack(packing, scheme, held)
        return (held[""][0], held["scale"][0]), replace(found, q=found.q.changed(copies.back))

    def _of_file(self, part: Part, scheme: QuantScheme, rows: Tensor) -> QuantTensor:
        """Rows of a GGUF file. Shared experts of another type than the routed ones are decoded to bf16, and gate and
        up of different types likewise.
        """
        if rows.dtype is not torch.uint8:
            q = plain(rows.dtype).quantize(rows)
        else:
            stored = self.source.entry(self.prefix + self.convention.spell(part)).dtype_name.lower()
            q = decoded(stored, rows) if stored in DECODED else of_gguf(IN_GGUF.get(stored, scheme), rows)
            if stored in DECODED:
                held = f"held as {q.scheme.name}: {q.num_bytes / rows.nbytes:.1f}x the memory"
                warnings.warn(f"{stored} experts are decoded at load and {held}", FallbackWarning, stacklevel=2)
        if q.scheme == scheme or (part.role is Role.SHARED and isinstance(q.scheme, Plain)):
            return q
        wanted = scheme if isinstance(scheme, Plain) else plain(torch.bfloat16)
        return wanted.quantize(q.dequantize(wanted.dtype))

    @property
    def _order(self) -> str:
        """The order of gate and up in one tensor: that of the convention, else that of the caller."""
        return self.spec.gate_up_order if self.convention.order == "gate_up" else self.convention.order

    def _quantised(self, part: Part, row: int | None) -> tuple[tuple[str, str], QuantTensor]:
        """A whole matrix as a view, in the shapes of its scheme, and the names of its values and scales."""
        scheme = self.spec.scheme_of(part.role, part.projection)
        is_plain = scheme.per_byte == 1 and self.convention.holds(part.role, "plain")
        name, values = self._open(replace(part, extra="plain") if is_plain else part, row)
        turned = self.spec.stacks_transposed and row is not None
        values = values.T if turned else values
        if isinstance(scheme, Plain):
            return (name, ""), QuantTensor(values, None, scheme)
        assert isinstance(scheme, BlockedScheme)
        values = values.flatten(1) if values.dim() == 3 else values
        values = values.view(scheme.element.dtype) if values.dtype is torch.int8 else values
        scale_name, scales = self._open(replace(part, extra="scale"), row)
        tall, wide = scheme.scale_shape(values.shape[0], scheme.logical_columns(values.shape[1]))
        if part.projection == "gate_up" and scheme.rows != WHOLE:
            tall = 2 * scheme.scale_shape(values.shape[0] // 2, 1)[0]
        scales = in_memory(scales).T if turned and scheme.columns != WHOLE else scales
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype is torch.uint8 else scales
        above = self._read(replace(part, extra="global"), row)[1].reshape(1, 1) if scheme.has_global_scale else None
        above = None if above is None else above.to(torch.float32)
        above = 1.0 / above if above is not None and self.convention.divides else above
        return (name, scale_name), QuantTensor(values, scales.reshape(tall, wide), scheme, above)

    def _in_dtype(self, scheme: Plain, values: Tensor) -> QuantTensor:
        """Plain values in the dtype that the settings state, as models are loaded in the dtype of their config.json."""
        if values.dtype is not scheme.dtype and (values.dtype, scheme.dtype) not in self.converted:
            self.converted.add((values.dtype, scheme.dtype))
            how = "widened" if torch.promote_types(values.dtype, scheme.dtype) is scheme.dtype else "rounded"
            stored, dtype = (str(each).removeprefix("torch.") for each in (values.dtype, scheme.dtype))
            warnings.warn(
                f"{self.source.where}: experts under {self.prefix!r} are {stored} and are {how} to {dtype}, the stated "
                f"dtype, in memory of their own; to keep {stored}, state torch_dtype in config.json (quant.weights)",
                CheckpointWarning,
                stacklevel=2,
            )
        return scheme.quantize(values if values.dtype is scheme.dtype else in_memory(values))

    def _noted(self, q: QuantTensor, names: tuple[str, str]) -> QuantTensor:
        """Record opened tensors for the check of their contents, and convert plain values and scales to their dtype."""
        if isinstance(q.scheme, Plain):
            q = self._in_dtype(q.scheme, q.values)
        if self.spec.stacks_transposed:
            scales = None if q.scales is None else in_memory(q.scales).contiguous()
            q = replace(q, values=in_memory(q.values).contiguous(), scales=scales)
        self.contents.note(q, *names, f"{names[0]}, global scale")
        if q.scales is None or q.scheme.family == "wna16":
            return q
        assert isinstance(q.scheme, BlockedScheme)
        if q.scales.dtype is q.scheme.scale_dtype:
            return q
        return replace(q, scales=in_memory(q.scales).to(torch.float32).to(q.scheme.scale_dtype))

    def _biases(self, expert: int | None, share: tuple[int, int], order_I: Tensor | None = None) -> SlotBiases:
        """The biases of an expert, copied. order_I: rows of gate and up.

        With TP each rank has a share of gate and up; only rank 0 has down's.
        """
        fused = self.convention.fused
        row, of = (expert, None) if fused or self.convention.stacked else (None, expert)
        projections = ("gate_up", "down") if fused else (*self.spec.wide, "down")
        found = [self._read(Part(Role.EXPERT, p, of, "bias"), row) for p in projections]
        self.contents.values += found
        *wide, down_H = (bias for _, bias in found)
        if fused:
            wide = [*halves_of(wide[0], self._order)]
        *gate_I, up_I = ((bias if order_I is None else bias[order_I]).narrow(0, *share).clone() for bias in wide)
        down_H = down_H.clone() if self.tp_rank == 0 else torch.zeros_like(down_H)
        return SlotBiases(gate_I[0] if gate_I else None, up_I, down_H)

    def _numbers(self, role: Role, wanted: object) -> Tensor | None:
        """A vector of the router in f32, copied; None if the layer has none."""
        return self._vector(Part(role)).to(torch.float32, copy=True) if wanted else None

    def _vector(self, part: Part) -> Tensor:
        name, tensor = self._read(part, None)
        if tensor.dtype is torch.uint32:
            tensor = self._packed_gate(part, name, tensor)
        self.contents.values.append((name, tensor))
        return tensor

    def _packed_gate(self, part: Part, name: str, words: Tensor) -> Tensor:
        """A gate that MLX packed, in f32."""
        parts = {"": (name, words)}
        for what in ("scale", "zeros"):
            each = replace(part, extra=what)
            if self.prefix + self.convention.spell(each) not in self.source.names():
                raise WeightError(f"{name} is packed without {self.convention.spell(each)}; affine gates are read only")
            parts[what] = self._read(each, None)
        columns, groups = self.spec.hidden_size, parts["scale"][1].shape[1]
        scheme = grouped(WORD * words.shape[1] // columns, columns // groups, biases=True)
        return unpack("mlx", scheme, parts).q.dequantize(torch.float32)

    def _read(self, part: Part, row: int | None) -> tuple[str, Tensor]:
        """The name and the tensor, in memory."""
        name, tensor = self._open(part, row)
        return name, in_memory(tensor)

    def _open(self, part: Part, row: int | None) -> tuple[str, Tensor]:
        """The name and the tensor, as a view."""
        name = self.convention.spell(part)
        self.names[self.prefix + name] = None
        tensor = self.source.open(self.prefix + name)
        if row is None or tensor.numel() == 1:  # one scale of all experts
            self.source.read_ahead(self.prefix + name)
            return name, tensor
        num_bytes = tensor[row].numel() * tensor.element_size()
        self.source.read_ahead(self.prefix + name, row * num_bytes, num_bytes)
        return f"{name}[{row}]", tensor[row]
