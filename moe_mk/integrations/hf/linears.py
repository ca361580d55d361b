"""The linear layers of a model, by the native kernels: in bf16, or in the format in which a checkpoint has them.

torch multiplies weights in bf16 as they are stored, by oneDNN, or on processors without AVX-512 by loops of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Literal

import torch
from torch import Tensor, nn

from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.experts.cpu_native.weights import BLOCK, storage_of
from moe_mk.integrations.hf.blocks import LAYER
from moe_mk.integrations.hf.modules import save_whole_or_nothing
from moe_mk.integrations.hf.packed import cannot_be_saved
from moe_mk.integrations.hf.stored import PART, stored_parameters
from moe_mk.integrations.packed_linear import PackedLinear, packed_linear
from moe_mk.kernels.native.layout import STEP
from moe_mk.layer.custom_op import is_untraced
from moe_mk.quant import QuantTensor, weight_scheme
from moe_mk.quant.gguf import GGUF, Gguf
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.plain import BF16


class PackedLinearModule(nn.Module):
    """Called like the `nn.Linear` that it replaces. Its only parameter is the bias, so the model cannot be saved."""

    def __init__(self, linear: nn.Linear, q: QuantTensor, name: str, *, int8: bool) -> None:
        """q: the weight in a format of the kernels. int8: as of `PackedLinear`."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.packed, self.format = PackedLinear(q, name, int8=int8), q.scheme.name
        self.entry = nn.Buffer(self.packed.entry, persistent=False)
        self.register_state_dict_pre_hook(cannot_be_saved)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """The sizes and the format."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.format}"

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) bf16 to (..., N)."""
        if self.bias is None and is_untraced(x) and not x.requires_grad:
            return self.packed.run(x)
        return packed_linear(x, self.entry, self.bias, self.out_features)


def pack_linears(
    model: nn.Module,
    path: str | PathLike[str] | None = None,
    *,
    skip: Sequence[str] = (),
    activations: Literal["plain", "int8"] = "plain",
) -> dict[str, int]:
    """Replace the `nn.Linear` modules of a model on the CPU by packed ones; returns their paths with packed bytes.

    Layers in bf16, and those of FP8 models that are loaded inside `cpu_fp8()` in bf16, are replaced one by one where
    inputs are a multiple of 32. Each frees its weight unless another module holds it too, as tied embeddings do. Tokens
    are multiplied in bf16, those of FP8 layers too. Other classes, layers with hooks and those of patched blocks stay.
    path: the checkpoint that the model was loaded from, a folder or a GGUF file. A weight that it stores as INT4, INT8
    or blocks of GGUF is packed in that format if the model's weight equals the stored one; all others in bf16.
    skip: last parts of paths of layers to keep, for models that read `weight` of a layer directly.
    activations: int8 rounds tokens of layers in INT4, INT8, Q4_0, Q4_1, Q8_0 and Q4_K to INT8 in groups, which is
    faster and less accurate; those of other formats stay in bf16.
    The model can then neither be saved nor trained. Raises UnsupportedError if there is no such layer, ConfigError for
    other activations.
    """
    if activations not in ("plain", "int8"):
        raise ConfigError(f"activations={activations!r} of linear layers; use 'plain' or 'int8'")
    inner = tuple(f"{path}." for path, block in model.named_modules() if LAYER in vars(block))
    chosen = {
        name: module
        for name, module in model.named_modules()
        if name and name.rpartition(".")[2] not in skip and isinstance(module, nn.Linear) and not name.startswith(inner)
        and _matrix_of(module, getattr(model, "dtype", None)) is not None and module.in_features % STEP == 0
        and not module._forward_hooks and not module._forward_pre_hooks and not hasattr(module, "_hf_hook")
    }  # fmt: skip
    if not chosen:
        raise UnsupportedError(
            f"{type(model).__name__} has no linear layer to pack",
            [f"layers are linear, in bf16 or FP8 blocks, on the CPU, have a multiple of {STEP} inputs, and no hooks"],
        )
    stored = None if path is None else stored_parameters(path, model)
    sizes: dict[str, int] = {}
    for name in list(chosen):
        linear = chosen.pop(name)
        q = _matrix_of(linear, torch.bfloat16)
        assert q is not None, "it was chosen"
        if stored is not None and q.scheme == BF16:
            q = _same(q.values, stored.matrix(f"{name}.weight")) or q
        packed = PackedLinearModule(linear, q, name, int8=activations == "int8")
        del linear, q
        model.set_submodule(name, packed)
        sizes[name] = packed.packed.num_bytes
    save_whole_or_nothing(model)
    return sizes


def _matrix_of(linear: nn.Linear, dtype: torch.dtype | None) -> QuantTensor | None:
    """The weight of a layer on the CPU that is packed; None for others. dtype: that of the model's tokens."""
    w, scales = linear.weight.detach(), getattr(linear, "weight_scale_inv", None)
    if w.device.type != "cpu":
        return None
    if type(linear) is nn.Linear and w.dtype is torch.bfloat16:
        return QuantTensor(w.contiguous(), None, BF16)
    block = tuple(getattr(linear, "block_size", None) or ())
    if scales is None or block != (BLOCK, BLOCK) or w.dtype is not torch.float8_e4m3fn or dtype is not torch.bfloat16:
        return None
    return QuantTensor(w, scales.detach(), weight_scheme((BLOCK, BLOCK), ue8m0=scales.dtype is torch.float8_e8m0fnu))


def _same(w: Tensor, q: QuantTensor | None) -> QuantTensor | None:
    """The matrix, if the kernels store its format and it is the weight w, decoded and rounded to the dtype of w."""
    if q is None or q.shape != w.shape:
        return None
    if isinstance(q.scheme, Gguf) and storage_of(q.scheme) is None and q.scheme.blocks.held in {**GGUF, **GROUPED}:
        q = q.scheme.exact(q)
    if storage_of(q.scheme) is None:
        return None
    rows = max(1, PART // q.shape[1])
    parts = (slice(start, start + rows) for start in range(0, len(w), rows))
    return q if all(torch.equal(q[part].dequantize(w.dtype), w[part]) for part in parts) else None
