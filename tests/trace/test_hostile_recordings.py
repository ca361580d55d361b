"""Hostile recordings: a TraceError, before anything is allocated for what they only say."""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.errors import ConfigError
from moe_mk.lab.cli.inputs import read_token_ids
from moe_mk.lab.cli.loads import read_loads
from moe_mk.lab.trace import routing_file
from moe_mk.lab.trace.foreign import read_npy
from moe_mk.lab.trace.importers import from_arrays, import_trace
from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.lab.trace.routing_forward import MOST, TraceError, TraceFacts

IDS = torch.tensor([[[0, 1], [2, 3]], [[3, 0], [1, -1]]])
"""Two layers of two tokens with two of four experts each."""


def rewritten(
    folder: Path, header: Callable[[dict[str, Any]], str], version: str = "1", **tensors: Tensor | None
) -> Path:
    """A trace with another header, and other tensors, under a digest that is right."""
    from_arrays(IDS, num_experts=4).write(folder / "good.safetensors")
    stated, kept = routing_file.load(folder / "good.safetensors")
    held = {name: tensor for name, tensor in {**kept, **tensors}.items() if tensor is not None}
    text = header(dict(stated))
    notes = {"format": routing_file.FORMAT, "version": version, "header": text}
    save_file(held, folder / "bad.safetensors", {**notes, "digest": routing_file.digest(text, held)})
    return folder / "bad.safetensors"


def stating(**facts: Any) -> Callable[[dict[str, Any]], str]:
    return lambda stated: json.dumps(stated | facts)


NO_JSON = "has a header that is not JSON"


@pytest.mark.parametrize("header,changes,problem", [
    *((lambda _, text=text: text, {}, NO_JSON) for text in ("{", "1" * 5000, "[" * 100_000, "")),
    (json.dumps, {"version": "9" * 5000}, r"has version '9{20}', this library reads up to 1"),
    (stating(num_experts="4"), {}, "num_experts is a str, expected a whole number"),
    (stating(num_experts=None, model=3), {}, "num_experts is a NoneType, .*model is a int, expected a text"),
    (stating(top_k=2.5), {}, "top_k is a float"), (stating(num_ranks=True), {}, "num_ranks is a bool"),
    (stating(num_experts=2**40), {}, f"num_experts is above {MOST}"),
    (stating(num_ranks=2**40), {}, f"num_ranks is above {MOST}"),
    (json.dumps, {"tokens_X": torch.tensor([2, 2**40])}, "ids_RK has 4 for all of them"),
    (json.dumps, {"tokens_X": torch.tensor([2**62 - 1] * 4)}, "ids_RK has 4 for all of them"),
    (json.dumps, {"tokens_X": torch.tensor(4)}, "tokens_X has 0 dimensions, expected 1"),
    (json.dumps, {"ids_RK": torch.zeros(8, dtype=torch.uint8)}, r"ids_RK has shape \(8,\), expected rows of K"),
])  # fmt: skip
def test_what_a_trace_states_beyond_what_it_has_is_reported(
    tmp_path: Path, header: Callable[[dict[str, Any]], str], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(TraceError, match=problem):
        RoutingTrace.read(rewritten(tmp_path, header, **changes))


def test_facts_are_plain_values() -> None:
    assert TraceFacts(4, 2).problems() == []
    assert TraceFacts(np.int64(4), 2).problems() == []  # type: ignore[arg-type]
    assert asdict(TraceFacts(MOST, 2)) and TraceFacts(MOST, 2).problems() == []


def test_steps_beyond_64_bits_are_refused(tmp_path: Path) -> None:
    line = {"step": 2**70, "layer": 1, "rank": 0, "topk": 2, "top_indices": [[0, 1]], "block": "decoder"}
    (tmp_path / "t.jsonl").write_text(json.dumps(line))
    with pytest.raises(TraceError, match="must be numbers of 64 bits"):
        import_trace(tmp_path / "t.jsonl", num_experts=4)


@pytest.mark.parametrize("change,problem", [
    ({"rank": [0]}, "record 0 has rank of another kind"),
    ({"forward_mode": None}, "record 0 has forward_mode of another kind"),
    ({"forward_pass_id": torch.zeros(3)}, "record 0 has forward_pass_id of another kind"),
    ({"topk_ids_of_layer": [1, 2]}, "record 0 has topk_ids_of_layer of another kind"),
    ({"topk_ids_of_layer": torch.zeros(1, 2, 2)}, "record 0 has topk_ids_of_layer of another kind"),
    ({"input_ids": 7}, "record 0 has input_ids of another kind"),
    ({"input_ids": [2**70, 1]}, "record 0 has input_ids of another kind"),
    ({"map": torch.zeros(1, 4)}, "maps to experts with torch.float32"),
    ({"map": torch.zeros(1, 0, dtype=torch.int64)}, "maps to experts with torch.int64 of shape"),
    ({"map": torch.full((1, 4), 2**40)}, "do not fit torch.int32|num_experts is above"),
])  # fmt: skip
def test_a_recording_of_sglang_with_other_kinds_of_values_is_reported(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    ids = torch.tensor([[[0, 1], [2, 3]]])
    record = {"rank": 0, "forward_pass_id": 1, "forward_mode": 1, "topk_ids_of_layer": ids, "input_ids": [5, 6]}
    physical = change.pop("map", torch.arange(4)[None])
    torch.save({"records": [record | change], "last_physical_to_logical_map": physical}, tmp_path / "r.pt")
    with pytest.raises(TraceError, match=problem):
        import_trace(tmp_path / "r.pt")


def npy(shape: str, rest: bytes = b"") -> bytes:
    """A .npy file whose header states a shape. Source: numpy.lib.format, version 1.0."""
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + rest


@pytest.mark.parametrize(
    "content",
    [npy("(100000000, 100000000)"), npy("(2,)", bytes(15)), npy("(-1,)", bytes(16)), npy("((", bytes(16)), b"x"],
    ids=["petabytes", "a byte short", "negative", "a broken header", "no header"],
)
def test_arrays_are_not_made_before_their_file_has_them(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises((ValueError, OSError)):
        read_npy(tmp_path / "a.npy")
    with pytest.raises(TraceError, match="cannot be read as arrays of numbers"):
        import_trace(tmp_path / "a.npy", num_experts=4)
    with pytest.raises(ConfigError, match="--loads .* cannot be read"):
        read_loads(tmp_path / "a.npy")
    with pytest.raises(ConfigError, match="--token-ids .* cannot be read"):
        read_token_ids(tmp_path / "a.npy")


@pytest.mark.parametrize("shape", [(3,), (0, 2), (2, 0), ()])
def test_arrays_of_every_shape_are_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype=np.int32)
    np.save(tmp_path / "a.npy", array)
    assert np.array_equal(read_npy(tmp_path / "a.npy"), array)


def test_members_that_say_more_than_they_hold_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as members:
        members.writestr("topk_ids.npy", npy("(100000000, 100000000)", bytes(64)))
    with pytest.raises(TraceError, match=r"its header states \(100000000, 100000000\) of int64"):
        import_trace(tmp_path / "a.npz", num_experts=4)


def test_members_that_unpack_to_more_than_the_file_may_are_refused(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as members:
        members.writestr("topk_ids.npy", npy("(2, 2)", bytes(32)))
    content = stream.getvalue()
    at = content.index(b"PK\x01\x02") + 24  # the size in the directory, behind that of the packed bytes
    (tmp_path / "a.npz").write_bytes(content[:at] + (2**31).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(TraceError, match=r"have 2147483648 bytes; of 282 bytes the limit is 16777216 \(100 times"):
        import_trace(tmp_path / "a.npz", num_experts=4)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, f"[1, 1{'0' * 400}]"], ids=len)
def test_loads_beyond_their_reader_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(ConfigError, match="--loads .* cannot be read"):
        read_loads(tmp_path / "l.json")
