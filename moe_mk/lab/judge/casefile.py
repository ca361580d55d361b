"""Case files: one call of one MoE layer of any engine as one safetensors file. Read as data, never run.

    metadata   format "moe_mk case"   version "1"   header {"model": {...}, "router": {...}, "tp": 2, ...}
    tensors    x y topk_ids topk_weights experts w13 w2 ...: the fields of `Case`, by their names

A program without torch writes the same with safetensors.numpy. Dtypes that numpy lacks are then written as integers of
their width, and named in the header: "dtypes": {"x": "BF16", "w13": "F8_E4M3"}.

A file is bounded: weights of the experts that were hit, and a sample of the tokens. Sizes, shapes and dtypes of all
tensors are compared with the header before one of them is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.config.moe import ModelConfig
from moe_mk.config.router import RouterConfig
from moe_mk.errors import ConfigError, ShapeError, UnsupportedError, WeightError, expect_kind, unless_signalled
from moe_mk.files import NO_HEADER, parse_json, replacing, size_of
from moe_mk.quant.kinds import PLAIN_KINDS, scheme_of_kind
from moe_mk.quant.plain import plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.registry import did_you_mean
from moe_mk.shapes import expect
from moe_mk.weights.expert_weights import ExpertWeights, SlotBiases, SlotWeights
from moe_mk.weights.layer_spec import ORDERS
from moe_mk.weights.safetensors_header import DTYPE_NAMES, DTYPES, Header, TensorEntry, read_header
from moe_mk.weights.slices import gate_and_up, halves_of

FORMAT, VERSION = "moe_mk case", 1
MOST_BYTES, MOST_TOKENS, MOST_TEXT = 8 << 30, 4096, 1 << 20
MOST_VALUES = 1 << 28
"""Values of one tensor with a row for each assignment."""
LAYER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLOATS = (*LAYER_DTYPES, torch.float64)
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)
PARTS = ("", "_scale", "_global_scale", "_zeros", "_bias")
_AXES: Mapping[str, tuple[str, tuple[torch.dtype, ...]]] = {
    "x": ("T H", LAYER_DTYPES), "y": ("T H", FLOATS), "topk_ids": ("T K", INTEGERS), "topk_weights": ("T K", FLOATS),
    "gate": ("E H", FLOATS), "router_logits": ("T E", FLOATS), "bias": ("E", FLOATS), "logit_bias": ("E", FLOATS),
    "expert_scale": ("E", FLOATS), "experts": ("X", INTEGERS), "shared_gate": ("H", FLOATS),
    "expert_map": ("R E", INTEGERS), "physical_to_logical": ("P", INTEGERS), "x_quant": ("T H", FLOATS),
    "w13_out": ("T K N", FLOATS), "act_out": ("T K I", FLOATS), "w2_out": ("T K H", FLOATS),
    "rank_out": ("W T H", FLOATS), "routed_out": ("T H", FLOATS), "shared_out": ("T H", FLOATS),
    "tokens": ("T", INTEGERS),
}  # fmt: skip
"""Axes of tensors that are no weights. R: EP ranks, W: all ranks, N: rows of w13."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call of one layer. T tokens of the file, X experts of the file, K experts a token, W = ep * tp ranks."""

    model: ModelConfig
    """With `model.quant`: the formats of weights and activations."""
    router: RouterConfig
    x: Tensor
    """(T, H): the input; its dtype is that of the layer."""
    y: Tensor
    """(T, H): the output, summed over ranks; with the shared experts where their weights are in the file."""
    topk_ids: Tensor | None = None
    """(T, K): logical experts; -1 goes nowhere."""
    topk_weights: Tensor | None = None
    """(T, K): routing weights as they multiply rows: renormalised and scaled."""
    gate: Tensor | None = None
    """(E, H): the router's weight."""
    router_logits: Tensor | None = None
    """(T, E)."""
    bias: Tensor | None = None
    """(E,): added to the scores to choose, not to weigh."""
    logit_bias: Tensor | None = None
    """(E,): added to the logits."""
    expert_scale: Tensor | None = None
    """(E,): multiplied with the routing weights."""
    experts: Tensor | None = None
    """(X,): the logical experts of the stacks; None where the weights are those of a checkpoint."""
    w13: Tensor | None = None
    """(X, 2I, H), or (X, I, H) without gates: as stored, not sliced. Formats as of `ExpertWeights.from_engine`."""
    w13_scale: Tensor | None = None
    w13_global_scale: Tensor | None = None
    w13_zeros: Tensor | None = None
    w13_bias: Tensor | None = None
    w2: Tensor | None = None
    """(X, H, I)."""
    w2_scale: Tensor | None = None
    w2_global_scale: Tensor | None = None
    w2_zeros: Tensor | None = None
    w2_bias: Tensor | None = None
    shared_w13: Tensor | None = None
    """(1, 2I', H): all shared experts as one MLP, in `model.quant.shared`."""
    shared_w13_scale: Tensor | None = None
    shared_w13_global_scale: Tensor | None = None
    shared_w13_zeros: Tensor | None = None
    shared_w13_bias: Tensor | None = None
    shared_w2: Tensor | None = None
    shared_w2_scale: Tensor | None = None
    shared_w2_global_scale: Tensor | None = None
    shared_w2_zeros: Tensor | None = None
    shared_w2_bias: Tensor | None = None
    shared_gate: Tensor | None = None
    """(H,)."""
    expert_map: Tensor | None = None
    """(ep, E): the local slot of each logical expert on each EP rank, -1 where it has none."""
    physical_to_logical: Tensor | None = None
    """(P,): the logical expert of each physical one, rank by rank."""
    x_quant: Tensor | None = None
    """(T, H): rows as the first product reads them, dequantised."""
    w13_out: Tensor | None = None
    """(T, K, 2I): the first product, in the order of w13's rows."""
    act_out: Tensor | None = None
    """(T, K, I)."""
    w2_out: Tensor | None = None
    """(T, K, H): before routing weights."""
    rank_out: Tensor | None = None
    """(W, T, H): the output of each rank before the reduction; rank = ep_rank * tp + tp_rank."""
    routed_out: Tensor | None = None
    """(T, H): the sum over experts and ranks, without shared experts."""
    shared_out: Tensor | None = None
    """(T, H): what shared experts add."""
    tokens: Tensor | None = None
    """(T,): the positions of these tokens in the call; None: 0, 1, ..."""
    activation_group: int = 0
    """Columns under one scale, where the engine rounds rows to INT8 in groups that the settings do not state, as ggml
    does; 0: as they state."""
    order: str = "gate_up"
    """Of the rows of w13: gate_up, up_gate or interleaved."""
    tp: int = 1
    ep: int = 1
    num_tokens: int = -1
    """Tokens of the call; -1: those of the file."""
    layer_name: str = ""
    checkpoint: str = ""
    """The name of the checkpoint, for readers; it is never opened."""
    layer: int = -1
    """The layer's number in the checkpoint."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the engine and its libraries."""
    note: str = ""

    @property
    def size(self) -> int:
        """T, tokens of the call."""
        return int(self.x.shape[0])

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def positions(self) -> list[int]:
        """The position of each token in the call."""
        return list(range(self.size)) if self.tokens is None else [int(each) for each in self.tokens]

    def checked(self) -> Self:
        """The case itself, if it can be judged.

        Raises ConfigError for settings, ShapeError for tensors, WeightError for broken scales, and UnsupportedError for
        layers that cannot be replayed; each lists everything of its kind.
        """
        _expect_settings(self)
        _expect_tensors(self)
        self.slots()
        self.shared_slot()
        if not self.x.is_meta:
            _expect_values(self)
        return self

    def slots(self) -> dict[int, SlotWeights]:
        """The weights of the experts in the file, by logical expert; empty where they are those of a checkpoint."""
        if self.experts is None or self.w13 is None or self.w2 is None:
            return {}
        stack = _stack(self, "", self.model.quant.weights, self.model.quant.down)
        if self.experts.is_meta:
            return {}
        return {int(expert): stack[at] for at, expert in enumerate(self.experts)}

    def shared_slot(self) -> SlotWeights | None:
        """All shared experts as one MLP; None without."""
        if self.shared_w13 is None or self.shared_w2 is None:
            return None
        quant = self.model.quant
        same = quant.shared == "same"
        return _stack(self, "shared_", quant.weights if same else quant.shared, quant.down if same else None)[0]


TENSORS = tuple(f.name for f in fields(Case) if "Tensor" in str(f.type))
_TEXT = tuple(f.name for f in fields(Case) if f.name not in (*TENSORS, "model", "router"))


def _stack(case: Case, prefix: str, kind: str, down: str | None) -> list[SlotWeights]:
    """The experts of w13 and w2 one by one, as views. Raises ShapeError, WeightError."""
    parts = {f"{which}{part}": getattr(case, f"{prefix}{which}{part}") for which in ("w13", "w2") for part in PARTS}
    w13, w2 = parts.pop("w13"), parts.pop("w2")
    if scheme_of_kind(kind).family == "gguf" or down is not None:
        return _two_schemes(case, prefix, w13, w2, scheme_of_kind(kind), scheme_of_kind(down or kind))
    held = ExpertWeights.from_engine(
        w13, w2, quant="" if kind in PLAIN_KINDS else kind, block=case.model.quant.block, order=case.order,
        gated=case.model.gated, **parts,
    )  # fmt: skip
    return [held.slot(index) for index in range(held.num_slots)]


def _two_schemes(
    case: Case, prefix: str, w13: Tensor, w2: Tensor, wide: QuantScheme, down: QuantScheme
) -> list[SlotWeights]:
    """Blocks of GGUF, and plain stacks next to them: formats without separate scales."""
    hidden, rows = case.model.hidden_size, w13.shape[1]
    for name, values, scheme, columns in (
        (f"{prefix}w13", w13, wide, hidden), (f"{prefix}w2", w2, down, rows // (1 + case.model.gated)),
    ):  # fmt: skip
        dtype = values.dtype if scheme.block is None else torch.uint8
        expect(name, values, "X R B", dtype, X=len(w13), B=scheme.held_columns(columns))
        if (bias := getattr(case, f"{name}_bias")) is not None:
            expect(f"{name}_bias", bias, "X R", FLOATS, X=len(w13), R=values.shape[1])
        if scheme.block is None:
            plain(values.dtype)
    found, (b13, b2) = list[SlotWeights](), (getattr(case, f"{prefix}{which}_bias") for which in ("w13", "w2"))
    if (b13 is None) != (b2 is None):
        raise ShapeError(f"{prefix}w13_bias and {prefix}w2_bias belong together; pass zeros for the other one")
    for at, (first, second) in enumerate(zip(w13, w2, strict=True)):
        both, biases = QuantTensor(first, None, wide), None
        gate, up = gate_and_up(both, case.order) if case.model.gated else (None, both)
        if b13 is not None and b2 is not None:
            gate_I, up_I = halves_of(b13[at], case.order) if case.model.gated else (None, b13[at])
            biases = SlotBiases(gate_I, up_I, b2[at])
        found.append(SlotWeights(gate, up, QuantTensor(second, None, down), biases))
    return found


def _expect_settings(case: Case) -> None:
    model, router = case.model, case.router
    for name in ("tp", "ep"):
        expect_kind(name, getattr(case, name), int, most=1024)
        if getattr(case, name) < 1:
            raise ConfigError(f"{name} is {getattr(case, name)}, expected at least 1")
    expect_kind("activation_group", case.activation_group, int, most=1 << 20)
    if case.activation_group < 0:
        raise ConfigError(f"activation_group is {case.activation_group}, expected 0 or a number of columns")
    if case.order not in ORDERS:
        raise ConfigError(f"order {case.order!r} is unknown{did_you_mean(case.order, ORDERS)}")
    if router.top_k > model.num_experts or model.num_experts % router.num_expert_group:
        raise ConfigError(
            f"router.top_k={router.top_k} and num_expert_group={router.num_expert_group} do not fit "
            f"num_experts={model.num_experts}"
        )
    reasons = [
        f"{name}={value}: the judge replays no layer with it" for name, value in (
            ("latent_size", model.latent_size), ("input_norm", model.input_norm),
            ("hash_vocabulary", router.hash_vocabulary), ("first_image_token", router.first_image_token),
            ("num_zero_experts", model.num_zero_experts or None),
            ("num_fused_shared_experts", model.num_fused_shared_experts or None),
        ) if value is not None
    ]  # fmt: skip
    if router.kind != "topk":
        reasons.append(f"router.kind={router.kind!r}: it is for training")
    if reasons:
        raise UnsupportedError("this layer cannot be judged", reasons)


def _expect_tensors(case: Case) -> None:
    """Raise ShapeError for wrong shapes and dtypes, and ConfigError for missing tensors."""
    expect("x", case.x, "T H", LAYER_DTYPES, H=case.model.hidden_size)
    sizes: dict[str, Any] = {
        "T": case.size, "H": case.model.hidden_size, "E": case.model.num_experts, "K": case.router.top_k,
        "W": case.ep * case.tp, "R": case.ep, "I": case.model.moe_intermediate_size,
        "N": case.model.moe_intermediate_size * (1 + case.model.gated),
        "X": 0 if case.experts is None else case.experts.numel(),
    }  # fmt: skip
    for name, (axes, dtypes) in _AXES.items():
        if (tensor := getattr(case, name)) is not None:
            expect(name, tensor, axes, dtypes, **{axis: sizes[axis] for axis in axes.split() if axis in sizes})
    widest = max(sizes["N"], sizes["H"])
    if case.size > MOST_TOKENS or case.size * sizes["K"] * widest > MOST_VALUES:
        raise ShapeError(
            f"{case.size} tokens of {sizes['K']} experts and {widest} columns are more than a case may have "
            f"({MOST_TOKENS} tokens, {MOST_VALUES} values of assignments); sample fewer tokens"
        )
    missing = [
        f"{one} without {other}" for one, other in (
            ("w13", "w2"), ("w2", "w13"), ("w13", "experts"), ("experts", "w13"), ("shared_w13", "shared_w2"),
            ("shared_w2", "shared_w13"), ("topk_weights", "topk_ids"), ("w13_out", "topk_ids"), ("act_out", "topk_ids"),
            ("w2_out", "topk_ids"), ("shared_out", "shared_w13"),
        ) if getattr(case, one) is not None and getattr(case, other) is None
    ]  # fmt: skip
    if case.topk_ids is None and case.router_logits is None and case.gate is None:
        missing.append("neither topk_ids nor router_logits nor gate")
    if case.router.has_correction_bias and case.bias is None and case.topk_weights is None:
        missing.append("router.has_correction_bias without bias")
    if missing:
        raise ConfigError(f"the case has {', '.join(missing)}")
    for name, rows in (("w13", sizes["N"]), ("w2", sizes["H"])):
        if (tensor := getattr(case, name)) is not None and (tensor.dim() != 3 or tensor.shape[1] != rows):
            raise ShapeError(f"{name} has shape {list(tensor.shape)}, expected [{sizes['X']}, {rows}, ...]")


def _expect_values(case: Case) -> None:
    """Raise ShapeError for ids out of range, and for hit experts without weights."""
    experts = case.model.num_experts
    for name, least, end in (
        ("topk_ids", -1, experts), ("experts", 0, experts), ("expert_map", -1, experts),
        ("physical_to_logical", -1, experts), ("tokens", 0, 2**31),
    ):  # fmt: skip
        tensor = getattr(case, name)
        if tensor is None or not tensor.numel():
            continue
        low, high = int(tensor.min()), int(tensor.max())
        if low < least or high >= end:
            raise ShapeError(f"{name} holds {low} to {high}, expected {least} to {end - 1}")
    own = [] if case.experts is None else case.experts.tolist()
    if len(set(own)) != len(own):
        raise ShapeError(f"experts names an expert twice: {sorted(e for e in set(own) if own.count(e) > 1)[:8]}")
    hit = set() if case.topk_ids is None else set(case.topk_ids.flatten().tolist()) - {-1}
    if own and (lost := sorted(hit - set(own))):
        raise ShapeError(f"topk_ids name {len(lost)} experts without weights in the file, the first is {lost[0]}")


def write_case(path: Path, case: Case, *, portable: bool = False) -> None:
    """Write a file, whole or not at all; see `Case.checked` for errors. Raises WeightError where it cannot be written.

    portable: dtypes that numpy lacks as integers of the same width, so that safetensors.numpy reads every tensor.
    """
    case.checked()
    tensors, dtypes, seen = dict[str, Tensor](), dict[str, str](), set[int]()
    for name, tensor in case.tensors.items():
        whole = tensor.detach().cpu().contiguous()
        if whole.untyped_storage().nbytes() != whole.nbytes or whole.data_ptr() in seen:
            whole = whole.clone()  # the library refuses tensors that share memory
        seen.add(whole.data_ptr())
        if portable and whole.is_floating_point() and whole.dtype not in (torch.float16, torch.float32, torch.float64):
            dtypes[name] = DTYPE_NAMES[whole.dtype]
            whole = whole.view(_RAW[whole.element_size()])
        tensors[name] = whole
    header: dict[str, Any] = {name: getattr(case, name) for name in _TEXT} | {"versions": dict(case.versions)}
    header["model"] = case.model.model_dump(mode="json", exclude_defaults=True)
    header["router"] = case.router.model_dump(mode="json", exclude_defaults=True)
    text = json.dumps(header | ({"dtypes": dtypes} if dtypes else {}), sort_keys=True)
    total = sum(tensor.nbytes for tensor in tensors.values())
    if total > MOST_BYTES or len(text) > MOST_TEXT:
        raise ShapeError(
            f"the case has {total} bytes of tensors and {len(text)} of text, the limits are {MOST_BYTES} and "
            f"{MOST_TEXT}; keep the weights of fewer experts (those that the sampled tokens hit)"
        )
    try:
        with replacing(Path(path)) as temporary:
            save_file(tensors, temporary, metadata={"format": FORMAT, "version": str(VERSION), "header": text})
    except unless_signalled(OSError, SafetensorError) as problem:
        raise WeightError(f"case {path} cannot be written: {problem}; name another file") from problem


_RAW = {1: torch.uint8, 2: torch.int16}


def read_case(path: Path) -> Case:
    """Read a file. Everything but values is checked before memory is allocated for tensors.

    Raises WeightError for what is no case file or a damaged one, ConfigError for its header, and see `Case.checked`.
    """
    path = Path(path)
    found = _small_header(path)
    header = _header_of(path, found)
    dtypes = header.pop("dtypes", {})
    entries = {name: _entry(path, entry, dtypes) for name, entry in found.tensors.items()}
    text = {name: header[name] for name in _TEXT if name in header}
    made: dict[str, Any] = {
        "model": ModelConfig.parse(header.get("model", {}), f"{path.name}: model"),
        "router": RouterConfig.parse(header.get("router", {}), f"{path.name}: router"),
    }
    planned: dict[str, Any] = {name: torch.empty(s, dtype=d, device="meta") for name, (s, d) in entries.items()}
    if lacking := [name for name in ("x", "y") if name not in planned]:
        raise WeightError(f"{path.name} is no case: it has no tensor {' and no '.join(lacking)}")
    case = Case(**made, **text, **planned).checked()
    return replace(case, **_read(path, found, entries)).checked()


def _small_header(path: Path) -> Header:
    try:
        size = size_of(path)
        with path.open("rb") as file:
            announced = int.from_bytes(file.read(8), "little")
    except unless_signalled(OSError, ValueError) as problem:
        raise WeightError(f"case {path} cannot be read: {problem}") from problem
    if 4 * MOST_TEXT < announced <= NO_HEADER:
        raise WeightError(f"{path.name} has a header of {announced} bytes, that of a case has at most {4 * MOST_TEXT}")
    if size > MOST_BYTES + 4 * MOST_TEXT:
        raise WeightError(f"{path.name} has {size} bytes, a case has at most {MOST_BYTES}")
    found = read_header(path)
    if found.metadata.get("format") != FORMAT:
        raise WeightError(f"{path.name} is a safetensors file of another kind, not a case file of moe_mk")
    version = found.metadata.get("version", "")
    if not isinstance(version, str) or not version.isdecimal() or len(version) > 9 or int(version) > VERSION:
        raise WeightError(f"{path.name} has version {str(version)[:20]!r}, this library reads up to {VERSION}")
    if unknown := sorted(set(found.tensors) - set(TENSORS)):
        raise WeightError(f"{path.name} has an unknown tensor {unknown[0]!r}{did_you_mean(unknown[0], TENSORS)}")
    return found


def _header_of(path: Path, found: Header) -> dict[str, Any]:
    """The JSON header with values of the right kinds."""
    text = found.metadata.get("header", "")
    try:
        if not isinstance(text, str) or len(text) > MOST_TEXT:
            raise ValueError(f"it is no text of at most {MOST_TEXT} characters")
        header = parse_json(text)
        if not isinstance(header, dict):
            raise ValueError(f"it is a {type(header).__name__}, expected names with values")
    except ValueError as problem:
        raise WeightError(f"{path.name} has a broken header: {problem}") from problem
    known = (*_TEXT, "model", "router", "dtypes")
    if unknown := sorted(set(header) - set(known)):
        raise ConfigError(f"{path.name}: unknown key {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    for name, kind in _KINDS.items():
        if name in header:
            expect_kind(f"{path.name}: {name}", header[name], kind)
    for name in ("versions", "dtypes"):
        for key, value in header.get(name, {}).items():
            expect_kind(f"{path.name}: {name}.{key[:40]}", value, str)
    if header.get("num_tokens", -1) >= 2**31:
        raise ConfigError(f"{path.name}: num_tokens is {header['num_tokens']}, the limit is {2**31 - 1}")
    return header


_KINDS: Mapping[str, type] = {
    "activation_group": int, "order": str, "tp": int, "ep": int, "num_tokens": int, "layer_name": str,
    "checkpoint": str, "layer": int, "versions": dict, "note": str, "model": dict, "router": dict, "dtypes": dict,
}  # fmt: skip


def _entry(path: Path, entry: TensorEntry, dtypes: Mapping[str, str]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a tensor, that of the header where its bytes are stored as integers."""
    stored, name = entry.dtype, entry.name
    if stored is None:
        raise WeightError(f"{path.name}: {name} has dtype {entry.dtype_name}, which torch does not have")
    if entry.missing_bytes:
        raise WeightError(f"{path.name} is truncated: {name} lacks {entry.missing_bytes} of {entry.num_bytes} bytes")
    if name not in dtypes:
        return entry.shape, stored
    wanted = DTYPES.get(dtypes[name])
    if wanted is None or wanted.itemsize != stored.itemsize or stored not in _RAW.values():
        raise WeightError(f"{path.name}: {name} is stored as {entry.dtype_name}, its dtype is {dtypes[name][:20]!r}")
    return entry.shape, wanted


def _read(path: Path, found: Header, entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Any]:
    read = dict[str, Any]()
    try:
        with path.open("rb") as file:
            for name, (shape, dtype) in entries.items():
                raw = torch.empty(math.prod(shape) * dtype.itemsize, dtype=torch.uint8, device="cpu")
                file.seek(found.tensors[name].start)
                if file.readinto(raw.numpy().data) != raw.numel():
                    raise WeightError(f"{path.name} was truncated while it was read, at {name}")
                read[name] = raw.view(dtype).view(shape)
    except unless_signalled(OSError) as problem:
        raise WeightError(f"case {path} cannot be read: {problem}") from problem
    return read
