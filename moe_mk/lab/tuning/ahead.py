"""Compile the Triton kernels of a layer ahead of time, for a device that this machine does not have.

The launches are those of `TritonExperts.run` and of the router, on tensors of the meta device; no GPU is needed and no
weights are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import MoEConfig
from moe_mk.config.tuned import Case
from moe_mk.errors import LibraryMissing, UnsupportedError
from moe_mk.experts.base import ExpertsContext
from moe_mk.quant.fp8 import FP8_1x128, FP8_128x128
from moe_mk.quant.plain import BF16
from moe_mk.quant.tensor import QuantScheme, QuantTensor
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

if TYPE_CHECKING:
    from moe_mk.lab.tuning.triton_cache import CompiledKernel

META = torch.device("meta")
MULTIPROCESSORS = {(9, 0): 132, (10, 0): 148}
"""Of the SXM modules, by compute capability; persistent kernels are compiled for this number of programs."""
FORMATS: dict[str, tuple[QuantScheme, QuantScheme]] = {"fp8_block": (FP8_128x128, FP8_1x128), "plain": (BF16, BF16)}
"""Weights and activations, by the kind of a model's weights."""


@dataclass(frozen=True)
class AheadOrder:
    """Configuration, device, ranks and tokens for which to compile."""

    config: MoEConfig
    device: DeviceProfile
    ranks: int
    tokens: tuple[int, ...]
    """Tokens of a rank."""


def compile_layer(order: AheadOrder, folder: Path) -> list[CompiledKernel]:
    """Compile every kernel that calls with these numbers of tokens launch into a folder; returns all of them.

    On more than one rank, rows arrive from every rank, in bf16 and in the scheme of the products. Raises
    UnsupportedError for devices and weights without such kernels, LibraryMissing without Triton.
    """
    if find_spec("triton") is None:
        raise LibraryMissing("kernels cannot be compiled", ["triton is not installed", "pip install 'moe-mk[cuda]'"])
    from moe_mk.experts.triton.experts import TritonExperts
    from moe_mk.experts.triton.tuning import load_tuned
    from moe_mk.experts.triton.workspace import Workspace
    from moe_mk.lab.tuning.triton_cache import compiling

    weights, compute = _formats(order)
    context = _context(order, weights, compute)
    experts = TritonExperts(context, Workspace())
    case = Case(context.hidden_size, context.intermediate_size, context.num_slots, weights.name, compute.name)
    experts.tuned = load_tuned(order.device.name, case, log=False)
    model, arch = order.config.model, order.device.arch
    assert arch is not None
    fuses = order.ranks == 1 and model.shared_size == model.moe_intermediate_size
    stacks = [_stack(context.num_slots, order, weights)]
    if fuses:
        stacks.append(_stack(context.num_slots + 1, order, weights))
    with compiling(folder, arch[0] * 10 + arch[1], MULTIPROCESSORS[arch]) as found:
        for count in sorted(set(order.tokens)):
            _route(order, count)
            for x_RH in _rows(order, count, compute):
                tokens = _tokens(order, x_RH, context.num_slots, count)
                for stack in stacks:
                    experts.run(tokens, stack)
    unique = {each.key: each for each in reversed(found)}
    return sorted(unique.values(), key=lambda each: (each.name, each.key))


def _formats(order: AheadOrder) -> tuple[QuantScheme, QuantScheme]:
    kind, arch = order.config.model.quant.kind, order.device.arch
    problems = []
    if kind not in FORMATS:
        problems.append(f"weights are {kind}; compiled ahead are {' and '.join(FORMATS)}")
    if order.device.kind != "cuda" or arch not in MULTIPROCESSORS:
        known = " and ".join(f"sm_{major}{minor}" for major, minor in MULTIPROCESSORS)
        problems.append(f"{order.device.name} is not one of {known}")
    if order.config.model.num_experts % order.ranks:
        problems.append(f"{order.config.model.num_experts} experts do not divide over {order.ranks} ranks")
    if problems:
        raise UnsupportedError("kernels cannot be compiled ahead", problems)
    return FORMATS[kind]


def _context(order: AheadOrder, weights: QuantScheme, compute: QuantScheme) -> ExpertsContext:
    model = order.config.model
    return ExpertsContext(
        BF16, compute, model.activation, model.num_experts // order.ranks, model.hidden_size,
        _shard(order), META, weights=weights, top_k=order.config.router.top_k,
    )  # fmt: skip


def _shard(order: AheadOrder) -> int:
    return order.config.model.moe_intermediate_size // order.config.parallel.tp


def _stack(slots: int, order: AheadOrder, scheme: QuantScheme) -> ExpertWeights:
    hidden, inner = order.config.model.hidden_size, _shard(order)

    def matrix(rows: int, columns: int) -> QuantTensor:
        if scheme == BF16:
            return QuantTensor(torch.empty((slots, rows, columns), dtype=torch.bfloat16, device=META), None, scheme)
        scales = torch.empty((slots, -(-rows // 128), -(-columns // 128)), dtype=torch.float32, device=META)
        return QuantTensor(torch.empty((slots, rows, columns), dtype=torch.float8_e4m3fn, device=META), scales, scheme)

    return ExpertWeights(matrix(2 * inner, hidden), matrix(hidden, inner))


def _rows(order: AheadOrder, count: int, compute: QuantScheme) -> Sequence[QuantTensor]:
    """Received rows in the schemes in which they may arrive."""
    rows, hidden = count * order.ranks, order.config.model.hidden_size
    plain = QuantTensor(torch.empty((rows, hidden), dtype=torch.bfloat16, device=META), None, BF16)
    if order.ranks == 1 or compute == BF16:
        return [plain]
    codes = torch.empty((rows, hidden), dtype=torch.float8_e4m3fn, device=META)
    scales = torch.empty((rows, -(-hidden // 128)), dtype=torch.float32, device=META)
    return [plain, QuantTensor(codes, scales, compute)]


def _tokens(order: AheadOrder, x_RH: QuantTensor, slots: int, count: int) -> RowTokens:
    rows, top_k = x_RH.shape[0], order.config.router.top_k
    ids_RK = torch.empty((rows, top_k), dtype=torch.int32, device=META)
    weights_RK = torch.empty((rows, top_k), dtype=torch.float32, device=META)
    given = RowTokens(x_RH, ids_RK, weights_RK, slots)
    if order.ranks == 1:
        return given
    return RowTokens(x_RH, ids_RK, weights_RK, slots, expected_N=float(count * top_k), most_K=min(top_k, slots))


def _route(order: AheadOrder, count: int) -> None:
    """The router's launch, where it has a kernel."""
    from moe_mk.kernels.triton.topk import grouped_topk, serves

    router, experts = order.config.router, order.config.model.num_experts
    dtype = torch.float32 if router.router_dtype == "float32" else torch.bfloat16
    logits: Tensor = torch.empty((count, experts), dtype=dtype, device=META)
    bias = torch.empty(experts, dtype=torch.float32, device=META) if router.has_correction_bias else None
    if not serves(logits, router.top_k, router.num_expert_group, router.scoring_func, bias, dtype):
        return
    grouped_topk(
        logits, router.top_k, router.num_expert_group, router.topk_group, router.scoring_func, bias, router.renormalize,
        router.routed_scaling_factor, dtype,
        (torch.empty(experts, dtype=torch.int64, device=META), torch.empty(experts, dtype=torch.int32, device=META)),
    )  # fmt: skip
