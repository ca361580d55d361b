"""One-sided against all-to-all between processes, on every wire, by kernels and by torch."""

import pytest
import torch
from torch import Tensor

from moe_mk.flight import wait
from moe_mk.kernels.native import exchange
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.prepare_finalize.packing import packed_row_bytes
from moe_mk.quant import BF16, FP16, FP32
from moe_mk.quant.fp8_block import FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.int8 import INT8_TOKEN
from moe_mk.quant.microscaling import MXFP8
from moe_mk.quant.nvfp4 import NVFP4_TOKENS
from moe_mk.quant.tensor import QuantScheme
from moe_mk.tokens import Routing
from tests.support.one_sided_ranks import EXPERTS, HIDDEN, RANKS, TOP_K, context, drawn, there_and_back, world_comm

WIRES = (
    (FP32, FP32), (BF16, BF16), (FP16, FP16), (FP8_1x128, BF16), (FP8_1x128_UE8M0, BF16), (INT8_TOKEN, BF16),
    (MXFP8, BF16), (NVFP4_TOKENS, FP32),
)  # fmt: skip


def compare_with_all_to_all(rank: int, with_kernels: tuple[int, ...]) -> list[str]:
    """Every wire, with changing token counts, zero and -1 included: outputs, rows and traffic."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if rank not in with_kernels:
            patch.setattr(exchange, "ready", lambda: None)
        for wire, dtype in WIRES:
            made = {name: PREPARE_FINALIZE[name](context(world_comm(), wire=wire, dtype=dtype)) for name in NAMES}
            for seed, tokens in enumerate([(3, 0, 7, 1), (0, 0, 0, 0), (9, 9, 9, 9), (0, 5, 0, 0), (130, 1, 33, 2)]):
                found += differences(made, wire, tokens, drawn(100 * seed + rank, tokens[rank], dtype.dtype), rank)
            (buffer,) = made["one_sided"]._pool.slots  # type: ignore[attr-defined]
            if (buffer.exchange is not None) != (rank in with_kernels):
                found.append(f"{wire.name}: rows go by the wrong way")
    return found


def differences(
    made: dict[str, PrepareFinalize],
    wire: QuantScheme,
    tokens: tuple[int, ...],
    batch: tuple[Tensor, Routing],
    rank: int,
) -> list[str]:
    """What reports the two transports, and both from the model, after one call of each."""
    found, traffic = [], {name: made[name].context.comm.traffic for name in NAMES}
    for each in traffic.values():
        each.reset()
    combined = {name: wait(there_and_back(made[name], *batch)) for name in NAMES}
    if not torch.equal(combined["one_sided"], combined["all_to_all"]):
        found.append(f"{wire.name} {tokens}: outputs differ")
    model = modelled(batch[1], wire, rank)
    for phase in ("dispatch", "combine"):
        ours, theirs = (traffic[name].bytes_by_phase[phase] for name in NAMES)
        if ours != theirs or (phase == "dispatch" and ours != model):
            found.append(f"{wire.name} {tokens}: {ours} B in {phase}, {theirs}, {model}")
    return found


NAMES = ("one_sided", "all_to_all")


def modelled(routing: Routing, wire: QuantScheme, rank: int) -> int:
    """A row for each pair of a token and another rank that holds one of its experts, counted one by one."""
    rows = sum(len({e // (EXPERTS // RANKS) for e in ids if e >= 0} - {rank}) for ids in routing.ids_TK.tolist())
    return rows * packed_row_bytes(wire, HIDDEN, TOP_K)
