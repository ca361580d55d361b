"""transformers runs its experts through this library, and says the same tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

import transformers
from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import ExpertsInterface

from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.external.library import installed
from moe_mk.integrations.hf import plan as plans
from moe_mk.integrations.hf.gates import activation_of
from moe_mk.integrations.hf.modules import facts_of, is_experts
from moe_mk.integrations.hf.tiny import tiny_model, write_fp8_checkpoint
from moe_mk.integrations.transformers import (
    config_from_hf,
    cpu_fp8,
    explain,
    patch_blocks,
    patched_blocks,
    prepare,
    register,
    unpatch_blocks,
)
from moe_mk.quant import BF16, FP8_128x128
from moe_mk.quant.fp8_block import FP8_1x128
from moe_mk.verify.compare import experts_error
from tests.integrations.hf_classes import EXPERTS, HIDDEN, TOP_K, experts_classes, tiny_call, tiny_experts

CLASSES = experts_classes()
CLOSE = 1e-5
"""Relative, in f32: sums of some twenty products in another order. One percent of error is a thousand times that."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register()
    yield
    register()


@torch.no_grad()
def difference(module: nn.Module, call: tuple[Tensor, Tensor, Tensor]) -> float:
    """The largest difference between this library and the class's own forward, relative to the largest output."""
    ours = module(*call)
    module.config._experts_implementation = "eager"
    theirs = module(*call)
    module.config._experts_implementation = "moe_mk"
    return float((ours - theirs).abs().max() / theirs.abs().max())


def prompt(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(1, 90, (batch, length), generator=torch.Generator().manual_seed(3))


def generate(model: Any, ids: Tensor, tokens: int = 8) -> list[list[int]]:
    mask = torch.ones_like(ids)
    made = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return [list(map(int, row)) for row in made]


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    found: Tensor = model(ids).logits
    return found


# Every class.


def test_the_sweep_covers_every_class_of_this_version() -> None:
    assert len(CLASSES) >= 60
    assert {"DeepseekV3Experts", "GptOssExperts", "NemotronHExperts", "MuseSparkExperts", "AriaExperts"} <= {
        cls.__name__ for cls in CLASSES
    }


@pytest.mark.parametrize("cls", CLASSES, ids=[cls.__name__ for cls in CLASSES])
def test_every_experts_class_computes_what_its_own_forward_does(cls: type[nn.Module]) -> None:
    module = tiny_experts(cls)
    assert difference(module, tiny_call()) < CLOSE


@pytest.mark.parametrize(
    ("name", "oddities", "activation"),
    [
        ("DeepseekV3Experts", (), "silu"),
        ("Gemma4TextExperts", (), "gelu_tanh"),
        ("NemotronHExperts", (), "relu2"),
        ("AriaExperts", ("transposed weights",), "silu"),
        ("MuseSparkExperts", ("a norm after each expert",), "silu"),
        ("DeepseekV4Experts", ("a gate of its own",), None),
        (
            "GptOssExperts",
            ("transposed weights", "interleaved gate and up", "biases", "a gate of its own"),
            None,
        ),
    ],
)
def test_what_a_module_is_is_found_by_trying(name: str, oddities: tuple[str, ...], activation: str | None) -> None:
    facts = facts_of(tiny_experts(next(cls for cls in CLASSES if cls.__name__ == name)))
    assert (facts.oddities, facts.activation, facts.canonical) == (oddities, activation, not oddities)
    assert (facts.num_experts, facts.hidden_size) == (EXPERTS, HIDDEN)


def test_a_clamp_in_a_gate_is_noticed() -> None:
    def clamped(x: Tensor) -> Tensor:
        gate, up = x.clamp(max=2000.0).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    assert activation_of(clamped, gated=True, device=torch.device("cpu")) is None
    plain = lambda x: torch.nn.functional.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1]  # noqa: E731
    assert activation_of(plain, gated=True, device=torch.device("cpu")) == "silu"


# One call.


DEEPSEEK = next(cls for cls in CLASSES if cls.__name__ == "DeepseekV3Experts")


def deepseek() -> nn.Module:
    return tiny_experts(DEEPSEEK)


def test_one_token_by_hand() -> None:
    # Weights of ones times c: gate = up = c * sum(x); y = weight * c * I * silu(c s) * c s.
    module = deepseek()
    with torch.no_grad():
        module.gate_up_proj.fill_(0.5)
        module.down_proj.fill_(0.25)
        x_TH = torch.full((1, HIDDEN), 0.125)  # s = 32 / 8 = 4, so gate = up = 2
        y_TH = module(x_TH, torch.tensor([[2]]), torch.tensor([[3.0]]))
    silu_of_2 = 2.0 / (1.0 + torch.exp(torch.tensor(-2.0)))
    assert torch.allclose(y_TH, 3.0 * 0.25 * 24 * silu_of_2 * 2.0 * torch.ones(1, HIDDEN))


@pytest.mark.parametrize("name", ["DeepseekV3Experts", "GptOssExperts"])
def test_no_tokens_one_token_and_dropped_assignments(name: str) -> None:
    module = tiny_experts(next(cls for cls in CLASSES if cls.__name__ == name))
    x_TH, ids_TK, weights_TK = tiny_call()
    with torch.no_grad():
        assert module(x_TH[:0], ids_TK[:0], weights_TK[:0]).shape == (0, HIDDEN)
        whole = module(x_TH, ids_TK, weights_TK)
        assert torch.allclose(module(x_TH[:1], ids_TK[:1], weights_TK[:1]), whole[:1], atol=1e-5)
        # Hosts mark "not here" with E or -1; what the weight beside it says must not matter.
        kept = module(x_TH, ids_TK, weights_TK.clone().index_fill_(1, torch.tensor([1]), 0.0))
        for nowhere in (EXPERTS, -1, 2**31 - 1):
            ids = ids_TK.clone().index_fill_(1, torch.tensor([1]), nowhere)
            assert torch.allclose(module(x_TH, ids, weights_TK), kept, atol=1e-5)
        assert not module(x_TH, torch.full_like(ids_TK, EXPERTS), weights_TK).any()


def test_inputs_stay_as_they_were_and_ids_may_be_int32() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    before = [tensor.clone() for tensor in (x_TH, ids_TK, weights_TK)]
    with torch.no_grad():
        y_TH = module(x_TH, ids_TK, weights_TK)
        assert torch.equal(module(x_TH, ids_TK.int(), weights_TK), y_TH)
    assert all(torch.equal(one, other) for one, other in zip(before, (x_TH, ids_TK, weights_TK), strict=True))


def test_a_changed_weight_is_seen_and_a_copy_has_a_plan_of_its_own() -> None:
    module, call = deepseek(), tiny_call()
    with torch.no_grad():
        first = module(*call)
        twin = copy.deepcopy(module)
        module.down_proj.mul_(2.0)
        assert torch.allclose(module(*call), 2.0 * first)
        assert torch.equal(twin(*call), first)
        module.down_proj = nn.Parameter(module.down_proj * 0.0)
        assert not module(*call).any()
    assert getattr(twin, plans.NUMBER) != getattr(module, plans.NUMBER)


@pytest.mark.skipif("c++" not in installed(), reason="cpu_native needs a C++ compiler")
def test_parameters_can_be_given_up_where_the_backend_has_a_copy(tmp_path: Path) -> None:
    model, ids = tiny_model(dtype=torch.bfloat16), prompt()
    model.set_experts_implementation("moe_mk")
    before = explain(model)
    assert {module.backend for module in before.modules} == {"cpu_native"} and before.modules[0].copied
    wanted = logits(model, ids)
    after = prepare(model, in_place=True)
    assert not after.modules[0].copied and after.modules[0].num_bytes == before.modules[0].num_bytes
    experts = model.model.layers[1].mlp.experts
    assert experts.down_proj.device.type == "meta" and experts.down_proj.shape == (8, 128, 128)
    assert torch.equal(logits(model, ids), wanted)
    prepare(model)
    assert torch.equal(logits(torch.compile(model, fullgraph=True, backend="eager"), ids), wanted)
    with pytest.raises(UnsupportedError, match=r"given up by prepare\(in_place=True\)"):
        model.float()(ids)
    with pytest.raises((NotImplementedError, RuntimeError)):
        model.save_pretrained(tmp_path)


@pytest.mark.skipif("c++" not in installed(), reason="cpu_native needs a C++ compiler")
def test_a_changed_weight_is_packed_again_where_the_backend_has_a_copy() -> None:
    register(experts="cpu_native")
    call = tiny_call()
    module = tiny_experts(DEEPSEEK, hidden_size=64, moe_intermediate_size=64).to(torch.bfloat16)
    x_TH = torch.cat((call[0], call[0]), dim=1).bfloat16()
    with torch.no_grad():
        first = module(x_TH, *call[1:])
        module.down_proj.mul_(2.0)
        assert torch.equal(module(x_TH, *call[1:]), 2.0 * first)


def test_a_plan_is_kept_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, made = deepseek(), []
    real = plans.make_plan
    monkeypatch.setattr(plans, "make_plan", lambda *a, **k: made.append(1) or real(*a, **k))
    with torch.no_grad():
        for seed in range(3):
            module(*tiny_call(seed=seed))
    assert len(made) == 1


def test_wrong_calls_are_refused_with_names() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    with pytest.raises(ShapeError, match=r"top_k_index .*dtype torch.float32"):
        module(x_TH, weights_TK, weights_TK)
    with pytest.raises(ShapeError, match=r"top_k_weights is \(7, 2\), top_k_index is \(7, 3\)"):
        module(x_TH, ids_TK, weights_TK[:, :2])
    with pytest.raises(UnsupportedError, match=r"DeepseekV3Experts is called with more"):
        module(x_TH, ids_TK, weights_TK, process_group=None)


# Settings and refusals.


def test_settings_are_checked_when_they_are_registered() -> None:
    with pytest.raises(ConfigError, match=r"no kernel setting is called 'expertz'"):
        register(expertz="reference")
    assert register(experts="reference") == ("experts", "fp8 experts", "expert parallel")
    report = explain(tiny_model())
    assert {module.backend for module in report.modules} == {"reference"}
    assert "pinned by" in report.modules[0].because


def test_a_pin_that_cannot_serve_is_refused_with_the_reason() -> None:
    register(experts="cpu_native")
    with pytest.raises(UnsupportedError, match=r"computes in bf16, the layer is fp32"):
        prepare(tiny_model())
    gpt_oss = tiny_experts(next(cls for cls in CLASSES if cls.__name__ == "GptOssExperts"))
    with pytest.raises(
        UnsupportedError, match=r"cpu_native cannot compute GptOssExperts\n.*biases.*use experts='auto'"
    ):
        gpt_oss(*tiny_call())


def test_what_cannot_be_computed_is_named_before_any_work() -> None:
    module = deepseek()
    module.down_proj = nn.Parameter(torch.zeros((EXPERTS, HIDDEN, 12), dtype=torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"cannot compute DeepseekV3Experts\n  - its weights are packed FP4"):
        module(*tiny_call())
    model = tiny_model()
    for layer in (1, 2):
        experts = model.model.layers[layer].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"layers\.1\.mlp\.experts.*FP4(.|\n)*layers\.2\.mlp\.experts"):
        prepare(model)
    with pytest.raises(UnsupportedError, match="has no experts module"):
        prepare(nn.Linear(2, 2))


def test_a_backward_pass_says_that_there_is_none() -> None:
    model = tiny_model()
    model.set_experts_implementation("moe_mk")
    ids = prompt()
    loss = model(ids, labels=ids).loss
    with pytest.raises(UnsupportedError, match=r"gradients through experts_implementation='moe_mk'\n.*inference"):
        loss.backward()


# Whole models.


FAMILIES = ["deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe", "nemotron_h"]


def family(name: str) -> Any:
    """A tiny random causal model of a family, in f32."""
    shape = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32,
        "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": 2,
        "initializer_range": 0.3, "max_position_embeddings": 128, "pad_token_id": 0, "eos_token_id": 95,
    }  # fmt: skip
    if name == "deepseek_v3":
        return tiny_model()
    if name == "nemotron_h":
        shape |= {"hybrid_override_pattern": "*E", "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 1}
        shape |= {"moe_shared_expert_intermediate_size": 48, "n_group": 1, "topk_group": 1}
    config = transformers.AutoConfig.for_model(name, **shape)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).to(torch.float32).eval()


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


# Compiled.


def test_one_graph_without_breaks() -> None:
    model, ids = tiny_model(), prompt()
    model.set_experts_implementation("moe_mk")
    prepare(model)
    wanted = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(logits(compiled, ids), wanted)


def test_compiling_what_was_never_prepared_says_what_to_call() -> None:
    module = deepseek()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with pytest.raises(UnsupportedError, match=r"prepare\(model\) before torch.compile"), torch.no_grad():
        compiled(*tiny_call())


def test_two_modules_compiled_one_by_one_do_not_share_a_plan() -> None:
    one, other, call = deepseek(), deepseek(), tiny_call()
    with torch.no_grad():
        other.down_proj.mul_(-3.0)
        wanted = [module(*call) for module in (one, other)]
        got = [torch.compile(module, fullgraph=True, backend="eager")(*call) for module in (one, other)]
    assert all(torch.equal(mine, its) for mine, its in zip(got, wanted, strict=True))
    assert not torch.equal(*wanted)


def test_the_operator_keeps_the_rules_of_torch() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    tensors = [module.gate_up_proj.detach(), module.down_proj.detach()]
    arguments = (x_TH, ids_TK, weights_TK, tensors, plans.enter(module), "{}")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.moe_mk.hf_experts, arguments, test_utils=tests)


# Whole blocks.


@pytest.mark.row(65)
def test_patched_blocks_give_the_same_tokens_and_count_load() -> None:
    model, ids = tiny_model(), prompt()
    expected, wanted = generate(model, ids), logits(model, ids)
    layers = patch_blocks(model)
    assert sorted(layers) == ["model.layers.1.mlp", "model.layers.2.mlp"]
    assert generate(model, ids) == expected
    layers["model.layers.1.mlp"].reset_expert_load()
    assert float((logits(model, ids) - wanted).abs().max() / wanted.abs().max()) < 1e-6
    assert int(layers["model.layers.1.mlp"].expert_load.sum()) == ids.numel() * 2
    assert patch_blocks(model) == {}, "patched twice"
    assert unpatch_blocks(model) == 2
    assert torch.equal(logits(model, ids), wanted)


def test_router_logits_are_recorded_as_before() -> None:
    model, ids = tiny_model(), prompt()
    with torch.no_grad():
        wanted = model(ids, output_router_logits=True).router_logits
        with patched_blocks(model):
            got = model(ids, output_router_logits=True).router_logits
    assert len(got) == len(wanted) == 2
    assert all(torch.allclose(mine, its, atol=1e-4) for mine, its in zip(got, wanted, strict=True))


def test_patching_leaves_the_state_dict_alone() -> None:
    model = tiny_model()
    names = list(model.state_dict())
    with patched_blocks(model):
        assert list(model.state_dict()) == names


def test_a_block_that_routes_in_another_way_is_left_alone() -> None:
    model, ids = tiny_model(), prompt()
    gate = model.model.layers[2].mlp.gate
    own = gate.forward
    gate.forward = lambda x: (lambda out: (out[0], out[1], (out[2] + 1) % 8))(own(x))
    wanted = logits(model, ids)
    with pytest.raises(
        UnsupportedError, match=r"layers\.2\.mlp.*not DeepSeek-V3's block.*chooses other experts for 48"
    ):
        patch_blocks(model)
    assert torch.equal(logits(model, ids), wanted), "nothing was patched"
    gate.forward = lambda x: (lambda out: (out[0], out[1] * 1.01, out[2]))(own(x))
    with pytest.raises(UnsupportedError, match=r"its gate gives other weights"):
        patch_blocks(model)
    with pytest.raises(UnsupportedError, match=r"has no block with DeepSeek-V3's parts"):
        patch_blocks(family("mixtral"))


def test_patched_blocks_compile_into_one_graph() -> None:
    model, ids = tiny_model(), prompt()
    with patched_blocks(model):
        wanted = logits(model, ids)
        assert torch.equal(logits(torch.compile(model, fullgraph=True, backend="eager"), ids), wanted)


# FP8 on a CPU.


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fp8_checkpoint(tmp_path_factory.mktemp("fp8"))


def load_fp8(folder: Path, **settings: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **settings)


def test_an_fp8_checkpoint_stays_fp8_and_generates_the_same_tokens(fp8_folder: Path) -> None:
    register(activations="checkpoint")
    ids = prompt()
    with cpu_fp8():
        model = load_fp8(fp8_folder, experts_implementation="moe_mk", dtype=torch.float32)
        experts = model.model.layers[1].mlp.experts
        assert experts.down_proj.dtype is torch.float8_e4m3fn
        assert {module.scheme for module in explain(model).modules} == {"fp8_128x128"}
        got, mine = generate(model, ids), logits(model, ids)
        model.set_experts_implementation("eager")
        assert torch.equal(logits(model, ids), mine)
        assert generate(model, ids) == got
        # These add up in another order, and an ulp may round an activation to the FP8 number next to it.
        for theirs in ("grouped_mm", "batched_mm"):
            model.set_experts_implementation(theirs)
            assert float((logits(model, ids) - mine).norm() / mine.norm()) < 0.02


def test_fp8_in_bf16_is_as_near_as_its_formats_allow(fp8_folder: Path) -> None:
    with cpu_fp8():
        model = load_fp8(fp8_folder, experts_implementation="moe_mk")
        experts = model.model.layers[1].mlp.experts
        x_TH = torch.randn((16, 128), generator=torch.Generator().manual_seed(0)).bfloat16()
        ids_TK = torch.rand((16, 8), generator=torch.Generator().manual_seed(1)).argsort(dim=1)[:, :2]
        weights_TK = torch.full((16, 2), 0.5)
        with torch.no_grad():
            got = experts(x_TH, ids_TK, weights_TK).float()
            model.set_experts_implementation("eager")
            want = experts(x_TH, ids_TK, weights_TK).float()
    # transformers rounds activations to FP8, this library multiplies in bf16 unless told otherwise.
    limit = (
        1.5
        * (experts_error(BF16, BF16, FP8_128x128, 128) ** 2 + experts_error(BF16, FP8_1x128, FP8_128x128, 128) ** 2)
        ** 0.5
    )
    assert 0.0 < float((got - want).norm() / want.norm()) < limit


def test_fp8_blocks_are_patched_as_well(fp8_folder: Path) -> None:
    with cpu_fp8():
        model, ids = load_fp8(fp8_folder, dtype=torch.float32), prompt()
        wanted = logits(model, ids)
        patch_blocks(model, activations="checkpoint")
        assert float((logits(model, ids) - wanted).abs().max() / wanted.abs().max()) < 1e-4


def test_outside_of_it_transformers_is_as_it_was(fp8_folder: Path) -> None:
    before = finegrained_fp8._FINEGRAINED_FP8
    with cpu_fp8():
        assert finegrained_fp8._FINEGRAINED_FP8 is not before
    with pytest.raises(ZeroDivisionError), cpu_fp8():
        raise ZeroDivisionError
    assert finegrained_fp8._FINEGRAINED_FP8 is before


def test_another_transformers_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(finegrained_fp8, "FineGrainedFP8")
    with pytest.raises(UnsupportedError, match=r"has no FineGrainedFP8; known to work with 5.23"), cpu_fp8():
        pass


def test_fp8_checkpoints_that_cannot_be_computed_are_refused_while_loading(fp8_folder: Path, tmp_path: Path) -> None:
    for file in fp8_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= {"activation_scheme": "static"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="activation_scheme is 'static'"), cpu_fp8():
        load_fp8(tmp_path)


def test_two_names_with_two_settings_live_side_by_side() -> None:
    register("moe_mk_reference", experts="reference")
    try:
        model = tiny_model()
        assert {m.backend for m in prepare(model, "moe_mk_reference").modules} == {"reference"}
        assert {m.backend for m in prepare(model).modules} == {"torch_cpu"}
        with pytest.raises(UnsupportedError, match=r"'other' is not ours\n.*register\('other'\)"):
            prepare(model, "other")
    finally:
        del ExpertsInterface._global_mapping["moe_mk_reference"]
        del finegrained_fp8.FP8ExpertsInterface._global_mapping["moe_mk_reference"]
    assert TOP_K == 3
