"""Routing records in the layouts of engines and trainers, and files that are damaged or hostile."""

import base64
import io
import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.lab.trace.foreign import signed
from moe_mk.lab.trace.record_check import check_record
from moe_mk.lab.trace.records import ModelFacts, Sizes, read_record
from moe_mk.lab.trace.routing import RoutingTrace
from moe_mk.lab.trace.routing_forward import TracedForward, TraceError, TraceFacts

IDS = torch.randint(0, 60, (2, 6, 3, 2), generator=torch.Generator().manual_seed(0)).int()
"""Two sequences of six rows, three layers, two experts."""
TOKENS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 6, 7]]
SIZES = Sizes(3, 2)


def npy(ids: Tensor) -> str:
    stream = io.BytesIO()
    np.save(stream, ids.numpy())
    return base64.b64encode(stream.getvalue()).decode()


def bare(ids: Tensor) -> str:
    return base64.b64encode(ids.numpy().tobytes()).decode()


def vllm(number: int) -> dict[str, Any]:
    tokens = TOKENS[number]
    return {"prompt_token_ids": tokens[:4], "choices": [{"token_ids": tokens[4:], "routed_experts": npy(IDS[number])}]}


def sglang(number: int) -> dict[str, Any]:
    return {"meta_info": {"routed_experts": bare(IDS[number]), "prompt_tokens": 4, "completion_tokens": 3}}


def dynamo(number: int) -> dict[str, Any]:
    payload = {"data": bare(IDS[number].byte()), "shape": [6, 3, 2], "dtype": "uint8", "start": 0}
    return {"input_ids": TOKENS[number][:4], "output_ids": TOKENS[number][4:], "routed_experts": payload}


def slime(number: int) -> dict[str, Any]:
    return {"tokens": TOKENS[number], "response_length": 3, "rollout_routed_experts": IDS[number].tolist()}


def lines(entry: Callable[[int], dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(entry(number)).encode() for number in range(2))


def saved(content: object) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def verl() -> dict[str, Tensor]:
    """Left padding of two tokens and right padding of one, as of prompts and responses."""
    shape = (2, 10, 3, 2)
    ids, mask, tokens = (
        torch.zeros(shape, dtype=torch.int32),
        torch.zeros(shape[:2]).long(),
        torch.zeros(shape[:2]).long(),
    )
    ids[:, 2:8], mask[:, 2:9], tokens[:, 2:9] = IDS, 1, torch.tensor(TOKENS)
    return {"routed_experts": ids, "attention_mask": mask, "input_ids": tokens}


def npz() -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **{name: value.numpy() for name, value in verl().items()})  # type: ignore[arg-type]
    return stream.getvalue()


def megatron_lines() -> bytes:
    kept = [
        {"step": step, "layer": layer + 1, "rank": 0, "topk": 2, "top_indices": IDS[step, :, layer].tolist()}
        for step in range(2)
        for layer in range(3)
    ]
    return b"\n".join(json.dumps(each).encode() for each in kept)


FILES: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "vLLM": (".json", "vLLM", lambda: json.dumps([vllm(0), vllm(1)]).encode()),
    "vLLM, a line each": (".jsonl", "vLLM", lambda: lines(vllm)),
    "SGLang": (".jsonl", "SGLang", lambda: lines(sglang)),
    "Dynamo": (".jsonl", "vLLM", lambda: lines(dynamo)),
    "slime": (".jsonl", "slime", lambda: lines(slime)),
    "slime's samples": (".pt", "slime", lambda: saved({"rollout_id": 0, "samples": [slime(0), slime(1)]})),
    "slime's batch": (
        ".pt", "slime",
        lambda: saved({"rollout_routed_experts": list(IDS), "tokens": TOKENS, "response_lengths": [3, 3]}),
    ),
    "veRL": (".pt", "veRL", lambda: saved({"batch": verl()})),
    "veRL as arrays": (".npz", "veRL", npz),
    "Megatron's trace": (".jsonl", "a routing trace", megatron_lines),
}  # fmt: skip
every = pytest.mark.parametrize("name", FILES)


def written(folder: Path, name: str, content: bytes | None = None) -> Path:
    suffix, _, make = FILES[name]
    file = folder / f"record{suffix}"
    file.write_bytes(make() if content is None else content)
    return file


@pytest.mark.row("177")
@every
def test_a_layout_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    record = read_record(written(tmp_path, name), SIZES)
    assert record.kind == FILES[name][1] and len(record.sequences) == 2
    for number, each in enumerate(record.sequences):
        assert each.ids_TXK is not None
        rows = each.ids_TXK[:6]
        assert torch.equal(rows.long(), IDS[number].long())
        padded = len(each.ids_TXK) == 7 and not each.ids_TXK[6].any()
        assert padded if "veRL" in name else len(each.ids_TXK) == 6
        if each.token_ids_T is not None:
            assert each.token_ids_T.tolist() == TOKENS[number]
        if name.startswith(("vLLM", "SGLang", "slime", "Dynamo")):
            assert each.prompt == 4
    assert name in ("SGLang", "Megatron's trace") or record.sequences[0].token_ids_T is not None


@pytest.mark.row("177")
def test_one_sequence_of_routers_of_arrays_and_of_our_own_traces(tmp_path: Path) -> None:
    torch.save(list(IDS[0].unbind(1)), tmp_path / "megatron.pt")
    np.save(tmp_path / "one.npy", IDS[0].numpy())
    save_file({"routed_experts": IDS[0].contiguous()}, tmp_path / "one.safetensors")
    forwards = [TracedForward(0, layer + 3, 0, "prefill", IDS[0, :, layer]) for layer in range(3)]
    RoutingTrace.of(TraceFacts(60, 2), forwards).write(tmp_path / "own.safetensors")
    for file in ("megatron.pt", "one.npy", "one.safetensors", "own.safetensors"):
        record = read_record(tmp_path / file)
        (only,) = record.sequences
        assert only.ids_TXK is not None and torch.equal(only.ids_TXK.long(), IDS[0].long()), file
    assert record.layers == (3, 4, 5)


@pytest.mark.row("177")
def test_nulls_are_kept_as_dropped_fields_and_starts_and_widths_are_read(tmp_path: Path) -> None:
    entries = [vllm(0), vllm(1)]
    entries[1]["choices"][0]["routed_experts"] = None
    (tmp_path / "a.json").write_text(json.dumps(entries))
    assert read_record(tmp_path / "a.json").sequences[1].ids_TXK is None
    late = vllm(0) | {"routed_experts_prompt_start": 2}, dynamo(0)
    late[0]["choices"][0]["routed_experts"] = IDS[0, 2:].tolist()
    late[1]["routed_experts"] |= {"data": bare(IDS[0, 2:].byte()), "shape": [4, 3, 2], "start": 2}
    (tmp_path / "b.json").write_text(json.dumps(late))
    assert [each.start for each in read_record(tmp_path / "b.json").sequences] == [2, 2]
    wider = sglang(0)
    wider["meta_info"]["routed_experts"] = bare(torch.cat((IDS[0], IDS[0]), -1).contiguous())
    (tmp_path / "c.json").write_text(json.dumps(wider))
    found = read_record(tmp_path / "c.json", SIZES).sequences[0].ids_TXK
    assert found is not None and found.shape == (6, 3, 4), "the number of tokens shows another top-k"


@pytest.mark.row("177")
@pytest.mark.parametrize("file,content,message", [
    ("a.json", {"meta_info": {"routed_experts": bare(IDS[0])}}, "pass --checkpoint, or --layers and --top-k"),
    ("a.json", {"routed_experts": "!!"}, "cannot be read"),
    ("a.json", {"routed_experts": {"data": "AAAA", "shape": [2**40, 1, 1]}}, "cannot be read"),
    ("a.json", {"routed_experts": {"data": "AAAA", "shape": [1, 1, 3], "dtype": "object"}}, "dtype 'object'"),
    ("a.json", {"routed_experts": [[0.5]]}, "expected integers"),
    ("a.json", {"routed_experts": [[1, 2]]}, r"shape \(1, 2\)"),
    ("a.json", {"routed_experts": [[[]]]}, "K=0 must be 1 to 1024"), ("a.json", {"choices": [3]}, "a choice is a int"),
    ("a.json", [3], "holds a int"), ("a.json", [], "holds no response"),
    ("a.json", {"meta_info": 3}, "meta_info is a int"), ("a.jsonl", "{", "cannot be read"),
    ("a.txt", "", "ends in '.txt', known are"),
])  # fmt: skip
def test_files_that_are_no_records_are_refused(tmp_path: Path, file: str, content: Any, message: str) -> None:
    (tmp_path / file).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TraceError, match=message):
        read_record(tmp_path / file)


class Bomb:
    """An object that would write a file where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.row("177")
@pytest.mark.parametrize("suffix", [".pt", ".npy", ".npz", ".json"])
def test_nothing_is_unpickled(tmp_path: Path, suffix: str) -> None:
    bomb, file = np.array([Bomb(tmp_path / "fired")], object), tmp_path / f"bad{suffix}"
    stream = io.BytesIO()
    np.save(stream, bomb)
    content: dict[str, Callable[[], bytes]] = {
        ".pt": lambda: saved({"routed_experts": Bomb(tmp_path / "fired")}),
        ".npy": stream.getvalue,
        ".npz": lambda: pickle.dumps(bomb),
        ".json": lambda: json.dumps({"routed_experts": base64.b64encode(stream.getvalue()).decode()}).encode(),
    }
    file.write_bytes(content[suffix]())
    with pytest.raises(TraceError):
        read_record(file)
    torch.save({"samples": [{"tokens": TOKENS[0], "rollout_routed_experts": IDS[0].numpy()}]}, tmp_path / "numpy.pt")
    with pytest.raises(TraceError, match="numpy"):
        read_record(tmp_path / "numpy.pt")
    assert not (tmp_path / "fired").exists()


VALUES: tuple[Any, ...] = (None, -1, 2**70, "", "x", [], {}, [[[]]], 0.5, True, "AAAA", {"data": 1}, {"shape": []})


def mutated(content: bytes, draw: random.Random) -> bytes:
    """A file with bytes changed, removed or repeated."""
    octets = bytearray(content)
    for _ in range(draw.choice((1, 1, 3, 20))):
        at = draw.randrange(len(octets))
        match draw.randrange(4):
            case 0:
                octets[at] = draw.randrange(256)
            case 1:
                del octets[at : at + draw.randrange(1, 40)]
            case 2:
                octets[at:at] = octets[at : at + draw.randrange(1, 40)]
            case _:
                octets[at] ^= 1 << draw.randrange(8)
        if not octets:
            return b"{"
    return bytes(octets)


def replaced(value: Any, draw: random.Random) -> Any:
    """A value of JSON with one part of another kind."""
    if draw.random() < 0.25 or not isinstance(value, dict | list) or not value:
        return draw.choice(VALUES)
    if isinstance(value, dict):
        key = draw.choice(list(value))
        return value | {key: replaced(value[key], draw)}
    at = draw.randrange(len(value))
    return [*value[:at], replaced(value[at], draw), *value[at + 1 :]]


def outcome(file: Path) -> None:
    """A record or a TraceError, and of a record a report or a TraceError."""
    facts = ModelFacts(60, 2, (1, 2, 3), 4)
    try:
        record = read_record(file, SIZES)
        check_record(record, facts)
        check_record(record, facts, record)
        check_record(record, None, record)
    except TraceError:
        pass


@pytest.mark.row("177")
@pytest.mark.parametrize("rounds", [40, pytest.param(600, marks=pytest.mark.slow)])
@every
def test_damaged_files_raise_nothing_but_trace_errors(tmp_path: Path, name: str, rounds: int) -> None:
    draw, content = random.Random(f"{name} {rounds}"), FILES[name][2]()
    for _ in range(rounds):
        outcome(written(tmp_path, name, mutated(content, draw)))


@pytest.mark.row("177")
@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("entry", [vllm, sglang])
def test_rows_of_bare_ids_are_those_behind_the_start(
    tmp_path: Path, entry: Callable[[int], dict[str, Any]], first: int
) -> None:
    stated = entry(0) | {"routed_experts_prompt_start": first}
    payload = bare(IDS[0][first:].contiguous())
    if entry is vllm:
        stated["choices"][0]["routed_experts"] = payload
    else:
        stated["meta_info"]["routed_experts"] = payload
    (tmp_path / "a.json").write_text(json.dumps(stated))
    found = read_record(tmp_path / "a.json", Sizes(num_layers=3)).sequences[0]  # the rows decide K
    assert found.start == first and found.ids_TXK is not None and torch.equal(found.ids_TXK, IDS[0][first:])


@pytest.mark.parametrize("entry", [vllm, sglang, dynamo, slime])
def test_responses_with_parts_of_other_kinds_raise_nothing_but_trace_errors(
    tmp_path: Path, entry: Callable[[int], dict[str, Any]]
) -> None:
    draw = random.Random(entry.__name__)
    for _ in range(60):
        (tmp_path / "record.json").write_text(json.dumps(replaced([entry(0), entry(1)], draw)))
        outcome(tmp_path / "record.json")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_ids_of_every_dtype_keep_their_values_beside_minus_one(dtype: torch.dtype) -> None:
    held = signed(torch.tensor([0, torch.iinfo(dtype).max], dtype=dtype))
    assert held.tolist() == [0, torch.iinfo(dtype).max] and held.dtype.is_signed
