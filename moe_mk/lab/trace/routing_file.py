"""A routing trace as one safetensors file: tensors, and a header of JSON. Read as data, never run.

    metadata   format   "moe_mk routing trace"       version  "1"
               header   {"num_experts": 256, ...}    digest   sha256 of the header and every tensor
    tensors    step_X layer_X rank_X phase_X tokens_X ids_RK [weights_RK] [token_ids token_start_X]

A folder of such files, chunk-000000.safetensors and so on, is a trace that was appended to while it was recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.errors import unless_signalled
from moe_mk.files import named_in_utf8, parse_json, replacing
from moe_mk.lab.files import expect_small_header
from moe_mk.lab.trace.routing_forward import TraceError

FORMAT, VERSION = "moe_mk routing trace", 1

CHUNK = "chunk-{:06d}.safetensors"


def save(path: Path, header: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write a file atomically, through a temporary file in the same folder. Raises TraceError."""
    text = json.dumps(header, sort_keys=True)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "header": text, "digest": digest(text, whole)}
    try:
        with replacing(path) as temporary:
            save_file(whole, temporary, metadata=metadata)
    except unless_signalled(OSError, SafetensorError) as problem:
        raise TraceError(f"trace {path} cannot be written: {problem}; name another file") from problem


def load(path: Path) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Header and tensors of one file; raises TraceError unless every byte is as it was written."""
    try:
        expect_small_header(path)
        with named_in_utf8(path) as file, safe_open(file, framework="pt", device="cpu") as opened:
            metadata = dict(opened.metadata() or {})
            _check_kind(path, metadata)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except TraceError:
        raise
    except unless_signalled(OSError, ValueError, SafetensorError) as problem:
        raise TraceError(f"trace {path} is damaged, or no safetensors file: {problem}") from problem
    text = metadata.get("header", "")
    if digest(text, tensors) != metadata.get("digest"):
        raise TraceError(f"trace {path} is damaged: its content does not have the digest it was written with")
    try:
        header = parse_json(text)
    except ValueError as problem:
        raise TraceError(f"trace {path} has a header that is not JSON: {problem}") from problem
    if not isinstance(header, dict):
        raise TraceError(f"trace {path} has a header of {type(header).__name__}, expected names with values")
    return header, tensors


def chunks_of(folder: Path) -> list[Path]:
    """The chunks of a folder in order; raises TraceError if there are none, or one in between is missing."""
    found = sorted(folder.glob("chunk-*.safetensors"))
    if not found:
        raise TraceError(f"trace {folder} is a folder without {CHUNK.format(0)}")
    expected = [CHUNK.format(number) for number in range(len(found))]
    if [file.name for file in found] != expected:
        missing = sorted(set(expected) - {file.name for file in found})
        raise TraceError(f"trace {folder} is incomplete: {missing[0]} is missing, {found[-1].name} is there")
    return found


def digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    """A hash over the header and the name, dtype, shape and bytes of every tensor."""
    hashed = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hashed.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():
            hashed.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return hashed.hexdigest()


def _check_kind(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        found = f"format {metadata['format']!r}" if "format" in metadata else "no format"
        raise TraceError(
            f"{path} is a safetensors file of another kind ({found}), not a routing trace; "
            "moe_mk.lab.trace.importers reads those of other programs"
        )
    version = metadata.get("version", "")
    if not version.isdecimal() or len(version) > 9 or int(version) > VERSION:
        raise TraceError(f"trace {path} has version {version[:20]!r}, this library reads up to {VERSION}; update it")


BYTE = 256


def id_dtype(num_experts: int) -> torch.dtype:
    """The narrowest signed dtype for expert ids and -1."""
    return torch.int16 if num_experts <= 2**15 else torch.int32


def signed_ids(ids_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Ids on the CPU in a signed dtype; raises TraceError for values it cannot hold."""
    limit, ids_TK = torch.iinfo(dtype), ids_TK.cpu()
    if ids_TK.numel() and (int(ids_TK.min()) < limit.min or int(ids_TK.max()) > limit.max):
        raise TraceError(f"expert ids from {int(ids_TK.min())} to {int(ids_TK.max())} do not fit {dtype}")
    return ids_TK.to(dtype)


def pack_ids(ids_RK: Tensor, num_experts: int) -> Tensor:
    """One byte an id if all experts, and -1 as 255 where it occurs, have room in it."""
    holes = bool((ids_RK < 0).any())
    return ids_RK.to(torch.uint8) if num_experts + holes <= BYTE else ids_RK.to(id_dtype(num_experts))


def unpack_ids(ids_RK: Tensor, num_experts: int) -> Tensor:
    """Signed ids; raises TraceError for a dtype that no trace is written in."""
    if ids_RK.dtype not in (torch.uint8, torch.int16, torch.int32):
        raise TraceError(f"ids are {ids_RK.dtype}, expected uint8, int16 or int32")
    wide = signed_ids(ids_RK, id_dtype(num_experts))
    if ids_RK.dtype == torch.uint8 and num_experts < BYTE:
        wide[wide == BYTE - 1] = -1
    return wide


def pack_weights(weights_RK: Tensor) -> Tensor:
    """bf16 or f16 where that is exact, else f32 as it is."""
    for dtype in (torch.bfloat16, torch.float16):
        narrow = weights_RK.to(dtype)
        if torch.equal(narrow.to(torch.float32), weights_RK):
            return narrow
    return weights_RK


def pack_int(column: Tensor) -> Tensor:
    """int32 where that is enough."""
    fits = column.numel() == 0 or -(2**31) <= int(column.min()) <= int(column.max()) < 2**31
    return column.to(torch.int32) if fits else column


def pack_token_ids(token_ids_R: Tensor, tokens_X: Tensor) -> tuple[Tensor, Tensor]:
    """A pool of token ids, and where the tokens of each forward start in it; equal forwards share a stretch."""
    pool: list[Tensor] = []
    known: dict[bytes, int] = {}
    starts, size = [], 0
    for part in torch.split(token_ids_R, tokens_X.tolist()):
        key = part.numpy().tobytes()
        if key not in known:
            known[key] = size
            pool.append(part)
            size += len(part)
        starts.append(known[key])
    nothing = token_ids_R[:0]
    return pack_int(torch.cat([nothing, *pool])), torch.tensor(starts, dtype=torch.int64, device="cpu")


def unpack_token_ids(pool: Tensor, start_X: Tensor, tokens_X: Tensor) -> Tensor:
    """Token ids row by row; raises TraceError where a stretch leaves the pool."""
    if len(start_X) != len(tokens_X):
        raise TraceError(f"{len(start_X)} starts of token ids for {len(tokens_X)} forwards")
    if len(start_X):
        least, most, end = int(start_X.min()), int(start_X.max()), int((start_X + tokens_X).max())
        if least < 0 or max(most, end) > len(pool):  # a start near 2^63 makes an end below zero
            raise TraceError(f"token ids end at {end} and start at {least} to {most}, there are {len(pool)}")
    parts = [pool[start : start + size] for start, size in zip(start_X.tolist(), tokens_X.tolist(), strict=True)]
    return torch.cat([pool[:0], *parts]).to(torch.int64)
