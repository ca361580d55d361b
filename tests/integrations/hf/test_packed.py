"""Experts of packed checkpoints run as they are stored, in models of transformers."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from moe_mk.errors import ConfigError, UnsupportedError, WeightError
from moe_mk.integrations.hf.packed import PackedExperts, experts_of
from moe_mk.integrations.hf.stored import stored_parameters
from moe_mk.integrations.hf.without_experts import _load_rest, config_of
from moe_mk.integrations.transformers import (
    explain,
    model_without_experts,
    pack_linears,
    patch_blocks,
    prepare,
    register,
    replace_experts,
    unpatch_blocks,
)
from moe_mk.lab.checkpoints import write_checkpoint
from moe_mk.lab.checkpoints.gguf_checkpoint import write_gguf
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.lab.checkpoints.tiny_models import tiny_model, write_packed_checkpoint
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from tests.integrations.hf.cases import generate, logits, prompt, relative
from tests.integrations.hf.packed import (
    EXPERTS,
    MOE_LAYERS,
    SIZE,
    PeakBytes,
    bytes_of_experts,
    decoded_model,
    family_model,
    gguf_tensor,
    shape_of,
    write_gguf_model,
    write_packed,
)
from tests.layer.native import NEEDS_COMPILER
from tests.support.tiers import quick_where, slow
from tests.weights.test_packed_layouts import named, ordered

STATES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda model: model,
    "copied": copy.deepcopy,
    "in another dtype": lambda model: model.to(torch.float64),
    "with empty tensors": lambda model: model.to_empty(device="cpu").load_state_dict({}, strict=False) and model,
    "loaded without assign": lambda model: model.load_state_dict(
        {key: torch.zeros(each.shape) for key, each in model.named_parameters()}, strict=False) and model,
    "with one module replaced": lambda model: _with_one_replaced(model),
    "with another implementation": lambda model: model.set_experts_implementation("grouped_mm") or model,  # type: ignore[operator]
    "prepared for training": lambda model: model.train(),
}  # fmt: skip


def _with_one_replaced(model: nn.Module) -> nn.Module:
    (name, other), *_ = experts_of(model).items()
    real = copy.deepcopy(other).to_empty(device="cpu")
    real._forward_pre_hooks.clear()
    real.load_state_dict({key: torch.zeros_like(t) for key, t in real.named_parameters()})
    model.set_submodule(name, real)
    return model


MATRICES = 3 * EXPERTS * len(MOE_LAYERS)
BF16 = 2 * MATRICES * SIZE * SIZE
KINDS = {"int4_g32": "int4_g32", "int8_g128_zp": "int8_g128_zp", "awq": "int4_g128_zp", "gptq": "int4_g128"}
CASES = [(family, quant) for family in ("deepseek_v3", "qwen3_moe") for quant in KINDS]
Written = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint of a family and a format, written once; to be read only."""
    root = tmp_path_factory.mktemp("packed")

    def of(family: str, quant: str) -> Path:
        folder = root / family / quant
        if not folder.exists():
            write_gguf_model(folder, quant) if quant.startswith("q") else write_packed(folder, family, quant)
        return folder

    return of


@pytest.mark.parametrize("state", STATES)
def test_a_model_whose_experts_were_not_replaced_refuses_calls(state: str, written: Written) -> None:
    folder = written("qwen3_moe", "awq")
    model = STATES[state](model_without_experts(folder, dtype=torch.float32))
    remedy = r"has no weights\n.*replace_experts\(model, .*awq'\)"
    with pytest.raises(UnsupportedError, match=remedy):
        generate(model, prompt())
    with pytest.raises(UnsupportedError, match=remedy):
        model.state_dict()


def test_experts_that_get_their_weights_compute(written: Written) -> None:
    folder = written("qwen3_moe", "awq")
    config = config_of(folder)
    given = config.to_dict()
    model, whole = model_without_experts(folder, dtype=torch.float32, config=config), decoded_model(folder, "qwen3_moe")
    assert config.to_dict() == given, "the configuration is the caller's"
    model = copy.deepcopy(model)
    for name, module in experts_of(model).items():
        module.load_state_dict(whole.get_submodule(name).state_dict(), assign=True)
    assert torch.equal(logits(model, prompt()), logits(whole, prompt()))


def packed_modules(model: nn.Module) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


@pytest.mark.parametrize(("family", "quant"), quick_where(lambda *case: case == ("qwen3_moe", "int4_g32"), CASES))
def test_a_packed_model_equals_transformers_with_the_decoded_weights(family: str, quant: str, written: Written) -> None:
    folder = written(family, quant)
    model = model_without_experts(folder, dtype=torch.float32)
    assert bytes_of_experts(model) == 0 and not model.training
    report = replace_experts(model, folder)
    scheme = GROUPED[KINDS[quant]]
    assert {module.format for module in report.modules} == {scheme.name}
    assert [module.path for module in report.modules] == [f"model.layers.{n}.mlp.experts" for n in MOE_LAYERS]
    assert (report.num_bytes, report.bf16_bytes) == (MATRICES * scheme.num_bytes(SIZE, SIZE), BF16)
    assert {module.backend for module in report.modules} == {"torch_cpu"}
    assert not any(module.mapped for module in report.modules), "torch_cpu holds the experts in memory"
    wanted, ids = decoded_model(folder, family), prompt()
    for patched in (False, True):
        assert not patched or sorted(patch_blocks(model)) == [f"model.layers.{n}.mlp" for n in MOE_LAYERS]
        assert torch.allclose(logits(model, ids), logits(wanted, ids), rtol=1e-5, atol=1e-5)
        assert generate(model, ids) == generate(wanted, ids)


@NEEDS_COMPILER
@torch.no_grad()
def test_a_patched_block_is_one_native_call_with_the_packed_experts(written: Written) -> None:
    folder = written("deepseek_v3", "int4_g32")
    model = model_without_experts(folder)
    replace_experts(model, folder, experts="cpu_native")
    with pytest.raises(UnsupportedError, match="with {'experts': 'torch_cpu'}: .* packed .* with {'experts': 'cpu_n"):
        patch_blocks(model, experts="torch_cpu")
    block, x = model.model.layers[1].mlp, torch.randn((1, 5, SIZE)).bfloat16()
    layer = patch_blocks(model, experts="cpu_native")["model.layers.1.mlp"]
    assert layer.prepare().call is not None and layer.state.experts.weights is block.experts.layer.state.experts.weights
    for weight in block.parameters():
        before = block(x)
        weight.neg_()
        assert relative(block(x), type(block).forward(block, x)) < 0.02 < 0.1 < relative(block(x), before)
    before = block(x)
    assert not any(".shared_experts." in path for path in pack_linears(model) if ".1.mlp." in path)
    assert torch.equal(block(x), before) and unpatch_blocks(model) == len(MOE_LAYERS)
    assert relative(block(x), before) < 0.02
    pack_linears(model)
    with pytest.raises(UnsupportedError, match=r"gate_proj of the shared .* PackedLinearModule.*before pack_linears"):
        patch_blocks(model)


@pytest.mark.parametrize("experts", ["cpu_native", "torch_cpu"])
@pytest.mark.parametrize("quant", ["int4_g32", *slow("awq")])
def test_no_more_than_the_packed_bytes_are_allocated(quant: str, experts: str, written: Written) -> None:
    folder = written("qwen3_moe", quant)
    replace_experts(model_without_experts(folder), folder, experts=experts)  # kernels are checked at their first use
    with PeakBytes() as built:
        model = model_without_experts(folder)
    with PeakBytes() as replaced:
        report = replace_experts(model, folder, experts=experts)
    rest = sum(parameter.nbytes for parameter in model.parameters())
    assert built.peak < 1.5 * rest + 2**16, "the experts take no part in building the model"
    # cpu_native aligns each of two stacks a layer to 2 MiB, without touching what is beyond the weights.
    aligned = 2 * len(MOE_LAYERS) * 2**21 if experts == "cpu_native" else 0
    # The packed layers, the tensors of one layer as they are read, and one matrix that is being converted.
    limit = report.num_bytes * (1 + 1 / len(MOE_LAYERS)) + 8 * SIZE * SIZE
    assert replaced.peak - aligned < limit < 0.5 * BF16


@pytest.mark.parametrize("way", ["replace_experts", "patch_blocks", "register"])
def test_the_experts_of_all_layers_share_one_budget(way: str, written: Written, tmp_path: Path) -> None:
    folder, outputs, budget = written("qwen3_moe", "int4_g32"), [], 5 * 3 * SIZE * SIZE
    for more in ({}, {"residency": {"bytes": budget, "store": str(tmp_path)}}):
        model, settings = decoded_model(folder, "qwen3_moe").to(torch.bfloat16), {"experts": "cpu_native", **more}
        if way == "replace_experts":
            held = [replace_experts(model, folder, **settings).num_bytes]
        elif way == "patch_blocks":
            held = [each.memory_report().experts for each in patch_blocks(model, **settings).values()]
        else:
            register("paged", **settings)
            model.set_experts_implementation("paged")
            held = [each.num_bytes for each in prepare(model, "paged").modules]
        outputs.append(logits(model, prompt()))
    assert torch.equal(*outputs) and budget / 2 < sum(held) <= budget


def test_the_experts_of_a_loaded_model_are_freed(written: Written) -> None:
    folder = written("qwen3_moe", "q4_k")
    model, ids = decoded_model(folder, "qwen3_moe"), prompt()
    own, wanted = model.model.layers[1].mlp.experts, logits(model, ids)
    assert bytes_of_experts(model) == 2 * BF16
    report = replace_experts(model, folder / "model.gguf")
    assert own.down_proj.device.type == own.gate_up_proj.device.type == "meta"
    assert bytes_of_experts(model) == 0 and report.num_bytes == MATRICES * SIZE * 144
    assert torch.allclose(logits(model, ids), wanted, rtol=1e-5, atol=1e-5)
    text = str(report)
    assert "2 experts modules packed" in text and "q4_k" in text and "mapped" not in text
    assert json.loads(json.dumps(report.as_dict()))["modules"][1]["down_format"] == "q4_k"


def test_a_deepseek_file_is_read_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shape_of("deepseek_v3", "q5_k"), seed=2, threads=1)
    model, ids = decoded_model(tmp_path, "deepseek_v3"), prompt()
    wanted = logits(model, ids)
    assert {module.format for module in replace_experts(model, tmp_path / "model.gguf").modules} == {"q5_k"}
    assert torch.allclose(logits(model, ids), wanted, rtol=1e-5, atol=1e-5)


def test_mixed_types_of_gguf_are_read_by_projection(written: Written) -> None:
    folder = written("qwen3_moe", "q4_k_m")
    model, ids = decoded_model(folder, "qwen3_moe"), prompt()
    wanted = logits(model, ids)
    report = replace_experts(model, folder)
    assert {(module.format, module.down_format) for module in report.modules} == {("q4_k", "q6_k")}
    assert report.num_bytes == EXPERTS * len(MOE_LAYERS) * SIZE * (2 * 144 + 210)
    assert torch.allclose(logits(model, ids), wanted, rtol=1e-5, atol=1e-5) and "down q6_k" in str(report)


@pytest.mark.parametrize("rest", ["Q6_K", *slow("Q5_1")])
def test_a_gguf_model_has_the_parameters_that_transformers_reads(rest: str, tmp_path: Path) -> None:
    file, empty = write_gguf_model(tmp_path, "q4_k", rest), family_model("qwen3_moe", dense=())
    theirs = load_gguf_checkpoint(file, return_tensors=True, model_to_load=empty)["tensors"]
    wanted = {name: tensor for name, tensor in theirs.items() if ".experts." not in name}
    with PeakBytes() as built:
        model = model_without_experts(file, dtype=torch.float32)
    found = {name: tensor for name, tensor in model.named_parameters() if tensor.device.type != "meta"}
    assert all(each.requires_grad for each in found.values()), "as transformers loads them"
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], each) for name, each in wanted.items())
    assert built.peak < 2 * sum(each.nbytes for each in wanted.values()), "the experts are not decoded"
    replace_experts(model, file)
    empty.load_state_dict(theirs, strict=False)
    assert torch.allclose(logits(model, prompt()), logits(empty, prompt()), rtol=1e-5, atol=1e-5)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("rest", "stored"), [("Q6_K", "q6_k"), ("IQ4_XS", "int8_g32"), ("Q5_1", "q5_1"), ("Q2_K", "bf16")]
)
def test_linear_layers_keep_the_type_that_a_file_has(rest: str, stored: str, tmp_path: Path) -> None:
    file = write_gguf_model(tmp_path, "q4_k", rest)
    model = model_without_experts(file)
    replace_experts(model, file)
    model.model.layers[1].self_attn.k_proj.weight.data[-1, -1] += 2**-7
    held = {name: module.weight.detach() for name, module in model.named_modules() if type(module) is nn.Linear}
    sizes, x, formats = pack_linears(model, file), torch.randn(3, SIZE).bfloat16(), {}
    for name, w in held.items():
        packed, wanted = model.get_submodule(name), x.double() @ w.double().T
        formats[name] = packed.format
        assert float((packed(x).double() - wanted).norm() / wanted.norm()) < 0.01
    assert sizes.keys() == held.keys() and f"bias=False, {stored})" in str(model)
    assert formats.pop("model.layers.1.self_attn.k_proj") == "bf16", "it is not the file's any more"
    assert set(formats.values()) == {stored}


@NEEDS_COMPILER
@torch.no_grad()
def test_tokens_are_rounded_to_int8_where_that_is_asked_for(tmp_path: Path) -> None:
    file, found = write_gguf_model(tmp_path, "q4_k", "Q4_K"), {}
    for kind in ("plain", "int8"):
        model = model_without_experts(file)
        replace_experts(model, file, experts="cpu_native", activations=kind)
        assert patch_blocks(model) and pack_linears(model, file, activations=kind)
        block, projection = model.model.layers[1].mlp, model.model.layers[1].self_attn.q_proj
        x = torch.randn((1, 5, SIZE), generator=torch.Generator().manual_seed(0)).bfloat16()
        found[kind] = block(x), projection(x), logits(model, prompt())
        assert block.experts.layer.decision.compute.name == {"plain": "bf16", "int8": "int8_1x32"}[kind]
    for plain, rounded in zip(*found.values(), strict=True):
        assert 2e-3 < relative(rounded, plain) < 0.05
    with pytest.raises(ConfigError, match="activations='fp8' of linear layers; use 'plain' or 'int8'"):
        pack_linears(model, file, activations="fp8")  # type: ignore[arg-type]


@NEEDS_COMPILER
def test_rows_that_llama_cpp_stores_in_another_order_are_put_back(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=1, tie_word_embeddings=True, **sizes)
    model, tensors = transformers.LlamaForCausalLM(config).bfloat16(), []
    for name, heads in (("q", 4), ("k", 2)):
        w = getattr(model.model.layers[0].self_attn, f"{name}_proj").weight.detach()
        stored = w.float().view(heads, 2, 32, 256).transpose(1, 2).reshape(-1, 256)
        q = GGUF["q4_k"].quantize(stored)
        w.copy_(q.dequantize(torch.bfloat16).view(heads, 32, 2, 256).transpose(1, 2).reshape(-1, 256))
        tensors.append(gguf_tensor(f"blk.0.attn_{name}.weight", stored, "Q4_K"))
    write_gguf(tmp_path / "model.gguf", "llama", {}, tensors)
    x, attention = torch.randn(3, 256).bfloat16(), model.requires_grad_(False).model.layers[0].self_attn
    wanted = [attention.q_proj(x), attention.k_proj(x)]
    pack_linears(model, tmp_path / "model.gguf")
    assert (attention.q_proj.format, attention.k_proj.format, model.lm_head.format) == ("q4_k", "q4_k", "bf16")
    for got, each in zip((attention.q_proj(x), attention.k_proj(x)), wanted, strict=True):
        assert float((got - each).norm() / each.norm()) < 0.01


def copy_with(folder: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with other tensors and another config.json."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("packing", ["awq", "gptq"])
def test_packed_matrices_outside_of_the_experts_are_decoded(packing: str, written: Written, tmp_path: Path) -> None:
    name, kind, decoded = "model.layers.2.self_attn.q_proj.", {"awq": "int4_g128_zp", "gptq": "int4_g128"}[packing], []

    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        q = GROUPED[kind].quantize(tensors.pop(f"{name}weight"))  # GPTQ has columns in another order than their groups
        parts, wide = ordered(q, 5) if packing == "gptq" else (named(pack("awq", q)), q.dequantize(torch.float32))
        decoded.append(wide)
        words = {"": "qweight", "scale": "scales", "zeros": "qzeros", "order": "g_idx"}
        tensors |= {name + words[part]: tensor.contiguous() for part, (_, tensor) in parts.items()}

    folder = copy_with(written("qwen3_moe", packing), tmp_path, change)
    model = model_without_experts(folder, dtype=torch.float32)
    assert torch.equal(model.model.layers[2].self_attn.q_proj.weight, decoded[0])
    model.to(torch.bfloat16)
    pack_linears(model, folder)
    assert model.model.layers[2].self_attn.q_proj.format == (kind if packing == "awq" else "bf16")


def test_parameters_that_a_checkpoint_lacks_are_listed(written: Written, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.gate.weight"]
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:3].clone()
        tensors[codes] = tensors[codes].to(torch.uint8)
        tensors[scaled] = tensors[scaled].to(torch.float8_e4m3fn)

    codes, scaled = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("up", "down"))
    folder = copy_with(written("deepseek_v3", "int4_g32"), tmp_path, change)
    with pytest.raises(
        WeightError, match=r"2 parameters are missing: .*gate\.weight(.|\n)*lm_head.* \[3, 256\]"
    ) as caught:
        model_without_experts(folder)
    for name, stored in ((codes, "torch.uint8"), (scaled, "torch.float8_e4m3fn")):
        assert f"{name} is {stored}, expected 16 bits or more" in str(caught.value)


def test_numbers_of_experts_in_a_table_are_not_rounded(tmp_path: Path) -> None:
    # bf16 holds whole numbers up to 256 only.
    model = nn.Module()
    model.register_buffer("table", torch.zeros(2, dtype=torch.int64))
    model._keep_in_fp32_modules = model._keep_in_fp32_modules_strict = model._tied_weights_keys = None
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(tie_word_embeddings=False))
    save_file({"table": torch.tensor([257, 383])}, tmp_path / "model.safetensors")
    _load_rest(model, stored_parameters(tmp_path, model), ("none",), torch.bfloat16)
    assert model.table.dtype is torch.int64 and model.table.tolist() == [257, 383]


def test_the_bias_of_the_gate_stays_in_f32(written: Written) -> None:
    model = model_without_experts(written("deepseek_v3", "int4_g32"))
    assert model.model.layers[1].mlp.gate.e_score_correction_bias.dtype is torch.float32
    assert model.model.layers[1].self_attn.o_proj.weight.dtype is torch.bfloat16


def test_every_reason_of_every_module_is_listed_and_nothing_is_changed(written: Written) -> None:
    model = tiny_model(num_hidden_layers=4, hidden_size=SIZE)
    before = bytes_of_experts(model)
    with pytest.raises(UnsupportedError) as caught:
        replace_experts(model, written("deepseek_v3", "int4_g32"))
    text = "\n".join(caught.value.reasons)
    assert "model.layers.1.mlp.experts (DeepseekV3Experts): the module has num_experts=8" in text
    assert "model.layers.2.mlp.experts" in text and "the checkpoint has no blocks of experts for layer 3" in text
    assert bytes_of_experts(model) == before and not packed_modules(model)


@pytest.mark.parametrize(
    ("quant", "reason"),
    [
        ("bf16", "experts are bf16 in the checkpoint; use experts_implementation='moe_mk'"),
        ("fp8", r"experts are fp8_block .* int4 and int8 in groups and q4_0(.|\n)*inside cpu_fp8"),
        ("int8", "experts are int8 in the checkpoint; packed are"),
    ],
)
def test_other_formats_are_refused_with_what_reads_them(quant: str, reason: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shape_of("deepseek_v3", quant), threads=1)
    with pytest.raises(UnsupportedError, match=reason):
        replace_experts(family_model("deepseek_v3"), tmp_path)


def test_what_packed_experts_do_not_compute_is_named(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = family_model("qwen3_moe"), written("qwen3_moe", "int4_g32")
    experts = model.model.layers[2].mlp.experts
    monkeypatch.setattr(experts, "has_bias", True)
    experts.act_fn = nn.Tanh()
    with pytest.raises(UnsupportedError, match=r"layers\.2.* has biases(.|\n)*layers\.2.* has a custom gate"):
        replace_experts(model, folder)
    with pytest.raises(ConfigError, match="unknown kernel setting 'expert'"):
        replace_experts(model, folder, expert="cpu_native")


def test_models_that_are_not_loaded_or_were_replaced_are_refused(written: Written) -> None:
    folder = written("qwen3_moe", "int4_g32")
    with torch.device("meta"):
        empty = family_model("qwen3_moe")
    with pytest.raises(UnsupportedError, match=r"parameters outside of its experts are on the meta device"):
        replace_experts(empty, folder)
    model = model_without_experts(folder)
    replace_experts(model, folder)
    with pytest.raises(UnsupportedError, match="its experts were replaced before"):
        replace_experts(model, folder)
    with pytest.raises(UnsupportedError, match="replace_experts returned their report"):
        explain(model)


def test_what_model_without_experts_cannot_decode_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shape_of("deepseek_v3", "fp8"), threads=1)
    config = family_model("deepseek_v3").config
    with pytest.raises(UnsupportedError, match="matrices of attention as fp8_block"):
        model_without_experts(tmp_path, config=config)
    (tmp_path / "gguf").mkdir()
    write_checkpoint(tmp_path / "gguf", shape_of("deepseek_v3", "q5_k"), threads=1)
    with pytest.raises(UnsupportedError, match=r"architecture 'deepseek2'\n.*not known how llama.cpp stores"):
        model_without_experts(tmp_path / "gguf" / "model.gguf", config=config)


def test_a_format_that_config_json_contradicts_is_refused(written: Written, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        config["quantization_config"] |= {"group_size": 64}

    folder = copy_with(written("qwen3_moe", "awq"), tmp_path, change)
    with pytest.raises(UnsupportedError, match="tensors are int4_g128_zp, and quantization_config states int4_g64_zp"):
        replace_experts(family_model("qwen3_moe"), folder)


def test_a_group_as_long_as_a_row_is_read(tmp_path: Path) -> None:
    folder = write_packed_checkpoint(tmp_path, "int8_g128_zp")
    report = replace_experts(model_without_experts(folder), folder)
    assert report.num_bytes == 2 * 8 * 3 * GROUPED["int8_g128_zp"].num_bytes(128, 128)


def test_a_damaged_checkpoint_leaves_the_model_as_it_was(written: Written, tmp_path: Path) -> None:
    def change(tensors: dict[str, Any], config: dict[str, Any]) -> None:
        tensors["model.layers.2.mlp.experts.3.up_proj.weight_scale"][5, 1] = float("nan")

    folder = copy_with(written("qwen3_moe", "int4_g32"), tmp_path, change)
    model = decoded_model(written("qwen3_moe", "int4_g32"), "qwen3_moe")
    wanted = logits(model, prompt())
    with pytest.raises(WeightError, match=r"experts\.3\.up_proj"):
        replace_experts(model, folder)
    assert torch.equal(logits(model, prompt()), wanted) and not packed_modules(model)


@pytest.mark.slow
def test_a_replaced_model_compiles_into_one_graph_and_runs_long_batches(written: Written) -> None:
    folder, ids = written("qwen3_moe", "int4_g32"), prompt()
    model = model_without_experts(folder, dtype=torch.float32)
    replace_experts(model, folder, max_num_tokens=5)
    wanted = logits(decoded_model(folder, "qwen3_moe"), ids)
    for patched in (False, True):
        assert not patched or patch_blocks(model)
        assert torch.allclose(logits(model, ids), wanted, rtol=1e-5, atol=1e-5)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        assert torch.allclose(logits(compiled, ids), wanted, rtol=1e-5, atol=1e-5)


def test_a_replaced_model_is_not_trained_saved_or_moved(written: Written, tmp_path: Path) -> None:
    folder = written("qwen3_moe", "int4_g32")
    model = model_without_experts(folder, dtype=torch.float32)
    replace_experts(model, folder)
    embedded = model.get_input_embeddings()(prompt()).detach().requires_grad_()
    size = 3, model.config.num_experts_per_tok
    routing = torch.zeros(size, dtype=torch.int64), torch.ones(size, requires_grad=True)
    for got in (model(inputs_embeds=embedded).logits, packed_modules(model)[0](torch.ones(3, SIZE), *routing)):
        with pytest.raises(UnsupportedError, match="gradients through packed experts"):
            got.sum().backward()
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.experts is packed and cannot be saved"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(UnsupportedError, match="cannot be converted from torch.float32"):
        model.half()
