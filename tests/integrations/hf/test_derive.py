"""Equations derived from model classes: of a family without a row, and of those that have a row in a table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from moe_mk import DeepseekV3MoE
from moe_mk.config import MoEConfig
from moe_mk.errors import UnsupportedError
from moe_mk.integrations.hf.without_experts import model_of
from moe_mk.integrations.transformers import model_without_experts
from moe_mk.lab.checkpoints.block_tensors import is_block
from moe_mk.lab.checkpoints.derive import derive, derive_from
from moe_mk.lab.checkpoints.like import write_like
from moe_mk.lab.cli.checkpoints import config_problems
from moe_mk.weights import inspect_checkpoint
from moe_mk.weights.names import layer_of
from tests.cli.conftest import printed
from tests.config.test_keys import QUANTS
from tests.config.test_published import REFUSED as PUBLISHED_ALONE
from tests.config.test_published import by_definition, loaded
from tests.config.test_published import written as published
from tests.support.tiers import slow

H, I, E, K, S = 40, 12, 6, 3, 20


class OddConfig(transformers.PretrainedConfig):
    model_type = "odd_one"

    def __init__(self, breadth: int = H, reach: int = I, staff: int = E, pick: int = K, common: int = S,
                 stretch: float = 1.75, **others: Any) -> None:  # fmt: skip
        self.breadth, self.reach, self.staff, self.pick, self.common = breadth, reach, staff, pick, common
        self.stretch = stretch
        super().__init__(**others)


class Worker(nn.Module):
    def __init__(self, breadth: int, reach: int) -> None:
        super().__init__()
        self.beta, self.alpha = nn.Linear(breadth, reach, bias=False), nn.Linear(breadth, reach, bias=False)
        self.omega = nn.Linear(reach, breadth, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.omega(nn.functional.gelu(self.alpha(x)) * self.beta(x))


class Mixture(nn.Module):
    """Softmax, a bias for the choice alone, weights that are not renormalised, and a scale."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.config = config
        self.chooser = nn.Linear(config.breadth, config.staff, bias=False)
        self.balance = nn.Parameter(torch.zeros(config.staff))
        self.workers = nn.ModuleList(Worker(config.breadth, config.reach) for _ in range(config.staff))
        self.everyone = Worker(config.breadth, config.common)

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        ids = (scores + self.balance).topk(self.config.pick).indices
        return torch.zeros_like(scores).scatter(1, ids, scores.gather(1, ids) * self.config.stretch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights = self.weights(self.chooser(flat).softmax(-1))
        routed = sum(weights[:, e, None] * worker(flat) for e, worker in enumerate(self.workers))
        return (routed + self.everyone(flat)).view(x.shape)


class Squared(Mixture):
    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        return super().weights(scores) ** 2


class Precise(Mixture):
    """Logits in f32, of weights that are not converted."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.chooser.register_forward_pre_hook(lambda _, args: args[0].float())


class Crossed(Mixture):
    """Each part alone is as in a layer, and both together are not their sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shared = self.everyone(x)
        return super().forward(x) + shared * (super().forward(x) - shared)


class OddLayer(nn.Module):
    def __init__(self, config: OddConfig, index: int) -> None:
        super().__init__()
        self.turn = nn.Linear(config.breadth, config.breadth)
        self.mix = (
            {"squared": Squared, "crossed": Crossed, "plain": Mixture, "precise": Precise}[config.kind](config)
            if index
            else Worker(config.breadth, 8)
        )


class OddModel(transformers.PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.stages = nn.ModuleList(OddLayer(config, index) for index in range(3))
        self.then = nn.ModuleList(OddLayer(config, index) for index in range(2))  # a second decoder
        self.post_init()


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    transformers.AutoConfig.register("odd_one", OddConfig)
    transformers.AutoModel.register(OddConfig, OddModel)


def written(folder: Path, **changes: Any) -> OddModel:
    model = OddModel(OddConfig(**{"kind": "plain", "dtype": "float32"} | changes))
    draw = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=draw) / 4)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["plain", "precise"])
def test_a_family_that_no_table_has_runs_by_its_derived_equation(kind: str, tmp_path: Path) -> None:
    model = written(tmp_path, kind=kind)
    printed("derive", tmp_path)
    equation = json.loads((tmp_path / "layer_equation.json").read_text())
    assert equation["layers"] == [1, 2] and equation["names"]["prefix"] == "stages.{N}.mix."
    assert equation["config"] == {"breadth": H, "staff": E, "reach": I, "common": S, "pick": K, "stretch": 1.75}
    assert equation["names"]["parts"]["experts.{e}.gate_proj"] == "workers.{e}.alpha"
    config = MoEConfig.from_hf(tmp_path)
    router = config.router
    assert (router.scoring_func, router.top_k, router.has_correction_bias) == ("softmax", K, True)
    assert (router.renormalize, router.routed_scaling_factor) == (False, 1.75)
    assert (config.model.activation, config.model.shared_size) == ("gelu", S)
    layer = DeepseekV3MoE.from_checkpoint(tmp_path, 2, dtype=torch.float32, experts="torch_cpu")
    x = torch.randn((33, H), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(layer(x), model.stages[2].mix(x), rtol=1e-4, atol=1e-5)


REFUSED = {
    "squared": r"its routing is none that is known; the nearest .* for token \d+, the",
    "crossed": r"something else than its parts\n.*the output of token \d+ differs by",
    "plain": r"(?s)layer 0 .* layers with experts: \[1, 2\]",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_layer_computes_is_refused_with_the_difference(kind: str, tmp_path: Path) -> None:
    written(tmp_path, kind=kind)
    with pytest.raises(UnsupportedError, match=REFUSED[kind]):
        derive(tmp_path, layer=0 if kind == "plain" else None)


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 32}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 48},
    "qwen2_moe": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "num_experts": 8},
    "qwen3_moe": {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
    "olmoe": {"intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {"intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v2": {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "dots1": {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    "lara_mini": {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "num_experts": 8},
    "sarvam_moe": {}, "sarvam_mla": {},
}  # fmt: skip
for family in ("deepseek_v2", "dots1", "sarvam_moe", "sarvam_mla"):
    FAMILIES[family] |= {"moe_intermediate_size": 48, "n_routed_experts": 8, "num_experts_per_tok": 3,
                         "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5}  # fmt: skip
BLOCKS: dict[str, dict[str, Any]] = {
    "inkling_text": {"moe_intermediate_size": 48, "n_routed_experts": 8, "n_shared_experts": 2},
    "inkling2_text": {"moe_intermediate_size": 48, "n_routed_experts": 8, "unpadded_vocab_size": 32},
    "inkling2_loop_text": {"moe_intermediate_size": 48, "n_routed_experts": 8, "unpadded_vocab_size": 32,
                           "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2},
    "longcat_flash": {"expert_ffn_hidden_size": 48, "n_routed_experts": 8, "zero_expert_num": 4, "num_layers": 2},
    "nemotron_h": {"moe_latent_size": 56, "layers_block_type": ["moe", "attention"], "n_routed_experts": 8},
    "deepseek_v4": {"moe_intermediate_size": 48, "n_routed_experts": 8, "num_hash_layers": 1},
}  # fmt: skip


def config_for(family: str, settings: dict[str, Any]) -> transformers.PretrainedConfig:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    return transformers.AutoConfig.for_model(family, **settings)


@pytest.mark.parametrize("family", BLOCKS)
def test_a_saved_model_runs_by_its_derived_equation(family: str, tmp_path: Path) -> None:
    model = model_of(config_for(family, SMALL | BLOCKS[family] | {"dtype": "float32", "num_experts_per_tok": 3}))
    draw = torch.Generator().manual_seed(3)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=draw) / 4 + 1.3 * ("scale" in name))
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    equation = derive(tmp_path)
    (tmp_path / "layer_equation.json").write_text(equation.model_dump_json())
    assert equation.layers is not None and inspect_checkpoint(tmp_path).sound
    number, x = equation.layers[-1], torch.randn((33, 64), generator=draw)
    block = next(each for name, each in model.named_modules() if layer_of(f"{name}.") == number and is_block(each))
    for experts in ("torch_cpu", "reference"):
        layer = DeepseekV3MoE.from_checkpoint(tmp_path, number, dtype=torch.float32, experts=experts)
        torch.testing.assert_close(layer(x), block(x[None])[0], rtol=1e-4, atol=1e-5)


REASONS = {
    "xai-org--grok-2": "can be derived", "Tiiny--SmallThinker-4BA0.6B-Instruct": "not read by transformers",
    "sgl-project--DeepSeek-V4-Flash-FP8": "not read by transformers", "gemma4_text": "can be derived",
    "jetmoe": "no known purpose",
}  # fmt: skip


def configured(folder: Path, family: str) -> Path:
    """A published configuration, or the one of a class."""
    if family in PUBLISHED_ALONE:
        return published(folder, family)
    chosen = {"num_experts_per_tok": 7} if family == "flex_olmo" else {}  # all: renormalising has no effect
    (folder / "config.json").write_text(json.dumps(config_for(family, chosen).to_dict(), default=str))
    return folder / "config.json"


@pytest.mark.parametrize(
    "family",
    ["jamba", "baidu--ERNIE-4.5-21B-A3B-PT", *slow(*sorted(PUBLISHED_ALONE.keys() - REASONS), "granitemoe", "flint",
     "minimax", "axk2", "inkling_text", "phimoe", "kolibri1", "beam", "aria", "flex_olmo", "unlimited_ocr")],
)  # fmt: skip
def test_a_model_reads_a_layer_that_is_like_it(family: str, tmp_path: Path) -> None:
    like = configured(tmp_path, family)
    (tmp_path / "layer_equation.json").write_text(derive(like).model_dump_json())
    number = write_like(folder := tmp_path / "small", like)
    assert inspect_checkpoint(folder).sound
    with torch.device("meta"):
        kind = type(model_of(transformers.AutoConfig.from_pretrained(folder)))
    with pytest.MonkeyPatch.context() as patched:  # random values of the other layers take most of the time
        # Not left as they are: `trunc_normal_` draws again until no value is out of range.
        patched.setattr(torch.Tensor, "normal_", lambda tensor, *_, **__: tensor.zero_())
        model = kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    block = next(each for name, each in model.named_modules() if layer_of(f"{name}.") == number and is_block(each))
    layer = DeepseekV3MoE.from_checkpoint(folder, number, dtype=torch.float32, experts="reference")
    x = torch.randn((33, 256), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = block.double()(x.double()[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    assert float((layer(x) - expected.view(x.shape)).norm() / expected.norm()) < 1e-5


APART = {
    ("tencent--Hy3", "fp8_tensor", "same"): {"quant_method": "fp8", "activation_scheme": "static"},
    ("tencent--Hy3", "fp8_channel", "bf16"): {**QUANTS["w8a8"], "ignore": ["re:.*shared_mlp.*", "lm_head"]},
    ("arcee-ai--Trinity-Mini", "nvfp4", "bf16"): {**QUANTS["modelopt"], "ignore": ["*shared_experts*"]},
    ("LiquidAI--LFM2-8B-A1B", "int4_g128_zp", "same"): QUANTS["awq"],
}
"""Sections by the model, and the formats of its routed and shared experts."""


@pytest.mark.parametrize("case", APART)
def test_quantised_experts_of_a_derived_family_are_read_under_its_names(case: tuple[str, ...], tmp_path: Path) -> None:
    like = published(tmp_path, case[0])
    (tmp_path / "layer_equation.json").write_text(derive(like).model_dump_json())
    like.write_text(json.dumps({**json.loads(like.read_text()), "quantization_config": APART[case]}))
    number = write_like(folder := tmp_path / "small", like)
    facts = inspect_checkpoint(folder)
    assert not [*facts.problems, *facts.layers[0].problems, *config_problems(folder, facts)]
    weights, config = loaded(folder, number)
    assert (config.model.quant.weights, config.model.quant.shared) == case[1:]
    pairs = list(by_definition(folder, weights))
    assert len(pairs) in (3, 6) and all(torch.equal(ours, expected) for _, ours, expected in pairs)


WHOLE = (
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa", "glm4_moe_lite", "mimo_v2_flash", "solar_open",
    "qwen3_5_moe_text", "qwen3_next", "glm5_next_text", "hy_v4", "bailing_hybrid", "kimi_linear", "llama4_text",
    "longcat_flash", "deepseek_v4", "hy_v4_vl_text",
)  # fmt: skip
"""With the default configuration of their class."""


@pytest.mark.slow
@pytest.mark.parametrize("door", [derive, model_without_experts])
def test_code_of_a_checkpoint_is_never_run(door: Callable[[Path], object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "own_code", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nOwn = None\n")
    with pytest.raises(UnsupportedError, match="not read by transformers"):
        door(tmp_path)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "config.json").write_text('{"model_type": "granitemoehybrid", "mamba_n_heads": 3}')
    with pytest.raises(UnsupportedError, match="ValueError: .*amba"):
        door(tmp_path)


@pytest.mark.parametrize("family", [*FAMILIES, *slow(*WHOLE)])
def test_derived_equations_are_those_of_the_table(family: str, tmp_path: Path) -> None:
    config = config_for(family, SMALL | FAMILIES[family] if family in FAMILIES else {})
    hf = json.loads(json.dumps(config.to_dict(), default=str)) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    table = MoEConfig.from_hf(tmp_path)
    equation = derive_from(config, hf)
    (tmp_path / "layer_equation.json").write_text(equation.model_dump_json())
    derived = MoEConfig.from_hf(tmp_path, layer=equation.layers[0])
    ours = {"shared_size": table.model.shared_size, **table.model.model_dump(), **table.router.model_dump()}
    theirs = {"shared_size": derived.model.shared_size, **derived.model.model_dump(), **derived.router.model_dump()}
    stated = {"name", "num_shared_experts", "shared_intermediate_size", "stacks_transposed"}  # names, not mathematics
    assert {k: (v, theirs[k]) for k, v in ours.items() if k not in stated and v != theirs[k]} == {}


@pytest.mark.slow
@pytest.mark.parametrize("family", REASONS)
def test_models_that_are_not_derived_are_refused_with_the_reason(family: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=REASONS[family]):
        derive(configured(tmp_path, family))


def test_a_part_of_a_model_is_built_by_the_class_that_takes_its_configuration() -> None:
    config = transformers.AutoConfig.for_model("qwen3_omni_moe_text")  # in no list of AutoModel
    equation = derive_from(config, config.to_dict())
    assert (equation.router["scoring_func"], equation.router["top_k"]) == ("softmax", 8)
    assert (equation.model["num_experts"], equation.model["moe_intermediate_size"]) == (128, 768)
    with torch.device("meta"):  # AutoModel has its body, which generates nothing
        whole = model_of(transformers.AutoConfig.for_model("qwen3_vl_moe"))
    assert type(whole).__name__ == "Qwen3VLMoeForConditionalGeneration"
