"""Plans of modules: made once, made anew where something changed, by the settings that were registered; one call."""

import copy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'moe-mk[hf]'")

from transformers.integrations import finegrained_fp8
from transformers.integrations.moe import ExpertsInterface

from moe_mk.errors import ConfigError, FallbackWarning, MoEMKError, ShapeError, UnsupportedError
from moe_mk.external.library import installed
from moe_mk.integrations.hf import plan as plans
from moe_mk.integrations.transformers import explain, patch_blocks, prepare, register
from moe_mk.lab.checkpoints.tiny_models import tiny_model
from tests.integrations.hf.cases import (
    EXPERTS,
    HIDDEN,
    NormedExperts,
    deepseek,
    difference,
    experts_of,
    logits,
    prompt,
    tiny_call,
    tiny_experts,
)
from tests.layer.test_doors import MAY_WORK, OTHERS
from tests.support.ambient import AMBIENT
from tests.support.tiers import quick_where


@pytest.mark.parametrize("name", ["GptOssExperts", "NemotronHExperts", "DeepseekV3Experts"])
def test_a_change_of_any_weight_is_seen_and_a_copy_has_a_plan_of_its_own(name: str) -> None:
    module, call = experts_of(name), tiny_call()
    with torch.no_grad():
        before, twin = module(*call), copy.deepcopy(module)
        assert torch.equal(twin(*call), before)
        for number, (path, held) in enumerate(module.named_parameters()):
            held.mul_(-0.5) if number % 2 else setattr(module, path, nn.Parameter(held * -0.5))
            assert difference(module, call) < 1e-5 and not torch.equal(module(*call), before), path
            before = module(*call)
        assert difference(twin, call) < 1e-5 and not torch.equal(twin(*call), before)
    assert getattr(twin, plans.NUMBER) != getattr(module, plans.NUMBER)


@pytest.mark.slow
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
    with pytest.raises(UnsupportedError, match=r"freed by prepare\(in_place=True\)"):
        model.float()(ids)
    with pytest.raises(
        UnsupportedError, match=r"DeepseekV3Experts has freed its weights for moe_mk and cannot be saved"
    ):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.skipif("c++" not in installed(), reason="cpu_native needs a C++ compiler")
@pytest.mark.parametrize("other", ["eager", "grouped_mm", "batched_mm"])
def test_other_experts_are_refused_where_the_weights_were_given_up(other: str) -> None:
    # torch multiplies with parameters on the meta device, and gives arbitrary numbers.
    model, ids = tiny_model(dtype=torch.bfloat16), prompt()
    model.set_experts_implementation("moe_mk")
    wanted = logits(model, ids)
    prepare(model, in_place=True)
    prepare(model, in_place=True)
    freed = rf"has freed its weights for moe_mk, but has .*{other}"
    with pytest.raises(UnsupportedError, match=freed):
        model.set_experts_implementation(other)
    assert torch.equal(logits(model, ids), wanted), "nothing has changed"
    model.config._experts_implementation_internal = other  # behind its back: the next forward refuses
    with pytest.raises(UnsupportedError, match=freed):
        logits(model, ids)
    model.set_experts_implementation("moe_mk")
    assert torch.equal(logits(model, ids), wanted)


@pytest.mark.skipif("c++" not in installed(), reason="cpu_native needs a C++ compiler")
def test_a_weight_written_through_data_is_packed_again_by_prepare() -> None:
    # torch counts no version there, and engines write new weights so; explain() looks and changes nothing.
    model, ids = tiny_model(dtype=torch.bfloat16), prompt()
    model.set_experts_implementation("moe_mk")
    before = logits(model, ids)
    model.model.layers[1].mlp.experts.down_proj.data.neg_()
    explain(model)
    assert torch.equal(logits(model, ids), before)
    prepare(model)
    assert not torch.allclose(logits(model, ids), before, atol=0.1)


@pytest.mark.parametrize("name", quick_where(lambda name: name == "autocast_bf16", AMBIENT))
@pytest.mark.parametrize("again", [False, True])
def test_settings_of_torch_change_no_result(name: str, again: bool) -> None:
    module, call = deepseek(), tiny_call()
    with torch.no_grad():
        wanted = module(*call)
        with AMBIENT[name]():
            got = (copy.deepcopy(module) if again else module)(*call)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)  # threads change the order of sums


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("at", range(3))
def test_arguments_that_do_not_fit_are_refused_with_their_names(at: int) -> None:
    register()
    module, call = deepseek(), tiny_call()
    for other in set(OTHERS) - MAY_WORK - ({"gradients", "meta"} if at == 0 else {"gradients"}):
        given = [OTHERS[other](tensor) if i == at else tensor for i, tensor in enumerate(call)]
        with torch.no_grad(), pytest.raises(MoEMKError, match=("hidden_states", "top_k_index", "top_k_weights")[at]):
            module(*given)


class Wrapped(nn.Module):
    """What peft puts in the place of a module: the module with factors next to it."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.lora_A = base_layer, nn.Parameter(torch.zeros(2, 2))

    def __getattr__(self, name: str) -> object:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_layer, name)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base_layer(*args)
        return y


@pytest.mark.skipif("c++" not in installed(), reason="cpu_native needs a C++ compiler")
@pytest.mark.parametrize(
    "where", quick_where(lambda where: where != "patched", ["in_place", "patched", "patched_shared"])
)
def test_adapters_over_weights_that_are_held_elsewhere_are_refused(where: str) -> None:
    model, ids = tiny_model(dtype=torch.bfloat16), prompt()
    model.set_experts_implementation("moe_mk")
    if where == "in_place":
        prepare(model, in_place=True)
    else:
        patch_blocks(model)
    wanted, block = logits(model, ids), model.model.layers[1].mlp
    owner, name = (block.shared_experts, "up_proj") if where == "patched_shared" else (block, "experts")
    held = getattr(owner, name)
    setattr(owner, name, Wrapped(held))
    with pytest.raises(UnsupportedError, match=r"(?s)Wrapped.*LoRA on experts: .*low-rank.*merge_and_unload"):
        logits(model, ids)
    setattr(owner, name, held)
    assert torch.equal(logits(model, ids), wanted)


def test_a_model_whose_experts_are_not_dispatched_warns_when_it_is_built(recwarn: pytest.WarningsRecorder) -> None:
    from transformers import AutoModelForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=1, head_dim=16,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1,
    )  # fmt: skip
    register()
    AutoModelForCausalLM.from_config(copy.deepcopy(config), experts_implementation="eager")
    tiny_model().set_experts_implementation("moe_mk")
    assert not [warning for warning in recwarn if warning.category is FallbackWarning]
    with pytest.warns(FallbackWarning, match=r"'moe_mk' has no effect on Llama4ForCausalLM: transformers does not"):
        AutoModelForCausalLM.from_config(config, experts_implementation="moe_mk")


def test_a_plan_is_kept_while_nothing_changes_and_serves_nothing_else() -> None:
    module, made = deepseek(), list[plans.ModulePlan]()
    with torch.no_grad():
        for seed in range(3):
            module(*tiny_call(seed=seed))
            made.append(plans._plans[module])
    dtype, settings, shared = made[0].dtype, made[0].settings, plans.Ranks(plans.ALONE.grid, replicated=True)
    assert made == [plans.held_plan(module, dtype, settings)] * 3
    for other in ((torch.bfloat16, settings), (dtype, {"experts": "reference"}), (dtype, settings, shared)):
        assert plans.held_plan(module, *other) is None


def test_settings_are_checked_when_they_are_registered() -> None:
    with pytest.raises(ConfigError, match=r"unknown kernel setting 'expertz'; did you mean 'experts'\?"):
        register(expertz="reference")
    with pytest.raises(ConfigError, match=r"no experts backend is called 'torch_cup'; did you mean 'torch_cpu'\?"):
        register(experts="torch_cup")
    with pytest.raises(ConfigError, match=r"'all_to_al'; did you mean 'all_to_all'\?"):
        register(prepare_finalize="all_to_al")
    with pytest.raises(ConfigError, match=r"max_num_tokens: .*greater than or equal to 1, got -1"):
        register(max_num_tokens=-1)
    parallel = ("expert parallel",) if find_spec("transformers.distributed.expert_parallel") else ()
    assert register(experts="reference") == ("experts", "fp8 experts", *parallel)
    report = explain(tiny_model())
    assert {module.backend for module in report.modules} == {"reference"}
    assert "pinned by" in report.modules[0].because


def test_a_pin_that_cannot_serve_is_refused_with_the_reason() -> None:
    register(experts="cpu_native")
    with pytest.raises(UnsupportedError, match=r"computes in bf16, the layer is fp32"):
        prepare(tiny_model())
    normed = tiny_experts(NormedExperts)
    with pytest.raises(
        UnsupportedError, match=r"cpu_native cannot compute NormedExperts\n.*a norm after each.*use experts='auto'"
    ):
        normed(*tiny_call())


def test_what_runs_is_what_explain_states_and_a_loop_is_warned_of_once() -> None:
    plans._warn_of_a_loop.cache_clear()
    model = nn.ModuleList([experts_of("GptOssExperts"), tiny_experts(NormedExperts)])
    with pytest.warns(FallbackWarning, match="NormedExperts in a Python loop over its experts, no faster") as seen:
        reports = [explain(copy.deepcopy(model)) for _ in range(2)]
    assert len(seen) == 1
    report = reports[1]
    oss, normed = report.modules
    assert (oss.backend, normed.backend) == ("torch_cpu", "module_loop")
    for module in report.modules:
        assert not any(verdict.chosen for verdict in module.others)
    assert {verdict.experts for verdict in normed.others} == {verdict.experts for verdict in oss.others} | {"torch_cpu"}
    assert all("a norm after each expert" in str(verdict.reasons[0]) for verdict in normed.others)
    assert not any(line.strip().startswith("*") for line in str(report).splitlines())


@pytest.mark.skipif("c++" not in installed(), reason="cpu_native needs a C++ compiler")
def test_gpt_oss_in_bf16_runs_in_the_native_kernels() -> None:
    module = experts_of("GptOssExperts")
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 0.3)
    x, ids, weights = tiny_call()
    module.config._experts_implementation = "eager"
    wanted = module(x, ids, weights)
    low = copy.deepcopy(module).bfloat16()
    low.config._experts_implementation = "moe_mk"
    with torch.no_grad():
        got = low(x.bfloat16(), ids, weights)
    plan = plans._plans[low]
    assert plan.experts == "cpu_native" and plan.of_rank.decision.problem.config.model.expert_bias
    assert "kernel.instruction_set" in plan.of_rank.notes()["numerics"], "engines' ranks compare it as well"
    assert float((got - wanted).norm() / wanted.norm()) < 0.02


@pytest.mark.skipif("c++" not in installed(), reason="cpu_native needs a C++ compiler")
def test_experts_without_their_weights_refuse_others_that_they_get_unnoticed() -> None:
    module = deepseek().bfloat16()
    x, ids, weights = tiny_call()
    with torch.no_grad():
        module(x.bfloat16(), ids, weights)
        model = nn.ModuleDict({"experts": module})
        prepare(model, in_place=True)
        model.to_empty(device="cpu")
        with pytest.raises(UnsupportedError, match="has freed its weights for moe_mk, and has others or empty ones"):
            module(x.bfloat16(), ids, weights)


def test_two_names_with_two_settings_live_side_by_side() -> None:
    register("moe_mk_reference", experts="reference")
    try:
        model = tiny_model()
        assert {m.backend for m in prepare(model, "moe_mk_reference").modules} == {"reference"}
        assert {m.backend for m in prepare(model).modules} == {"torch_cpu"}
        with pytest.raises(UnsupportedError, match=r"'other' is not one of moe_mk\n.*register\('other'\)"):
            prepare(model, "other")
    finally:
        del ExpertsInterface._global_mapping["moe_mk_reference"]
        del finegrained_fp8.FP8ExpertsInterface._global_mapping["moe_mk_reference"]


@pytest.mark.parametrize("name", ["DeepseekV3Experts", "GptOssExperts"])
def test_no_tokens_one_token_and_dropped_assignments(name: str) -> None:
    module = experts_of(name)
    x_TH, ids_TK, weights_TK = tiny_call()
    with torch.no_grad():
        assert module(x_TH[:0], ids_TK[:0], weights_TK[:0]).shape == (0, HIDDEN)
        whole = module(x_TH, ids_TK, weights_TK)
        assert torch.allclose(module(x_TH[:1], ids_TK[:1], weights_TK[:1]), whole[:1], atol=1e-5)
        # Hosts mark "not here" with E or -1; the weight at such a place is ignored.
        kept = module(x_TH, ids_TK, weights_TK.clone().index_fill_(1, torch.tensor([1]), 0.0))
        for nowhere in (EXPERTS, -1, 2**31 - 1):
            ids = ids_TK.clone().index_fill_(1, torch.tensor([1]), nowhere)
            assert torch.allclose(module(x_TH, ids, weights_TK), kept, atol=1e-5)
        assert not module(x_TH, torch.full_like(ids_TK, EXPERTS), weights_TK).any()


def test_wrong_calls_are_refused_with_names() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    with pytest.raises(ShapeError, match=r"top_k_index .*dtype torch.float32"):
        module(x_TH, weights_TK, weights_TK)
    with pytest.raises(ShapeError, match=r"top_k_weights is \(7, 2\), top_k_index is \(7, 3\)"):
        module(x_TH, ids_TK, weights_TK[:, :2])
    with pytest.raises(UnsupportedError, match=r"DeepseekV3Experts is called with more"):
        module(x_TH, ids_TK, weights_TK, process_group=None)


def test_a_backward_pass_states_that_there_is_none() -> None:
    model = tiny_model()
    model.set_experts_implementation("moe_mk")
    ids = prompt()
    loss = model(ids, labels=ids).loss
    with pytest.raises(UnsupportedError, match=r"gradients through experts_implementation='moe_mk'\n.*inference"):
        loss.backward()


def test_the_operator_keeps_the_rules_of_torch() -> None:
    module, (x_TH, ids_TK, weights_TK) = deepseek(), tiny_call()
    tensors = [module.gate_up_proj.detach(), module.down_proj.detach()]
    arguments = (x_TH, ids_TK, weights_TK, tensors, plans.enter(module), "{}")
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.moe_mk.hf_experts, arguments, test_utils=tests)
