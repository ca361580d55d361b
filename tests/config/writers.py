"""What the packages that write lists of modules select by their own functions, recorded in `writers.json`.

python tests/config/writers.py       records again, for each package that is installed

Names are all linear maps of the experts of published models, of the first, second and last expert of every layer. A
verdict is a text for each name, "-" where the module is left as it is, with the number of times that it follows.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from moe_mk.config.hf import FAMILIES, family_of, module_names, text_of
from moe_mk.config.modules import Block, Module, layers_with_experts

FILE = Path(__file__).with_name("writers.json")
PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
MODELS = sorted(
    name for name, files in PUBLISHED.items()
    if "quant" in str(files["config"].keys()) and family_of(text_of(files["config"])) in FAMILIES
)  # fmt: skip
Verdicts = Callable[[Sequence[str], Mapping[str, Any]], list[str]]
LINEAR = nn.Linear(1, 1)


def block_of(name: str) -> Block:
    """The names of a published model, as its family has them."""
    hf = PUBLISHED[name]["config"]
    block = module_names(hf, family_of(text_of(hf)))
    return Block(block.prefix, block.experts, block.shared, layers_with_experts(text_of(hf)), 128, every=True)


def modules_of(name: str) -> list[Module]:
    """All modules of the first, second and last expert of every layer, and the shared ones."""
    block = block_of(name)
    routed = [module for module in block.modules("experts") if module.expert in (None, 0, 1, 127)]
    unique = {module.name: module for module in (*routed, *block.modules("shared_experts"))}
    return list(unique.values())


def section(name: str) -> Mapping[str, Any]:
    """The quantisation of a published model."""
    hf = PUBLISHED[name]["config"]
    found = (each.get("quantization_config") or each.get("compression_config") for each in (hf, text_of(hf)))
    return next((each for each in found if isinstance(each, Mapping)), {})


def compressed_tensors(names: Sequence[str], rules: Mapping[str, Any]) -> list[str]:
    """`match_targets` and `is_match` of a Linear module. rules: targets with their group, and what is ignored."""
    match = importlib.import_module("compressed_tensors.utils.match")
    found = []
    for name in names:
        targets = match.match_targets(name, LINEAR, rules["targets"])
        ignored = not targets or match.is_match(name, LINEAR, rules["ignore"])
        found.append("-" if ignored else rules["targets"][targets[0]])
    return found


def gptqmodel(names: Sequence[str], rules: Mapping[str, Any]) -> list[str]:
    """`dynamic_get`."""
    config = importlib.import_module("gptqmodel.quantization.config")
    stated = {rule: {"bits": bits} for rule, bits in rules["dynamic"].items()}
    found = [config.dynamic_get(stated, name, default={"bits": "4"}) for name in names]
    return ["-" if each is False else each["bits"] for each in found]


def autoawq(names: Sequence[str], rules: Mapping[str, Any]) -> list[str]:
    """`exclude_layers_to_not_quantize`, of a file that needs no other one of the package."""
    spec = importlib.util.find_spec("awq")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "utils" / "module.py"
    made = importlib.util.spec_from_file_location("awq_utils_module", path)
    assert made is not None and made.loader is not None
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    left = module.exclude_layers_to_not_quantize(dict.fromkeys(names, LINEAR), rules["modules_to_not_convert"])
    return ["4" if name in left else "-" for name in names]


def auto_round(names: Sequence[str], rules: Mapping[str, Any]) -> list[str]:
    """`check_start_with_block_name` and `_expand_regex_config`."""
    utils = importlib.import_module("auto_round.inference.utils")
    inside = importlib.import_module("auto_round.utils.model").check_start_with_block_name
    model = SimpleNamespace(named_modules=lambda: ((name, LINEAR) for name in names))
    layers = [name for name in names if inside(name, rules["blocks"])]
    stated = {key: {"bits": bits} for key, bits in rules["extra_config"].items()}
    config = utils._expand_regex_config(
        regex_config=stated, base_config=copy.copy(stated), layer_names=layers, model=model
    )
    made = {name: config.get(name, {"bits": "4"})["bits"] for name in {*layers, *config}}
    return ["-" if made.get(name, "16") == "16" else made[name] for name in names]


def modelopt(names: Sequence[str], rules: Mapping[str, Any]) -> list[str]:
    """Each entry of the list that `_prefix_wildcard_summarize_exclude_modules` makes of modules that are plain."""
    summarize = importlib.import_module("modelopt.torch.export.quant_utils")._prefix_wildcard_summarize_exclude_modules
    plain = {name for name, each in zip(names, unpacked(rules["plain"]), strict=True) if each == "-"}
    return sorted(summarize([name for name in names if name in plain], [name for name in names if name not in plain]))


def quark(names: Sequence[str], rules: Mapping[str, Any]) -> list[str]:
    """`get_layer_quant_config`."""
    parser = importlib.import_module("quark.torch.export.main_export.quant_config_parser")
    config = SimpleNamespace(
        exclude=rules["exclude"], layer_quant_config=rules["layer_quant_config"], layer_type_quant_config={},
        global_quant_config="4", kv_cache_quant_config={},
    )  # fmt: skip
    found = (parser.get_layer_quant_config(config, nn.Linear, name) for name in names)
    return ["-" if each is None else each for each in found]


@dataclass(frozen=True)
class Writer:
    """A package and its function."""

    package: str
    verdicts: Verdicts
    method: str
    """The quant_method of its sections."""


WRITERS = {
    "compressed-tensors": Writer("compressed-tensors", compressed_tensors, "compressed-tensors"),
    "gptqmodel": Writer("gptqmodel", gptqmodel, "gptq"), "autoawq": Writer("autoawq", autoawq, "awq"),
    "auto-round": Writer("auto-round", auto_round, "auto-round"),
    "modelopt": Writer("nvidia-modelopt", modelopt, "modelopt"), "quark": Writer("amd-quark", quark, "quark"),
}  # fmt: skip


def expressions(draw: random.Random, names: Sequence[str], *, is_glob: bool = False) -> list[str]:
    """What people write about modules: whole names, parts, layers, roles, look-aheads, numbers."""
    made = []
    for _ in range(draw.randint(1, 4)):
        parts = draw.choice(names).split(".")
        number = next((part for part in parts if part.isdigit()), "0")
        some = ".".join(parts[draw.randrange(len(parts)) :][: draw.randint(1, 5)])
        if is_glob:
            made.append(draw.choice((
                ".".join(parts), f"*{some}*", f"*{parts[-1]}", f"{'.'.join(parts[: draw.randint(2, len(parts))])}*",
                f"*.{number}.*", f"*layers.{number[0]}?.*", "*experts.[01].*", f"*shared_expert*{parts[-1]}", some,
            )))  # fmt: skip
        else:
            made.append(draw.choice((
                ".".join(parts), f".*{some}.*", some, rf".*\.{number}\..*", rf"(?!.*\.{number}\.).*", f".*{parts[-1]}$",
                r".*layers\.(?:1|2[0-9])\..*experts.*", r".*\.experts\.[01]\..*", r"(?!.*\.experts\.).*shared.*",
                ".".join(parts[:3]), rf"^{'.'.join(parts)}$".replace(".", r"\."), r".*(?<!shared_)experts\..*",
            )))  # fmt: skip
    return made


def cases(writer: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(published model, rules): those that are published, then drawn ones."""
    draw, method = random.Random(writer), WRITERS[writer].method
    for name in [name for name in MODELS if section(name).get("quant_method") == method]:
        quant = section(name)
        if writer == "compressed-tensors":
            groups = quant["config_groups"]
            targets = {target: group for group, each in groups.items() for target in each["targets"]}
            yield name, {"targets": targets, "ignore": list(quant.get("ignore") or ())}
        elif writer == "gptqmodel" and quant.get("dynamic"):
            yield name, {"dynamic": {rule: str(own.get("bits", 4)) for rule, own in quant["dynamic"].items()}}
        elif writer == "auto-round" and quant.get("extra_config"):
            blocks = str(quant.get("block_name_to_quantize") or block_of(name).prefix.partition(".{N}")[0]).split(",")
            extra = {key: str(own["bits"]) for key, own in quant["extra_config"].items()}
            yield name, {"blocks": blocks, "extra_config": extra}
        elif writer == "quark":
            exclude = [each for each in quant.get("exclude") or () if not each.startswith("re:")]
            yield name, {"exclude": exclude, "layer_quant_config": {}}
    for _ in range(40):
        name = draw.choice(MODELS)
        yield name, drawn(writer, draw, modules_of(name))


def drawn(writer: str, draw: random.Random, modules: Sequence[Module]) -> dict[str, Any]:
    """Rules as people write them for the modules of a model."""
    names = [module.name for module in modules]
    bits = [str(draw.choice((2, 4, 8, 16))) for _ in range(8)]
    if writer == "compressed-tensors":
        some, others = (
            [f"re:{each}" if draw.random() < 0.7 else draw.choice(names) for each in expressions(draw, names)]
            for _ in range(2)
        )
        targets = [*others, *["Linear"] * draw.randint(0, 1)]
        return {"targets": {each: f"group_{at % 2}" for at, each in enumerate(targets)}, "ignore": some}
    if writer == "gptqmodel":
        signed = [f"{draw.choice(('-:', '+:', ''))}{each}" for each in expressions(draw, names)]
        return {"dynamic": dict(zip(signed, bits, strict=False))}
    if writer == "autoawq":
        parts = [each.split(".") for each in draw.sample(names, 3)]
        return {"modules_to_not_convert": [
            ".".join(draw.choice((each, each[-1:], each[-3:], each[:3]))) for each in parts
        ]}  # fmt: skip
    if writer == "auto-round":
        starts = [".".join(draw.choice(names).split(".")[: draw.randint(2, 4)]) for _ in range(draw.randint(1, 2))]
        return {"blocks": starts, "extra_config": dict(zip(expressions(draw, names), bits, strict=False))}
    if writer == "modelopt":
        return {"plain": packed(plain_ones(draw, modules))}
    exclude = expressions(draw, names, is_glob=True) if draw.random() < 0.7 else []
    return {
        "exclude": exclude,
        "layer_quant_config": dict(zip(expressions(draw, names, is_glob=True), bits, strict=False)),
    }


def plain_ones(draw: random.Random, modules: Sequence[Module]) -> list[str]:
    """Whole layers, one role, or some modules that a person leaves as they are."""
    layers = draw.sample(sorted({module.layer for module in modules}), 3)
    kind = draw.choice(("layers", "shared", "words", "some"))
    left = (
        {"layers": module.layer in layers, "shared": not module.holder, "words": module.end == "down",
         "some": draw.random() < 0.03}[kind]
        for module in modules
    )  # fmt: skip
    return ["-" if each else "4" for each in left]


def unpacked(verdicts: Sequence[Sequence[Any]]) -> list[str]:
    """What `packed` was made of."""
    return [each for each, times in verdicts for _ in range(times)]


def packed(verdicts: Sequence[str]) -> list[list[Any]]:
    """Verdicts in short: each with the number of times that it follows."""
    return [[each, len(list(same))] for each, same in groupby(verdicts)]


def main() -> None:
    recorded = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, writer in WRITERS.items():
        try:
            made = [
                {"model": model, "rules": rules, "verdicts": found if name == "modelopt" else packed(found)}
                for model, rules in cases(name)
                for found in [writer.verdicts([module.name for module in modules_of(model)], rules)]
            ]
            number = version(writer.package)
        except (ImportError, PackageNotFoundError) as problem:
            print(f"{name} is kept as it is: {problem}")
            continue
        recorded[name] = {"version": number, "cases": made}
        print(f"{name} {number}: {len(made)} cases")
    lines = [
        f"{json.dumps(name)}: {{\"version\": {json.dumps(each['version'])}, \"cases\": [\n"
        + ",\n".join(map(json.dumps, each["cases"])) + "\n]}"
        for name, each in recorded.items()
    ]  # fmt: skip
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
