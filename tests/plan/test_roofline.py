"""Floors by hand, against rows that were published with the formulas, and at the edges."""

import pytest

from moe_mk.config import device_profile, load_config
from moe_mk.errors import ConfigError
from moe_mk.lab.plan.roofline import LayerShape, Rates, experts_us, floors, layer_us, main

PEAK = Rates(memory_gbs=4300.0, fp8_tflops=1979.0, bf16_tflops=790.0)
PRACTICAL = Rates(memory_gbs=4300.0, fp8_tflops=1550.0, bf16_tflops=790.0)


def deepseek_v3(ep: int) -> LayerShape:
    return LayerShape.of(load_config("deepseek_v3"), ep)


def test_one_expert_by_hand() -> None:
    # 1 token, 1 expert, H = I = 128: w13 reads 256 x 128 weights and 2 scales, a row of 128 + 4 B, writes one as long.
    shape = LayerShape(hidden_size=128, intermediate_size=128, num_experts=1, top_k=1)
    found = {floor.op: floor for floor in floors(shape, 1, Rates(1.0, 1.0, 1.0))}
    assert found["w13"].num_bytes == 256 * 128 + 2 * 4 + 132 + 132
    assert found["w13"].flops == 2 * 256 * 128
    assert found["w2"].num_bytes == 128 * 128 + 4 + 132 + 256
    # 33,040 B at 1 GB/s are 33.04 us; 65,536 products at 1 TFLOP/s are 0.07 us.
    assert found["w13"].us == pytest.approx(33.04, abs=0.01) and found["w13"].bound == "memory"
    assert "shared" not in found


@pytest.mark.parametrize("ep,tokens,hit,w13,w2,shared,total,practical,bound", [
    (1, 1, 8.0, 54.6, 27.3, 10.3, 93.1, 93.1, "memory"), (1, 64, 222.4, 1519.6, 761.6, 10.6, 2295.1, 2295.1, "memory"),
    (1, 1024, 256.0, 1754.2, 905.5, 45.6, 2746.2, 2758.8, "memory"),
    (1, 4096, 256.0, 1771.5, 999.5, 182.3, 3117.1, 3167.6, "memory"),
    (1, 16384, 256.0, 3889.1, 1944.6, 729.2, 7217.9, 9034.4, "compute"),
    (8, 8, 27.8, 190.0, 95.2, 10.3, 296.5, 296.5, "memory"),
    (8, 1024, 32.0, 243.1, 140.6, 45.6, 439.5, 533.9, "compute"),
    (32, 128, 8.0, 56.9, 31.2, 11.0, 101.1, 101.1, "memory"),
    (32, 8192, 8.0, 1944.6, 972.3, 364.6, 3363.2, 4271.4, "compute"),
])  # fmt: skip
def test_published_rows(
    ep: int, tokens: int, hit: float, w13: float, w2: float, shared: float, total: float, practical: float, bound: str
) -> None:
    shape = deepseek_v3(ep)
    found = {floor.op: floor for floor in floors(shape, tokens, PEAK)}
    assert shape.experts_hit(tokens) == pytest.approx(hit, abs=0.06)
    for op, expected in (("w13", w13), ("w2", w2), ("shared", shared)):
        assert found[op].us == pytest.approx(expected, abs=0.06), op
    assert layer_us(shape, tokens, PEAK) == pytest.approx(total, abs=0.15)
    assert experts_us(shape, tokens, PEAK) == pytest.approx(w13 + w2, abs=0.12)
    assert layer_us(shape, tokens, PRACTICAL) == pytest.approx(practical, abs=0.15)
    assert {floor.op: floor.bound for floor in floors(shape, tokens, PRACTICAL)}["w13"] == bound


def test_a_device_without_fp8_multiplies_at_the_bf16_rate() -> None:
    cpu = device_profile("cpu")
    assert Rates.of(cpu).fp8_tflops == (cpu.fp8_tflops or cpu.bf16_tflops)


def test_sizes_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"256 experts do not divide over ep=3"):
        LayerShape(128, 128, 256, 8, ep=3)
    with pytest.raises(ConfigError, match=r"at least 1"):
        LayerShape(128, 0, 256, 8)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--config", "deepseek_v3", "--device", "h200", "--ep", "8", "--tokens", "8,1024", "--memory-gbs", "4300"]
    assert main(command) == 0
    head, _, eight, many = capsys.readouterr().out.splitlines()
    assert head.startswith("| tokens a rank | experts hit |")
    assert eight.startswith("| 8 | 27.8 | 2.3 |") and "| 190.0 | 95.2 |" in eight
    assert many.startswith("| 1024 | 32.0 | 256.0 |") and many.endswith("| compute |")
    options = "--config=tiny --device=b200 --ep=4 --tokens=3 --memory-gbs=1 --fp8-tflops=1".split()
    printed = {(main(more), capsys.readouterr().out)[1] for more in ([], *([option] for option in options))}
    assert len(printed) == 1 + len(options), "every option counts"
