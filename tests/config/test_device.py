"""Device profiles: what must be given, and what cannot be."""

from typing import Any

import pytest

from moe_mk.config import DeviceProfile
from moe_mk.errors import ConfigError

MINE: dict[str, Any] = {
    "name": "mine",
    "kind": "cuda",
    "arch": [9, 0],
    "memory_gib": 80,
    "memory_gbs": 3000,
    "bf16_tflops": 700,
    "intra_node_gbs": 150,
    "inter_node_gbs": 40,
}


def test_any_device_can_be_imagined() -> None:
    profile = DeviceProfile.parse(MINE, "here")
    assert profile.arch == (9, 0) and profile.fp8_tflops == 0 and profile.ranks_per_node == 8


@pytest.mark.parametrize("key", ["name", "kind", "memory_gib", "memory_gbs", "bf16_tflops", "intra_node_gbs"])
def test_what_a_cost_needs_must_be_given(key: str) -> None:
    with pytest.raises(ConfigError, match=f"here: {key}: Field required"):
        DeviceProfile.parse({k: v for k, v in MINE.items() if k != key}, "here")


@pytest.mark.parametrize(
    "key, value",
    [("kind", "tpu"), ("memory_gib", 0), ("memory_gbs", -1), ("fp8_tflops", -1), ("ranks_per_node", 0), ("arch", [9])],
)
def test_values_that_cannot_be_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"here: {key}"):
        DeviceProfile.parse({**MINE, key: value}, "here")
