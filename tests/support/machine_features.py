"""Features that a layer's configuration can have, what cannot be combined, and a pairwise cover of the rest.

A configuration is a row: one value of every feature. A value is a set of settings by section and key. `LEFT_OUT` names
every field of the schema that no feature sets, with the reason, so that a new field is a decision.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations, product
from typing import Any

from tests.support.plain_formats import BLOCK, WHOLE
from tests.support.plain_layer import AS_IS, Scheme

Row = dict[str, str]
Values = Mapping[str, Mapping[str, Any]]
EXPERTS, TOP_K, VOCABULARY, IMAGES = 8, 3, 11, 8

CLAMPED = ("swiglu_limit", "swiglu_oai", "silu_limit", "situ")
PACKED = {
    "int4_g32 compressed_tensors": "int4_g32", "int4_g32_zp awq": "int4_g32_zp", "int4_g64_zp gptq": "int4_g64_zp",
    "int4_g32_zp gptq ordered": "int4_g32_zp", "int8_row_zp compressed_tensors": "int8_row_zp",
    "int8_g128 compressed_tensors": "int8_g128", "int4_g32_affine mlx": "int4_g32_affine", "q8_0 gguf": "q8_0",
    "q4_1 gguf": "q4_1", "q5_0 gguf": "q5_0", "int8_g64 compressed_tensors down=int4_g32": "int8_g64",
    "q8_0 gguf down=q4_0": "q8_0",
}  # fmt: skip
"""Weight-only kinds by kind, packing, and whether columns are ordered."""
WEIGHTS = (
    "fp32", "bf16", "fp16", "fp8_block", "fp8_block_128", "fp8_ue8m0", "fp8_channel", "fp8_tensor", "int8",
    "int8_block", "int8_block_128", "mxfp8", "mxfp4", "nvfp4", *PACKED,
)  # fmt: skip
STATIC = {"fp8_channel", "fp8_tensor", "nvfp4"}
INPUT_SCALE, HIDDEN_SCALE = 0.011, 0.004


def _weights(value: str) -> dict[str, Any]:
    kind, down = PACKED.get(value, value), value.partition(" down=")[2]
    made: dict[str, Any] = {"weights": kind.removesuffix("_128").replace("_ue8m0", "_block")}
    if kind in ("fp8_block", "fp8_ue8m0", "int8_block"):
        made["block"] = (32, 32)
    if kind == "fp8_ue8m0":
        made["scale"] = "ue8m0"
    if down:
        made["down"] = down
    return {"model.quant": made}


FEATURES: Mapping[str, Values] = {
    "weights": {value: _weights(value) for value in WEIGHTS},
    "experts": {name: {"kernel.experts": name} for name in ("reference", "torch_cpu", "cpu_native")},
    "dtype": {"fp32": {}, "bf16": {}, "fp16": {}},
    "rounding": {
        "plain": {"kernel.activations": "plain"}, "checkpoint": {"kernel.activations": "checkpoint"},
        "static": {"kernel.activations": "checkpoint"}, "int8": {"kernel.activations": "int8"},
    },
    "widths": {"even": {}, "odd": {}},
    "names": {name: {} for name in ("official", "scaled", "stacked", "fused", "mixtral")},
    "frame": {
        "plain": {}, "input_norm": {"model.input_norm": 1e-5}, "latent": {"model.latent_size": 128},
        "latent_norm": {"model.latent_size": 128, "model.latent_norm": 1e-5},
    },
    "biases": {"none": {}, "experts": {"model.expert_bias": True}},
    "activation": {
        **{name: {"model.activation": name} for name in ("silu", "gelu", "gelu_tanh", "relu2")},
        **{name: {"model.activation": name, "model.swiglu_limit": 0.9, "model.swiglu_alpha": 1.3} for name in CLAMPED},
        "situ without limit": {"model.activation": "situ", "model.swiglu_alpha": 0.8},
    },
    "gated": {"yes": {}, "no": {"model.gated": False}},
    "shared": {
        "none": {}, "one": {"model.num_shared_experts": 1},
        "gate": {"model.num_shared_experts": 1, "model.shared_gate": True},
        "gate and half": {"model.num_shared_experts": 1, "model.shared_gate": True, "model.shared_scale": 0.5},
        "half": {"model.num_shared_experts": 2, "model.shared_scale": 0.5},
        "width": {"model.num_shared_experts": 1, "model.shared_intermediate_size": 0},
        "activation": {"model.num_shared_experts": 1, "model.shared_activation": "silu_limit",
                       "model.shared_swiglu_limit": 0.6},
        "type": {"model.num_shared_experts": 1, "quant.shared": "bf16"},
    },
    "others": {
        "none": {}, "zero": {"model.num_zero_experts": 3, "model.zero_expert_type": "identity"},
        "drop": {"model.num_zero_experts": 3, "model.zero_expert_type": "drop"},
        "fused": {"model.num_fused_shared_experts": 1},
    },
    "choice": {
        "best": {}, "groups": {"router.num_expert_group": 4, "router.topk_group": 2},
        "two_best": {"router.num_expert_group": 4, "router.topk_group": 2, "router.group_score": "two_best"},
        "table": {"router.hash_vocabulary": VOCABULARY},
        "images": {"router.first_image_token": IMAGES},
        "images and table": {"router.first_image_token": IMAGES, "router.hash_vocabulary": IMAGES},
    },
    "scoring": {
        name: {"router.scoring_func": name}
        for name in ("softmax", "sigmoid", "sqrtsoftplus", "logit_sigmoid", "logit_softmax", "masked_softmax")
    },
    "bias": {
        "none": {}, "correction": {"router.has_correction_bias": True}, "logit": {"router.has_logit_bias": True},
        "both": {"router.has_correction_bias": True, "router.has_logit_bias": True},
    },
    "weighing": {
        "sum to one": {}, "as scored": {"router.renormalize": False},
        "scaled": {"router.routed_scaling_factor": 2.5},
        "as scored, scaled": {"router.renormalize": False, "router.routed_scaling_factor": 0.7},
    },
    "factor": {
        "none": {}, "of experts": {"router.has_expert_scale": True},
        "on the input": {"router.weight_on_input": True},
        "of experts, on the input": {"router.weight_on_input": True, "router.has_expert_scale": True},
    },
    "router_dtype": {"float32": {}, "model": {"router.router_dtype": "model"}},
    "grid": {
        "alone": {}, "ep2": {"parallel.ep": 2}, "tp2": {"parallel.tp": 2},
        "ep2tp2": {"parallel.ep": 2, "parallel.tp": 2}, "ep4": {"parallel.ep": 4},
    },
    "placement": {
        "linear": {}, "round_robin": {"parallel.placement": "round_robin"},
        "replicas": {"parallel.placement": (0, 3, 5, 1, 2, 7, 6, 4, 3, 5, 1, 0)},
    },
    "transport": {
        "auto": {}, "all_to_all": {"kernel.prepare_finalize": "all_to_all"},
        "all_gather": {"kernel.prepare_finalize": "all_gather"},
        "replicated": {"kernel.prepare_finalize": "replicated", "parallel.tokens": "replicated"},
        "hierarchical": {"kernel.prepare_finalize": "hierarchical", "parallel.ranks_per_node": 2,
                         "kernel.relay_tokens": 3},
    },
    "lost": {name: {"parallel.on_lost_expert": name} for name in ("raise", "drop", "renormalise")},
    "bits": {
        "any": {}, "deterministic": {"kernel.deterministic": True},
        "batch_invariant": {"kernel.batch_invariant": True}, "invariant": {"kernel.invariant": True},
    },
    "tiles": {"one": {}, "three": {"kernel.tiles": 3}},
    "fused_router": {"yes": {}, "no": {"kernel.fused_router": False}},
    "threads": {"auto": {}, "own": {"kernel.threads": "own"}},
    "instruction_set": {"auto": {}, "scalar": {"kernel.instruction_set": "scalar"}},
    "residency": {
        "none": {}, "slots": {"residency.slots": 5}, "bytes": {"residency.bytes": 1 << 16}, "pool": {},
    },
    "policy": {name: {} for name in ("decayed", "lru", "lfu")},
}  # fmt: skip

LEFT_OUT = {
    "model.name": "text", "model.total_params_b": "for information", "model.active_params_b": "for information",
    "model.stacks_transposed": "a layout of files, tests/weights/test_checkpoint_formats.py",
    "quant.activations": "set with mxfp4 by `settings_of`", "quant.activation_scales": "a claim, which tensors decide",
    "quant.gptq_v2": "a layout of files, tests/weights/test_packed_layouts.py",
    "router.kind": "the others are for training, tests/training/test_router.py",
    "router.noise_std": "training", "router.capacity_factor": "training", "router.num_choices": "training",
    "parallel.dp": "sums of loads over replicas of a layer, tests/rebalance",
    "kernel.wire": "auto follows the rounding; wires are a product of their own, tests/conformance",
    "kernel.fallback": "formats that no backend of a CPU reads", "kernel.cache_dir": "of compiled kernels",
    "kernel.tile_carrier": "threads, tests/runner/test_tiles.py", "kernel.comm_units": "network and GPUs",
    "kernel.trust": "backends from outside of this package, tests/oracle/test_trust.py",
    "kernel.tuned_dir": "times and certificates, tests/oracle/test_trust.py",
    "kernel.graphs": "CUDA graphs", "kernel.allow_emulated": "emulated libraries, tests/testing/emulated",
    "kernel.timeout_s": "waits", "kernel.network": "processes", "kernel.network_link": "processes",
}  # fmt: skip
"""Fields that no feature sets, and why."""
SET_APART = {
    "model.hidden_size", "model.moe_intermediate_size", "model.num_experts", "model.quant", "router.top_k",
    "quant.weights", "quant.block", "quant.scale", "quant.down", "quant.input_scale", "quant.hidden_scale",
    "kernel.max_num_tokens", "kernel.residency", "residency.store", "residency.policy",
}  # fmt: skip
"""Fields that `settings_of` sets from several features."""

_ALL = {name: set(values) for name, values in FEATURES.items()}
_WEIGHT_ONLY = set(PACKED)
_SCALED = {value for value in WEIGHTS if value not in ("fp32", "bf16", "fp16") and value not in _WEIGHT_ONLY}
_SPREAD = {"ep2", "ep4", "ep2tp2"}
_TABLES = {"table", "images and table"}
_INVARIANT = {"batch_invariant", "invariant"}
CONFLICTS: Sequence[tuple[str, set[str], str, set[str]]] = (
    # What a format can be rounded to, and who reads it.
    ("weights", {"fp32", "bf16", "fp16", *_WEIGHT_ONLY}, "rounding", {"checkpoint"}),
    ("weights", _ALL["weights"] - STATIC, "rounding", {"static"}),
    ("weights", _ALL["weights"] - _WEIGHT_ONLY - {"int8", "int8_block", "int8_block_128"}, "rounding", {"int8"}),
    ("experts", {"torch_cpu"}, "rounding", {"checkpoint", "static", "int8"}),
    ("experts", {"cpu_native"}, "dtype", {"fp32", "fp16"}),
    ("experts", {"cpu_native"}, "weights", {"fp32", "fp16", "fp8_block", "fp8_ue8m0", "int8_block"}),
    ("experts", {"cpu_native"}, "rounding", {"static"}),
    ("experts", {"reference", "torch_cpu"}, "bits", _INVARIANT),
    ("experts", {"reference", "torch_cpu"}, "residency", {"slots", "bytes", "pool"}),
    # Names of checkpoints, and what they have none for.
    ("names", {"stacked", "fused", "mixtral"}, "weights", {"nvfp4", *_WEIGHT_ONLY}),
    ("names", {"official"}, "weights", {"nvfp4"}),
    ("names", {"fused"}, "weights", {"fp8_tensor", "fp8_block_128", "int8_block_128"}),
    ("names", {"scaled"}, "weights", _WEIGHT_ONLY),
    ("names", {"fused", "mixtral"}, "biases", {"experts"}),
    ("names", {"stacked", "fused", "mixtral"}, "bias", {"logit", "both"}),
    ("names", {"fused"}, "gated", {"no"}),
    ("weights", _WEIGHT_ONLY, "shared", {"type"}),
    # Sizes.
    ("widths", {"odd"}, "weights", {value for value in WEIGHTS if "mlx" in value or "gguf" in value}),
    # The equation.
    ("activation", {*CLAMPED, "situ without limit"}, "gated", {"no"}),
    ("shared", {"activation"}, "gated", {"no"}),
    ("frame", {"input_norm"}, "shared", _ALL["shared"] - {"none"}),
    ("frame", _ALL["frame"] - {"plain"}, "others", {"zero", "drop"}),
    ("frame", {"latent", "latent_norm"}, "bits", _INVARIANT),
    ("choice", _ALL["choice"] - {"best", "images"}, "others", _ALL["others"] - {"none"}),
    ("choice", _TABLES, "bias", {"correction", "both"}),
    ("factor", _ALL["factor"] - {"none"}, "others", {"zero", "drop"}),
    ("factor", {"on the input", "of experts, on the input"}, "others", {"fused"}),
    ("choice", {*_TABLES, "images"}, "weights", {value for value in WEIGHTS if "gguf" in value}),
    # The grid.
    ("transport", {"replicated"}, "bits", {"invariant"}),
    ("grid", {"alone", "tp2"}, "transport", _ALL["transport"] - {"auto"}),
    ("grid", {"alone", "tp2"}, "placement", {"round_robin", "replicas"}),
    ("transport", {"hierarchical"}, "grid", {"ep2"}),
    ("bits", {"invariant"}, "tiles", {"three"}),
    ("residency", {"none"}, "policy", {"lru", "lfu"}),
)
"""Two features, and values of each that the library refuses together, or that have no meaning together."""


CONFLICTS_OF_THREE: Sequence[Mapping[str, set[str]]] = (
    {"widths": {"odd"}, "grid": {"tp2", "ep2tp2"}, "weights": _ALL["weights"] - {"fp32", "bf16", "fp16"}},
    {"experts": {"cpu_native"}, "rounding": {"int8"}, "weights": {"q5_0 gguf"}},
    {"widths": {"odd"}, "names": {"fused"}, "weights": set(BLOCK)},
    {"scoring": {"masked_softmax"}, "router_dtype": {"model"}, "dtype": {"bf16", "fp16"}},  # a step at every 2 percent
    {"experts": {"cpu_native"}, "rounding": {"checkpoint"},
     "weights": _ALL["weights"] - {"fp8_block_128", "int8", "int8_block_128"}},
)  # fmt: skip


def fits(row: Row) -> bool:
    """Whether no two values of a row conflict, and no three."""
    return all(_adds(row, feature, value) for feature, value in row.items())


def _adds(row: Row, feature: str, value: str) -> bool:
    """Whether a value conflicts with none of a row."""
    if not _clashes().get((feature, value), frozenset()).isdisjoint(row.items()):
        return False
    return not any(
        value in each.get(feature, ())
        and all(row.get(name) in values for name, values in each.items() if name != feature)
        for each in CONFLICTS_OF_THREE
    )


@cache
def _clashes() -> Mapping[tuple[str, str], set[tuple[str, str]]]:
    """By value of a feature: the values that conflict with it."""
    found: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for a, of_a, b, of_b in CONFLICTS:
        for one, other in product(((a, v) for v in of_a), [(b, v) for v in of_b]):
            found.setdefault(one, set()).add(other)
            found.setdefault(other, set()).add(one)
    return found


def settings_of(row: Row) -> dict[str, Any]:
    """The sections of a configuration. Residency has no store yet."""
    hidden, inner, latent = (128, 64, 128) if row["widths"] == "even" else (72, 40, 88)
    made: dict[str, dict[str, Any]] = {
        "model": {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": EXPERTS, "quant": {}},
        "router": {"top_k": 1 if "input" in row["factor"] else TOP_K}, "parallel": {}, "kernel": {},
    }  # fmt: skip
    made["kernel"]["max_num_tokens"] = 64
    for feature, value in row.items():
        for key, setting in FEATURES[feature][value].items():
            section, _, name = key.partition(".")
            if section == "residency":
                made["kernel"].setdefault("residency", {})[name] = setting
            elif section == "quant":
                made["model"]["quant"][name] = setting
            elif name == "quant":
                made["model"]["quant"] |= setting
            else:
                made[section][name] = setting
    if "latent_size" in made["model"]:
        # Equal to the width of the layer, or not.
        made["model"]["latent_size"] = latent if row["frame"] == "latent" or row["widths"] == "odd" else 64
    quant = made["model"]["quant"]
    if "tp2" in row["grid"]:  # slices begin at the edges of blocks
        inner = max(inner, 2 * next((edge for edge in (128, 64) if str(edge) in row["weights"]), inner // 2))
        made["model"]["moe_intermediate_size"] = inner
    if row["shared"] == "width":
        made["model"]["shared_intermediate_size"] = 2 * inner
    if row["weights"] == "mxfp4" and row["rounding"] == "checkpoint":
        quant["activations"] = "mxfp8"
    if row["rounding"] == "static":
        nvfp4 = row["weights"] == "nvfp4"
        quant |= {"input_scale": INPUT_SCALE * (0.2 if nvfp4 else 1.0)} | (
            {} if nvfp4 else {"hidden_scale": HIDDEN_SCALE}
        )
    if row["residency"] != "none":
        made["kernel"].setdefault("residency", {})["policy"] = row["policy"]
    return made


def rounding_of(row: Row, settings: Mapping[str, Any], *, shared: bool = False) -> tuple[Scheme, Scheme]:
    """What tokens and hidden rows are rounded to, from the meaning of the row."""
    weights, rounding = row["weights"], row["rounding"]
    if rounding == "plain" or (shared and row["shared"] == "type"):
        return AS_IS, AS_IS
    if rounding == "int8":
        if weights in ("int8", "int8_block", "int8_block_128"):
            return ("int8", WHOLE), ("int8", WHOLE)
        group = _group_of(weights.partition(" ")[0])
        down = settings["model"]["quant"].get("down")
        return ("int8", group), ("int8", _group_of(down) if down else group)
    quant = settings["model"]["quant"]
    if weights == "nvfp4":
        return (("nvfp4", quant.get("input_scale", 1.0)),) * 2
    if rounding == "static":
        return ("fp8_static", quant["input_scale"]), ("fp8_static", quant["hidden_scale"])
    groups: dict[str, Scheme] = {
        "fp8_block": ("fp8", 32), "fp8_block_128": ("fp8", 128), "fp8_ue8m0": ("fp8_ue8m0", 32),
        "fp8_channel": ("fp8", WHOLE), "fp8_tensor": ("fp8", WHOLE), "int8": ("int8", WHOLE),
        "int8_block": ("int8", WHOLE), "int8_block_128": ("int8", WHOLE), "mxfp8": ("mxfp8", 32),
        "mxfp4": ("mxfp8", 32),
    }  # fmt: skip
    return (groups[weights],) * 2


def _group_of(kind: str) -> int:
    if not kind.startswith("int"):
        return 32
    return 128 if "_row" in kind else min(int(kind.split("_g")[1].split("_")[0]), 128)


Value = tuple[str, str]
"""A feature and one of its values."""
Wanted = dict[Value, set[Value]]
"""By value: those with which it should still occur in a row."""


@cache
def pairwise(seed: int = 0) -> tuple[Row, ...]:
    """Rows in which every two values that do not conflict occur together."""
    draw, rows = random.Random(seed), list[Row]()
    singles = sorted((feature, value) for feature, values in FEATURES.items() for value in values)
    left = [(a, b) for a, b in combinations(singles, 2) if a[0] != b[0] and fits(dict((a, b)))]
    draw.shuffle(left)
    wanted: Wanted = {one: set() for one in singles}
    for a, b in left:
        wanted[a].add(b)
        wanted[b].add(a)
    for a, b in left:
        if b in wanted[a] and (row := completed(dict((a, b)), draw, wanted)) is not None:
            rows.append(row)
            for one in row.items():
                wanted[one].difference_update(row.items())
    return tuple(rows)


def completed(row: Row, draw: random.Random, wanted: Wanted) -> Row | None:
    """A whole row with these values, each other one the best of what fits; None where there is none."""
    for _ in range(40):
        if (whole := _completed(dict(row), draw, wanted)) is not None:
            return whole
    return None


def _completed(row: Row, draw: random.Random, wanted: Wanted) -> Row | None:
    order = [feature for feature in FEATURES if feature not in row]
    draw.shuffle(order)
    for feature in order:
        able = [value for value in FEATURES[feature] if _adds(row, feature, value)]
        if not able:
            return None
        draw.shuffle(able)
        if wanted:
            have = set(row.items())
            able.sort(key=lambda value: -len(wanted[feature, value] & have))
        row[feature] = able[0]
    return row


DIRECT: Row = {
    "experts": "cpu_native", "grid": "alone", "tiles": "one", "residency": "none", "rounding": "plain", "bits": "any",
}  # fmt: skip
TORCH: Row = DIRECT | {"experts": "torch_cpu"}
PAGED_ALONE: Row = {"experts": "cpu_native", "grid": "alone", "tiles": "one", "residency": "slots"}
BASES = (DIRECT, TORCH, PAGED_ALONE)
"""Rows with an execution of their own: one native call, or one of torch, for a layer; experts larger than memory."""


@cache
def around(number: int) -> tuple[Row, ...]:
    """Rows in which every value that fits occurs with a base."""
    draw, base, rows = random.Random(number), BASES[number], list[Row]()
    singles = [(feature, value) for feature, values in FEATURES.items() for value in values if feature not in base]
    wanted: Wanted = {(feature, value): set() for feature, values in FEATURES.items() for value in values}
    for one in singles:
        wanted[one] = set(base.items())
    for feature, value in singles:
        if not wanted[feature, value] or not fits(base | {feature: value}):
            continue
        if (row := completed(base | {feature: value}, draw, wanted)) is not None:
            rows.append(row)
            for one in row.items():
                wanted[one] = set()
    return tuple(rows)


def row_of(values: Row) -> Row:
    """A row with the first value of every feature that is not given."""
    return {feature: values.get(feature, next(iter(of))) for feature, of in FEATURES.items()}
