"""Routing traces out of the recordings of other programs.

    .pt of SGLang's expert distribution recorder, mode per_token     `from_sglang`, one file a rank
    .jsonl of Megatron-LM's routing trace, one file a rank            `from_megatron`
    .npz or .pt of router tensors by layer name                       `from_router_tensors`
    .npy or .npz with a layer axis                                    `from_arrays`
    our own files and folders                                         `RoutingTrace.read`

`import_trace` detects the kind.

What Megatron-LM and programs like it keep of their routers: JSON lines of choices, and tensors by layer name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_mk.files import parse_json
from moe_mk.lab.files import read_lines
from moe_mk.lab.trace.foreign import num_experts_of, read_arrays, read_pt, resized, signed
from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.lab.trace.routing_file import id_dtype
from moe_mk.lab.trace.routing_forward import TracedForward, TraceError, TraceFacts
from moe_mk.rebalance.load import Phase

LAYER = re.compile(r"(?:^|[^a-z])layers?[^0-9a-z]?(\d+)(?:\D|$)", re.IGNORECASE)
KINDS = {
    "routing_map": "map",
    "probs": "probs",
    "topk_indices": "ids", "top_indices": "ids", "indices": "ids", "topk_ids": "ids",
    "topk_weights": "weights", "top_scores": "weights", "scores": "weights",
}  # fmt: skip
"""The content of a tensor by the last word of its name. map and probs are (T, E), ids and weights (T, K)."""
PIECE = 1 << 20
"""Entries of a map that are sorted at a time."""
FIELDS = {"step": int, "layer": int, "rank": int, "topk": int, "top_indices": list}
"""What a line of a routing trace must hold."""


def from_megatron(
    files: Sequence[Path], *, num_experts: int | None = None, num_groups: int = 1, phase: Phase = "prefill"
) -> RoutingTrace:
    """Routing traces of Megatron-LM, router_trace_rank0.jsonl and so on: one line a step, layer and rank.

    Lines of the multi-token prediction block are left out: their layers have numbers of their own. phase: of all
    forwards, which the lines do not contain. Routing weights are not in there. Source: NVIDIA/Megatron-LM,
    --moe-routing-trace-path (2026).
    """
    records = [record for file in files for record in _lines(file)]
    kept = [record for record in records if record.get("block", "decoder") == "decoder"]
    if not kept:
        raise TraceError(f"{len(files)} files hold no line of a decoder layer")
    ranks, top_k = sorted({record["rank"] for record in kept}), max(record["topk"] for record in kept)
    forwards = [
        resized(
            TracedForward(record["step"], record["layer"], ranks.index(record["rank"]), phase, record["top_indices"]),
            top_k,
        )
        for record in kept
    ]
    experts = num_experts_of(num_experts, [forward.ids_TK for forward in forwards])
    return RoutingTrace.of(TraceFacts(experts, top_k, num_groups, len(ranks)), forwards)


def from_router_tensors(
    tensors: Mapping[str, Tensor], *, num_experts: int | None = None, num_groups: int = 1
) -> RoutingTrace:
    """Read the outputs of routers, by names that end in one of KINDS and hold the number of a layer.

        decoder.layers.3.mlp.router.routing_map   (T, E) bool     and .probs (T, E), which gives the weights
        layer_3.topk_indices                      (T, K) integer  and .topk_weights (T, K)

    Of a map the experts of a token stand in ascending order, with -1 behind them. Source of the words: Megatron-LM,
    core/transformer/moe/router.py, where a router returns probs and routing_map. Other tensors are left alone.
    """
    layers: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        kind, layer = KINDS.get(re.split(r"[./\\]|(?<=\d)_", name)[-1]), LAYER.search(name)
        if kind and layer:
            layers[int(layer[1])][kind] = tensor
    rows = {
        layer: _rows_of(f"layer {layer}", found)
        for layer, found in sorted(layers.items())
        if {"map", "ids"} & set(found)
    }
    if not rows:
        raise TraceError(f"none of {sorted(tensors)[:6]} names a layer and one of {', '.join(KINDS)}")
    widths = {int(found["map"].shape[1]) for found in layers.values() if "map" in found}
    experts = num_experts_of(num_experts or (max(widths) if widths else None), [ids for ids, _ in rows.values()])
    top_k = max(max(int(ids.shape[1]) for ids, _ in rows.values()), 1)
    weighed = all(weights is not None for _, weights in rows.values())
    made = [
        resized(TracedForward(0, layer, 0, "prefill", ids, weights if weighed else None), top_k)
        for layer, (ids, weights) in rows.items()
    ]
    return RoutingTrace.of(TraceFacts(experts, top_k, num_groups), made)


def _lines(file: Path) -> list[dict[str, Any]]:
    """Every line as a record whose top_indices are a tensor (T, K)."""
    records: list[dict[str, Any]] = []
    lines = enumerate(read_lines(file), 1)
    while True:
        try:
            number, line = next(lines)
        except StopIteration:
            return records
        except (OSError, ValueError) as problem:
            raise TraceError(f"{file} cannot be read: {problem}") from problem
        try:
            record = parse_json(line)
            wrong = [name for name, kind in FIELDS.items() if not isinstance(record.get(name), kind)]
            if not wrong:
                ids = torch.tensor(record["top_indices"], dtype=torch.int64, device="cpu")
                record["top_indices"] = ids.reshape(len(record["top_indices"]), record["topk"])
        except (ValueError, TypeError, AttributeError, RuntimeError) as problem:
            raise TraceError(f"{file}, line {number} is no record of a routing trace: {problem}") from problem
        if wrong:
            raise TraceError(f"{file}, line {number} lacks {', '.join(wrong)}, or has them in another kind")
        records.append(record)


def _rows_of(where: str, found: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """Ids (T, K) and weights of one layer."""
    if "ids" in found:
        ids, weights = found["ids"], found.get("weights")
        wrong = ids.dim() != 2 or ids.is_floating_point() or (weights is not None and weights.shape != ids.shape)
        if wrong:
            sizes = None if weights is None else tuple(weights.shape)
            raise TraceError(
                f"{where}: indices are {ids.dtype} {tuple(ids.shape)}, weights {sizes}; expected two (T, K)"
            )
        return signed(ids), None if weights is None else weights.to(torch.float32)
    chosen, probs = found["map"].bool(), found.get("probs")
    if chosen.dim() != 2 or (probs is not None and probs.shape != chosen.shape):
        sizes = None if probs is None else tuple(probs.shape)
        raise TraceError(f"{where}: routing_map has shape {tuple(chosen.shape)}, probs {sizes}; expected two (T, E)")
    top_k = max(int(chosen.sum(1).max()) if len(chosen) else 1, 1)
    num_tokens, num_experts = chosen.shape
    ids_TK = torch.empty((num_tokens, top_k), dtype=id_dtype(num_experts), device="cpu")
    weights_TK = None if probs is None else torch.empty((num_tokens, top_k), dtype=torch.float32, device="cpu")
    step = max(PIECE // max(num_experts, 1), 1)  # in pieces: sorting takes ten times as much as a map
    for start in range(0, num_tokens, step):
        piece_TE = chosen[start : start + step]
        # True before False, and in order among equals: chosen experts first, ascending.
        order_TK = torch.argsort(piece_TE.to(torch.uint8), dim=1, descending=True, stable=True)[:, :top_k]
        there_TK = piece_TE.gather(1, order_TK)
        ids_TK[start : start + step] = torch.where(there_TK, order_TK, -1)
        if probs is not None and weights_TK is not None:
            part_TE = probs[start : start + step].to(torch.float32)
            weights_TK[start : start + step] = part_TE.gather(1, order_TK) * there_TK
    return ids_TK, weights_TK


__all__ = ["from_arrays", "from_megatron", "from_router_tensors", "from_sglang", "import_trace"]

DECODING = (2, 4, 5)
"""SGLang's forward modes that belong to decoding: DECODE, IDLE, TARGET_VERIFY (0.5, `ForwardMode`)."""


def import_trace(path: str | PathLike[str], *, num_experts: int | None = None, num_groups: int = 1) -> RoutingTrace:
    """Read a trace of any known kind, detected from the file. Raises TraceError that lists the kinds.

    num_experts: where the file does not say it. num_groups: expert groups, which only our own files know.
    """
    path = Path(path)
    if path.is_dir() and (recordings := sorted(path.glob("*.pt"))):
        return from_sglang(recordings, num_groups=num_groups)
    if path.is_dir() and (traces := sorted(path.glob("*.jsonl"))):
        return from_megatron(traces, num_experts=num_experts, num_groups=num_groups)
    if path.is_dir() or path.suffix == ".safetensors":
        return RoutingTrace.read(path)
    if not path.is_file():
        raise TraceError(f"trace {path} is not there")
    if path.suffix == ".pt":
        content = read_pt(path)
        if isinstance(content, dict) and ("records" in content or "logical_count" in content):
            return from_sglang([path], num_groups=num_groups)
        return from_router_tensors(_tensors(path, content), num_experts=num_experts, num_groups=num_groups)
    if path.suffix == ".jsonl":
        return from_megatron([path], num_experts=num_experts, num_groups=num_groups)
    if path.suffix not in (".npy", ".npz"):
        known = ".safetensors, .pt, .jsonl, .npy, .npz and folders"
        raise TraceError(f"trace {path} ends in {path.suffix!r}, known are {known}")
    arrays = read_arrays(path)
    if {"", "topk_ids"} & set(arrays):
        ids = arrays.get("topk_ids", arrays.get(""))
        assert ids is not None
        weights = arrays.get("topk_weights")
        return from_arrays(ids, weights, num_experts=num_experts, num_groups=num_groups)
    return from_router_tensors(arrays, num_experts=num_experts, num_groups=num_groups)


def from_sglang(files: Sequence[Path], *, num_groups: int = 1) -> RoutingTrace:
    """Recordings of SGLang in its mode "per_token", one file for every rank.

    Their ids are of physical experts, which the map at the end of the file turns into logical ones: it is the last map
    of the recording, so a rebalance during the recording cannot be detected. Layers without experts are left out.
    Routing weights are not in there. Source: sgl-project/sglang, srt/eplb/expert_distribution.py (0.5).
    """
    contents = [_recording(file) for file in files]
    num_experts = 1 + max(int(physical.max()) for _, physical in contents)
    ranks = sorted({int(record["rank"]) for records, _ in contents for record in records})
    forwards = [
        forward
        for records, physical in contents
        for record in records
        for forward in _forwards_of(record, physical, ranks.index(int(record["rank"])))
    ]
    met = {forward.layer for forward in forwards if bool((forward.ids_TK >= 0).any())}
    kept = [forward for forward in forwards if forward.layer in met]
    used = [
        int((forward.ids_TK >= 0).any(0).nonzero().max()) + 1 for forward in kept if bool((forward.ids_TK >= 0).any())
    ]
    if not used:
        raise TraceError(f"{len(files)} recordings hold no token that met an expert")
    facts = TraceFacts(num_experts, max(used), num_groups, len(ranks))
    # The recorder's rows are as wide as its buffer, whatever the model's top-k.
    return RoutingTrace.of(facts, [resized(forward, facts.top_k) for forward in kept])


def from_arrays(
    ids: Tensor,
    weights: Tensor | None = None,
    *,
    num_experts: int | None = None,
    num_groups: int = 1,
    phase: Phase = "prefill",
) -> RoutingTrace:
    """Ids of [[steps,] layers,] tokens, K, and weights of the same shape; layers are numbered from 0."""
    if ids.is_floating_point() or ids.dtype == torch.bool or not 2 <= ids.dim() <= 4:
        raise TraceError(
            f"ids are {ids.dtype} of shape {tuple(ids.shape)}, expected integers of [[steps,] layers,] tokens, K"
        )
    if weights is not None and weights.shape != ids.shape:
        raise TraceError(f"weights have shape {tuple(weights.shape)}, ids have {tuple(ids.shape)}")
    ids = signed(ids)
    shape = (1,) * (4 - ids.dim()) + tuple(ids.shape)
    grid, weighed = ids.reshape(shape), None if weights is None else weights.reshape(shape)
    forwards = [
        TracedForward(step, layer, 0, phase, grid[step, layer], None if weighed is None else weighed[step, layer])
        for step in range(shape[0])
        for layer in range(shape[1])
    ]
    return RoutingTrace.of(TraceFacts(num_experts_of(num_experts, [ids]), shape[3], num_groups), forwards)


def _recording(file: Path) -> tuple[list[dict[str, Any]], Tensor]:
    content = read_pt(file)
    if isinstance(content, dict) and "logical_count" in content:
        raise TraceError(f"{file} holds loads without tokens (mode stat); use it as loads, or record in mode per_token")
    physical = content.get("last_physical_to_logical_map") if isinstance(content, dict) else None
    records = content.get("records") if isinstance(content, dict) else None
    if not isinstance(records, list) or not isinstance(physical, Tensor) or physical.dim() != 2:
        raise TraceError(f"{file} is no recording of SGLang: records or last_physical_to_logical_map are not in it")
    needed = {"topk_ids_of_layer", "rank", "forward_pass_id", "forward_mode"}
    for number, record in enumerate(records):
        missing = sorted(needed - set(record)) if isinstance(record, dict) else sorted(needed)
        if missing:
            raise TraceError(f"{file}: record {number} lacks {missing}; record in mode per_token")
        if wrong := _of_another_kind(record):
            raise TraceError(f"{file}: record {number} has {', '.join(wrong)} of another kind than SGLang writes")
    if physical.is_floating_point() or physical.is_complex() or not physical.numel():
        raise TraceError(f"{file} maps to experts with {physical.dtype} of shape {tuple(physical.shape)}")
    return records, physical.long()


def _of_another_kind(record: Mapping[str, Any]) -> list[str]:
    """The entries of a record that are not what the recorder writes."""
    numbers = [name for name in ("rank", "forward_pass_id", "forward_mode") if not _is_number(record[name])]
    ids, tokens = record["topk_ids_of_layer"], record.get("input_ids")
    integer = isinstance(ids, Tensor) and not ids.is_floating_point() and not ids.is_complex()
    listed = tokens.dim() == 1 if isinstance(tokens, Tensor) else isinstance(tokens, list | tuple | None)
    if listed and isinstance(tokens, list | tuple):
        listed = all(_is_number(token) for token in tokens)
    return numbers + ["topk_ids_of_layer"] * (not integer) + ["input_ids"] * (not listed)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _forwards_of(record: Mapping[str, Any], physical: Tensor, rank: int) -> list[TracedForward]:
    ids_XTK, tokens = record["topk_ids_of_layer"].long(), record.get("input_ids")
    if (
        ids_XTK.dim() != 3
        or len(ids_XTK) != len(physical)
        or int(ids_XTK.max() if ids_XTK.numel() else 0) >= physical.shape[1]
    ):
        raise TraceError(
            f"forward {record['forward_pass_id']} has ids of shape {tuple(ids_XTK.shape)} up to "
            f"{int(ids_XTK.max()) if ids_XTK.numel() else -1}, the map of [layers, slots] is {tuple(physical.shape)}"
        )
    known = None if tokens is None else torch.tensor(list(tokens), dtype=torch.int64, device="cpu")
    if known is not None and len(known) != ids_XTK.shape[1]:
        raise TraceError(f"forward {record['forward_pass_id']} names {len(known)} tokens for {ids_XTK.shape[1]} rows")
    phase: Phase = "decode" if int(record["forward_mode"]) in DECODING else "prefill"
    logical = physical.gather(1, ids_XTK.flatten(1).clamp_min(0)).view(ids_XTK.shape)
    logical[ids_XTK < 0] = -1
    step = int(record["forward_pass_id"])
    return [TracedForward(step, layer, rank, phase, ids_TK, None, known) for layer, ids_TK in enumerate(logical)]


def _tensors(path: Path, content: object) -> dict[str, Tensor]:
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise TraceError(f"{path} holds a {type(content).__name__}, expected tensors by name, or a recording of SGLang")
    return {str(name): value for name, value in content.items()}
