"""The tensors of a checkpoint by the names of a model's parameters: decoded, or packed as they are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import modeling_gguf_pytorch_utils as transformers_gguf

from moe_mk.config.hf import read_config
from moe_mk.config.hf_quant import quant_from_hf
from moe_mk.errors import UnsupportedError, WeightError
from moe_mk.external.library import find
from moe_mk.quant import QuantTensor
from moe_mk.quant.kinds import PLAIN_KINDS, WEIGHT_ONLY_KINDS, scheme_of_kind
from moe_mk.weights.gguf_source import GgufSource, is_gguf
from moe_mk.weights.names import PACKED_WORDS
from moe_mk.weights.packed_layouts import DECODED, IN_GGUF, decoded, dequantized, of_gguf, unpack
from moe_mk.weights.source import SafetensorsSource

PART = 2**24
"""Values of a block type that are decoded at once."""


class SafetensorsParameters:
    """Of safetensors, some packed as in compressed-tensors, GPTQ or AWQ."""

    def __init__(self, path: str | PathLike[str]) -> None:
        """Raises ConfigError for a quantisation that is not supported."""
        self.source, self.where = SafetensorsSource(path), str(path)
        quant = stated_quantisation(path)
        self.kind = str(quant_from_hf(quant, self.where)["weights"]) if quant else "bf16"
        self._scheme = scheme_of_kind(self.kind) if self.kind in WEIGHT_ONLY_KINDS else None
        packing = str(quant.get("quant_method", "")).replace("-", "_")
        v2 = packing == "gptq" and quant.get("checkpoint_format") == "gptq_v2"
        self._packing = "gptq_v2" if v2 else packing
        self._words, self._names = PACKED_WORDS.get(packing, {}), self.source.names()

    def find(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A copy of a parameter in a dtype, or None.

        Raises UnsupportedError for a checkpoint with scaled values, WeightError for a parameter of no plain values.
        """
        if self.kind not in (*WEIGHT_ONLY_KINDS, *PLAIN_KINDS):
            raise UnsupportedError(
                f"{self.where}: matrices of attention as {self.kind}",
                ["load the model with from_pretrained(path, experts_implementation='moe_mk'), which reads them"],
            )
        if name in self._names:
            held, floating = self.source.read(name), dtype.is_floating_point
            if held.is_floating_point() != floating or (floating and held.dtype.itemsize == 1):
                raise WeightError(f"{name} is {held.dtype}, expected {'16 bits or more' if floating else dtype}")
            return held.to(dtype, copy=True)
        q, order_K = self._unpacked(name)
        matrix = None if q is None else q.dequantize(dtype)
        return matrix if matrix is None or order_K is None else matrix[:, torch.argsort(order_K)].contiguous()

    def matrix(self, name: str) -> QuantTensor | None:
        """A matrix in the format of the checkpoint; None if it is not packed, or has its columns in another order."""
        q, order_K = self._unpacked(name)
        return q if order_K is None else None

    def _unpacked(self, name: str) -> tuple[QuantTensor | None, Tensor | None]:
        folder = name.removesuffix("weight")
        parts = {part: folder + word for part, word in self._words.items() if folder + word in self._names}
        if self._scheme is None or not name.endswith(".weight") or not {"", "scale"} <= parts.keys():
            return None, None
        opened = {part: (full, self.source.read(full)) for part, full in parts.items()}
        found = unpack(self._packing, self._scheme, opened)
        return found.q, found.order_K


class GgufParameters:
    """Of a GGUF model, all parts of a split one, of an architecture that transformers reads too.

    llama.cpp stores some tensors in another order or with an offset, which transformers' processor of the architecture
    takes back.
    """

    def __init__(self, path: str | PathLike[str], model: nn.Module) -> None:
        """model: gives the names of parameters. Raises UnsupportedError for an architecture without a reader."""
        self.source, self.where = GgufSource(path, everything=True), str(path)
        architecture = str(self.source.metadata.get("general.architecture"))
        known = (name.replace("_", "") for name in transformers_gguf.GGUF_SUPPORTED_ARCHITECTURES)  # qwen3_moe
        if architecture.replace("-", "") not in known:
            raise UnsupportedError(
                f"{path}: GGUF architecture {architecture!r}",
                ["transformers reads no files of it, so it is not known how llama.cpp stores its tensors"],
            )
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        made: Any = transformers_gguf.TENSOR_PROCESSORS.get(architecture, transformers_gguf.TensorProcessor)
        self._processor = made(config=config.to_dict())
        names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
        found = parameter_names(architecture, config.num_hidden_layers, names)
        for name in names:
            others: dict[str, str] = {}
            self._processor.perform_fallback_tensor_mapping(others, "", "", name)
            found |= {name: stored for stored in others if name not in found}  # noqa: B035
        self._names = {name: stored for name, stored in found.items() if stored in self.source.names()}

    def find(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """A copy of a parameter in a dtype; None if the file has none."""
        if (stored := self._names.get(name)) is None:
            return None
        return torch.from_numpy(np.ascontiguousarray(self._processed(stored, self._values(stored)))).to(dtype)

    def matrix(self, name: str) -> QuantTensor | None:
        """A matrix in the type of the file; None if it has no blocks, or of a type that is not read."""
        stored = self._names.get(name)
        if stored is None or self.source.entry(stored).dtype is not torch.uint8:
            return None
        kind = self.source.entry(stored).dtype_name.lower()
        rows = torch.from_numpy(np.ascontiguousarray(self._processed(stored, self.source.read(stored).numpy())))
        if kind in DECODED:
            return decoded(kind, rows)
        return of_gguf(IN_GGUF[kind], rows) if kind in IN_GGUF else None

    def _processed(self, stored: str, values: Any) -> Any:
        return self._processor.process(values, stored, tensor_key_mapping={}, parsed_parameters={}).weights

    def _values(self, stored: str) -> Any:
        """A tensor in f32, decoded in parts."""
        kind, held = self.source.entry(stored).dtype_name, self.source.read(stored)
        if held.dtype is not torch.uint8:
            return held.to(torch.float32).numpy()
        rows = max(1, PART // max(1, held.shape[-1]))
        parts = (held[start : start + rows] for start in range(0, len(held), rows))
        return np.concatenate([dequantized(kind, part.numpy()) for part in parts])


def parameter_names(architecture: str, num_layers: int, names: Iterable[str]) -> dict[str, str]:
    """The tensors of a file by the names that transformers has for them, as far as the package knows them.

    architecture: as files spell it. Raises LibraryMissing without the package, WeightError for an unknown one.
    """
    gguf = find("gguf")
    number = next((key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture), None)
    if number is None:
        raise WeightError(f"the gguf package knows no architecture {architecture!r}; install a newer one")
    known = gguf.get_tensor_name_map(number, num_layers)

    def stored(name: str) -> str | None:
        found: str | None = known.get_name(name.replace("correction_bias", "correction.bias"), (".weight", ".bias"))
        return found

    return {name: found for name in names if (found := stored(name)) is not None}


def stated_quantisation(path: str | PathLike[str]) -> Mapping[str, Any]:
    """The quantisation that the configuration of a checkpoint states; empty without one, and for GGUF."""
    root = Path(path)
    file = (root if root.is_dir() else root.parent) / "config.json"
    found = None if is_gguf(path) or not file.exists() else read_config(file).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


StoredParameters = SafetensorsParameters | GgufParameters


def stored_parameters(path: str | PathLike[str], model: nn.Module) -> StoredParameters:
    """The parameters of a folder or file for a model, in the quantisation that its configuration states."""
    return GgufParameters(path, model) if is_gguf(path) else SafetensorsParameters(path)
