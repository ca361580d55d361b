"""GGUF models: read in place by layer and expert, split files, mixed types, damage; needs the `gguf` package."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("gguf", reason="the gguf package reads and writes the files: pip install 'moe-mk[gguf]'")

from moe_mk import MoELayer
from moe_mk.config import MoEConfig
from moe_mk.config.hf import settings_from_hf
from moe_mk.errors import ConfigError, FallbackWarning, WeightError
from moe_mk.lab.checkpoints import CheckpointShape
from moe_mk.lab.checkpoints.convert import convert_checkpoint
from moe_mk.lab.checkpoints.gguf_checkpoint import GgufTensor, gguf_from_hf, mxfp4_to_gguf, write_gguf
from moe_mk.lab.checkpoints.synthesize import is_complete
from moe_mk.lab.verify.dense import decoded
from moe_mk.layer.settings import config_of, layer_spec_of, stated
from moe_mk.oracle.expected_error import error_of
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.weights import SlotWeights, inspect_checkpoint, load_layer
from moe_mk.weights.gguf_metadata import hf_from_gguf
from moe_mk.weights.gguf_source import GgufSource, open_source, read_gguf
from moe_mk.weights.packed_layouts import DECODED
from moe_mk.weights.source import is_mapped
from tests.weights.one_layer import load_written, wide

EXPERTS, HIDDEN, INNER = 4, 256, 512
SHAPE = CheckpointShape(EXPERTS, HIDDEN, INNER, layers=(1,), top_k=2, num_groups=2, top_k_groups=1)


@pytest.mark.parametrize("quant", [*GGUF, "q4_k_m", "mxfp4_gguf"])
def test_a_type_is_written_described_and_read(quant: str, written: Callable[[str], Path]) -> None:
    folder = written(quant)
    facts = inspect_checkpoint(folder)
    assert facts.sound and facts.model_type == "deepseek2", [*facts.problems, *facts.layers[0].problems]
    assert is_complete(folder, replace(SHAPE, quant=quant)) and not is_complete(folder, SHAPE)
    config = stated(config_of(folder), folder, 1)
    assert (config.model.quant.weights, config.model.quant.down) == (
        ("q4_k", "q6_k") if quant == "q4_k_m" else (quant.removesuffix("_gguf"), None)
    )
    assert layer_spec_of(config) == facts.layers[0].layer_spec() and config.router.scoring_func == "sigmoid"
    weights = load_written(folder)
    for matrix, q in zip(wide(weights.experts.slots[2]), three(weights.experts.slots[2]), strict=True):
        gain = 1.7 if matrix.shape[1] == HIDDEN else 0.9
        assert float(matrix.std()) * matrix.shape[1] ** 0.5 == pytest.approx(gain, rel=0.1)
        assert torch.equal(decoded(q), matrix.double()), "two decoders agree"


def test_a_layer_that_a_model_does_not_have_is_refused_with_those_it_has(written: Callable[[str], Path]) -> None:
    folder = written("q4_k")
    with pytest.raises(WeightError, match=r"layer 7.*\[1\]|layer 7.*: 1"):
        stated(config_of(folder, 1), folder, 7)


def three(slot: SlotWeights) -> list:
    return [slot.gate_IH, slot.up_IH, slot.down_HI]


@pytest.mark.row(169)
def test_experts_are_views_of_the_mapped_file(written: Callable[[str], Path]) -> None:
    weights = load_written(written("q4_k"), (3, 1))
    slots = weights.experts.slots
    storages = {q.values.untyped_storage().data_ptr() for slot in slots for q in three(slot)}
    assert len(storages) == 3 and all(is_mapped(q.values) for slot in slots for q in three(slot))
    whole = load_written(written("q4_k")).experts.slots
    assert all(torch.equal(a, b) for a, b in zip(wide(slots[0]), wide(whole[3]), strict=True))


def test_slices_of_tensor_parallel_ranks_are_the_whole_and_cut_no_block(written: Callable[[str], Path]) -> None:
    whole = wide(load_written(written("q4_k_m")).experts.slots[1])
    parts = [wide(load_written(written("q4_k_m"), tp_rank=rank, tp_size=2).experts.slots[1]) for rank in (0, 1)]
    assert all(torch.equal(torch.cat([p[i] for p in parts], dim=int(i == 2)), whole[i]) for i in range(3))
    with pytest.raises(ConfigError, match=r"tp_size=4 cannot cut .* 1x256 blocks; possible: 1, 2$"):
        load_written(written("q4_k_m"), tp_rank=0, tp_size=4)


def split(folder: Path, target: Path, count: int) -> list[Path]:
    """The same tensors in parts named as llama.cpp's gguf-split names them."""
    whole = read_gguf(folder / "model.gguf")
    data = np.fromfile(folder / "model.gguf", dtype=np.uint8)
    files = []
    for part in range(count):
        tensors = [
            GgufTensor(
                e.name, e.dtype_name, (e.num_bytes // 4,) if e.dtype_name == "F32" and len(e.shape) == 1 else _bytes(e),
                lambda e=e: data[e.start : e.start + e.num_bytes].reshape(_bytes(e)),
            )
            for e in [*whole.tensors.values()][part::count]
        ]  # fmt: skip
        tensors = [replace(t, shape=t.make().shape) for t in tensors]
        files.append(target / f"m-{part + 1:05d}-of-{count:05d}.gguf")
        metadata = {k: v for k, v in whole.metadata.items() if k.startswith("deepseek2.")} if part == 0 else {}
        write_gguf(files[-1], "deepseek2", metadata, tensors)
    return files


def _bytes(entry) -> tuple[int, ...]:
    return (*entry.shape[:-1], entry.shape[-1] * 4) if entry.dtype_name == "F32" else entry.shape


@pytest.mark.row(169)
def test_split_files_are_read_as_one(written: Callable[[str], Path], tmp_path: Path) -> None:
    files = split(written("q4_k"), tmp_path, 3)
    whole = load_written(written("q4_k")).experts.slots[0]
    for path in (tmp_path, files[0], files[2]):
        found = load_written(path).experts.slots[0]
        assert all(torch.equal(a, b) for a, b in zip(wide(found), wide(whole), strict=True))
    files[1].unlink()
    with pytest.raises(WeightError, match=r"1 of 3 parts of m are missing: m-00002-of-00003\.gguf"):
        GgufSource(files[0])


def test_a_truncated_file_names_the_tensors_that_are_cut_off(written: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes((written("q4_k") / "model.gguf").read_bytes()[:-400_000])
    facts = inspect_checkpoint(file)
    problems = facts.layers[0].problems
    assert not facts.sound and any("cut off, their file is truncated: ffn_" in line for line in problems)
    spec = inspect_checkpoint(written("q4_k")).layers[0].layer_spec()
    with pytest.raises(WeightError, match=r"ffn_down_shexp\.weight lacks \d+ of \d+ bytes"):
        load_layer(GgufSource(file), 1, spec, owned=(0,))
    file.write_bytes(b"GGUF" + bytes(6))
    with pytest.raises(WeightError, match="model.gguf has no readable GGUF header"):
        GgufSource(file)


def test_a_nan_factor_is_reported_with_its_tensor(written: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    data = bytearray((written("q8_0") / "model.gguf").read_bytes())
    entry = read_gguf(written("q8_0") / "model.gguf").tensors["blk.1.ffn_up_exps.weight"]
    at = entry.start + 2 * entry.num_bytes // EXPERTS
    data[at : at + 2] = b"\x00\x7e"
    file.write_bytes(bytes(data))
    assert load_written(file, (0, 1, 3)) is not None, "only the experts of this rank are read"
    with pytest.raises(WeightError, match=r"1 values are NaN or infinite .*ffn_up_exps\.weight\[2\], factors"):
        load_written(file)


@pytest.mark.parametrize("kind", ["mxfp4", "bf16"])
def test_experts_with_biases_as_gpt_oss_are_read_in_our_order(kind: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    quantize, shapes = scheme_of_kind(kind).quantize, {"gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    matrices = {p: quantize(normal(2, *shape)) for p, shape in shapes.items()}
    biases = {p: normal(2, 128 if p == "down" else 64) for p in matrices}
    floats = {"ffn_gate_inp.weight": normal(2, 128), "ffn_gate_inp.bias": normal(2)}
    floats |= {f"ffn_{p}_exps.bias": bias for p, bias in biases.items()}
    stored = mxfp4_to_gguf if kind == "mxfp4" else lambda q: q.values.view(torch.uint8)
    tensors = [(f"ffn_{p}_exps.weight", kind.upper(), stored(q)) for p, q in matrices.items()]
    tensors += [(name, "F32", t.contiguous().view(torch.uint8)) for name, t in floats.items()]
    metadata = {"embedding_length": 128, "expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 64}
    write_gguf(
        tmp_path / "m.gguf", "gpt-oss", {f"gpt-oss.{key}": value for key, value in metadata.items()},
        [GgufTensor(f"blk.1.{name}", kind, tuple(t.shape), t.numpy) for name, kind, t in tensors],
    )  # fmt: skip
    config = stated(config_of(tmp_path), tmp_path, 1)
    assert config.model.quant.weights == kind and config.model.expert_bias and config.router.has_logit_bias
    weights = load_layer(open_source(tmp_path), 1, layer_spec_of(config), owned=(1,))
    slot = weights.experts.slots[0]
    for q, name in zip(three(slot), matrices, strict=True):
        assert torch.equal(q.dequantize(torch.float32), matrices[name][1].dequantize(torch.float32))
    assert slot.biases is not None and torch.equal(slot.biases.down_H, biases["down"][1])


DEEPSEEK = {
    "model_type": "deepseek_v3", "n_routed_experts": 16, "moe_intermediate_size": 256, "n_group": 8, "topk_group": 4,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
}  # fmt: skip
ARCHITECTURES = pytest.mark.parametrize(
    "hf",
    [
        DEEPSEEK,
        {**DEEPSEEK, "model_type": "deepseek_v2", "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 256, "norm_topk_prob": True},
        {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 512},
        {"model_type": "gpt_oss", "num_local_experts": 8, "intermediate_size": 256},
    ],
    ids=lambda hf: hf["model_type"],
)


@ARCHITECTURES
def test_metadata_of_every_architecture_is_read_as_its_config_json(hf: dict[str, object]) -> None:
    hf = {**hf, "hidden_size": 512, "num_experts_per_tok": 2, "torch_dtype": "bfloat16"}
    for key, value in {"": 0, "norm_topk_prob": False, "n_shared_experts": 0}.items():
        other = {**hf, key: value} if key in hf else hf
        architecture, metadata = gguf_from_hf(other, "here")
        back = hf_from_gguf({"general.architecture": architecture, **metadata}, "here")
        assert settings_from_hf(back, "here") == settings_from_hf(other, "here")


OF_OTHERS = {"swiglu_clamp_exp": [7.0, 7.0], "moe_latent_size": 64, "expert_group_scale": 2.0, "router_bias": True}
BIAS = ["blk.3.exp_probs_b.bias"]


@ARCHITECTURES
def test_metadata_that_lacks_or_contradicts_a_key_gives_the_same_layer_or_an_error(hf: dict[str, Any]) -> None:
    hf = {**hf, "hidden_size": 512, "num_experts_per_tok": 2, "num_hidden_layers": 4, "first_k_dense_replace": 1}
    names = BIAS if hf["model_type"] == "deepseek_v3" else []
    architecture, metadata = gguf_from_hf(hf, "here")

    def read(changed: dict[str, Any]) -> MoEConfig | str:
        try:
            stated = hf_from_gguf({"general.architecture": architecture, **changed}, "here", names)
            return MoEConfig.parse(settings_from_hf(stated, "here"), "here")
        except ConfigError as refusal:
            return str(refusal)

    same, wrong = read(metadata), []
    assert isinstance(same, MoEConfig)
    for key, value in metadata.items():
        cases = [({k: v for k, v in metadata.items() if k != key}, "absent")]
        others = ("x", [1, 2], -1, float("nan"), not value if isinstance(value, bool) else True)
        cases += [({**metadata, key: other}, repr(other)) for other in others if other is not (not value)]
        if key.endswith("gating_func"):
            cases += [({**metadata, key: other}, str(other)) for other in (1, 2, 3, 4) if other != value]
        for changed, title in cases:
            found = read(changed)
            allowed = isinstance(found, str) or found == same
            if not allowed and not (key.endswith("gating_func") and not names):  # without a bias both are valid
                wrong.append(f"{key} {title}: {found}")
    for key, value in OF_OTHERS.items():
        found = read({**metadata, f"{architecture}.{key}": value})
        if not isinstance(found, str) or key not in found:
            wrong.append(f"{key}: {found}")
    assert not wrong, "\n".join(wrong)


def test_what_older_deepseek_files_leave_out_is_known_by_size_or_stated_by_hand() -> None:
    architecture, metadata = gguf_from_hf({**DEEPSEEK, "hidden_size": 512, "num_experts_per_tok": 2}, "here")
    old = {"general.architecture": architecture, **{k: v for k, v in metadata.items() if "_group_" not in k}}
    with pytest.raises(ConfigError, match=r"lacks deepseek2.expert_group_count; state num_expert_group=.*topk_group="):
        hf_from_gguf(old, "here", BIAS)
    assert hf_from_gguf(old, "here", BIAS, ["num_expert_group", "topk_group"])["n_group"] == 1
    for (experts, hidden), groups in (((256, 7168), (8, 4)), ((384, 7168), (1, 1))):
        sizes = {"deepseek2.expert_count": experts, "deepseek2.embedding_length": hidden}
        found = hf_from_gguf({**old, **sizes}, "here", BIAS)
        assert (found["n_group"], found["topk_group"]) == groups
    del old["deepseek2.expert_gating_func"]
    overrides = ["num_expert_group", "topk_group"]
    # A bias is added to sigmoid scores.
    assert hf_from_gguf(old, "here", BIAS, overrides)["model_type"] == "deepseek_v3"
    assert hf_from_gguf(old, "here", [], overrides)["model_type"] == "deepseek_v2"
    with pytest.raises(ConfigError, match=r"expert_gating_func is 1 \(softmax\), but the layers have a bias"):
        hf_from_gguf({**old, "deepseek2.expert_gating_func": 1}, "here", BIAS, overrides)


@pytest.mark.parametrize(
    "name", ["m-00001-of-00000.gguf", "m-00000-of-00001.gguf", "m-00003-of-00002.gguf", "m-00002-of-00002.gguf"]
)
def test_names_of_parts_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(WeightError, match=r"is part \d+ of|parts of m are missing"):
            inspect_checkpoint(path)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ConfigError, match="no MoE layer is known for architecture 'qwen3'"):
        hf_from_gguf({"general.architecture": "qwen3"}, "here")


def test_a_conversion_there_and_back_keeps_every_value(written: Callable[[str], Path], tmp_path: Path) -> None:
    report = convert_checkpoint(written("q4_k_m"), tmp_path / "bf16", "bf16")
    assert 0 < max(error.worst for error in report.errors) < 0.004
    config = config_of(tmp_path / "bf16")
    assert (config.model.hidden_size, config.router.has_correction_bias) == (HIDDEN, True)
    again = convert_checkpoint(tmp_path / "bf16", tmp_path / "q8_0", "q8_0")
    assert inspect_checkpoint(tmp_path / "q8_0").sound and max(e.worst for e in again.errors) < 0.01
    assert len(again.errors) == EXPERTS + 1 and min(e.worst for e in again.errors) > 0
    one, other = load_written(written("q4_k_m")), load_written(tmp_path / "q8_0")
    assert torch.equal(one.gate_EH.float(), other.gate_EH.float())
    for a, b in zip(wide(one.experts.slots[3]), wide(other.experts.slots[3]), strict=True):
        assert float((a - b).norm() / a.norm()) < 0.01


@pytest.mark.row(169)
@pytest.mark.parametrize("source", ["mxfp4", "bf16", "int4_g32"])  # the last with shared experts in bf16
def test_mxfp4_is_converted_to_a_gguf_file_and_back(
    source: str, written: Callable[[str], Path], tmp_path: Path
) -> None:
    # The gguf package, which shares no code with ours, reads the same numbers from the file, bit for bit.
    from gguf import GGUFReader
    from gguf.quants import dequantize

    report = convert_checkpoint(written(source), tmp_path / "gguf", "mxfp4_gguf")
    exact = source == "mxfp4"
    assert (max(error.up for error in report.errors) == 0.0) == exact
    slots = load_written(tmp_path / "gguf").experts.slots
    tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "gguf" / "model.gguf").tensors}
    for at, projection in enumerate(("gate", "up", "down")):
        tensor = tensors[f"blk.1.ffn_{projection}_exps.weight"]
        assert tensor.tensor_type.name == tensors[f"blk.1.ffn_{projection}_shexp.weight"].tensor_type.name == "MXFP4"
        theirs = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
        for expert, slot in enumerate(slots):
            assert torch.equal(wide(slot)[at], theirs[expert]), (projection, expert)
    convert_checkpoint(tmp_path / "gguf", tmp_path / "back", "mxfp4")
    for mine, back in zip(slots, load_written(tmp_path / "back").experts.slots, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(wide(mine), wide(back), strict=True))
    if exact:
        first = load_written(written("mxfp4")).experts.slots
        assert all(
            torch.equal(a, b) for m, f in zip(slots, first, strict=True) for a, b in zip(wide(m), wide(f), strict=True)
        )


def test_any_mix_of_types_is_read_projection_by_projection(tmp_path: Path) -> None:
    # Gate and up of one type, or decoded to bf16 if they differ; down of any type; gate and up in one tensor.
    draw, hidden, inner = np.random.default_rng(5), 256, 512
    metadata = {"expert_count": 2, "expert_used_count": 1, "embedding_length": 256, "expert_feed_forward_length": 512}
    plain_types = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    for trial in range(12):
        types = [str(draw.choice([*GGUF, *plain_types])) for _ in range(3)]
        if is_fused := trial % 3 == 0:
            types[1] = types[0]
        data, exact = [], []
        for name, (n, k) in zip(types, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
            matrices = [torch.from_numpy(draw.standard_normal((n, k), dtype=np.float32)) for _ in range(2)]
            if name in plain_types:
                matrices = [matrix.to(plain_types[name]) for matrix in matrices]
                data.append(torch.stack(matrices).view(torch.uint8))
                exact.append(matrices[1].float())
            else:
                held = [GGUF[name].quantize(matrix) for matrix in matrices]
                data.append(torch.stack([q.values for q in held]))
                exact.append(held[1].dequantize(torch.float32))
        stacks = dict(zip(("gate", "up", "down"), zip(types, data, strict=True), strict=True))
        if is_fused:
            stacks = {"gate_up": (types[0], torch.cat(data[:2], 1)), "down": stacks["down"]}
        router = torch.from_numpy(draw.standard_normal((2, hidden), dtype=np.float32)).view(torch.uint8)
        tensors = [("ffn_gate_inp.weight", "F32", router)]
        tensors += [(f"ffn_{name}_exps.weight", kind.upper(), t) for name, (kind, t) in stacks.items()]
        (folder := tmp_path / str(trial)).mkdir()
        write_gguf(
            folder / "m.gguf", "qwen3moe", {f"qwen3moe.{key}": value for key, value in metadata.items()},
            [GgufTensor(f"blk.1.{name}", kind, tuple(t.shape), t.numpy) for name, kind, t in tensors],
        )  # fmt: skip
        assert inspect_checkpoint(folder).sound
        config = stated(config_of(folder), folder, 1)
        slot = load_layer(open_source(folder), 1, layer_spec_of(config), owned=(1,)).experts.slots[0]
        for q, right, of in zip(three(slot), exact, ("gate", "up", "down"), strict=True):
            assert q.scheme.name == (
                config.model.quant.down or config.model.quant.weights if of == "down" else config.model.quant.weights
            )
            limit = 0.0 if of == "down" or types[0] == types[1] else 2**-8
            assert ((q.dequantize(torch.float32) - right).abs() <= limit * right.abs()).all(), (types, of)
        x_TH = torch.from_numpy(draw.standard_normal((5, hidden), dtype=np.float32)).bfloat16()
        layers = [MoELayer.from_checkpoint(folder, 1, experts=experts) for experts in ("auto", "reference")]
        found, right = (layer(x_TH).float() for layer in layers)
        assert float((found - right).norm() / right.norm()) < 1.5 * error_of(layers[0].decision), types


@pytest.mark.parametrize("name", DECODED)
def test_types_that_the_gguf_package_decodes_are_held_in_others_with_a_warning(name: str, tmp_path: Path) -> None:
    gguf, draw, size = pytest.importorskip("gguf"), np.random.default_rng(3), DECODED[name].num_bytes
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (256, size)
    small = np.where(np.isin(np.arange(size), (1, size - 1)), 0x1F, 0xFF).astype(np.uint8)  # d, and upper bits in iq1_m
    blocks = {p: draw.integers(0, 256, (2, 256, size), dtype=np.uint8) & small for p in ("gate", "up", "down")}
    stacks = [(f"ffn_{p}_exps.weight", name.upper(), raw) for p, raw in blocks.items()]
    stacks += [("ffn_gate_inp.weight", "F32", draw.standard_normal((2, 256), dtype=np.float32).view(np.uint8))]
    tensors = [GgufTensor(f"blk.1.{local}", of, held.shape, lambda held=held: held) for local, of, held in stacks]
    keys = {"expert_count": 2, "expert_used_count": 1, "embedding_length": 256, "expert_feed_forward_length": 256}
    write_gguf(tmp_path / "m.gguf", "qwen3moe", {f"qwen3moe.{k}": v for k, v in keys.items()}, tensors)
    with pytest.warns(FallbackWarning, match=f"{name} experts are decoded at load and held as {DECODED[name].held}: "):
        both = [MoELayer.from_checkpoint(tmp_path, 1, experts=experts) for experts in ("auto", "reference")]
    for q, raw in zip(three(both[0].weights.experts.slots[1]), blocks.values(), strict=True):
        right = torch.from_numpy(gguf.dequantize(raw[1], kind)).to(getattr(q.scheme, "dtype", torch.float32)).float()
        assert q.scheme.name == both[0].config.model.quant.weights == DECODED[name].held
        assert torch.equal(q.dequantize(torch.float32), right) and right.isfinite().all() and right.any()
    found, wanted = (layer(torch.ones(3, 256, dtype=torch.bfloat16)).float() for layer in both)
    assert float((found - wanted).norm()) <= 1.5 * error_of(both[0].decision) * float(wanted.norm())
