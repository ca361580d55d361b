"""`moe-mk bisect A B`: the first stage in which two pairs of backends differ, with token, expert and block."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from moe_mk.errors import ConfigError
from moe_mk.lab.cli.exits import MISMATCH, OK, print_json
from moe_mk.lab.cli.inputs import draws, dtype_of
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.testing.bisect import STAGES, Bisection, Scene, bisect
from moe_mk.lab.testing.experts import random_experts
from moe_mk.quant.fp8 import FP8_1x128, FP8_128x128
from moe_mk.quant.plain import plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.registry import did_you_mean
from moe_mk.tokens import Routing

FORMATS = ("plain", "fp8")


@dataclass(frozen=True)
class BisectOrder:
    """The settings of a comparison."""

    one: str
    other: str
    ranks: int = 1
    tokens: int = 16
    experts: int = 8
    top_k: int = 2
    hidden: int = 256
    intermediate: int = 128
    weights: str = "plain"
    """plain: the dtype. fp8: blocks of 128x128."""
    activations: str = "plain"
    dtype: str = "bfloat16"
    seed: int = 0
    exact: bool = False


def bisect_backends(screen: Screen, order: BisectOrder, *, as_json: bool) -> int:
    """Compare and print; exit code 1 if there is a difference."""
    found = bisect(order.one, order.other, scene_of(order), exact=order.exact)
    if as_json:
        print_json(asdict(found))
    else:
        _show(screen, found)
    return OK if found.first is None else MISMATCH


def scene_of(order: BisectOrder) -> Scene:
    """Random tokens, routing and experts; raises ConfigError for contradicting options."""
    for what, value in (("--weights", order.weights), ("--activations", order.activations)):
        if value not in FORMATS:
            raise ConfigError(f"{what} {value!r} is unknown{did_you_mean(value, FORMATS)}")
    if order.weights == "fp8" and order.intermediate % FP8_128x128.rows:
        raise ConfigError(f"--intermediate {order.intermediate} must be a multiple of 128 with --weights fp8")
    if order.experts % order.ranks or order.top_k > order.experts:
        raise ConfigError(
            f"--experts {order.experts} must divide over --ranks {order.ranks} and be at least --top-k {order.top_k}"
        )
    dtype, cpu = plain(dtype_of(order.dtype)), torch.device("cpu")
    draw = draws(order.seed)
    x_TH = torch.randn((order.tokens, order.hidden), generator=draw, dtype=torch.float32, device="cpu")
    scores_TE = torch.rand((order.tokens, order.experts), generator=draw, dtype=torch.float32, device="cpu")
    weights_TK, ids_TK = scores_TE.topk(order.top_k, dim=1)
    stored: QuantScheme = FP8_128x128 if order.weights == "fp8" else dtype
    compute: QuantScheme = FP8_1x128 if order.activations == "fp8" else dtype
    stack = random_experts(stored, order.experts, order.hidden, order.intermediate, cpu)
    routing = Routing(ids_TK.to(torch.int32), weights_TK)
    return Scene(x_TH.to(dtype.dtype), routing, stack, order.ranks, dtype, compute, wire=compute)


def _show(screen: Screen, found: Bisection) -> None:
    screen.fact("compared", f"{found.names[0]} and {found.names[1]}, limit {found.limit:.1e} by their number formats")
    for stage in STAGES:
        if stage in found.compared:
            differs = found.first is not None and found.first.stage == stage
            text = f"{found.num_differing} of {found.compared[stage]} vectors differ" if differs else "equal"
            screen.fact(stage, text if differs else f"{text}, {found.compared[stage]} vectors")
    for reason in found.skipped:
        screen.fact("not compared", reason)
    if found.first is None:
        screen.fact("verdict", "no stage differs")
        return
    first = found.first
    whom = {"reduce": f"rank {first.expert}", "combine": "combined output"}.get(first.stage, f"expert {first.expert}")
    where = f"token {first.token}, {whom}, columns from {first.block * 128}"
    screen.fact("first", f"stage {first.stage}: {where}: relative error {first.error:.2e}, {first.what}")
