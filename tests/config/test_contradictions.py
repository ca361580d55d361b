"""A configuration that contradicts its tensors, key by key: an error, a warning, or the values of the tensors."""

import json
import re
import warnings
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_mk.errors import CheckpointWarning, MoEMKError
from moe_mk.lab.checkpoints.like import write_like
from moe_mk.lab.cli.checkpoints import config_problems
from moe_mk.lab.verify.dense import decoded
from moe_mk.layer.settings import config_of, stated
from moe_mk.weights import inspect_checkpoint
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.input_scales import ENDS
from tests.config.test_keys import FLOATS, ONE, QUANTS, TOKENS, full, grouped, sections, with_key
from tests.config.test_published import by_definition, loaded
from tests.config.test_published import written as published
from tests.config.test_quant_values import KEYS, VALUES
from tests.support.tiers import slow
from tests.weights.test_inspect import rewritten

ALONE = {**ONE, "num_experts_per_tok": 1, "n_routed_experts": 2, "num_hidden_layers": 1}
READ: list[dict[str, Any]] = [
    section for section, expected in json.loads(Path(__file__).with_name("quant_sections.json").read_text())
    # Sections that name one expert of several, and those that pack the shared experts alone, describe other layers.
    if not isinstance(expected, str) and ".experts.0." not in json.dumps(section)
    and not (expected["weights"] == "bf16" and expected.get("shared", "bf16") != "bf16")
]  # fmt: skip
SECTIONS = [*(QUANTS[name] for name in ("fp8", "modelopt", "w8a8", "packed", "gptq", "awq")), *READ]
NAMES = (
    "deepseek-ai--DeepSeek-V3", "nvidia--MiniMax-M2.7-NVFP4", "moonshotai--Kimi-K2.5", "deepseek-ai--DeepSeek-V4-Flash",
    "nvidia--Qwen3.5-122B-A10B-NVFP4", "nvidia--DeepSeek-V4-Flash-NVFP4", "nvidia--GLM-5-NVFP4", "openai--gpt-oss-20b",
    "moonshotai--Kimi-K3",
)  # fmt: skip
STATED = "quantization_config", "compression_config", "quantization"
LISTED = [
    ["*.down_proj"], ["re:.*down_proj"], ["down_proj"], ["w2"], ["*.experts.0.up_proj"], ["re:.*experts.*gate_proj"],
    ["*.w1", "*.w3"], ["*shared_expert*"], ["shared_experts"], ["re:.*experts.*"], ["*experts*"], ["experts"], ["gate"],
]  # fmt: skip
"""Modules that are not quantised, as the writers of lists name all experts, shared ones, or some projections."""
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": ALONE, "glm4_moe": ALONE, "qwen3_moe": {"num_experts": 2}, "qwen2_moe": {"num_experts": 2},
    "mixtral": {"num_local_experts": 2}, "minimax_m2": {"num_local_experts": 2},
}  # fmt: skip


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of nested mappings."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        yield (*path, key)
        yield from places(inner, (*path, key))


def at(value: Any, path: Iterable[str]) -> Any:
    for step in path:
        value = value[step]
    return value


def contradicted(files: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The files of a configuration with one key of a section on quantisation dropped, renamed, added or set to another
    value, everywhere, with lists of modules, or with another section.
    """
    for path in [path for path in places(files) if path[-1] in STATED]:
        quant = at(files, path)
        for *place, key in places(quant):
            made = json.loads(json.dumps(files))
            value = at(made, (*path, *place)).pop(key)
            yield made
            yield with_key(made, (*path, *place), f"{key}s", value)
        for key in ("ignore", "modules_to_not_convert", "exclude_modules", "exclude"):
            yield from (with_key(files, path, key, names) for names in LISTED)
        paths = {*places(quant), *((*place, key) for place in sections(quant) for key in KEYS)}
        for *place, key in sorted(paths):
            yield from (with_key(files, (*path, *place), key, value) for value in VALUES)
        yield from (with_key(files, path[:-1], path[-1], other) for other in SECTIONS)


def written(folder: Path, quant: dict[str, Any], family: str = "deepseek_v3") -> Path:
    """A small layer in the format of a section."""
    (folder / "like").mkdir()
    hf = {**full(family, **{**FAMILIES[family], "num_experts_per_tok": 1, "num_hidden_layers": 1})}
    hf |= {"quantization_config": quant}
    (folder / "like" / "config.json").write_text(json.dumps(hf))
    write_like(folder / "small", folder / "like" / "config.json")
    return folder / "small"


def found(folder: Path, layer: int) -> tuple[list[torch.Tensor], object]:
    """The values of an expert and of the shared ones, and what activations are rounded to."""
    weights, config = loaded(folder, layer)
    slots = [slot for slot in (weights.experts.slots[0], weights.shared) if slot is not None]
    return [decoded(q) for slot in slots for q in slot.matrices.values()], config.model.quant.activation_scheme


CASES: list[tuple[int | str, str]] = [
    (seed, family) for family in FAMILIES for seed in range(len(SECTIONS) if family == "deepseek_v3" else 6)
]
CASES += [(name, "") for name in NAMES]
QUICK = [*CASES[:6], (0, "mixtral"), (1, "minimax_m2"), (2, "qwen2_moe"), (5, "mixtral")]
EVERY = [
    *((*case, 41) for case in QUICK), *slow(*((*case, 23) for case in CASES)),
    *(pytest.param(*case, 3, marks=pytest.mark.stress) for case in CASES),
]  # fmt: skip


@pytest.mark.parametrize(("seed", "family", "every"), EVERY)
def test_no_contradiction_is_read_silently(seed: int | str, family: str, every: int, tmp_path: Path) -> None:
    """Static scales of activations are tensors too: what is rounded changes only with a warning."""
    if isinstance(seed, str):
        (tmp_path / "like").mkdir()
        number = write_like(folder := tmp_path / "small", published(tmp_path / "like", seed))
    else:
        folder, number = written(tmp_path, SECTIONS[seed], family), 0
        pairs = list(by_definition(folder, loaded(folder, number)[0], "v2" not in str(SECTIONS[seed])))
        assert len(pairs) in (3, 6) and all(torch.equal(ours, expected) for _, ours, expected in pairs)
    right, rounded = found(folder, number)
    calibrated, wrong = any(name.endswith(ENDS) for name in open_source(folder).names()), []
    files = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json") if "index" not in file.name}
    for changed in islice(contradicted(files), every // 2, None, every * (12 if isinstance(seed, str) else 1)):
        if ("gptq_v2" in str(changed)) != ("gptq_v2" in str(files)):
            continue  # tensors do not show how zero points are stored
        for stem, content in changed.items():
            (folder / f"{stem}.json").write_text(json.dumps(content))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", CheckpointWarning)
                values, now = found(folder, number)
        except (MoEMKError, CheckpointWarning):
            continue
        if not all(torch.equal(a, b) for a, b in zip(values, right, strict=True)) or (calibrated and now != rounded):
            wrong.append(f"{now} {[at(changed, path) for path in places(changed) if path[-1] in STATED]}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


WHOLE = {"quant_method": "fp8", "activation_scheme": "static"}
INT8 = grouped({**FLOATS, "type": "int"}, {**TOKENS, "type": "int"}, quant_method="compressed-tensors")
NONE = grouped({**FLOATS, "strategy": "tensor"}, None, quant_method="compressed-tensors")


@pytest.mark.parametrize(
    "quant, changed, has_scales, problem",
    [
        (WHOLE, {"activation_scheme": "dynamic"}, True, "dynamic scales of .* fp8_tensor .* static ones .* are used"),
        (WHOLE, {}, False, "states static scales .* for fp8_tensor weights, .* have none .input_scale.: every token"),
        (INT8, {}, True, "states dynamic scales .* for int8 weights, the tensors have static ones .* not used"),
        (NONE, {}, True, "states no scales .* for fp8_tensor weights, the tensors have static ones .* not used"),
    ],
)
def test_scales_of_activations_that_contradict_are_named_when_loaded_and_inspected(
    quant: dict[str, Any], changed: dict[str, Any], has_scales: bool, problem: str, tmp_path: Path
) -> None:
    folder, scale = written(tmp_path, quant), torch.tensor(1 / 8)
    (tmp_path / "other").mkdir()

    def other(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept = {name: tensor for name, tensor in state.items() if not name.endswith("input_scale")}
        scales = {n.replace("weight_scale", "input_scale"): scale.clone() for n in kept if n.endswith("weight_scale")}
        return kept | (scales if has_scales else {})

    assert not config_problems(folder, inspect_checkpoint(folder))
    folder = rewritten(folder, tmp_path / "other", other)
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, "quantization_config": {**quant, **changed}}))
    with pytest.warns(CheckpointWarning, match=problem):
        config = stated(config_of(folder, 0), folder, 0)
    assert config.model.quant.input_scale == (1 / 8 if has_scales and quant is WHOLE else None)
    (text,) = config_problems(folder, inspect_checkpoint(folder))
    assert re.search(problem, text)


def test_shared_experts_round_with_a_scale_that_covers_theirs(tmp_path: Path) -> None:
    folder = written(tmp_path, WHOLE)
    (tmp_path / "other").mkdir()

    def larger(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: 8 * t if "shared" in name and "input" in name else t for name, t in state.items()}

    before = stated(config_of(folder, 0), folder, 0).model.quant
    quant = stated(config_of(folder, 0), rewritten(folder, tmp_path / "other", larger), 0).model.quant
    assert before.input_scale is not None and quant.input_scale == quant.hidden_scale == 8 * before.input_scale
