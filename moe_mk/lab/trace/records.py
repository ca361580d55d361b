"""Routing records of rollouts (R3), one array (tokens, layers, K) a sequence, read as they are and never unpickled.

    vLLM       JSON of a response: choices[i].routed_experts, base64 of a .npy file, int32, with token_ids and
               prompt_token_ids; earlier versions: nested lists. Source: vllm/outputs.py, vllm-project/vllm#28284,
               #44638 and #51906 (routed_experts_prompt_start)
    SGLang     JSON of a response: meta_info.routed_experts or sglext.routed_experts, base64 of bare int32; dense layers
               are counted too. Source: sgl-project/sglang#12162
    Dynamo     routed_experts = {data, shape, dtype, start} with base64. Source: ai-dynamo/dynamo#10529
    slime      .pt or JSON with samples of {tokens, response_length, rollout_routed_experts}, or a batch of lists.
               Source: THUDM/slime, slime/utils/types.py, class Sample
    veRL       .pt, .npz or .safetensors with routed_experts (B, T, layers, K), zeros on padding, attention_mask and
               input_ids (B, T). Source: volcengine/verl, verl/utils/megatron/router_replay_utils.py
    Megatron   .pt with a list of (T, K), one for each router: RouterReplay; .jsonl of a routing trace, see `importers`
    ours       routing traces of `RoutingTrace`, and .npy or .npz of (tokens, layers, K)

Rows are those of the tokens but the last, which no forward has seen; veRL pads with zeros to all tokens.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_mk.errors import unless_signalled
from moe_mk.files import INDEX_BYTES, named_in_utf8, parse_json, read_json
from moe_mk.lab.files import expect_small_header, read_lines
from moe_mk.lab.trace.foreign import array_of, read_arrays, read_pt
from moe_mk.lab.trace.importers import import_trace
from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.lab.trace.routing_file import FORMAT
from moe_mk.lab.trace.routing_forward import MOST, TraceError

Fault = Literal[
    "field dropped", "top-k", "layer count", "layer order", "dtype wrap", "physical ids", "rows lost", "rows shifted",
    "prefix repeated", "prefix missing", "cache hole", "unexplained",
]  # fmt: skip
"""What may be wrong with a record."""
FIELDS = ("routed_experts", "rollout_routed_experts")
DTYPES = {str(np.dtype(kind)): np.dtype(kind) for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "i8")}
"""Dtypes of ids that a payload may state."""
MOST_ALONG = 1024
"""Layers, and experts of a token."""
NPY = b"\x93NUMPY"
PROBLEMS = (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError, EOFError, MemoryError)


@dataclass(frozen=True)
class RecordedSequence:
    """The record of one sequence, unchanged: `record_check` finds faults."""

    name: str
    ids_TXK: Tensor | None
    """Integers (tokens, layers, K) in the dtype of the file; None: there are none in it."""
    token_ids_T: Tensor | None = None
    """int64; the vocabulary's numbers of all tokens, where they are known."""
    start: int = 0
    """The token of the first row."""
    prompt: int | None = None
    """Number of tokens of the prompt."""


@dataclass(frozen=True)
class RoutingRecord:
    """The sequences of one file."""

    kind: str
    sequences: tuple[RecordedSequence, ...]
    layers: tuple[int, ...] | None = None
    """Numbers of the model's layers along the layer axis; None: all layers with experts, or all layers, in order."""

    @classmethod
    def of_trace(cls, trace: RoutingTrace, kind: str = "a routing trace") -> RoutingRecord:
        """One sequence for each step of each rank. Raises TraceError where its layers have other numbers of tokens."""
        rows: dict[tuple[int, int], dict[int, Tensor]] = defaultdict(dict)
        known: dict[tuple[int, int], Tensor | None] = {}
        for forward in trace.forwards():
            rows[forward.step, forward.rank][forward.layer] = forward.ids_TK
            known[forward.step, forward.rank] = forward.token_ids_T
        found = []
        for (step, rank), of_layer in rows.items():
            if len({len(ids_TK) for ids_TK in of_layer.values()}) > 1 or sorted(of_layer) != trace.layers:
                counts = {layer: len(ids_TK) for layer, ids_TK in of_layer.items()}
                raise TraceError(f"step {step} of rank {rank} has rows {counts} for the layers {trace.layers}")
            ids_TXK = torch.stack([of_layer[layer] for layer in trace.layers], 1)
            found.append(RecordedSequence(f"step {step}, rank {rank}", ids_TXK, known[step, rank]))
        return cls(kind, tuple(found), tuple(trace.layers))


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model that a record must fit."""

    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    """Numbers of the layers with experts."""
    num_hidden_layers: int | None = None
    """All layers, the dense ones included; some engines record as many."""
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class Finding:
    """One fault, where it is, and what shows it."""

    fault: Fault
    where: str
    evidence: str


@dataclass(frozen=True)
class Sizes:
    """Sizes that bare bytes do not contain."""

    num_layers: int | None = None
    top_k: int | None = None


def read_record(path: str | Path, sizes: Sizes = Sizes()) -> RoutingRecord:
    """Read a record of any known kind. sizes: for bare int32 of SGLang. Raises TraceError."""
    path = Path(path)
    try:
        return _read(path, sizes)
    except TraceError:
        raise
    except unless_signalled(OSError, SafetensorError, binascii.Error, *PROBLEMS) as problem:
        raise TraceError(f"routing record {path} cannot be read: {problem}") from problem


def _read(path: Path, sizes: Sizes) -> RoutingRecord:
    if path.is_dir() or path.suffix == ".jsonl":
        if path.is_dir() or b'"top_indices"' in next(read_lines(path), b""):
            return RoutingRecord.of_trace(import_trace(path, num_experts=MOST))
        return _of_responses([parse_json(line) for line in read_lines(path) if line.strip()], sizes)
    if path.suffix == ".json":
        content = read_json(path, INDEX_BYTES)
        return _of_responses(content if isinstance(content, list) else [content], sizes)
    if path.suffix == ".safetensors":
        expect_small_header(path)
        with named_in_utf8(path) as file, safe_open(file, framework="pt", device="cpu") as opened:
            if (opened.metadata() or {}).get("format") == FORMAT:
                return RoutingRecord.of_trace(RoutingTrace.read(path))
            return _of_tensors({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    if path.suffix in (".npy", ".npz"):
        return _of_tensors(read_arrays(path))
    if path.suffix == ".pt":
        return _of_pt(read_pt(path))
    known = ".json, .jsonl, .npy, .npz, .safetensors, .pt and folders of traces"
    raise TraceError(f"routing record {path} ends in {path.suffix!r}, known are {known}")


def _of_pt(content: object) -> RoutingRecord:
    if isinstance(content, list | tuple) and content and all(isinstance(each, Tensor) for each in content):
        ids_TXK = _layout("the file", torch.stack([_integers(each) for each in content], 1))
        return _of_tensors({"": ids_TXK}) if ids_TXK.dim() != 3 else _single("Megatron", ids_TXK)
    while isinstance(content, dict) and isinstance(content.get("batch"), dict):
        content = content["batch"]
    if isinstance(content, dict) and isinstance(content.get("samples"), list | tuple):
        return _of_responses(content["samples"], Sizes())
    if isinstance(content, dict) and isinstance(content.get(FIELDS[1]), list | tuple):
        columns = (content[FIELDS[1]], content.get("tokens"), content.get("response_lengths"))
        count = len(columns[0])
        ids, tokens, lengths = (each if each is not None else [None] * count for each in columns)
        samples = [
            {FIELDS[1]: one, "tokens": known, "response_length": length}
            for one, known, length in zip(ids, tokens, lengths, strict=True)
        ]
        return _of_responses(samples, Sizes())
    if isinstance(content, Tensor):
        return _of_tensors({"": content})
    if not isinstance(content, dict):
        raise TraceError(f"it holds a {type(content).__name__}, expected tensors by name")
    return _of_tensors({str(name): value for name, value in content.items() if isinstance(value, Tensor)})


def _of_tensors(tensors: Mapping[str, Tensor]) -> RoutingRecord:
    """(tokens, layers, K), or (B, T, layers, K) with a mask of tokens."""
    named = [name for name in ("", *FIELDS, "topk_ids") if name in tensors]
    if not named:
        raise TraceError(f"it has none of {', '.join(FIELDS)} among {sorted(tensors)[:6]}: the field was dropped")
    ids, kind = _layout("the file", tensors[named[0]]), "arrays" if named[0] in ("", "topk_ids") else "veRL"
    tokens, mask = tensors.get("input_ids"), tensors.get("attention_mask")
    if ids.dim() == 3:
        return _single(kind, ids, _flat_tokens(tokens))
    if ids.dim() != 4:
        raise TraceError(f"{named[0] or 'ids'} has shape {tuple(ids.shape)}, expected [sequences,] tokens, layers, K")
    if mask is None:
        mask = torch.ones(ids.shape[:2], dtype=torch.bool, device="cpu")
    for name, given in (("attention_mask", mask), ("input_ids", tokens)):
        if given is not None and given.shape != ids.shape[:2]:
            raise TraceError(f"{name} is {tuple(given.shape)}, {named[0]} has {tuple(ids.shape[:2])} tokens")
    found = []
    for number in range(len(ids)):
        kept_T = mask[number].bool()
        known = None if tokens is None else _flat_tokens(tokens[number][kept_T])
        found.append(RecordedSequence(f"sequence {number}", ids[number][kept_T], known))
    return RoutingRecord(kind, tuple(found))


def _single(kind: str, ids_TXK: Tensor, token_ids_T: Tensor | None = None) -> RoutingRecord:
    return RoutingRecord(kind, (RecordedSequence("sequence 0", ids_TXK, token_ids_T),))


def _of_responses(entries: Sequence[Any], sizes: Sizes) -> RoutingRecord:
    found: list[RecordedSequence] = []
    kinds: set[str] = set()
    for entry in entries:
        if not isinstance(entry, dict):
            raise TraceError(f"it holds a {type(entry).__name__}, expected responses or samples")
        choices = entry.get("choices")
        parts = choices if isinstance(choices, list) and choices else [entry]
        for part in parts:
            if not isinstance(part, dict):
                raise TraceError(f"a choice is a {type(part).__name__}, expected an object")
            kind, sequence = _of_response(f"sequence {len(found)}", entry, part, sizes)
            kinds.add(kind)
            found.append(sequence)
    if not found:
        raise TraceError("it holds no response")
    return RoutingRecord(" and ".join(sorted(kinds)), tuple(found))


def _of_response(name: str, entry: dict[str, Any], part: dict[str, Any], sizes: Sizes) -> tuple[str, RecordedSequence]:
    """One sequence of a response of an engine, or of a sample of a trainer."""
    meta = entry.get("meta_info") or entry.get("sglext") or {}
    if not isinstance(meta, dict):
        raise TraceError(f"{name}: meta_info is a {type(meta).__name__}, expected an object")
    if FIELDS[1] in part or "response_length" in part:
        kind, payload, tokens = "slime", part.get(FIELDS[1]), part.get("tokens")
        response = part.get("response_length")
        prompt = None if tokens is None or response is None else len(tokens) - int(response)
    else:
        kind = "SGLang" if meta else "vLLM"
        payload = meta.get(FIELDS[0]) if meta else part.get(FIELDS[0], entry.get(FIELDS[0]))
        before = part.get("prompt_token_ids") or entry.get("prompt_token_ids") or entry.get("input_ids")
        after = part.get("token_ids") or entry.get("output_ids")
        tokens = None if before is None or after is None else [*before, *after]
        prompt = meta.get("prompt_tokens") if before is None else len(before)
    start = payload.get("start") or 0 if isinstance(payload, dict) else entry.get("routed_experts_prompt_start") or 0
    rows = None if tokens is None else len(tokens) - 1 - start
    if rows is None and isinstance(prompt, int) and isinstance(count := meta.get("completion_tokens"), int):
        rows = prompt + count - 1 - start
    ids_TXK = None if payload is None else _payload(name, payload, sizes, rows)
    return kind, RecordedSequence(name, ids_TXK, _flat_tokens(tokens), int(start), prompt)


def _payload(name: str, payload: Any, sizes: Sizes, rows: int | None) -> Tensor:
    """The ids of one sequence: nested lists or a tensor, an object with shape and dtype, or text in base64."""
    if isinstance(payload, dict):
        dtype = DTYPES.get(str(payload.get("dtype", "uint8")))
        if dtype is None:
            raise TraceError(f"{name} has dtype {payload.get('dtype')!r}, known are {', '.join(DTYPES)}")
        flat = np.frombuffer(base64.b64decode(payload["data"], validate=True), dtype)
        ids = torch.from_numpy(flat.reshape([int(side) for side in payload["shape"]]).copy())
    elif isinstance(payload, str):
        octets = base64.b64decode(payload, validate=True)
        if octets.startswith(NPY):
            ids = torch.from_numpy(np.ascontiguousarray(array_of(io.BytesIO(octets), len(octets))))
        else:
            ids = _shaped(name, torch.from_numpy(np.frombuffer(octets, "<i4").copy()), sizes, rows)
    else:
        ids = _numbers(payload)
    ids = _layout(name, ids)
    if ids.dim() != 3:
        raise TraceError(f"{name} has ids of shape {tuple(ids.shape)}, expected tokens, layers, K")
    return ids


def _shaped(name: str, flat: Tensor, sizes: Sizes, rows: int | None) -> Tensor:
    """Bare ids as (tokens, layers, K). The number of rows, where it is known, decides K against the stated one."""
    if sizes.num_layers is None or (sizes.top_k is None and not rows):
        raise TraceError(f"{name} is bare int32 without a shape; pass --checkpoint, or --layers and --top-k")
    top_k = sizes.top_k
    if rows and len(flat) and len(flat) % (rows * sizes.num_layers) == 0:
        top_k = len(flat) // (rows * sizes.num_layers)
    assert top_k is not None
    if len(flat) % (sizes.num_layers * top_k):
        each = f"{sizes.num_layers} layers with {top_k} experts"
        raise TraceError(f"{name} has {len(flat)} ids, no multiple of {each}; the record has other layers or top-k")
    return flat.view(-1, sizes.num_layers, top_k)


def _integers(ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        raise TraceError(f"ids are {ids.dtype}, expected integers")
    return ids


def _layout(name: str, ids: Tensor) -> Tensor:
    """Ids of (..., tokens, layers, K), where layers and K are numbers that a model can have. Raises TraceError."""
    sizes = dict(zip(("layers", "K"), ids.shape[-2:], strict=False))
    if wrong := [f"{key}={size}" for key, size in sizes.items() if not 1 <= size <= MOST_ALONG]:
        raise TraceError(f"{name} has ids of shape {tuple(ids.shape)}: {' and '.join(wrong)} must be 1 to {MOST_ALONG}")
    return _integers(ids)


def _flat_tokens(tokens: object) -> Tensor | None:
    if tokens is None:
        return None
    return _integers(_numbers(tokens)).flatten().to(torch.int64)


def _numbers(values: object) -> Tensor:
    """Nested lists of numbers as a tensor, or the tensor."""
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))
