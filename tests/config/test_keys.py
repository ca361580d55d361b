"""Every key of every family and quantisation, changed in every way: the same settings, or an error that names it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from moe_mk.config import MoEConfig, keys
from moe_mk.config.hf import DEFAULTS, FAMILIES, READ, SECOND, settings_from_hf
from moe_mk.errors import ConfigError

SIZES: dict[str, Any] = {"hidden_size": 64, "num_experts_per_tok": 2, "hidden_act": "silu", "torch_dtype": "bfloat16"}
V3 = SIZES | {
    "moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 1, "norm_topk_prob": True, "n_group": 8,
    "topk_group": 4, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
ONE = V3 | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
QWEN = SIZES | {"moe_intermediate_size": 32, "num_experts": 16, "norm_topk_prob": False}
LONGCAT = SIZES | {
    "moe_intermediate_size": 32, "n_routed_experts": 16, "zero_expert_num": 8, "zero_expert_type": "identity",
    "routed_scaling_factor": 6.0, "norm_topk_prob": False, "router_dtype": "float32",
}  # fmt: skip
MINIMAX_M3 = SIZES | {
    "hidden_act": "swigluoai", "num_local_experts": 8, "intermediate_size": 32, "use_routing_bias": True,
    "routed_scaling_factor": 2.0, "n_shared_experts": 1, "shared_intermediate_size": 48, "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}  # fmt: skip
GROUP = "config_groups", "group_0"
BASES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "kimi_k2"), V3),
    "glm4_moe": ONE,
    "dots1": ONE | {"n_shared_experts": 0},
    "deepseek_v2": QWEN | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 2},
    "deepseek_v4": {k: v for k, v in V3.items() if "group" not in k}
    | {"routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0},
    "deepseek": QWEN | {"n_shared_experts": 0},
    "qwen3_moe": QWEN,
    "qwen3_vl_moe": QWEN | {"norm_topk_prob": True},
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 48},
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_moe"), QWEN | {"norm_topk_prob": True, "shared_expert_intermediate_size": 48}
    ),
    "glm_moe_dsa": ONE | {"routed_scaling_factor": 2.5, "moe_router_dtype": "float32"},
    "nemotron_h": {k: v for k, v in ONE.items() if k != "hidden_act"}
    | {"mlp_hidden_act": "relu2", "moe_shared_expert_intermediate_size": 48},
    "minimax_m2": SIZES | {"num_local_experts": 8, "intermediate_size": 32, "use_routing_bias": True},
    "minimax_m3": MINIMAX_M3,
    "longcat_flash": LONGCAT,
    "olmoe": {k: v for k, v in QWEN.items() if k != "moe_intermediate_size"} | {"intermediate_size": 32},
    "mixtral": SIZES | {"num_local_experts": 8, "intermediate_size": 32},
    "gpt_oss": SIZES | {"num_local_experts": 8, "intermediate_size": 32, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
}
"""The values of keys that may be absent are the defaults of the class, so that dropping them may change nothing."""
OF_OTHERS = (
    "swiglu_limits", "moe_swiglu_limit", "expert_clamp", "zero_expert_num", "shared_expert_rank",
    "router_scale", "gate_temperature_scaling", "num_null_experts", "topk_softmax_first", "latent_size", "mlp_bias",
    "activation_limit", "norm_topk_prob_eps",
    "swish_beta", "renormalise", "router_sinkhorn", "intermediate_sizes",
    "expert_rotation", "ffn_hadamard", "score_correction", "shared_gate",
)  # fmt: skip
"""Keys that no family here reads."""
WRONG: tuple[Any, ...] = ("3", True, math.nan, -1, 2.5, [], {}, "", [1], {"a": 1}, math.inf, 0)

TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FOUR = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def grouped(weights: dict[str, Any], tokens: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens}
    return {"config_groups": {"group_0": group}, **more}


QUANTS: dict[str, dict[str, Any]] = {
    "mixed": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16,
        "quantized_layers": {"model.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}},
    },
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "mxfp4": {"quant_method": "mxfp4"},
    "modelopt": grouped(FOUR, FOUR, quant_method="modelopt", quant_algo="NVFP4", group_size=16),
    "w8a8": grouped(FLOATS, TOKENS, quant_method="compressed-tensors", format="float-quantized"),
    "packed": grouped(PACKED, None, quant_method="compressed-tensors", format="pack-quantized"),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}  # fmt: skip
UNREAD = {"transform_config": {"config_groups": {"R": {"type": "hadamard"}}}, "rotation": "R4", "clip_ratio": 0.9,
          "sparsity_config": {"format": "sparse-24-bitmask"}, "pre_quant_scale": True, "new_key": 1}  # fmt: skip


def full(family: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": family, **BASES[family], **changes}


def read(hf: dict[str, Any]) -> MoEConfig:
    return MoEConfig.parse(settings_from_hf(hf, "here"), "here")


def outcome(hf: dict[str, Any]) -> MoEConfig | str:
    """The settings, or the text of the error. Errors of other types end the test."""
    try:
        return read(hf)
    except ConfigError as refusal:
        return str(refusal)


def changed_values(family: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(key, config, "refused" or "same or refused") of every change of one key."""
    base = full(family)
    for key in BASES[family]:
        expected = "default" if key == "norm_topk_prob" and key in DEFAULTS[family] else "same or refused"
        yield key, {k: v for k, v in base.items() if k != key}, expected
        if key not in ("n_shared_experts", "zero_expert_num"):  # null is none
            yield key, {**base, key: None}, expected
        for value in WRONG:
            valid = key in ("routed_scaling_factor", "swiglu_limit", "swiglu_alpha") and value == 2.5
            valid |= key in ("n_shared_experts", "zero_expert_num") and value == 0 and type(value) is int
            valid |= key in ("norm_topk_prob", "use_routing_bias") and value is True
            valid |= (key, value) == ("shared_expert_intermediate_size", 0) and type(value) is int
            valid |= (family, key, value) == ("deepseek_v4", "swiglu_limit", 0) and type(value) is int
            if not valid:
                yield key, {**base, key: value}, "refused"
    for key in (
        *(set(OF_OTHERS) - base.keys()),
        *({"swiglu_limit", "n_group", "n_shared_experts", "num_hidden_groups"} - base.keys()),
    ):
        yield key, {**base, key: 3}, "refused"
        yield key, {**base, key: {"all": [3.0]}}, "refused"
        yield key, {**base, key: True}, "refused"  # no factor of 1
    for key in {"norm_topk", "normalize_topk", "router_renormalize", "norm_topk_prob"} - base.keys():
        yield key, {**base, key: False}, "refused"


@pytest.mark.parametrize("family", BASES)
def test_a_key_of_a_family_is_read_or_refused_and_absent_ones_have_the_default(family: str) -> None:
    same, wrong = read(full(family)), []
    for none in {"n_shared_experts", "shared_expert_intermediate_size"} & BASES[family].keys():
        model = read(full(family, **{none: 0})).model
        assert (model.num_shared_experts, model.shared_gate) == (0, False), none
    for key, hf, expected in changed_values(family):
        found = outcome(hf)
        if expected == "default":
            if found != outcome(full(family, **{key: DEFAULTS[family][key]})):
                wrong.append(f"{key} is absent: not the default {DEFAULTS[family][key]}: {found}")
        elif isinstance(found, str):
            if key not in found and not (key == "torch_dtype" and "dtype" in found):
                wrong.append(f"{key}={hf.get(key)!r}: the error does not name it: {found}")
        elif expected == "refused" or found != same:
            wrong.append(f"{key}={hf.get(key, 'absent')!r}: accepted as {found.model} {found.router}")
    assert not wrong, f"{len(wrong)} of {family}:\n" + "\n".join(wrong[:20])


def sections(quant: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The places of a section and of all mappings inside, except where keys are free names."""
    if path[-1:] not in (("config_groups",), ("quantized_layers",)):
        yield path
    for key, value in quant.items():
        if isinstance(value, dict):
            yield from sections(value, (*path, key))


def with_key(quant: dict[str, Any], path: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    made = place = {**quant}
    for step in path:
        place[step] = place = {**place[step]}
    place[key] = value
    return made


@pytest.mark.parametrize("name", QUANTS)
def test_a_key_of_a_quantisation_is_read_or_refused(name: str) -> None:
    quant, wrong = QUANTS[name], []
    same = read(full("deepseek_v3", quantization_config=quant))
    for path in sections(quant):
        for key, value in UNREAD.items():
            found = outcome(full("deepseek_v3", quantization_config=with_key(quant, path, key, value)))
            if not isinstance(found, str) or key not in found:
                wrong.append(f"{'.'.join(path)}.{key}={value!r}: {found}")
            empty = outcome(full("deepseek_v3", quantization_config=with_key(quant, path, key, {})))
            if empty != same:
                wrong.append(f"{'.'.join(path)}.{key} is empty: {empty}")
        place = quant
        for step in path:
            place = place[step]
        for key in place:
            for value in ({"a": 1}, [3], "x", -7, True, math.nan):
                states = key == "dynamic" and value is True and path[-1] == "input_activations"  # which tensors decide
                if value is not place[key] and key not in ("config_groups", "targets") and not states:
                    found = outcome(full("deepseek_v3", quantization_config=with_key(quant, path, key, value)))
                    if not isinstance(found, str) and found != same:
                        wrong.append(f"{'.'.join(path)}.{key}={value!r}: accepted as {found.model.quant}")
    assert not wrong, f"{len(wrong)} of {name}:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("family", [f for f in FAMILIES if f in transformers.CONFIG_MAPPING or f == "minimax_m3"])
def test_defaults_are_those_of_the_configuration_class(family: str) -> None:
    config = transformers.AutoConfig.for_model("minimax_m3_vl" if family == "minimax_m3" else family)
    text, made = config.get_text_config(), config.to_dict()
    made = made.get("text_config") or made
    renormalises = getattr(text, "norm_topk_prob", None)
    if "norm_topk_prob" in READ[family] and isinstance(renormalises, bool):
        assert DEFAULTS[family]["norm_topk_prob"] is renormalises
    ours = {key: value for key, value in DEFAULTS[family].items() if made.get(key) is not None}
    assert ours == {key: made[key] for key in ours} and ours.keys() >= made.keys() & {"routed_scaling_factor"}


TEXT = full("deepseek_v3", num_hidden_layers=5, first_k_dense_replace=1)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
EQUATION = {"model_type": "new", "model": {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4},
            "router": {"top_k": 2}, "config": {"hidden_size": 64}, "layers": [0, 1]}  # fmt: skip


@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers"])
def test_a_list_of_modules_is_read_under_every_name_and_in_both_sections(key: str) -> None:
    listed = {key: ["model.layers.3.mlp*"]}
    for section in ({**MODELOPT, **listed}, {**MODELOPT, "quantization": {"quant_algo": "NVFP4", **listed}}):
        quant = settings_from_hf({**TEXT, "quantization_config": section}, "here", layer=3)["model"]["quant"]
        assert quant["weights"] == "bf16"
        with pytest.raises(ConfigError, match=r"none in layers 3 .*name one: layer=N"):
            settings_from_hf({**TEXT, "quantization_config": section}, "here")


@pytest.mark.parametrize(
    ("listed", "problem"),
    [(["gate_proj"], ""), (["w2"], "w2 of layer 0 is left"), (["w1", "w3"], "w1 and w3 of layer 0")],
)
def test_projections_have_the_names_of_the_family_in_a_list_of_modules(listed: list[str], problem: str) -> None:
    found = outcome(full("mixtral", quantization_config={**QUANTS["awq"], "modules_to_not_convert": listed}))
    assert problem in str(found) if problem else isinstance(found, MoEConfig)


PROBES: tuple[Any, ...] = (
    True, False, None, "", "3", -2, -1, 0, 1, 7, -0.5, 0.0, 2.5, math.inf, -math.inf, math.nan, [], ["a"], ("a", "b"),
    [1], [1, 2], (0, 2), [1, 2.0], [1, 2, 3], ["a", 1], {}, {"a": 1},
)  # fmt: skip
FITTING: dict[str, list[Any]] = {
    "COUNT": [1, 7], "COUNT_OR_NONE": [0, 1, 7], "FACTOR": [1, 7, 2.5], "LIMIT": [0, 1, 7, 0.0, 2.5],
    "FLAG": [True, False], "WORD": ["3"], "SECTION": [{}, {"a": 1}], "NAMES": [[], ["a"], ("a", "b")], "PAIR": [[1, 2]],
    "COLUMNS": [-1, 1, 7], "ANY": list(PROBES),
}  # fmt: skip


@pytest.mark.parametrize("kind", FITTING)
def test_a_kind_takes_its_values_and_no_others(kind: str) -> None:
    words, fits = getattr(keys, kind)
    assert words and [repr(value) for value in PROBES if fits(value)] == [repr(value) for value in FITTING[kind]]


def test_null_is_none_for_shared_experts_and_no_statement_about_groups() -> None:
    assert read(full("deepseek_v3", n_shared_experts=None)).model.num_shared_experts == 0
    with pytest.raises(ConfigError, match=r"n_group is null, and deepseek_v3 has groups; state 1 for none"):
        read(full("deepseek_v3", n_group=None))
    for key in ("n_group", "topk_group", "routed_scaling_factor"):
        with pytest.raises(ConfigError, match=f"{key} is absent, which every kimi_k2 states"):
            read({k: v for k, v in full("kimi_k2").items() if k != key})
    without = {k: v for k, v in full("glm4_moe").items() if k not in ("n_group", "topk_group")}
    assert read(without) == read(full("glm4_moe"))
    for key in ("n_group", "topk_group"):
        with pytest.raises(ConfigError, match=f"{key} is absent"):
            read({k: v for k, v in full("glm4_moe").items() if k != key})
    grouped_v2 = {k: v for k, v in full("deepseek_v2", n_group=8, topk_group=3).items() if k != "topk_method"}
    with pytest.raises(ConfigError, match="n_group is 8 and topk_method is absent"):
        read(grouped_v2)


def test_one_meaning_under_two_names_must_agree() -> None:
    for more, named in (({"num_experts": 32}, "num_experts is 32, which"), ({"dtype": "float16"}, "dtype is 'float16'"),
                        ({"topk_method": "greedy"}, "topk_method is 'greedy'")):  # fmt: skip
        with pytest.raises(ConfigError, match=named):
            read({**TEXT, **more})
    assert read({**TEXT, "num_experts": 16, "dtype": "torch.bfloat16"}) == read(TEXT)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("equation", [{}, {"layer_equation": {**EQUATION, "model_type": "deepseek_v3"}}])
def test_a_wrapper_states_the_quantisation_of_its_text_model_and_nothing_against_it(
    key: str, equation: dict[str, Any]
) -> None:
    outer = {"model_type": "kimi_k25", "vision_config": {"a": 1}, **equation}
    for place in ({"text_config": TEXT, key: MODELOPT}, {"text_config": {**TEXT, key: MODELOPT}}):
        assert read({**outer, **place}).model.quant.weights == "nvfp4"
    against = ({"n_group": 4}, "n_group is 4 and text_config has 8"), ({"moe_latent_size": 3}, "moe_latent_size is 3")
    for stated, problem in () if equation else against:
        with pytest.raises(ConfigError, match=problem):
            read({**outer, "text_config": TEXT, key: MODELOPT, **stated})


def test_the_second_file_of_modelopt_is_read_and_may_not_contradict(tmp_path: Path) -> None:
    stated = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["model.layers.4*"]}}
    (tmp_path / SECOND).write_text(json.dumps(stated))
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    assert MoEConfig.from_hf(tmp_path, layer=3).model.quant.weights == "nvfp4"
    assert MoEConfig.from_hf(tmp_path, layer=4).model.quant.weights == "bf16"
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, "quantization_config": QUANTS["fp8"]}))
    with pytest.raises(ConfigError, match=r"quant_method 'fp8' .* states quant_algo 'NVFP4'"):
        MoEConfig.from_hf(tmp_path)
    (tmp_path / SECOND).write_text("{}")
    with pytest.raises(ConfigError, match="states no quantization with a quant_algo"):
        MoEConfig.from_hf(tmp_path)


OF_ATTENTION = (
    "num_attention_groups", "use_head_wise_attn_gate", "gated_attention_proj_granularity_type", "kda_safe_gate",
    "layernorm_mlp_beta", "mlp_intermediate_size", "swa_scale_factor", "mla_output_scale", "vision_moe_free_scale",
    "linear_attn_gate_scale", "dense_hidden_dim",
)  # fmt: skip
OF_THE_LAYER = (
    "moe_attention_scale", "expert_kv_scale", "router_embedding_scale", "shared_mlp_hidden_size", "moe_mlp_hidden_size",
    "expert_layernorm_scale", "topk_scaling_method", "gate_clamp", "swiglu_beta_limit",
)  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_a_key_of_another_part_is_no_reason_and_one_of_the_layer_is(family: str) -> None:
    same = read(full(family))
    for key in OF_ATTENTION:
        if "moe" not in key:
            assert outcome(full(family, **{key: 7})) == same, key
    for key in OF_THE_LAYER:
        assert f"{key} is 7" in str(outcome(full(family, **{key: 7}))), key


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"gate_clamp": 3}, "moe-mk derive here measures .*--as FAMILY"),
        ({"hidden_size": "wide"}, "moe-mk derive here measures"),
        ({"n_routed_experts": None}, "moe-mk derive here measures"),
        ({"scoring_func": "softmax"}, "moe-mk derive here measures"),
        ({"quantization_config": {"quant_method": "bitnet"}}, r"register\(\)"),
        ({"quantization_config": {**QUANTS["fp8"], "fmt": "e5m2"}}, r"register\(\)"),
        ({"model_type": "never_seen"}, "moe-mk derive here.*--as FAMILY"),
    ],
)
def test_every_refusal_ends_with_a_way_out(changes: dict[str, Any], way: str) -> None:
    with pytest.raises(ConfigError, match=way):
        read({**TEXT, **changes})


def places_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a value inside of mappings and lists."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places_of(each, (*path, key))


HUGE = (10**400, -(10**400), 2**63, 10**5000)


@pytest.mark.parametrize("name", [*QUANTS, "equation", "settings"])
def test_a_huge_number_at_any_place_is_a_typed_error(name: str, tmp_path: Path) -> None:
    hf: Any = {"model_type": "new", "hidden_size": 64, "layer_equation": EQUATION}
    if name == "settings":
        hf = json.loads(read(TEXT).model_dump_json())
    elif name != "equation":
        hf = {**TEXT, "quantization_config": QUANTS[name], "rope_scaling": {"factor": 40}}
    for number, path in enumerate(places_of(hf)):
        made = json.loads(json.dumps(hf))
        place = made
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = HUGE[number % len(HUGE)]
        with pytest.raises(ConfigError):
            MoEConfig.parse(made if name == "settings" else settings_from_hf(made, "here"), "here")
    for text in ("1" + "0" * 400, "1" + "0" * 5000):
        for stem in ("config.json", "c.yaml", SECOND):
            held = f'{{"quantization": {{"quant_algo": {text}}}}}' if stem == SECOND else f'{{"model": {text}}}'
            (tmp_path / "config.json").write_text(json.dumps(TEXT))
            (tmp_path / stem).write_text(held)
            with pytest.raises(ConfigError):
                MoEConfig.load(tmp_path / stem) if stem == "c.yaml" else MoEConfig.from_hf(tmp_path)
            (tmp_path / stem).unlink()


PRUNED = {"method": "prune", "num_experts": [None, 12, 16, 12, 14]}


def test_experts_pruned_by_layer_have_their_number() -> None:
    hf = {**TEXT, "n_group": 1, "topk_group": 1}
    for quant in ({"quant_method": "compressed-tensors"}, QUANTS["packed"]):
        made = {**hf, "quantization_config": {**quant, "moe_sparsity_config": PRUNED}}
        of_layers = [settings_from_hf(made, "here", n)["model"] for n in (1, 2, 3, 4)]
        assert [each["num_experts"] for each in of_layers] == [12, 16, 12, 14]
        kind = settings_from_hf({**hf, "quantization_config": quant if "config_groups" in quant else None}, "here")
        assert of_layers[0]["quant"] == kind["model"]["quant"]
        for layer, problem in (
            (None, r"has \[12, 14, 16\] in different layers.*layer=N"),
            (0, "no experts in layer 0"),
        ):
            with pytest.raises(ConfigError, match=problem):
                settings_from_hf(made, "here", layer)
    same = {**made["quantization_config"], "moe_sparsity_config": {**PRUNED, "num_experts": [None, 12, 12, 12, 12]}}
    assert settings_from_hf({**hf, "quantization_config": same}, "here")["model"]["num_experts"] == 12
    for change, problem in (({"method": "novice"}, "'novice', constant .*; load such"), ({"more": 1}, "has more"),
                            ({"num_experts": [12]}, "each of 5 layers"), ({"num_experts": [0] * 5}, "each of 5 layers"),
                            ({"num_experts": 12}, "each of 5 layers")):  # fmt: skip
        quant = {**made["quantization_config"], "moe_sparsity_config": {**PRUNED, **change}}
        with pytest.raises(ConfigError, match=problem):
            settings_from_hf({**hf, "quantization_config": quant}, "here", 1)


def test_the_algorithm_of_experts_alone_is_read_and_named_where_it_is_another(tmp_path: Path) -> None:
    alone = {**QUANTS["fp8"], "moe_quant_algo": "NVFP4"}
    quant = settings_from_hf({**TEXT, "quantization_config": alone}, "here")["model"]["quant"]
    assert (quant["weights"], quant["shared"]) == ("nvfp4", "fp8_block")
    for other in ("NVFP4_AWQ", "MXFP8", "W4A8"):
        for more in ({}, {"quant_algo": "MIXED_PRECISION"}):
            with pytest.raises(ConfigError, match=f"moe_quant_algo is '{other}'"):
                read({**TEXT, "quantization_config": {**alone, **more, "moe_quant_algo": other}})
    (tmp_path / SECOND).write_text(json.dumps({"quantization": {"quant_algo": "NVFP4", "moe_quant_algo": "NVFP4"}}))
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, "quantization_config": QUANTS["fp8"]}))
    with pytest.raises(ConfigError, match="moe_quant_algo is 'NVFP4'"):
        MoEConfig.from_hf(tmp_path)


def test_the_method_of_gptqmodel_7_is_that_of_the_section() -> None:
    for name in ("gptq", "awq"):
        assert read({**TEXT, "quantization_config": {**QUANTS[name], "method": name}}) == read(
            {**TEXT, "quantization_config": QUANTS[name]}
        )
        with pytest.raises(ConfigError, match="method is 'qqq'"):
            read({**TEXT, "quantization_config": {**QUANTS[name], "method": "qqq"}})


def test_settings_without_a_model_are_taken_with_that_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TEXT))
    (tmp_path / "serve.yaml").write_text("kernel: {experts: reference, timeout_s: 7}\nparallel: {ep: 2}\n")
    config = MoEConfig.from_hf(tmp_path, settings=tmp_path / "serve.yaml", timeout_s=9)
    assert (config.kernel.experts, config.kernel.timeout_s, config.parallel.ep) == ("reference", 9, 2)
    assert config.with_(settings={"kernel": {"tiles": 2}}).kernel.tiles == 2
    with pytest.raises(ConfigError, match=r"states no model; .*from_hf\(folder, settings=FILE\)"):
        MoEConfig.load(tmp_path / "serve.yaml")
    with pytest.raises(ConfigError, match="unknown setting 'kernel.expert'; did you mean"):
        config.with_(settings={"kernel": {"expert": 2}})
    with pytest.raises(ConfigError, match=r"unknown setting 'expert'; did you mean 'experts'\?"):
        config.with_(expert="torch_cpu")
    with pytest.raises(ConfigError, match="experts is no section"):
        config.with_(settings={"experts": "auto"})
