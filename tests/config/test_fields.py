"""Every field of a configuration, from its schema: set alone it is that field and no other, and every copy keeps it.

Every key of a config.json changes the field of its meaning and no other.
"""

import ast
import copy
import json
import math
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import moe_mk
from moe_mk.config import MoEConfig
from moe_mk.config.hf import READ
from moe_mk.config.moe import ResidencyConfig
from moe_mk.errors import ConfigError
from moe_mk.layer.settings import for_ranks, with_sizes
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.quant.kinds import FORMATS
from tests.config.test_keys import BASES, full, outcome, read

BASE = {
    "model": {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 16, "num_shared_experts": 2},
    "router": {"top_k": 4}, "kernel": {}, "parallel": {},
}  # fmt: skip
WITH: tuple[dict[str, Any], ...] = (
    {}, {"num_shared_experts": 0}, {"num_shared_experts": 0, "latent_size": 64},
    {"activation": "swiglu_oai", "swiglu_limit": 7.0},
    {"num_expert_group": 4, "topk_group": 2}, {"top_k": 1}, {"kind": "expert_capacity"}, {"latent_size": 64},
    {"shared_activation": "swiglu_oai", "shared_swiglu_limit": 7.0}, {"scoring_func": "sqrtsoftplus"},
    {"quant": {"weights": "fp8_tensor", "input_scale": 0.5}}, {"quant": {"weights": "int4_g128_zp"}},
    {"quant": {"weights": "fp8_block"}}, {"quant": {"weights": "mxfp4"}}, {"num_zero_experts": 8},
)  # fmt: skip
"""Bases in which every field may have another value."""


def fields(cls: type[BaseModel] = MoEConfig, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all fields that hold plain values."""
    for name, field in cls.model_fields.items():
        inner = next((each for each in (field.annotation, *get_args(field.annotation)) if is_section(each)), None)
        if inner is not None:
            yield from fields(inner, (*path, name))
        else:
            yield (*path, name)


def is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def candidates(annotation: Any, now: Any) -> Iterator[Any]:
    """Values of a type, other than the present one."""
    if get_origin(annotation) in (Union, UnionType):
        for each in get_args(annotation):
            yield from candidates(each, now)
    elif get_origin(annotation) is Literal:
        yield from (each for each in get_args(annotation) if each != now)
    elif annotation is bool:
        yield not now
    elif annotation is int:
        yield from (each for each in (2, 3, 4, 8, 1, 64, 32, 512, 131) if each != now)
    elif annotation is float:
        yield from (each for each in (0.25, 2.5, 8.0) if each != now)
    elif annotation is str:
        yield from (each for each in ("reference", "lru", "10.0.0.0/24", *FORMATS.built_in) if each != now)
    elif annotation is not NoneType and "Path" in str(annotation):
        yield Path("/there")
    elif get_origin(annotation) is tuple:
        yield from ((64, 64), tuple(reversed(range(16))), ("mine",))


def at(data: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        data = None if data is None else data.get(step)
    return data


def leaves(data: Any, path: str = "") -> dict[str, Any]:
    """All values by their paths."""
    if not isinstance(data, dict):
        return {path: data}
    return {name: each for key, inner in data.items() for name, each in leaves(inner, f"{path}.{key}").items()}


@cache
def infos() -> dict[tuple[str, ...], FieldInfo]:
    found = {}
    for path in fields():
        cls: Any = MoEConfig
        for step in path[:-1]:
            annotation = cls.model_fields[step].annotation
            cls = next(each for each in (annotation, *get_args(annotation)) if is_section(each))
        found[path] = cls.model_fields[path[-1]]
    return found


def changed(path: tuple[str, ...]) -> tuple[MoEConfig, MoEConfig, Any]:
    """(a configuration, the same with another value of one field alone, that value)."""
    for more in WITH:
        try:
            base = MoEConfig.parse(BASE, "base").with_(**more)
            if "residency" in path:
                base = base.with_(residency={"policy": "lfu"} | ({"slots": 3} if path[-1] == "slots" else {}))
        except ConfigError:
            continue
        for value in candidates(infos()[path].annotation, at(base.model_dump(), path)):
            data = base.model_dump()
            at(data, path[:-1])[path[-1]] = value
            try:
                made = MoEConfig.parse(data, "changed")
            except ConfigError:
                continue
            if at(made.model_dump(), path) != at(base.model_dump(), path):
                return base, made, value
    raise AssertionError(f"{'.'.join(path)} has no other value in any base")


@pytest.mark.parametrize("path", fields(), ids=".".join)
def test_a_field_is_itself_alone_and_every_copy_keeps_it(path: tuple[str, ...]) -> None:
    base, made, value = changed(path)
    name, before, after = "." + ".".join(path), leaves(base.model_dump()), leaves(made.model_dump())
    assert {key for key in after if after[key] != before[key]} == {name} and after[name] == value
    assert made != base and hash(made) == hash(copy.deepcopy(made))
    text = made.model_dump_json()
    assert MoEConfig.parse(json.loads(text), "json") == made == MoEConfig.parse(yaml.safe_load(text), "yaml")
    assert pickle.loads(pickle.dumps(made)) == made == copy.deepcopy(made) == made.model_copy()
    section = path[0]
    assert base.model_copy(update={section: getattr(made, section)}) == made
    own = getattr(made, section).model_dump()[path[1]]
    bare, dotted = base.with_(**{path[1]: own}), base.with_(**{f"{section}.{path[1]}": own})
    assert bare == dotted == made == base.with_(settings={section: {path[1]: own}})
    if path[-1] != "timeout_s":
        assert leaves(made.with_(timeout_s=7.5).model_dump()) == {**after, ".kernel.timeout_s": 7.5}
    if section == "model":
        shared = leaves(made.model.of_shared().model_dump())
        others = {key: each for key, each in leaves(made.model.model_dump()).items() if "activation" not in key and
                  "swiglu_limit" not in key}  # fmt: skip
        assert {key: shared[key] for key in others} == others


SIZES = "hidden_size moe_intermediate_size num_experts num_shared_experts hash_vocabulary max_num_tokens".split()
"""What is refused beyond every machine, without counting up to it."""
BEYOND_F32 = (1e39, -1e39, 3.41e38, 1e-39, 1e-46, 10**39, 10**400, "1e39")


@pytest.mark.parametrize("path", fields(), ids=".".join)
def test_a_value_beyond_what_a_field_states_is_refused_by_its_key(path: tuple[str, ...]) -> None:
    assert path[-1] not in SIZES or any(hasattr(each, "le") for each in infos()[path].metadata)
    steps = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
    beyond = [getattr(each, name) + by for each in infos()[path].metadata for name, by in steps.items()
              if hasattr(each, name)]  # fmt: skip
    for value in (*beyond, *BEYOND_F32, math.inf, math.nan, "no such value"):
        data = changed(path)[0].model_dump()
        at(data, path[:-1])[path[-1]] = value
        if infos()[path].annotation is not str or not isinstance(value, str):
            with pytest.raises(ConfigError, match=re.escape(f"test: {'.'.join(path)}")):
                MoEConfig.parse(data, "test")


@pytest.mark.parametrize("path", [path for path in fields() if path[0] != "parallel"], ids=".".join)
def test_a_change_of_ranks_keeps_every_other_field(path: tuple[str, ...]) -> None:
    made = changed(path)[1]
    experts = made.model.num_experts
    if experts % 2 or (made.model.num_fused_shared_experts and experts < 4):
        return
    expected = made.with_(ep=2)
    assert for_ranks(made, ExpertMap.linear(experts, 2)) == expected == with_sizes(made, {"ep": 2})


@pytest.mark.slow
def test_every_field_is_read_somewhere_in_the_package() -> None:
    """As an attribute, outside of the file that defines it and of what only shows a configuration."""
    root = Path(moe_mk.__file__).parent
    own = {"moe.py", "quant.py", "hf.py", "hf_quant.py", "hf_rules.py"}
    files = [file for file in root.rglob("*.py") if not (file.parent.name == "config" and file.name in own)]
    attributes = {
        node.attr for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)
    }
    by_config = {  # through a property or a check of the configuration itself
        "shared_intermediate_size", "shared_swiglu_limit", "block", "scale", "hidden_scale", "activation_scales",
        "shared", "down", "weights", "activations", "total_params_b", "active_params_b", "dp", "fallback",
    }  # fmt: skip
    assert {path[-1] for path in fields()} - attributes <= by_config
    assert set(ResidencyConfig.model_fields) <= attributes


MEANINGS = {
    ".model.num_experts": "n_routed_experts num_experts num_local_experts", ".model.hidden_size": "hidden_size",
    ".model.moe_intermediate_size": "moe_intermediate_size intermediate_size", ".router.top_k": "num_experts_per_tok",
    ".model.activation": "hidden_act", ".model.latent_size": "moe_latent_size",
    ".model.shared_intermediate_size": "moe_shared_expert_intermediate_size shared_expert_intermediate_size "
                                       "shared_intermediate_size",
    ".router.num_expert_group": "n_group", ".router.topk_group": "topk_group", ".model.swiglu_limit": "swiglu_limit",
    ".model.num_shared_experts": "n_shared_experts", ".router.renormalize": "norm_topk_prob",
    ".router.routed_scaling_factor": "routed_scaling_factor", ".model.swiglu_alpha": "swiglu_alpha",
    ".router.has_correction_bias": "use_routing_bias", ".model.num_zero_experts": "zero_expert_num",
    ".model.zero_expert_type": "zero_expert_type",
    ".model.quant.weights": "quantization_config compression_config torch_dtype",
}  # fmt: skip
FIELD_OF = {key: {name} for name, keys in MEANINGS.items() for key in keys.split()}
"""What a key of a config.json states."""
FOLLOWS = {".model.stacks_transposed": "quantization_config compression_config", ".model.shared_intermediate_size":
           "n_shared_experts"}  # fmt: skip
"""What changes with it in some families."""
VALUES: tuple[Any, ...] = (
    1, 2, 3, 4, 8, 24, 48, 96, 2.5, True, False, "gelu", "float16", "drop", "identity", {"quant_method": "mxfp4"}, None,
)  # fmt: skip
NEVER = set(
    "dtype experts_per_token num_hidden_layers first_k_dense_replace scoring_func topk_method model_type expert_dtype "
    "hybrid_override_pattern layers_block_type mlp_hidden_act moe_router_dtype router_dtype dense_intermediate_size "
    "disable_quant_module".split()
)
"""Second names of a key that the bases state, layers, and keys with one value that is supported."""


@pytest.mark.parametrize("family", BASES)
def test_a_key_of_a_config_json_changes_the_field_of_its_meaning_alone(family: str) -> None:
    before, wrong = leaves(read(full(family)).model_dump()), []
    for key in READ[family]:
        changes, stated = set[str](), set[str]()
        for value in VALUES:
            found = outcome(full(family, **{key: value}))
            if isinstance(found, str):
                continue
            after = leaves(found.model_dump())
            changes |= {name for name in after if after[name] != before[name]}
            stated |= {key for name in FIELD_OF.get(key, set()) if after[name] == value and before[name] != value}
        follow = {name for name, keys in FOLLOWS.items() if key in keys.split()}
        if not changes <= FIELD_OF.get(key, set()) | follow:
            wrong.append(f"{key} changes {sorted(changes)}")
        one_group = key in ("n_group", "topk_group") and BASES[family].get("n_group") == 1  # neither changes alone
        if (
            key in BASES[family]
            and key not in NEVER
            and not one_group
            and type(BASES[family][key]) in (int, float)
            and not stated
        ):
            wrong.append(f"{key} is stated and no value of it arrives")
    assert not wrong, "\n".join(wrong)
