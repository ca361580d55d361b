"""Lists of modules select what the functions of their writers select, as recorded, and live where they are there."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from moe_mk.config.hf_quant import _READERS, _left
from moe_mk.config.modules import Module
from tests.config.writers import FILE, WRITERS, block_of, cases, modules_of, packed, unpacked

RECORDED: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
INT4 = {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}}
PACKED: dict[str, Any] = {"bits": 4, "group_size": 128, "sym": True}


def section_of(writer: str, rules: Mapping[str, Any]) -> dict[str, Any]:
    """The rules as a writer puts them into a config.json."""
    if writer == "compressed-tensors":
        groups: dict[str, dict[str, Any]] = {group: {**INT4, "targets": []} for group in rules["targets"].values()}
        for target, group in rules["targets"].items():
            groups[group]["targets"].append(target)
        return {"config_groups": groups, "ignore": rules["ignore"], "format": "pack-quantized"}
    if writer == "gptqmodel":
        return {**PACKED, "dynamic": {rule: {"bits": int(bits)} for rule, bits in rules["dynamic"].items()}}
    if writer == "autoawq":
        return {**PACKED, "zero_point": True, **rules}
    if writer == "auto-round":
        extra = {key: {"bits": int(bits)} for key, bits in rules["extra_config"].items()}
        return {**PACKED, "block_name_to_quantize": rules["blocks"], "extra_config": extra}
    if writer == "modelopt":
        return {"quant_algo": "NVFP4", "exclude_modules": rules["exclude_modules"]}
    stated = {rule: {"bits": bits} for rule, bits in rules["layer_quant_config"].items()}
    return {"exclude": rules["exclude"], "layer_quant_config": stated, "global_quant_config": {"bits": "4"}}


def ours(writer: str, model: str, rules: Mapping[str, Any]) -> list[str]:
    """The verdict of our reader on each module of a model."""
    method, quant = WRITERS[writer].method, section_of(writer, rules)
    block = block_of(model)
    block = replace(block, num_experts=128, of_model=block.layers)
    read = _READERS[method](quant, block).without(_left(quant, method, block))
    names = {id(each): name for name, each in (quant.get("config_groups") or {}).items()}

    def verdict(module: Module) -> str:
        part = read.part_of(module)
        found = "-" if part is None else names.get(id(part)) or str(part.get("bits", 4))
        return "-" if found == "16" and writer == "auto-round" else found

    return [verdict(module) for module in modules_of(model)]


@pytest.mark.parametrize("writer", RECORDED)
def test_our_rules_are_those_of_the_writer_on_every_module(writer: str) -> None:
    wrong = []
    for case in RECORDED[writer]["cases"]:
        rules, expected = case["rules"], case["verdicts"]
        if writer == "modelopt":
            rules, expected = {"exclude_modules": expected}, rules["plain"]
        found, expected = ours(writer, case["model"], rules), unpacked(expected)
        names = [module.name for module in modules_of(case["model"])]
        differ = [(name, got, want) for name, got, want in zip(names, found, expected, strict=True) if got != want]
        wrong += [f"{case['model']} {rules}: {len(differ)} of {len(names)}: {differ[:3]}"] if differ else []
    assert not wrong, f"{len(wrong)} of {len(RECORDED[writer]['cases'])}:\n" + "\n".join(wrong)[:6000]


@pytest.mark.parametrize("writer", WRITERS)
def test_what_is_recorded_is_what_an_installed_package_selects(writer: str) -> None:
    folder = {"autoawq": "awq", "nvidia-modelopt": "modelopt", "amd-quark": "quark"}
    package = WRITERS[writer].package
    if importlib.util.find_spec(folder.get(package, package.replace("-", "_"))) is None:
        pytest.skip(f"{package} is not installed; version {RECORDED[writer]['version']} is recorded")
    made = [
        (model, rules, WRITERS[writer].verdicts([module.name for module in modules_of(model)], rules))
        for model, rules in cases(writer)
    ]
    recorded = [(case["model"], case["rules"], case["verdicts"]) for case in RECORDED[writer]["cases"]]
    short = [(model, json.loads(json.dumps(rules)), found if writer == "modelopt" else packed(found))
             for model, rules, found in made]  # fmt: skip
    assert short == recorded
