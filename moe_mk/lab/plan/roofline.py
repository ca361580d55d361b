"""Lower bound on the time of an MoE layer on one rank: the roofline of every op.

    python -m moe_mk.lab.plan.roofline --config deepseek_v3 --device h200 --ep 8 --tokens 1,64,1024

Each op takes the longer of its bytes at the memory bandwidth and its floating-point operations at the matrix-unit rate
(`moe_mk.config.device.Rates`, which the oracle uses too). Ops run one after the other: overlap, launches and network
are not counted. Routing is uniform; each weight is read once if any token needs it. FP8 weights in blocks of 128 x 128,
activations in groups of 128, bf16 outputs, as in DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from moe_mk.comm.destinations import expected_experts
from moe_mk.config.device import Rates
from moe_mk.config.moe import MoEConfig
from moe_mk.config.shipped import device_profile, load_config
from moe_mk.errors import ConfigError
from moe_mk.quant.fp8 import FP8_1x128, FP8_128x128
from moe_mk.quant.wire import row_bytes

__all__ = ["Floor", "LayerShape", "Rates", "experts_us", "floors", "layer_us", "table"]

BF16 = 2
"""Bytes of a bf16 value."""
TABLE = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer that the roofline depends on."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    shared_size: int = 0
    """Intermediate size of all shared experts together."""
    ep: int = 1

    def __post_init__(self) -> None:
        if min(self.hidden_size, self.intermediate_size, self.num_experts, self.top_k, self.ep) < 1:
            raise ConfigError(f"sizes must be at least 1: {self}")
        if self.num_experts % self.ep:
            raise ConfigError(f"{self.num_experts} experts do not divide over ep={self.ep}")

    @classmethod
    def of(cls, config: MoEConfig, ep: int = 1) -> LayerShape:
        """The shape of a model on `ep` ranks."""
        model = config.model
        return cls(
            model.hidden_size, model.moe_intermediate_size, model.num_experts, config.router.top_k,
            model.shared_size, ep,
        )  # fmt: skip

    def experts_hit(self, tokens: int) -> float:
        """Expected number of this rank's experts that at least one of ep x tokens tokens chooses."""
        return expected_experts(self.num_experts / self.ep, self.num_experts, self.top_k, tokens * self.ep)


@dataclass(frozen=True)
class Floor:
    """The least bytes, floating-point operations and microseconds of one op."""

    op: str
    num_bytes: float
    flops: float
    us: float
    bound: str
    """"memory" or "compute", whichever takes longer."""


def floors(shape: LayerShape, tokens: int, rates: Rates) -> tuple[Floor, ...]:
    """Every op of one forward with `tokens` tokens a rank, in order.

    With ep ranks each rank multiplies as many rows as it sends, K a token; received rows are already grouped by expert,
    and the sum over K is part of combine.
    """
    h, i, k = shape.hidden_size, shape.intermediate_size, shape.top_k
    rows, hit = k * tokens, shape.experts_hit(tokens)
    read = tokens if shape.ep == 1 else rows
    ops = [
        ("gate", BF16 * h * (tokens + shape.num_experts) + 4 * tokens * shape.num_experts, 0.0,
         2.0 * tokens * shape.num_experts * h),
        ("topk", 4 * tokens * shape.num_experts + 8 * rows, 0.0, 0.0),
        ("align", 12 * rows + 4 * shape.num_experts, 0.0, 0.0),
        ("quantise", BF16 * tokens * h + _row(h) * tokens, 0.0, 0.0),
        ("w13", hit * _matrix(2 * i, h) + read * _row(h) + rows * _row(i), 4.0 * rows * i * h, 0.0),
        ("w2", hit * _matrix(i, h) + rows * (_row(i) + BF16 * h), 2.0 * rows * i * h, 0.0),
        ("combine", BF16 * h * (rows + tokens) if shape.ep == 1 else 0.0, 0.0, 0.0),
    ]  # fmt: skip
    if shape.shared_size:
        wide = shape.shared_size
        moved = _matrix(3 * wide, h) + tokens * (_row(h) + BF16 * (wide + h))
        ops.append(("shared", moved, 6.0 * tokens * wide * h, 0.0))
    return tuple(_floor(op, moved, fp8, bf16, rates) for op, moved, fp8, bf16 in ops)


def layer_us(shape: LayerShape, tokens: int, rates: Rates) -> float:
    """Microseconds of all ops, one after the other."""
    return sum(floor.us for floor in floors(shape, tokens, rates))


def experts_us(shape: LayerShape, tokens: int, rates: Rates) -> float:
    """Microseconds of the two grouped GEMMs alone."""
    return sum(floor.us for floor in floors(shape, tokens, rates) if floor.op in ("w13", "w2"))


def _matrix(rows: int, columns: int) -> int:
    """Bytes of FP8 weights with a scale for each block."""
    return FP8_128x128.num_bytes(rows, columns)


def _row(columns: int) -> int:
    """Bytes of one FP8 row with its scales."""
    return row_bytes(FP8_1x128, columns)


def _floor(op: str, moved: float, fp8: float, bf16: float, rates: Rates) -> Floor:
    memory = rates.memory_us(moved)
    multiply = rates.compute_us(fp8, fp8=True) + rates.compute_us(bf16, fp8=False)
    return Floor(op, moved, fp8 + bf16, max(memory, multiply), "memory" if memory >= multiply else "compute")


def table(shape: LayerShape, tokens: Sequence[int], rates: Rates) -> str:
    """A markdown table, one line a number of tokens."""
    names = [floor.op for floor in floors(shape, 1, rates)]
    head = ["tokens a rank", "experts hit", "rows an expert hit", *(f"{name} us" for name in names), "sum us", "bound"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---:|" * len(head)]
    for count in tokens:
        found, hit = floors(shape, count, rates), shape.experts_hit(count)
        bound = next(floor.bound for floor in found if floor.op == "w13")
        cells = [str(count), f"{hit:.1f}", f"{shape.top_k * count / hit:.1f}", *(f"{floor.us:.1f}" for floor in found)]
        lines.append("| " + " | ".join([*cells, f"{sum(floor.us for floor in found):.1f}", bound]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the floors of a model on a device."""
    parser = argparse.ArgumentParser(prog="python -m moe_mk.lab.plan.roofline", description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="deepseek_v3", help="a shipped model, or a file")
    parser.add_argument("--device", default="h200", help="a shipped device, or a file")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share out the experts")
    parser.add_argument("--tokens", default=",".join(map(str, TABLE)), help="tokens of each rank, by comma")
    parser.add_argument("--memory-gbs", type=float, help="measured read bandwidth instead of the profile's")
    parser.add_argument("--fp8-tflops", type=float, help="measured FP8 rate instead of the profile's")
    given = parser.parse_args(arguments)
    rates = Rates.of(device_profile(given.device))
    rates = replace(
        rates, memory_gbs=given.memory_gbs or rates.memory_gbs, fp8_tflops=given.fp8_tflops or rates.fp8_tflops
    )
    shape = LayerShape.of(load_config(given.config), given.ep)
    sys.stdout.write(table(shape, [int(count) for count in given.tokens.split(",")], rates) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
