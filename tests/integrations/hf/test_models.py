"""Whole models of several families generate the same tokens, compiled ones too."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers

from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.modules import is_experts
from moe_mk.integrations.transformers import (
    config_from_hf,
    explain,
    model_without_experts,
    pack_linears,
    prepare,
    replace_experts,
)
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from tests.integrations.hf.cases import deepseek, family, generate, logits, prompt, tiny_call
from tests.integrations.hf.packed import write_gguf_model
from tests.layer.native import NEEDS_COMPILER

FAMILIES = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe", "nemotron_h"]


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_is_equal_token_for_token(name: str) -> None:
    model, ids = family(name), prompt()
    model.set_experts_implementation("eager")
    expected, wanted = generate(model, ids), logits(model, ids)
    model.set_experts_implementation("moe_mk")
    calls = [module for module in model.modules() if is_experts(module)]
    assert calls, "the model has no experts"
    assert generate(model, ids) == expected
    error = float((logits(model, ids) - wanted).abs().max() / wanted.abs().max())
    assert error < 1e-4
    with torch.no_grad():  # and the tokens would not be equal if the experts were left out
        for module in calls:
            module.down_proj.zero_()
    assert generate(model, ids) != expected


def test_a_saved_model_loads_with_the_experts_named(tmp_path: Path) -> None:
    model, ids = tiny_model(), prompt()
    wanted = logits(model, ids)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="moe_mk")
    assert loaded.get_experts_implementation() == {"": "moe_mk"}
    assert float((logits(loaded, ids) - wanted).abs().max() / wanted.abs().max()) < 1e-6
    layer_config = config_from_hf(loaded.config, experts="reference")
    assert (layer_config.model.num_experts, layer_config.router.num_expert_group) == (8, 2)
    assert layer_config.kernel.experts == "reference"


def test_the_report_names_every_module_and_every_rival() -> None:
    report = explain(tiny_model())
    assert [module.path for module in report.modules] == [f"model.layers.{n}.mlp.experts" for n in (1, 2)]
    rivals = {verdict.experts: verdict for verdict in report.modules[0].others}
    assert "computes in bf16, the layer is fp32" in str(rivals["cpu_native"].reasons[0])
    assert json.loads(json.dumps(report.as_dict()))["modules"][0]["backend"] == report.modules[0].backend
    assert "refused" in str(report) and "2 experts modules" in str(report)


@pytest.mark.slow
def test_one_graph_without_breaks() -> None:
    model, ids = tiny_model(), prompt()
    model.set_experts_implementation("moe_mk")
    prepare(model)
    wanted = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled, ids), wanted)


def test_compiling_what_was_never_prepared_states_what_to_call() -> None:
    module = deepseek()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with pytest.raises(UnsupportedError, match=r"prepare\(model\) before torch.compile"), torch.no_grad():
        compiled(*tiny_call())


@NEEDS_COMPILER
def test_linear_layers_in_bf16_are_packed_and_freed(tmp_path: Path) -> None:
    model, ids = family("qwen3_moe").bfloat16(), prompt()
    plain, projection = logits(model, ids), model.model.layers[1].self_attn.k_proj
    x, w, held = torch.randn(3, 5, 64).bfloat16(), projection.weight.detach().double(), weakref.ref(projection.weight)
    del projection
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *_: None)
    model.model.layers[0].self_attn.k_proj.register_forward_pre_hook(lambda *_: None)
    model.model.layers[0].self_attn.o_proj._hf_hook = object()  # of accelerate
    sizes = pack_linears(model, skip=["lm_head"])
    assert list(sizes) == [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in ("q", "qkvo")[i]]
    assert held() is None and isinstance(model.lm_head, nn.Linear)
    packed = model.model.layers[1].self_attn.k_proj
    assert float((packed(x).double() - x.double() @ w.T).abs().max() / w.abs().max()) < 2**-6
    assert float((logits(model, ids) - plain).abs().max() / plain.abs().max()) < 0.05
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), packed(x))
    with pytest.raises(UnsupportedError, match=r"q_proj is packed and cannot be saved\n.*in the checkpoint"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(UnsupportedError, match="gradients through a packed linear layer"):
        packed(x.clone().requires_grad_()).sum().backward()
    with pytest.raises(UnsupportedError, match=r"ForCausalLM has no linear layer to pack\n.*FP8 blocks, on the CPU"):
        pack_linears(model, skip=["lm_head"])  # what is left has hooks


def test_two_modules_compiled_one_by_one_do_not_share_a_plan() -> None:
    one, other, call = deepseek(), deepseek(), tiny_call()
    with torch.no_grad():
        other.down_proj.mul_(-3.0)
        wanted = [module(*call) for module in (one, other)]
        got = [torch.compile(module, fullgraph=True, backend="eager")(*call) for module in (one, other)]
    assert all(torch.equal(mine, its) for mine, its in zip(got, wanted, strict=True))
    assert not torch.equal(*wanted)


@pytest.mark.slow
def test_a_gguf_model_in_parts_is_the_whole_one(tmp_path: Path) -> None:
    found = []
    for parts in (1, 3):
        file = write_gguf_model(tmp_path / str(parts), "q4_k", "Q6_K", parts)
        model = model_without_experts(file, dtype=torch.float32)
        replace_experts(model, file)
        found.append(logits(model, prompt()))
    assert torch.equal(*found)
