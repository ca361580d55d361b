"""Packed integers of compressed-tensors, GPTQ and AWQ: their words by hand, there and back, and damage by name."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_mk.config import MoEConfig
from moe_mk.config.hf_quant import quant_from_hf
from moe_mk.errors import ConfigError, WeightError
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.checkpoints.convert import convert_checkpoint
from moe_mk.lab.checkpoints.dialects import quantization_config
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import AFFINE, GROUPED, grouped
from moe_mk.quant.microscaling import MXFP4
from moe_mk.quant.tensor import QuantTensor
from moe_mk.weights import LayerSpec, MappingSource, SafetensorsSource, inspect_checkpoint, load_layer
from moe_mk.weights.inspect import describe_block
from moe_mk.weights.layer_spec import expected_tensors
from moe_mk.weights.names import CONVENTIONS
from moe_mk.weights.packed_layouts import packed_shapes, unpack
from tests.support.draws import normal
from tests.support.strides import restrided
from tests.weights.one_layer import load_written, wide

EXPERTS, HIDDEN, INNER = 4, 128, 256
SHAPE = CheckpointShape(EXPERTS, HIDDEN, INNER, layers=(1,), top_k=2, num_groups=2, top_k_groups=1)
PACKINGS = ("compressed_tensors", "gptq", "awq")
PLAIN = [name for name in GROUPED if name not in AFFINE]


def named(tensors: dict[str, Tensor]) -> dict[str, tuple[str, Tensor]]:
    return {what: (what or "codes", tensor) for what, tensor in tensors.items()}


@pytest.mark.row(168)
def test_gptq_words_by_hand() -> None:
    # Row 0 has codes 1..8 in columns 0..7: one word, the lowest four bits are column 0. Zero point 5 is stored as 4.
    scheme = grouped(4, 32, zeros=True)
    words, zeros = torch.zeros(4, 8, dtype=torch.int32), torch.full((1, 1), 0x44444444, dtype=torch.int32)
    words[0, 0] = int.from_bytes(bytes((0x21, 0x43, 0x65, 0x87)), "little", signed=True)
    parts = {"": words, "scale": torch.full((1, 8), 0.5, dtype=torch.float16), "zeros": zeros}
    values = unpack("gptq", scheme, named(parts)).q.dequantize(torch.float32)
    assert values[0, :8].tolist() == [(code - 5) * 0.5 for code in range(1, 9)] and float(values[1, 0]) == -2.5


@pytest.mark.row(168)
def test_zero_points_of_gptq_v2_are_stored_as_they_are() -> None:
    # The same words: stored 4 is a zero point of 5 in gptq, of 4 in gptq_v2; stored 15 is valid in gptq_v2 alone.
    scheme = grouped(4, 32, zeros=True)
    words = torch.full((4, 8), 0x66666666, dtype=torch.int32)
    stored = torch.tensor([[0x44444444]], dtype=torch.int32)
    parts = {"": words, "scale": torch.full((1, 8), 0.5, dtype=torch.float16), "zeros": stored}
    for packing, zero in (("gptq", 5), ("gptq_v2", 4)):
        q = unpack(packing, scheme, named(parts)).q
        assert q.zeros is not None and q.zeros.unique().tolist() == [zero]
        assert q.dequantize(torch.float32).unique().tolist() == [(6 - zero) * 0.5]
        again = pack(packing, q)
        assert torch.equal(again["zeros"], stored) and torch.equal(again[""], words)
    parts["zeros"] = torch.tensor([[0x0F0F0F0F]], dtype=torch.int32)
    q = unpack("gptq_v2", scheme, named(parts)).q
    assert q.zeros is not None and q.zeros[:2, 0].tolist() == [15, 0]
    assert torch.equal(pack("gptq_v2", q)["zeros"], parts["zeros"])
    with pytest.raises(WeightError, match="a zero point of 16 is out of range"):
        unpack("gptq", scheme, named(parts))
    with pytest.raises(ConfigError, match="GPTQ stores a zero point minus one, and one of the matrix is 0"):
        pack("gptq", q)


@pytest.mark.row(168)
def test_awq_words_by_hand() -> None:
    # Nibble i of a word is row 0 2 4 6 1 3 5 7 of eight; zero points have the same order and no offset.
    scheme = grouped(4, 32, zeros=True)
    words = torch.zeros(32, 1, dtype=torch.int32)
    words[3, 0] = int.from_bytes(bytes((0x21, 0x43, 0x65, 0x87)), "little", signed=True)
    zeros = torch.tensor([[int.from_bytes(bytes((0x10, 0x32, 0x54, 0x76)), "little", signed=True)]], dtype=torch.int32)
    parts = {"": words, "scale": torch.ones((1, 8), dtype=torch.float16), "zeros": zeros}
    q = unpack("awq", scheme, named(parts)).q
    assert scheme.codes(q)[:, 3].tolist() == [1, 5, 2, 6, 3, 7, 4, 8]
    assert q.zeros is not None and q.zeros.flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.row(167)
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*itertools.product(PACKINGS, PLAIN), *itertools.product(("mlx",), sorted(AFFINE))]),
    st.integers(1, 24), st.integers(1, 3), st.integers(0, 99),
)  # fmt: skip
def test_packing_comes_back_bit_for_bit(case: tuple[str, str], rows: int, wide: int, seed: int) -> None:
    # Words of compressed-tensors hold columns, and zero points of any number of rows; GPTQ and AWQ fill words of rows.
    packing, scheme = case[0], GROUPED[case[1]]
    rows += -rows % 8 * (packing in ("gptq", "awq"))
    if packing == "awq" and scheme.bits == 8:
        with pytest.raises(ConfigError, match="awq checkpoints hold int4 in groups, not int8"):
            packed_shapes(packing, scheme, 8, 128)
        return
    q = scheme.quantize(normal(rows, 128 * wide, seed=seed))
    if packing == "gptq" and q.zeros is not None:
        q = replace(q, zeros=q.zeros.clamp_min(1))
    tensors = pack(packing, q)
    held = packed_shapes(packing, scheme, *q.shape)
    assert all(tuple(t.shape) == held[what].shape and t.dtype in held[what].dtypes for what, t in tensors.items())
    assert all(each.optional for what, each in held.items() if what not in tensors)
    back = unpack(packing, scheme, named(tensors))
    assert back.order_K is None
    for one, other in ((back.q.values, q.values), (back.q.zeros, q.zeros)):
        assert (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
    assert torch.equal(back.q.dequantize(torch.float32), q.dequantize(torch.float32))
    parts = [part for part in (back.q.values, back.q.scales, back.q.zeros) if part is not None]
    assert all(part.is_contiguous() for part in parts), "kernels read them as they are"
    for what in tensors:
        for other in restrided(tensors[what]):
            again = unpack(packing, scheme, named(tensors | {what: other})).q
            assert torch.equal(again.dequantize(torch.float32), q.dequantize(torch.float32)), (what, other.stride())


def test_what_compressed_tensors_state_about_a_matrix_must_hold() -> None:
    # The logical shape, and g_idx, which may only state that columns are in the order of their groups.
    q = GROUPED["int4_g32"].quantize(normal(6, 64))
    tensors = named(pack("compressed_tensors", q))
    inside = ("g_idx", torch.arange(64, dtype=torch.int32) // 32)
    assert torch.equal(unpack("compressed_tensors", q.scheme, tensors | {"order": inside}).q.values, q.values)
    with pytest.raises(WeightError, match=r"g_idx orders columns by activation .*which is not supported"):
        unpack("compressed_tensors", q.scheme, tensors | {"order": ("g_idx", inside[1].flip(0))})
    for shape in ([6, 63], [7, 64]):
        with pytest.raises(WeightError, match=rf"size is \[{shape[0]}, {shape[1]}\], and codes has \[6, 64\] codes"):
            unpack("compressed_tensors", q.scheme, tensors | {"shape": ("size", torch.tensor(shape))})


def test_awq_zero_points_of_symmetric_weights_are_all_the_middle() -> None:
    q = GROUPED["int4_g32"].quantize(normal(8, 64))
    tensors = named(pack("awq", q))
    assert unpack("awq", q.scheme, tensors).q.zeros is None
    tensors["zeros"][1][1, 0] ^= 1
    with pytest.raises(WeightError, match=r"zeros: zero points differ from 8"):
        unpack("awq", q.scheme, tensors)


@pytest.mark.parametrize("packing", ["gptq", "awq"])
def test_sizes_that_do_not_fill_words_are_refused(packing: str) -> None:
    with pytest.raises(ConfigError, match=f"{packing} packs 8 numbers of 4 bits into a word.* 12 x 128"):
        packed_shapes(packing, GROUPED["int4_g32"], 12, 128)
    for scheme, columns in ((GGUF["q4_k"], 300), (MXFP4, 48), (GROUPED["int4_g32"], 64)):
        with pytest.raises(ConfigError, match=str(columns)):
            packed_shapes("gguf", scheme, 8, columns)


EXPERT_2 = "model.layers.1.mlp.experts.2."


def load_changed(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors, spec = load_file(next(folder.glob("*.safetensors"))), inspect_checkpoint(folder).layers[0].layer_spec()
    change(tensors)
    load_layer(MappingSource(tensors), 1, spec, owned=range(EXPERTS))


def shortened(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERT_2 + "up_proj.weight_packed"] = tensors[EXPERT_2 + "up_proj.weight_packed"][:, 1:]
    del tensors[EXPERT_2 + "down_proj.weight_scale"]


DAMAGED: list[tuple[str, Callable[[dict[str, Tensor]], object], str]] = [
    ("gptq", lambda tensors: tensors[EXPERT_2 + "up_proj.scales"][0, 3:4].fill_(float("nan")),
     r"1 values are NaN or infinite .*: experts\.2\.up_proj\.scales \(1\)"),
    ("gptq", lambda tensors: tensors[EXPERT_2 + "up_proj.qzeros"][0, :1].bitwise_xor_(1),
     r"experts\.2\.up_proj\.qzeros: zero points differ from 8"),
    # Two groups would be needed: hidden 128 has one. A matrix of one group has no order.
    ("gptq", lambda tensors: tensors[EXPERT_2 + "up_proj.g_idx"][:64].fill_(1),
     r"2\.up_proj\.g_idx puts 64 to 64 of 128 columns into a group of 128"),
    ("int4_g32", shortened, r"(?s)lacks experts\.2\.down_proj\.weight_scale"),
    ("int4_g32", shortened, r"(?s)experts\.2\.up_proj\.weight_packed is \[256, 15\], expected \[256, 16\]"),
]  # fmt: skip


@pytest.mark.row(168)
@pytest.mark.parametrize("quant,change,stated", DAMAGED, ids=["nan", "zeros", "order", "missing", "shape"])
def test_damage_is_reported_with_its_tensor(
    quant: str, change: Callable[[dict[str, Tensor]], object], stated: str, written: Callable[[str], Path]
) -> None:
    with pytest.raises(WeightError, match=stated):
        load_changed(written(quant), change)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_out_of_range_is_reported_with_its_tensor(bits: int) -> None:
    scheme = grouped(bits, 32, zeros=True)
    tensors = named(pack("gptq", replace(q := scheme.quantize(normal(8, 64)), zeros=torch.ones_like(q.zeros))))
    tensors["zeros"] = ("experts.2.up_proj.qzeros", torch.full_like(tensors["zeros"][1], -1))
    with pytest.raises(WeightError, match=rf"experts\.2\.up_proj\.qzeros: a zero point of {2**bits} is out of range"):
        unpack("gptq", scheme, tensors)
    most = pack("gptq_v2", replace(q, zeros=torch.full_like(q.zeros, 2**bits - 2)))  # stored less one: 2^bits - 1
    assert (unpack("gptq", scheme, named(most)).q.zeros == 2**bits - 1).all()


def ordered(q: QuantTensor, seed: int) -> tuple[dict[str, tuple[str, Tensor]], Tensor]:
    """GPTQ tensors whose columns are in another order than their groups, and the values in that order."""
    k = q.shape[1]
    order_K = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    tensors = pack("gptq", q)
    shuffled = replace(q, values=q.scheme.pack(q.scheme.codes(q)[:, order_K].float()))  # type: ignore[attr-defined]
    tensors[""] = pack("gptq", shuffled)[""]
    tensors["order"] = tensors["order"][order_K]
    return named(tensors), q.dequantize(torch.float32)[:, order_K]


@pytest.mark.parametrize("tp_size", [1, 2])
def test_an_expert_whose_down_is_ordered_by_activation_computes_the_same(
    tp_size: int, written: Callable[[str], Path]
) -> None:
    """Rows of gate and up follow the columns of down, so that the expert is the same function."""
    tensors = load_file(next(written("gptq").glob("*.safetensors")))
    spec, name = inspect_checkpoint(written("gptq")).layers[0].layer_spec(), EXPERT_2 + "down_proj."
    plain = wide(load_written(written("gptq")).experts.slots[2])
    held = {"": "qweight", "scale": "scales", "zeros": "qzeros", "order": "g_idx"}
    q = unpack("gptq", spec.scheme, {what: (word, tensors[name + word]) for what, word in held.items()}).q
    shuffled, values = ordered(q, 5)
    tensors |= {name + word: shuffled[what][1] for what, word in held.items()}
    order = torch.randperm(INNER, generator=torch.Generator().manual_seed(5))
    x, y = normal(3, HIDDEN), torch.zeros(3, HIDDEN)
    for rank in range(tp_size):
        loaded = load_layer(MappingSource(tensors), 1, spec, owned=range(EXPERTS), tp_rank=rank, tp_size=tp_size)
        gate, up, down = wide(loaded.experts.slots[2])
        y += (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    gate, up, _ = plain
    by_hand = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T))[:, torch.arange(INNER)] @ values.T
    assert torch.equal(values, plain[2][:, order]), "the columns of this expert were shuffled"
    assert torch.allclose(y, by_hand, rtol=1e-4, atol=1e-5)


def test_tokens_are_not_permuted_for_each_expert(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, replace(SHAPE, quant="gptq", hidden_size=256), threads=1)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[EXPERT_2 + "up_proj.g_idx"] = tensors[EXPERT_2 + "up_proj.g_idx"].flip(0)

    with pytest.raises(WeightError, match=r"2\.up_proj\.qweight: columns are ordered by activation \(desc_act\)"):
        load_changed(tmp_path, change)


def test_a_conversion_between_packings_of_the_same_groups_changes_no_value(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    gptq = written("gptq")
    steps = ((gptq, "awq", "awq"), (tmp_path / "awq", "ct", "int4_g128_zp"), (gptq, "with zeros", "int4_g128_zp"))
    for source, name, to in steps:
        report, found = convert_checkpoint(source, tmp_path / name, to), tmp_path / name
        assert max(error.worst for error in report.errors if to == "awq" or error.expert is not None) == 0.0
        layers = [load_written(path).experts for path in (gptq, found)]
        for one, other in zip(*(experts.slots for experts in layers), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(wide(one), wide(other), strict=True))
        if to != "awq":
            assert MoEConfig.from_hf(found).model.quant.shared == "bf16"
            scale = SafetensorsSource(found).entry("model.layers.1.mlp.experts.0.up_proj.weight_scale")
            assert scale.dtype is torch.float16, "bf16 would round the scales of GPTQ and AWQ"


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("packing", PACKINGS)
def test_what_we_write_into_config_json_is_what_we_read(name: str, packing: str) -> None:
    if packing == "awq" and not (GROUPED[name].bits == 4 and GROUPED[name].has_zeros):
        return
    read = quant_from_hf(quantization_config(name, (128, 128), packing=packing), "here")
    assert read == {"weights": name} | ({"shared": "bf16"} if packing == "compressed_tensors" else {})


def test_compressed_tensors_packs_the_same_words() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        scheme = grouped(bits, 32, zeros=True)
        q = scheme.quantize(normal(24, 128) + 0.3)
        assert q.zeros is not None
        ours = pack("compressed_tensors", q)
        signed = (scheme.codes(q).to(torch.int16) - scheme.middle).to(torch.int8)
        assert torch.equal(helpers.pack_to_int32(signed, bits), ours[""])
        zeros = (q.zeros.to(torch.int16) - scheme.middle).to(torch.int8)
        assert torch.equal(helpers.pack_to_int32(zeros, bits, packed_dim=0), ours["zeros"])
        theirs = helpers.unpack_from_int32(ours["zeros"], bits, q.zeros.shape, packed_dim=0)
        assert torch.equal(theirs, zeros)


@pytest.mark.parametrize("latent", [None, 64])
@pytest.mark.parametrize("name", [name for name, each in CONVENTIONS.items() if each.packing in PACKINGS])
def test_a_packed_layer_is_described_by_its_headers_as_it_was_written(name: str, latent: int | None) -> None:
    names = CONVENTIONS[name]
    kinds = ("int4_g32", "int8_g64"), ("int4_g64_zp", "int4_g128_zp"), ("int8_row_zp", "int8_g32_zp")
    for scheme, shared in ((GROUPED[kind], GROUPED[other]) for kind, other in kinds):
        if names.packing == "awq" and scheme.name != "int4_g64_zp":
            continue  # its files have four bits and zero points
        spec = LayerSpec(4, 256, 128, scheme, 1, 128, latent_size=latent, shared_scheme=shared)
        wanted = {local: each for local, each in expected_tensors(spec, names).items() if not each.optional}
        source = MappingSource({local: torch.zeros(each.shape, dtype=each.dtypes[0]) for local, each in wanted.items()})
        for stated in ({"sym": False},) if scheme.has_zeros else ({"sym": True}, {"bits": 4}):
            assert describe_block(source, "", None, dict[str, object](stated)).layer_spec() == spec


def test_damaged_packed_layers_are_described_by_the_first_expert_that_is_there(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = load_file(next(written("int4_g32").glob("*.safetensors")))
    gate = next(name for name in tensors if name.endswith("mlp.gate.weight"))
    up = next(name for name in tensors if name.endswith("experts.0.up_proj.weight_packed"))
    down, last = up.replace("up_proj", "down_proj"), up.replace("experts.0", "experts.3")

    def described(changed: dict[str, Tensor], *without: str) -> tuple[tuple[int, int, int], str]:
        kept = {name: tensor.clone() for name, tensor in changed.items() if not any(each in name for each in without)}
        save_file(kept, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((written("int4_g32") / "config.json").read_text())
        (layer,) = inspect_checkpoint(tmp_path).layers
        return (layer.num_experts, layer.hidden_size, layer.intermediate_size), "\n".join(layer.problems)

    missing = "the gate or the first expert is missing"
    for changed, without, problem in (
        (tensors, [gate], missing),
        (tensors | {gate: tensors[gate][0]}, [], missing),
        (tensors, [up], missing),
        (tensors, [down], missing),
        (tensors | {up: tensors[up][None]}, [], "projections have shapes [1, 256, 16] and [128, 32]"),
        (tensors | {down: tensors[down][None]}, [], "projections have shapes [256, 16] and [1, 128, 32]"),
    ):
        assert problem in described(changed, *without)[1]
    narrow = tensors | {last: tensors[last][:64]}
    sizes, problems = described(narrow, "experts.0.", "experts.1.")
    assert sizes == (EXPERTS, HIDDEN, INNER)
    assert "2 of 4 experts are missing: 0, 1" in problems and "is [64, 16], expected [256, 16]" in problems
