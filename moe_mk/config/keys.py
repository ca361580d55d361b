"""The keys of each format of configuration: read, without effect on an MoE layer, or refused by name.

A key that no table lists is refused where its name suggests that it changes the layer, and in a quantisation section
wherever it has a value. What is read of a config.json depends on the family: `config.hf` holds that table.
Names as of transformers 5.24, compressed-tensors 0.15, modelopt 0.45, AutoGPTQ, AutoAWQ and llama.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

Kind = tuple[str, Callable[[Any], bool]]
"""What a value must be, in words and as a test."""
COUNT: Kind = ("a whole number of at least 1", lambda v: type(v) is int and v >= 1)
COUNT_OR_NONE: Kind = ("a whole number of at least 0", lambda v: type(v) is int and v >= 0)
FACTOR: Kind = ("a finite number above 0", lambda v: type(v) in (int, float) and 0 < v < math.inf)
LIMIT: Kind = ("a finite number of at least 0", lambda v: type(v) in (int, float) and 0 <= v < math.inf)
FLAG: Kind = ("true or false", lambda v: type(v) is bool)
WORD: Kind = ("a text", lambda v: type(v) is str and v != "")
SECTION: Kind = ("a mapping", lambda v: isinstance(v, Mapping))
SECTIONS: Kind = ("a mapping of mappings", lambda v: SECTION[1](v) and all(map(SECTION[1], v.values())))
NAMES: Kind = ("a list of texts", lambda v: isinstance(v, list | tuple) and all(type(each) is str for each in v))
_TWO = "two whole numbers of at least 1"
PAIR: Kind = (_TWO, lambda v: isinstance(v, list | tuple) and [*map(COUNT[1], v)] == [True, True])
COLUMNS: Kind = ("a whole number of columns, or -1", lambda v: type(v) is int and (v >= 1 or v == -1))
TRUE: Kind = ("true", lambda v: v is True)
LIMITS: Kind = (
    "a list of limits of at least 0, or null",
    lambda v: isinstance(v, list | tuple) and len(v) > 0 and all(each is None or LIMIT[1](each) for each in v),
)
ANY: Kind = ("any value", lambda v: True)
BLOCKS: Kind = ("a text, or a list of texts or of lists of texts", lambda v: isinstance(v, str) or NAMES[1](v) or (
    isinstance(v, list | tuple) and all(map(NAMES[1], v))))  # fmt: skip


def one_of(*words: str) -> Kind:
    """One of some texts."""
    return " or ".join(map(repr, words)), lambda v: isinstance(v, str) and v in words


ACTIVATIONS = {
    "silu": "silu", "gelu": "gelu", **dict.fromkeys(("gelu_pytorch_tanh", "gelu_tanh"), "gelu_tanh"), "relu2": "relu2",
    "swish": "silu",
}  # fmt: skip
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys((
        "hidden_size", "num_experts_per_tok", "n_routed_experts", "num_experts", "num_local_experts", "topk_group",
        "num_hidden_layers", "moe_intermediate_size", "n_group", "intermediate_size", "share_expert_dim",
        "shared_intermediate_size", "dense_intermediate_size", "moe_shared_expert_intermediate_size",
        "interleave_moe_layer_step", "experts_per_token",
    ), COUNT),
    **dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "moe_latent_size", "zero_expert_num",
                     "shared_expert_intermediate_size"), COUNT_OR_NONE),
    **dict.fromkeys(("routed_scaling_factor", "swiglu_alpha", "rms_norm_eps", "activation_situ_beta",
                     "activation_situ_linear_beta"), FACTOR),
    **dict.fromkeys(("norm_topk_prob", "use_routing_bias", "latent_moe_use_norm", "use_grouped_topk"), FLAG),
    **dict.fromkeys(("model_type", "scoring_func", "topk_method", "expert_dtype", "hybrid_override_pattern"), WORD),
    **dict.fromkeys(("quantization_config", "compression_config"), SECTION),
    **dict.fromkeys(("torch_dtype", "dtype", "moe_layers"), ANY), "swiglu_limit": LIMIT,
    **dict.fromkeys(("swiglu_limits", "swiglu_limits_shared"), LIMITS), "norm_expert_weight": TRUE,
    **dict.fromkeys(("layers_block_type", "disable_quant_module"), NAMES), "moe_router_enable_shared_expert": TRUE,
    "hidden_act": (f"one of {', '.join(ACTIVATIONS)}", lambda v: isinstance(v, str) and v in ACTIVATIONS),
    "mlp_hidden_act": one_of("relu2"), "moe_router_dtype": one_of("float32"),
    "zero_expert_type": one_of("identity", "drop"), "enable_moe_block": TRUE,
    "shared_expert_combination_strategy": one_of("average", "sum"), "router_dtype": one_of("float32", "fp32"),
    "expert_selection_fn": one_of("softmax", "sigmoid"), "router_jitter_noise": ("0.01", lambda v: v == 0.01),
}  # fmt: skip

_CHANGES_LAYER = re.compile(
    r"moe|expert|rout|gat(?:e|ing)(?:_|$)|top_?k|_group|swiglu|limit|clamp|clip|latent|shared|zero_|scal(?:e|ing)|factor"
    r"|norm_topk|scor(?:e|ing)|rotat|hadamard|transform|spars|quant|compress(?:ion|ed)|activation|mlp|ffn|feed_forward"
    r"|(?:^|_)act(?:_|$)|bias|hash|identity|smooth|jitter"
    r"|glu|silu|relu|swish|renorm|normaliz|softmax|sinkhorn|intermediate|capacity|temperature_"
)
_NEUTRAL_AT_ONE = re.compile(r"scal(?:e|ing)|factor|_group|freq|multiplier")

_TRUE_IF_ABSENT = re.compile(r"norm(?:alize)?_topk|(?:^|_)renorm")
"""A key that changes the layer where it is false."""

CONFIG_JSON = frozenset({
    "transformers_version", "attention_bias", "qkv_bias", "output_router_logits", "router_aux_loss_coef", "clip_qkv",
    "router_z_loss_coef", "router_jitter_noise", "moe_layer_freq", "mlp_only_layers", "mlp_layer_types", "top_k",
    "intermediate_size", "num_key_value_groups", "use_qkv_bias", "decoder_sparse_step", "partial_rotary_factor",
    "num_hash_layers", "add_swa_attention_sink_bias", "add_full_attention_sink_bias",
})  # fmt: skip
"""Keys of a config.json without effect on an MoE layer, among those whose names suggest one. `top_k` is that of
sampling; layers with a table of experts by token id are recognised by their tensors, not by `num_hash_layers`."""
GGUF = frozenset({
    "feed_forward_length", "expert_shared_feed_forward_length", "residual_scale", "moe_every_n_layers",
    "interleave_moe_layer_step", "nextn_predict_layers", "activation_sparsity_scale",
})  # fmt: skip
"""The same of the keys of an architecture in GGUF files. Widths of shared experts are read from their tensors."""
_OTHERS = re.compile(
    r"(?:attn|attention|rope|index|indexer|vision|audio|mtp|nextn|hc|linear|ssm|mamba|q|k|v|o|qk|kv|head|embedding|logits?"
    r"|rms|sliding|initializer|lm|mla|yarn|projector|mm|image|img|video|multimodal)[_.]"
)
"""Prefixes of other parts of a model."""
_OTHER_WORDS = re.compile(
    r"(?:^|_)(?:attn|attention|swa|kda|mla|gdn|mamba|ssm|conv|rope|rotary|indexer|layernorm|prenorm|postnorm|qk|qkv|kv"
    r"|vision|visual|audio|video|mtp|nextn|embeddings?|sliding|sinks?)(?:_|$)"
    r"|(?:^|_)(?:mlp|ffn|dense)_(?:intermediate|hidden)_(?:size|dim)$"
)
"""Words of attention, of other parts, and the widths of dense layers, anywhere in a key."""
_OF_MOE = re.compile(r"moe|expert|rout|shared?(?:_|$)")
"""What makes a key one of the MoE layer, whatever other words it has."""


def _is_of_another_part(key: str) -> bool:
    return bool(_OTHERS.match(key) or (_OTHER_WORDS.search(key) and not _OF_MOE.search(key)))


_WRITER = frozenset({"producer", "kv_cache_scheme", "kv_cache_quant_algo", "quantization_status"})
_CALIBRATION = frozenset({
    "tokenizer", "dataset", "damp_percent", "damp_auto_increment", "act_group_aware", "true_sequential",
    "static_groups", "module_name_preceding_first_block",
    "meta", "backend", "batch_size", "pad_token_id", "max_input_length", "model_seqlen", "cache_block_outputs",
    "quantizer", "lm_head", "model_file_base_name", "model_name_or_path", "is_marlin_format", "pack_dtype",
    "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "use_exllama", "disable_exllama",
    "use_cuda_fp16", "max_memory", "autoround_version", "iters", "seqlen", "nsamples", "lr", "minmax_lr", "amp",
    "enable_quanted_input", "model_free", "enable_minmax_tuning", "enable_norm_bias_tuning", "low_gpu_mem_usage",
    "gradient_accumulate_steps", "scale_dtype", "supported_types", "act_data_type", "act_group_size", "act_sym",
    "act_dynamic", "vllm_backend",
})  # fmt: skip
"""Of AutoGPTQ, AutoAWQ and AutoRound: how the weights were found, and with which kernels they were to run."""
_LISTS = "modules_to_not_convert ignored_layers ignore exclude_modules "
_TOP = "quant_method " + _LISTS
_FP8 = _TOP + "fmt activation_scheme weight_block_size scale_fmt expert_dtype "
_MODULE = "bits group_size sym "
_KINDS_OF_WORDS: tuple[tuple[str, Kind], ...] = (
    (_LISTS + "exclude targets", NAMES), ("bits num_bits act_bits group_size", COUNT), ("activation_scale_ub", FACTOR),
    ("fmt activation_scheme scale_fmt expert_dtype quant_algo moe_quant_algo format checkpoint_format packing_format "
     "data_type mode method version dtype qscheme scale_format type strategy", WORD),
    ("sym desc_act zero_point symmetric is_dynamic is_scale_quant", FLAG), ("pack_dtype", one_of("int32")),
    ("weight_block_size block_size block_structure", PAIR),
    ("block_name_to_quantize to_quant_block_names modules_in_block_to_quantize", BLOCKS),
    ("quantization config_groups sparsity_config moe_sparsity_config dynamic modules global_quant_config export "
     "weights input_activations", SECTION),
    ("quantized_layers extra_config layer_quant_config layer_type_quant_config", SECTIONS),
    ("quant_method algo_config weight input_tensors ch_axis actorder scale_dtype zp_dtype", ANY),
)  # fmt: skip
_SECTION_KINDS = {key: kind for keys, kind in _KINDS_OF_WORDS for key in keys.split()}


def _section(
    keys: str, harmless: frozenset[str] = frozenset(), **own: Kind
) -> tuple[Mapping[str, Kind], frozenset[str]]:
    """own: kinds that are other ones in this section."""
    return {key: own.get(key, _SECTION_KINDS[key]) for key in keys.split()}, harmless


QUANTIZATION: Mapping[str, tuple[Mapping[str, Kind], frozenset[str]]] = {
    "fp8": _section(_FP8, _WRITER),
    "mixed": _section(_FP8 + "quant_algo moe_quant_algo quantized_layers group_size config_groups", _WRITER),
    "mxfp4": _section(_TOP, _WRITER),
    "fbgemm_fp8": _section(_TOP + "activation_scale_ub", _WRITER),
    "modelopt": _section(_TOP + "quant_algo quantization config_groups group_size quantized_layers", _WRITER),
    "compressed-tensors": _section(
        _TOP + "config_groups format sparsity_config moe_sparsity_config",
        _WRITER | {"global_compression_ratio", "version"},
    ),
    "gptq": _section(
        _TOP + _MODULE + "desc_act checkpoint_format format dynamic pack_dtype method block_name_to_quantize "
        "modules_in_block_to_quantize", _CALIBRATION, group_size=COLUMNS
    ),
    "auto-round": _section(
        _TOP + _MODULE + "packing_format data_type act_bits extra_config block_name_to_quantize to_quant_block_names",
        _CALIBRATION, group_size=COLUMNS,
    ),
    "module": _section(_MODULE + "data_type act_bits", _CALIBRATION, group_size=COLUMNS),
    "mlx": _section("quant_method bits group_size mode modules"),
    "mlx module": _section("bits group_size mode"),
    "quark": _section(
        "quant_method global_quant_config exclude export algo_config layer_quant_config layer_type_quant_config",
        _WRITER | {"kv_cache_quant_config", "kv_cache_post_rope", "quant_mode", "version"},
    ),
    "quark module": _section("weight input_tensors", frozenset({"target_device"})),
    "quark tensor": _section(
        "dtype qscheme ch_axis group_size block_size symmetric is_dynamic scale_format is_scale_quant",
        frozenset({"round_method", "scale_type", "scale_calculation_mode", "observer_cls", "enable_buffer_reuse",
                   "max_input_numel", "zero_point_type"}),
    ),
    "awq": _section(
        _TOP + "bits group_size zero_point version format checkpoint_format desc_act sym method", _CALIBRATION,
        group_size=COLUMNS, sym=ANY,
    ),
    "group": _section("targets weights input_activations format"),
    "weights": _section(
        "num_bits type strategy symmetric dynamic group_size block_structure actorder scale_dtype zp_dtype",
        frozenset({"observer", "observer_kwargs"}), group_size=COLUMNS, dynamic=ANY,
    ),
}  # fmt: skip
"""(read, without effect) by quant_method, and of the groups and arguments inside of config_groups."""


def is_empty(value: object) -> bool:
    """Whether a value states nothing: null, false, 0, an empty text, or a list or mapping of such values."""
    if isinstance(value, Mapping):
        return all(is_empty(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(is_empty(each) for each in value)
    return value is None or value is False or value == "" or (type(value) in (int, float) and value == 0)


def wrong_types(stated: Mapping[str, Any], read: Mapping[str, Kind]) -> list[str]:
    """The keys with a value of another kind; null states nothing."""
    return [
        f"{key} is {_short(stated[key])}, expected {words}"
        for key, (words, fits) in read.items()
        if stated.get(key) is not None and not fits(stated[key])
    ]


def unread_keys(stated: Mapping[str, Any], read: Collection[str], harmless: Collection[str] = CONFIG_JSON) -> list[str]:
    """The keys of a config.json, or of one architecture in a GGUF file, that change the layer and are not read."""
    return [
        f"{key} is {_short(value)}, which is not supported for this family"
        for key, value in stated.items()
        if key not in read and key not in harmless and not _is_of_another_part(key)
        and _CHANGES_LAYER.search(key) and (not is_empty(value) or (value is False and _TRUE_IF_ABSENT.search(key)))
        and not (type(value) in (int, float) and value == 1 and _NEUTRAL_AT_ONE.search(key))
    ]  # fmt: skip


def section_problems(stated: Mapping[str, Any], kind: str) -> list[str]:
    """Wrong types and unknown keys of a quantisation section. kind: of `QUANTIZATION`."""
    read, harmless = QUANTIZATION[kind]
    return wrong_types(stated, read) + [
        f"{key} is {_short(value)}, which is not read"
        for key, value in stated.items()
        if key not in read and key not in harmless and not is_empty(value)
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
