"""What Megatron-LM and programs like it keep of their routers: JSON lines of choices, and tensors by layer name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_mk.files import parse_json, read_lines
from moe_mk.trace.foreign import num_experts_of, resized, signed
from moe_mk.trace.routing import RoutingTrace
from moe_mk.trace.routing_forward import Phase, TracedForward, TraceError, TraceFacts
from moe_mk.trace.routing_pack import id_dtype

LAYER = re.compile(r"(?:^|[^a-z])layers?[^0-9a-z]?(\d+)(?:\D|$)", re.IGNORECASE)
KINDS = {
    "routing_map": "map",
    "probs": "probs",
    "topk_indices": "ids", "top_indices": "ids", "indices": "ids", "topk_ids": "ids",
    "topk_weights": "weights", "top_scores": "weights", "scores": "weights",
}  # fmt: skip
"""What the last word of a tensor's name says it is. map and probs are (T, E), ids and weights (T, K)."""
PIECE = 1 << 20
"""Entries of a map that are sorted at a time."""
FIELDS = {"step": int, "layer": int, "rank": int, "topk": int, "top_indices": list}
"""What a line of a routing trace must hold."""


def from_megatron(
    files: Sequence[Path], *, num_experts: int | None = None, num_groups: int = 1, phase: Phase = "prefill"
) -> RoutingTrace:
    """Routing traces of Megatron-LM, router_trace_rank0.jsonl and so on: one line a step, layer and rank.

    Lines of the multi-token prediction block are left out: their layers have numbers of their own. phase: of all
    forwards, which the lines do not tell. Routing weights are not in there. Source: NVIDIA/Megatron-LM,
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
    """What routers returned, by names that end in one of KINDS and hold the number of a layer.

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
