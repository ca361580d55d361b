"""The linear layers of a model in bf16, by the native kernels.

torch multiplies weights in bf16 as they are stored, by oneDNN, or on processors without AVX-512 by loops of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.packed import cannot_be_saved
from moe_mk.integrations.packed_linear import PackedLinear, packed_linear
from moe_mk.kernels.native.layout import STEP
from moe_mk.quant import QuantTensor
from moe_mk.quant.plain import BF16


class PackedLinearModule(nn.Module):
    """Called like the `nn.Linear` that it replaces. Its only parameter is the bias, so the model cannot be saved."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.packed = PackedLinear(QuantTensor(linear.weight.detach().contiguous(), None, BF16), name)
        self.entry = nn.Buffer(self.packed.entry, persistent=False)
        self.register_state_dict_pre_hook(cannot_be_saved)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) bf16 to (..., N)."""
        return packed_linear(x, self.entry, self.bias, self.out_features)


def pack_linears(model: nn.Module, *, skip: Sequence[str] = ()) -> dict[str, int]:
    """Replace the `nn.Linear` modules of a model on the CPU by packed ones; returns their paths with packed bytes.

    Layers in bf16 with a multiple of 32 inputs are replaced, one by one, and each frees its weight unless another
    module holds it too, as tied embeddings do. Subclasses of `nn.Linear` and layers with hooks stay as they are.
    skip: last parts of paths of layers to keep, for models that read `weight` of a layer directly.
    The model can then neither be saved nor trained. Raises UnsupportedError if there is no such layer.
    """
    chosen = {
        path: module
        for path, module in model.named_modules()
        if type(module) is nn.Linear and path and path.rpartition(".")[2] not in skip
        and module.weight.dtype is torch.bfloat16 and module.weight.device.type == "cpu"
        and module.in_features % STEP == 0 and not module._forward_hooks and not module._forward_pre_hooks
        and not hasattr(module, "_hf_hook")
    }  # fmt: skip
    if not chosen:
        raise UnsupportedError(
            f"{type(model).__name__} has no linear layer to pack",
            [f"layers are nn.Linear in bf16 on the CPU with a multiple of {STEP} inputs, without hooks"],
        )
    sizes: dict[str, int] = {}
    for path in list(chosen):
        parent, _, name = path.rpartition(".")
        packed = PackedLinearModule(chosen.pop(path), path)
        setattr(model.get_submodule(parent), name, packed)
        sizes[path] = packed.packed.num_bytes
    return sizes
