"""Values of a section of quantisation: what each key takes, and what the layer becomes, are those recorded.

python tests/config/test_quant_values.py       writes quant_values.json anew, after a change that is meant
"""

import json
from pathlib import Path
from typing import Any

import pytest

from moe_mk.errors import ConfigError
from tests.config.test_keys import QUANTS, full, read, sections, with_key

FILE = Path(__file__).parent / "quant_values.json"
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 4, 8, 16, 32, 64, 128, "int", "float", "static", "dynamic", "group", "weight", "token",
    "tensor", "channel", "block", "gemm", "gptq", "gptq_v2", "e4m3", "float8_e4m3fn", "ue8m0", "fp4", "fp8", "NVFP4",
    "MXFP8", "FP8", "MIXED_PRECISION", "int-quantized", "float-quantized", "pack-quantized", "naive-quantized",
    "mixed-precision", "nvfp4-pack-quantized", [64, 64], [128, 128], [32, 128],
)  # fmt: skip
KEYS = (
    "activation_scheme", "actorder", "bits", "block_structure", "checkpoint_format", "desc_act", "dynamic",
    "expert_dtype", "fmt", "format", "group_size", "moe_quant_algo", "num_bits", "quant_algo", "quant_method",
    "scale_fmt", "strategy", "sym", "symmetric", "type", "version", "weight_block_size", "zero_point",
)  # fmt: skip


NOT_READ = {"": [None, False, 0]}
"""A key without a meaning may be absent or empty."""


def accepted(name: str) -> dict[str, dict[str, list[Any]]]:
    """By place and key: the values that are taken, by the settings that they make; "" for those of the section."""
    quant, found = QUANTS[name], dict[str, dict[str, list[Any]]]()
    same = str(read(full("deepseek_v3", quantization_config=quant)).model.quant)
    for path in sections(quant):
        for key in KEYS:
            taken: dict[str, list[Any]] = {}
            for value in VALUES:
                try:
                    config = read(full("deepseek_v3", quantization_config=with_key(quant, path, key, value)))
                except ConfigError:
                    continue
                made = str(config.model.quant)
                taken.setdefault("" if made == same else made, []).append(value)
            if taken and taken != NOT_READ:
                found[".".join((*path, key))] = taken
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTS)
def test_values_that_are_taken_are_those_recorded(name: str) -> None:
    assert accepted(name) == json.loads(FILE.read_text(encoding="utf-8"))[name]


def main() -> None:
    lines = [
        f'"{name}": {{\n' + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in accepted(name).items()) + "\n}"
        for name in QUANTS
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
