"""From a transformers `config.json` to our settings: one table of names, families as rows.

Key names as of transformers 5.24 configurations of DeepSeek V2, V3 and V4, Kimi-K2, Qwen3-MoE, GLM-4.5, Mixtral and
gpt-oss. The first layers of DeepSeek-V4 have the sizes of the others and choose experts by token id: `router.hashed`.
A key that is absent or null has the default of the family's class, except scale and groups, which models of one family
have different values of; what no table of `config.keys` lists is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_mk.config import keys
from moe_mk.config.base import expect_numbers, read_mapping
from moe_mk.config.equation import FILE, KEY, LayerEquation, TensorNames, equation_next_to
from moe_mk.config.hf_quant import plain_kind, quant_from_hf
from moe_mk.config.keys import FACTOR, KINDS, Kind, is_empty, one_of, unread_keys
from moe_mk.config.modules import MOST_EXPERTS, Block, layers_with_experts, of_checkpoint, of_equation, of_family
from moe_mk.errors import ConfigError
from moe_mk.quant.kinds import PLAIN_KINDS
from moe_mk.registry import did_you_mean

SHARED_GATED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")
STEP = ("step3p5", "step3p7")
LONGCAT = ("longcat_flash", "longcat_flash_ngram")
TEXT_SECTIONS = ("text_config", "llm_config", "language_config", "thinker_config")
"""What describes the layers of multimodal models, whatever their own model type."""
SECOND = "hf_quant_config.json"
"""The file in which modelopt states formats, next to config.json or in place of its quantization_config."""

_TABLE: Mapping[str, Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("families.json").read_text(encoding="utf-8")
)
"""By model type, what is stated besides `_COMMON`: "keys" that are read; "defaults" of its class that differ from
`_ONE`; "aliases", other types with the same layers; keys that are "renamed" to the one with their meaning in other
families; the "scoring" of the gate, else softmax; whether selection is "biased", where no key use_routing_bias states
it; "topk_methods" that may be stated; "optional" where published models lack scale and groups; "shared_width", the key
of the width of the shared experts where there is one; keys of "other_parts" of the model among those whose names
suggest an effect; "width", the key of that of an expert; whether weights are "renormalised" in any case; what differs
from `modules.Block` in the names of its "modules"."""
_ONE = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 0}
FAMILIES = tuple(_TABLE)
DEFAULTS: Mapping[str, Mapping[str, Any]] = {name: {**_ONE, **each["defaults"]} for name, each in _TABLE.items()}
"""Of each family's configuration class."""

_SILU: Kind = ("'silu'", lambda v: v in ("silu", "swish"))
_COMMON = (
    "model_type hidden_size hidden_act num_experts_per_tok n_routed_experts num_experts num_local_experts "
    "num_hidden_layers first_k_dense_replace quantization_config compression_config torch_dtype dtype scoring_func "
)
_OWN_KINDS: Mapping[str, Mapping[str, Kind]] = {
    **{family: {"hidden_act": _SILU} for family in ("deepseek_v4", *STEP, "glm5_next", "hy_v4")},
    **{family: {"hidden_act": _SILU, "norm_topk_prob": ("false", lambda v: v is False)} for family in LONGCAT},
    "gpt_oss": {"hidden_act": _SILU, "swiglu_limit": FACTOR},
    "minimax_m3": {"hidden_act": one_of("swigluoai"), "swiglu_limit": FACTOR},
    "kimi_linear": {"hidden_act": one_of("silu", "situ")},
    "phimoe": {"num_experts_per_tok": ("2", lambda v: v == 2)},
}  # fmt: skip
READ: Mapping[str, Mapping[str, Kind]] = {
    family: {**{key: KINDS[key] for key in (*_COMMON.split(), *each["keys"])}, **_OWN_KINDS.get(family, {})}
    for family, each in _TABLE.items()
}
"""The keys that are read, by family; those of other families are refused where they have a value."""
_SAME = (
    ("n_routed_experts", "num_experts", "num_local_experts"), ("num_experts_per_tok", "experts_per_token"),
    ("intermediate_size", "moe_intermediate_size"), ("torch_dtype", "dtype"),
    ("quantization_config", "compression_config"),
)  # fmt: skip
"""Keys of one meaning, which may not differ."""


def read_config(file: Path) -> dict[str, Any]:
    """A config.json, with the formats that `hf_quant_config.json` next to it states, and its `layer_equation.json`.

    Raises ConfigError for a file that cannot be read, and where both state formats that differ.
    """
    hf = read_mapping(file)
    if (equation := equation_next_to(file)) is not None:
        hf = {**hf, KEY: equation}
    if not (second := file.with_name(SECOND)).is_file():
        return hf
    found = read_mapping(second).get("quantization")
    if not isinstance(found, Mapping) or not isinstance(found.get("quant_algo"), str):
        what = f"the keys {', '.join(map(str, found))}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise ConfigError(f"{second} states no quantization with a quant_algo, but {what}")
    stated = hf.get("quantization_config") or {}
    if is_empty(stated):
        return {**hf, "quantization_config": {"quant_method": "modelopt", **found}}
    algorithm = stated.get("quant_algo") if isinstance(stated, Mapping) else None
    if algorithm is None and isinstance(stated, Mapping) and stated.get("moe_quant_algo"):
        algorithm = "MIXED_PRECISION"  # of the experts alone
    if algorithm != found["quant_algo"]:
        method = stated.get("quant_method") if isinstance(stated, Mapping) else stated
        of_experts = {key: each.get("moe_quant_algo") for key, each in (("", stated), (SECOND, found))
                      if isinstance(each, Mapping) and each.get("moe_quant_algo")}  # fmt: skip
        more = f" (moe_quant_algo is {' and '.join(map(repr, of_experts.values()))})" if of_experts else ""
        raise ConfigError(
            f"{file}: quantization_config states quant_method {method!r} with quant_algo {algorithm!r}, {SECOND} "
            f"states quant_algo {found['quant_algo']!r}{more}; correct the one that does not describe the tensors"
        )
    return hf


def settings_from_hf(
    hf: Mapping[str, Any], where: str, layer: int | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Translate a parsed `config.json`; raises ConfigError naming what is missing, unknown or of a wrong type.

    layer: the layer to describe, where lists of modules give layers formats of their own. folder: with the tensors,
    whose names are those in lists of modules; without it, or without tensors, names are those of the family.
    """
    expect_numbers(hf, where)
    of = _Reading(where, layer, folder, None if section_of(hf) is None else str(hf.get("model_type")))
    try:
        hf = _of_mlx(hf, where)
        return _by_equation(hf, of) if hf.get(KEY) is not None else _settings(hf, of)
    except ConfigError as problem:
        text = str(problem)
        raise ConfigError(text if "moe-mk derive" in text else f"{text}. {_way_out(text, where)}") from None


def _way_out(problem: str, where: str) -> str:
    """Remedies for a configuration that is refused."""
    if "layer=N" in problem:
        return "Name the layer: MoEConfig.from_hf(path, layer=N)"
    if "quantization_config" in problem or "sparsity" in problem:
        return (
            "Other formats are served in transformers, which reads them itself: "
            "moe_mk.integrations.transformers.register(), from_pretrained(path, experts_implementation='moe_mk')"
        )
    return (
        f"Where the model's class in transformers reads these keys, moe-mk derive {where} measures what it computes; "
        "--as FAMILY declares the layers to be those of a known family"
    )


@dataclass(frozen=True)
class _Reading:
    """The layer and the model that are being read."""

    where: str
    layer: int | None
    folder: Path | None
    outer: str | None
    """The model type of what is around the text model; None: nothing is."""

    def block(self, family: str, names: TensorNames | None = None, *, is_mlx: bool = False) -> Block:
        """The names of modules that lists of the configuration name."""
        found = None if self.folder is None else of_checkpoint(self.folder)
        if found is not None:
            return found
        if names is not None:
            return of_equation(names)
        return of_family(_TABLE.get(family, {}).get("modules", {}), self.outer, is_mlx=is_mlx)


def module_names(hf: Mapping[str, Any], family: str) -> Block:
    """The names of modules of a model, as the checkpoints of its family have them."""
    outer = None if section_of(hf) is None else str(hf.get("model_type"))
    return of_family(_TABLE.get(family, {}).get("modules", {}), outer)


def _settings(hf: Mapping[str, Any], of: _Reading) -> dict[str, Any]:
    where, family = of.where, family_of(text_of(hf))
    if (section := section_of(hf)) is not None and family in FAMILIES:
        return _settings(_of_wrapper(hf, section, where), of)
    if family not in FAMILIES:
        raise ConfigError(
            f"{where}: no MoE layer is known for model_type {family!r}{did_you_mean(family, FAMILIES)}. Derive it from "
            f"the model's class in transformers: moe-mk derive {where}, which writes {FILE} next to it; --as FAMILY "
            "declares them to be one of these; by hand: MoELayer(MoEConfig(...)).load_from_safetensors(path, layer)"
        )
    hf, problems = renamed(_with_own_values(hf, family, of), family)
    harmless = keys.CONFIG_JSON | set(_TABLE[family].get("other_parts", ()))
    problems += keys.wrong_types(hf, READ[family]) + unread_keys(hf, READ[family], harmless)
    problems += _contradictions(hf, family)
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    stated = {**DEFAULTS[family], **{key: value for key, value in hf.items() if value is not None}}
    stated |= {key: 0 for key in ("n_shared_experts", "zero_expert_num") if key in hf and hf[key] is None}  # none
    if family in SHARED_GATED and hf.get("shared_expert_intermediate_size") == 0:
        stated["n_shared_experts"] = 0
    averaged = stated["n_shared_experts"] and stated.get("shared_expert_combination_strategy") == "average"
    stated["part"] = 0.5 if averaged else 1.0  # of the mean of routed and shared experts
    return {"model": _model(stated, family, of), "router": _router(stated, family, where)}


def _with_own_values(hf: Mapping[str, Any], family: str, of: _Reading) -> Mapping[str, Any]:
    """The configuration with the values that `per_layer_config` of transformers has for a layer in their place."""
    stated = hf.get("per_layer_config")
    if is_empty(stated):
        return hf
    if not isinstance(stated, Mapping) or not all(
        str(number).isdigit() and isinstance(own, Mapping) for number, own in stated.items()
    ):
        raise ConfigError(f"{of.where}: per_layer_config is no table of settings by the number of a layer")
    by_layer = {int(number): own for number, own in stated.items()}
    if of.layer is not None:
        return {**hf, **{key: value for key, value in by_layer.get(of.layer, {}).items() if key != "skip"}}
    names = READ[family].keys() | _TABLE[family].get("renamed", {}).keys()
    if other := {number: sorted(own.keys() & names) for number, own in by_layer.items() if own.keys() & names}:
        listed = "; ".join(f"layer {number}: {', '.join(found)}" for number, found in sorted(other.items())[:8])
        raise ConfigError(f"{of.where}: per_layer_config differs ({listed}); name one: from_hf(..., layer=N)")
    return hf


def _of_mlx(hf: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The `quantization` of an MLX checkpoint, which names modules among its keys, as a quantization_config."""
    section, other = hf.get("quantization"), hf.get("quantization_config")
    if not isinstance(section, Mapping) or "bits" not in section:
        return hf
    of_auto_round = isinstance(other, Mapping) and other.get("packing_format") == "mlx"  # the same, without modules
    if not is_empty(other) and other != section and not of_auto_round:
        raise ConfigError(f"{where}: quantization and quantization_config differ; remove the one that is wrong")
    modules = {key: each for key, each in section.items() if isinstance(each, Mapping | bool)}
    stated = {key: each for key, each in section.items() if not isinstance(each, Mapping | bool)}
    return {**hf, "quantization": None, "quantization_config": {"quant_method": "mlx", **stated, "modules": modules}}


def _by_equation(hf: Mapping[str, Any], of: _Reading) -> dict[str, Any]:
    """The settings that the equation of a model states, with the format of its config.json."""
    text, held, where, layer = text_of(hf), hf[KEY], of.where, of.layer
    equation = held if isinstance(held, LayerEquation) else LayerEquation.parse(held, f"{where}: {KEY}")
    settings = equation.settings(text, where, layer)
    formats = {key: hf[key] for key in ("quantization_config", "compression_config") if not is_empty(hf.get(key))}
    family = settings["model"].get("name", "")  # its names are those in lists of modules
    model, text = settings["model"], {**text, **formats}
    experts, has_shared = model.get("num_experts"), bool(model.get("num_shared_experts"))
    experts = _of_layer(text, experts if type(experts) is int else 1, of)
    model |= {"num_experts": experts} if "num_experts" in model else {}
    model["quant"] = _quant(text, family, of, equation.names, experts, has_shared=has_shared)
    return settings


def text_of(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of the language model, with the model's type if it has none: `TEXT_SECTIONS`; of other models all."""
    section = section_of(hf)
    outer = {key: hf[key] for key in ("model_type", "dtype", "torch_dtype") if key in hf}
    return hf if section is None else text_of({**outer, **hf[section]})


def section_of(hf: Mapping[str, Any]) -> str | None:
    """The key of that section; None where there is none."""
    return next((key for key in TEXT_SECTIONS if isinstance(hf.get(key), Mapping)), None)


def as_family(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    """This configuration with a family as the type of the language model."""
    section = section_of(hf)
    inner = {"model_type": family} if section is None else {section: as_family(hf[section], family)}
    return {**hf, **inner}


def family_of(hf: Mapping[str, Any]) -> str:
    """The model type, of a text_config that of the model itself."""
    family = str(hf.get("model_type", "")).removesuffix("_text")
    if family == "deepseek_v2" and hf.get("topk_method") == "noaux_tc":  # DeepSeek-VL2
        return "deepseek_v3"
    return next((name for name, each in _TABLE.items() if family in each.get("aliases", ())), family)


def renamed(hf: Mapping[str, Any], family: str) -> tuple[dict[str, Any], list[str]]:
    """The configuration with the keys that others have, and keys that then have two values."""
    known = _TABLE.get(family, {}).get("renamed", {})
    found = {key: value for key, value in hf.items() if key not in known or value is None}
    stated = {key: hf[key] for key in known if hf.get(key) is not None}
    differ = [
        f"{key} is {value!r} and {known[key]} is {found[known[key]]!r}, which differ"
        for key, value in stated.items()
        if found.get(known[key]) not in (None, value)
    ]
    return found | {known[key]: value for key, value in stated.items()}, differ


def _of_wrapper(hf: Mapping[str, Any], section: str, where: str) -> dict[str, Any]:
    """The text model of a multimodal wrapper, with the quantisation that the wrapper states."""
    text = text_of(hf)
    outer = {key: hf[key] for key in ("quantization_config", "compression_config") if not is_empty(hf.get(key))}
    read = READ.get(family_of(text), {})
    differing = [
        f"{key} is {value!r} and {section} has {text[key]!r}"
        for key, value in hf.items()
        if key in read and key != "model_type" and not is_empty(value) and not is_empty(text.get(key))
        and value != text[key]
    ]  # fmt: skip
    problems = differing + unread_keys({k: v for k, v in hf.items() if k != section}, read)
    if problems:
        raise ConfigError(f"{where}: {'; '.join(problems)}")
    return {**text, **outer}


def _contradictions(hf: Mapping[str, Any], family: str) -> list[str]:
    problems = []
    for same in _SAME:
        found = {key: hf[key] for key in same if key in READ[family] and hf.get(key) is not None}
        values = [str(value).removeprefix("torch.") for value in found.values()]
        if len(set(values)) > 1:
            problems.append(" and ".join(f"{key} is {value!r}" for key, value in found.items()) + ", which differ")
    others = {"n_group": "topk_group", "topk_group": "n_group", "routed_scaling_factor": "", "zero_expert_num": ""}
    for key, other in others.items():
        may_lack = "optional" in _TABLE[family] and key not in hf and hf.get(other) is None
        if key not in READ[family] or hf.get(key) is not None or may_lack:
            continue
        default = DEFAULTS[family][key]
        if key in hf and other and default != 1:
            problems.append(f"{key} is null, and {family} has groups; state 1 for none")
        elif key not in hf and (not other or default != 1 or hf.get(other) is not None):
            problems.append(f"{key} is absent, which every {family} states; its class has {default}")
    if family == "kimi_linear" and hf.get("hidden_act") == "situ" and hf.get("activation_situ_beta") is None:
        problems.append("hidden_act is 'situ' and activation_situ_beta is absent")
    if family == "kimi_linear" and hf.get("use_grouped_topk") is False and hf.get("n_group") not in (None, 1):
        problems.append(f"use_grouped_topk is false and num_expert_group is {hf['n_group']!r}")
    width = hf.get("moe_shared_expert_intermediate_size")
    if family.startswith("bailing") and width not in (None, hf.get("moe_intermediate_size")):
        problems.append(
            f"moe_shared_expert_intermediate_size is {width!r} and moe_intermediate_size "
            f"{hf.get('moe_intermediate_size')!r}; shared experts of the width of routed ones are supported"
        )
    if family == "llama4" and hf.get("num_experts_per_tok") not in (None, 1):
        problems.append(f"num_experts_per_tok is {hf['num_experts_per_tok']!r}, one expert a token is supported")
    method = hf.get("topk_method")
    if method is None and family == "deepseek_v2" and hf.get("n_group") not in (None, 1):
        problems.append(f"n_group is {hf['n_group']!r} and topk_method is absent: state group_limited_greedy or greedy")
    if method is not None and method not in (fitting := _TABLE[family].get("topk_methods", ())):
        problems.append(f"topk_method is {method!r}, {family} has {' or '.join(fitting) or 'none'}")
    return problems


def _model(hf: Mapping[str, Any], family: str, of: _Reading) -> dict[str, Any]:
    where, layer = of.where, of.layer
    activation = keys.ACTIVATIONS.get(hf.get("mlp_hidden_act") or hf.get("hidden_act", "silu"), "silu")
    width = _TABLE[family].get("width", "moe_intermediate_size")
    clamped = {}
    if family in ("gpt_oss", "minimax_m3"):
        activation, clamped = "swiglu_oai", {key: hf[key] for key in ("swiglu_limit", "swiglu_alpha")}
    if family == "kimi_linear" and hf.get("hidden_act") == "situ":
        activation = "situ"
        clamped = {"swiglu_limit": hf.get("activation_situ_linear_beta"), "swiglu_alpha": hf["activation_situ_beta"]}
    if family == "kimi_linear" and hf.get("moe_latent_size") and hf["latent_moe_use_norm"]:
        clamped["latent_norm"] = _first(hf, where, "rms_norm_eps")
    if family in ("deepseek_v4", "glm5_next", "hy_v4") and (limit := _first(hf, where, "swiglu_limit")):  # 0: SwiGLU
        activation, clamped = "swiglu_limit", {"swiglu_limit": limit}
        if family == "hy_v4" and hf["n_shared_experts"]:
            clamped["shared_activation"] = "silu"
    if family in STEP:
        clamped = _step_limits(hf, where, layer)
        activation = clamped.pop("activation")
    num_experts = _of_layer(hf, next((hf[key] for key in _SAME[0] if hf.get(key) is not None), 1), of)
    quant = _quant(hf, family, of, None, num_experts, has_shared=hf["n_shared_experts"] > 0)
    transposed = family in ("qwen3_vl_moe", "llama4") or (family == "gpt_oss" and quant["weights"] in PLAIN_KINDS)
    apart = _TABLE[family].get("shared_width") if hf["n_shared_experts"] else None
    shared = {"shared_intermediate_size": _first(hf, where, apart)} if apart else {}
    return {
        "name": family, **clamped, **shared, "gated": family != "nemotron_h", "expert_bias": family == "gpt_oss",
        "input_norm": hf["rms_norm_eps"] if family == "gemma4" else None,
        "shared_gate": family in SHARED_GATED and hf["n_shared_experts"] > 0,
        "latent_size": hf.get("moe_latent_size") or None, "stacks_transposed": transposed,
        "hidden_size": _first(hf, where, "hidden_size"), "moe_intermediate_size": _first(hf, where, width),
        "num_experts": num_experts if _first(hf, where, *_SAME[0]) else 0,
        "num_zero_experts": hf.get("zero_expert_num", 0), "zero_expert_type": hf.get("zero_expert_type", "identity"),
        "num_shared_experts": hf["n_shared_experts"], "shared_scale": hf["part"], "activation": activation,
        "quant": quant,
    }  # fmt: skip


def _router(hf: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    router: dict[str, Any] = {
        "top_k": _first(hf, where, "num_experts_per_tok", "experts_per_token"),
        "num_expert_group": hf["n_group"],
        "topk_group": hf["topk_group"],
        "renormalize": _TABLE[family].get("renormalised", False)
        or hf.get("expert_selection_fn") == "softmax"
        or (family != "llama4" and _first(hf, where, "norm_topk_prob")),
        "routed_scaling_factor": hf["routed_scaling_factor"] * hf["part"],
    }
    biased = hf.get("use_routing_bias", _TABLE[family].get("biased", False))
    scoring = _TABLE[family].get("scoring", "softmax")
    scoring = hf.get("scoring_func" if family in ("bailing_moe", "sarvam_moe") else "expert_selection_fn") or scoring
    router |= {"scoring_func": scoring, "has_correction_bias": biased, "weight_on_input": family == "llama4"}
    # The softmax over the chosen logits is that over all of them, renormalised.
    router |= {"has_logit_bias": family == "gpt_oss", "has_expert_scale": family == "gemma4"}
    if family == "deepseek_v4" and hf.get("vision_n_layers"):
        router["first_image_token"] = _first(hf, where, "vocab_size")
    if family == "mistral4" and hf["n_group"] > 1:
        router["group_score"] = "two_best"
    if hf.get("topk_method") == "greedy":
        router |= {"num_expert_group": 1, "topk_group": 1}
    stated = hf.get("scoring_func")
    if stated is not None and (family, stated) != ("dots1", "noaux_tc") and stated != router["scoring_func"]:
        raise ConfigError(f"{where}: scoring_func={stated!r} is not what {family} uses ({router['scoring_func']!r})")
    return router


def _step_limits(hf: Mapping[str, Any], where: str, layer: int | None) -> dict[str, Any]:
    """The activations of routed and shared experts: clamped after SiLU in the layers that have a limit other than 0.

    Raises ConfigError where no layer is named and the layers with experts have different limits.
    """
    found = []
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        limits = hf.get(key) or ()
        if limits and layer is not None and layer >= len(limits):
            raise ConfigError(f"{where}: {key} has {len(limits)} entries, none for layer {layer}")
        layers = layers_with_experts(hf) if layer is None else (layer,)
        here = {limits[n] or 0 for n in layers if n < len(limits)} or {0}
        if len(here) > 1:
            raise ConfigError(f"{where}: {key} has {sorted(here)} in different layers; name one: from_hf(..., layer=N)")
        found.append(here.pop())
    routed, shared = (("silu_limit", limit) if limit else ("silu", None) for limit in found)
    own = {} if routed == shared else {"shared_activation": shared[0], "shared_swiglu_limit": shared[1]}
    return {"activation": routed[0], "swiglu_limit": routed[1], **own}


def _quant(
    hf: Mapping[str, Any], family: str, of: _Reading, names: TensorNames | None, num_experts: int, *, has_shared: bool
) -> dict[str, Any]:
    stated = "quantization_config", "compression_config"
    quant = next((hf[name] for name in stated if hf.get(name) not in (None, {})), None)
    if quant is None or (isinstance(quant, Mapping) and is_empty(quant)):
        return {"weights": plain_kind(hf, of.where)}
    # DeepSeek-V4 checkpoints give the dtype of experts next to the quantisation config, later ones inside it.
    expert_dtype = {"expert_dtype": hf["expert_dtype"]} if hf.get("expert_dtype") is not None else {}
    quant = {**expert_dtype, **quant} if isinstance(quant, Mapping) else quant
    is_mlx = isinstance(quant, Mapping) and quant.get("quant_method") == "mlx"
    block = of.block(family, names, is_mlx=is_mlx)
    block = replace(block, num_experts=min(num_experts, MOST_EXPERTS), shared=block.shared if has_shared else ())
    return quant_from_hf(quant, of.where, hf, of.layer, block)


def _of_layer(hf: Mapping[str, Any], num_experts: int, of: _Reading) -> int:
    """The number of experts of the layer, where experts are pruned layer by layer (`moe_sparsity_config`)."""
    stated = hf.get("quantization_config") or hf.get("compression_config")
    pruned = stated.get("moe_sparsity_config") if isinstance(stated, Mapping) else None
    if is_empty(pruned) or not isinstance(pruned, Mapping):
        return num_experts
    where, counts = f"{of.where}: moe_sparsity_config", pruned.get("num_experts")
    if (method := pruned.get("method")) != "prune" or pruned.keys() - {"method", "num_experts"}:
        others = sorted(map(str, pruned.keys() - {"method", "num_experts"}))
        what = f"has {', '.join(others)}, which is not read" if others else f"has method {method!r}"
        novices = ", constant vectors in the place of experts (MoNE), which no backend adds" * (method == "novice")
        remedy = "'prune' is supported: experts that are left out, as REAP does; load such a file, or the whole model"
        raise ConfigError(f"{where} {what}{novices}; {remedy}")
    layers = hf.get("num_hidden_layers")
    fits = isinstance(counts, list) and all(each is None or (type(each) is int and each >= 1) for each in counts)
    if not isinstance(counts, list) or not fits or (type(layers) is int and len(counts) != layers):
        raise ConfigError(f"{where}.num_experts must have one number of experts, or null, for each of {layers} layers")
    if of.layer is not None:
        if of.layer >= len(counts) or counts[of.layer] is None:
            raise ConfigError(f"{where}.num_experts has no experts in layer {of.layer}")
        return int(counts[of.layer])
    found = sorted({each for each in counts if each is not None})
    if len(found) != 1:
        raise ConfigError(f"{where}.num_experts has {found or 'none'} in different layers; name one: layer=N")
    return int(found[0])


def _first(hf: Mapping[str, Any], where: str, *names: str) -> Any:
    for name in names:
        if hf.get(name) is not None:
            return hf[name]
    raise ConfigError(f"{where}: none of {', '.join(names)} is given; is this a MoE model?")
