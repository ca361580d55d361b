"""Case files: what is written is read, by numpy alone too; hostile files are refused before tensors are allocated."""

import json
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from moe_mk.config import ModelConfig, RouterConfig
from moe_mk.errors import ConfigError, MoEMKError, ShapeError, UnsupportedError, WeightError
from moe_mk.lab.judge import Case, read_case, write_case
from moe_mk.lab.judge.casefile import MOST_TOKENS
from moe_mk.quant.kinds import scheme_of_kind

T, H, I, E, K = 3, 256, 128, 4, 2


def case_of(kind="bf16", **changes):
    """A case with random values; experts 0, 1 and 3 are hit."""
    draw = torch.Generator().manual_seed(5)
    scheme = scheme_of_kind(kind)
    parts = {}
    for name, rows, columns in (("w13", 2 * I, H), ("w2", H, I)):
        q = scheme.quantize(torch.randn((3, rows, columns), generator=draw) * columns**-0.5)
        held = {"": q.values, "_scale": q.scales, "_global_scale": q.global_scale, "_zeros": q.zeros}
        parts |= {name + part: tensor for part, tensor in held.items() if tensor is not None}
    x = torch.randn((T, H), generator=draw).to(torch.bfloat16)
    fields = {
        "model": ModelConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, quant={"weights": kind}),
        "router": RouterConfig(top_k=K), "x": x, "y": x.flip(0), "experts": torch.tensor([0, 1, 3]),
        "topk_ids": torch.tensor([[0, 3], [1, -1], [3, 1]]), "topk_weights": torch.rand((T, K), generator=draw),
        "versions": {"engine": "1.2"}, "num_tokens": 9, "tokens": torch.tensor([0, 4, 8]), **parts,
    }  # fmt: skip
    return Case(**(fields | changes))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "case.safetensors"


@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "mxfp4", "int4_g32_zp", "nvfp4", "q4_k"])
@pytest.mark.parametrize("portable", [False, True])
def test_a_case_is_read_as_it_was_written(file, kind, portable):
    case = case_of("q4_0" if kind == "q4_k" else kind)
    if kind == "nvfp4":  # one global scale each of gate and up
        case = replace(case, w13_global_scale=case.w13_global_scale.expand(3, 2, 1).contiguous())
    write_case(file, case, portable=portable)
    found = read_case(file)
    assert found.tensors.keys() == case.tensors.keys()
    for name, tensor in case.tensors.items():
        same = found.tensors[name]
        assert same.dtype is tensor.dtype and same.contiguous().view(torch.uint8).equal(
            tensor.contiguous().view(torch.uint8)
        ), name
    # Each field by itself: since Python 3.13 dataclasses no longer take the same tensor for equal.
    rest = {each.name for each in fields(case)} - case.tensors.keys()
    assert {name: getattr(found, name) for name in rest} == {name: getattr(case, name) for name in rest}


def test_slots_are_named_by_their_expert(file):
    case = case_of("fp8_block")
    slots = case.slots()
    assert list(slots) == [0, 1, 3]
    assert slots[3].down_HI.values.view(torch.uint8).equal(case.w2[2].view(torch.uint8))
    assert slots[1].gate_IH.values.view(torch.uint8).equal(case.w13[1, :I].view(torch.uint8))


def test_numpy_reads_a_portable_case_and_writes_one(file):
    write_case(file, case_of("fp8_block"), portable=True)
    arrays = load_file(file)
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    assert arrays["x"].dtype == np.int16 and arrays["w13"].dtype == np.uint8
    arrays["y"] = arrays["x"] ^ np.int16(-(2**15))  # the bit of the sign
    other = file.with_name("other.safetensors")
    save_file(arrays, other, metadata)
    assert torch.equal(read_case(other).y, -case_of().x)


def test_a_case_needs_no_weights_where_they_are_in_a_checkpoint(file):
    nothing = dict.fromkeys(("w13", "w2", "experts"))
    write_case(file, case_of(checkpoint="a/model", layer=3, **nothing))
    found = read_case(file)
    assert found.slots() == {} and (found.checkpoint, found.layer) == ("a/model", 3)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"y": torch.zeros(T, 8)}, ShapeError, "y has H=8"),
        ({"topk_ids": torch.full((T, K), E)}, ShapeError, "topk_ids holds 4 to 4, expected -1 to 3"),
        ({"topk_ids": torch.tensor([[0, 2]] * T)}, ShapeError, "1 experts without weights"),
        ({"experts": torch.tensor([0, 1, 1])}, ShapeError, r"twice: \[1\]"),
        ({"w13": torch.zeros(3, 8, H)}, ShapeError, "w13|w2"),
        ({"w2": None}, ConfigError, "w13 without w2"),
        ({"kind": "q4_0", "w13_bias": torch.zeros(3, 2 * I)}, ShapeError, "w13_bias and w2_bias belong together"),
        ({"kind": "q4_0", "w13_bias": torch.zeros(3, I)}, ShapeError, r"w13_bias has R=128 \(axis 1\), expected R=256"),
        ({"topk_ids": None, "topk_weights": None}, ConfigError, "neither topk_ids nor router_logits nor gate"),
        ({"order": "up_down"}, ConfigError, "order 'up_down' is unknown"),
        ({"tp": 0}, ConfigError, "tp is 0"),
        ({"rank_out": torch.zeros(2, T, H)}, ShapeError, "rank_out has W=2"),
        ({"x": torch.zeros(MOST_TOKENS + 1, H)}, ShapeError, "y has T=3|sample fewer"),
        ({"model": ModelConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, latent_size=64)},
         UnsupportedError, "latent_size=64"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_case_is_named(file, changes, error, words):
    with pytest.raises(error, match=words):
        write_case(file, case_of(**changes))
    assert not file.exists()


def header_of(file):
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(file, header, data):
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


@pytest.mark.parametrize(("change", "words"), [
    (lambda raw: raw["__metadata__"].update(format="another"), "another kind"),
    (lambda raw: raw["__metadata__"].update(version="2"), "reads up to 1"),
    (lambda raw: raw["__metadata__"].update(header="["), "broken header"),
    (lambda raw: raw["__metadata__"].update(header='{"modle": {}}'), "did you mean"),
    (lambda raw: raw["__metadata__"].update(header='{"tp": "2"}'), "tp is '2'"),
    (lambda raw: raw.update(z=raw.pop("y")), "unknown tensor 'z'"),
    (lambda raw: raw["x"].update(shape=[2**40, 2**40]), "needs"), (lambda raw: raw["x"].update(dtype="F4"), "dtype F4"),
])  # fmt: skip
def test_hostile_headers_are_refused(file, change, words, monkeypatch):
    write_case(file, case_of())
    header, data = header_of(file)
    change(header)
    monkeypatch.setattr("moe_mk.lab.judge.casefile._read", None)  # before any tensor is read
    with pytest.raises(MoEMKError, match=words):
        read_case(with_header(file, header, data))


def test_a_shape_that_contradicts_the_settings_is_refused_before_it_is_read(file, monkeypatch):
    write_case(file, case_of())
    header, data = header_of(file)
    text = json.loads(header["__metadata__"]["header"])
    text["model"]["hidden_size"] = 2 * H
    header["__metadata__"]["header"] = json.dumps(text)
    monkeypatch.setattr("moe_mk.lab.judge.casefile._read", None)
    with pytest.raises(ShapeError, match="x has H=256"):
        read_case(with_header(file, header, data))


def test_other_files_are_no_cases(file, tmp_path):
    for content in (b"", b"x" * 100, (2**30).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content)
        with pytest.raises(WeightError):
            read_case(file)
    for other in (tmp_path, tmp_path / "missing", "/dev/zero"):
        with pytest.raises(WeightError):
            read_case(other)


def test_mutated_files_raise_typed_errors_alone(file):
    """Bits, bytes, numbers of the header and lengths are changed at random; a read gives a case or a MoEMKError."""
    write_case(file, case_of("fp8_block"))
    whole = file.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    draw, refused = random.Random(3), 0
    for _ in range(100):
        data = bytearray(whole)
        kind = draw.randrange(4)
        if kind == 0:
            data = data[: draw.randrange(len(data))]
        else:
            for _ in range(draw.randrange(1, 4)):
                at = draw.randrange(end if kind < 3 else len(data))
                digits = [n for n in range(8, end) if 48 <= data[n] <= 57]
                if kind == 1:
                    at = draw.choice(digits)
                data[at] = draw.randrange(48, 58) if kind == 1 else draw.randrange(256)
        file.write_bytes(data)
        try:
            read_case(file)
        except MoEMKError:
            refused += 1
    assert refused > 50
