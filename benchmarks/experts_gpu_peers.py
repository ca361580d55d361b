"""FP8 experts of this project and of others as contenders, each in a process of experts_gpu.py.

A contender is built from weights and tokens; it raises where it cannot take part. No library of others is a dependency
or part of this tree.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from experts_gpu_cases import Case, captured, exact, relative_error, replayed
from torch import Tensor

from moe_mk.config.tuned import Case as TunedCase
from moe_mk.config.tuned import Tuned
from moe_mk.errors import UnsupportedError
from moe_mk.experts import ExpertsContext
from moe_mk.experts.triton.experts import TritonExperts
from moe_mk.experts.triton.tuning import BUILT_IN, load_tuned
from moe_mk.external.device import profile_here
from moe_mk.kernels.triton.tile import Tile
from moe_mk.quant import BF16, FP8_1x128, FP8_128x128
from moe_mk.tokens import RowTokens
from moe_mk.weights.expert_weights import ExpertWeights

Call = Callable[[], Tensor]
Calls = Callable[[RowTokens], Call]
GLUON: tuple[tuple[float, Tile], ...] = (
    (4.0, Tile(8, True, 4, 6, "gluon")),
    (8.0, Tile(16, True, 4, 6, "gluon")),
    (20.0, Tile(32, True, 4, 6, "gluon")),
    (40.0, Tile(64, False, 4, 5, "gluon")),
    (float("inf"), Tile(128, False, 4, 4, "gluon")),
)
"""Gluon tiles by rows per expert, as BUILT_IN of the Triton kernels. Experts with two tiles of 64 rows read 80 KiB a
step through L2, one tile of 128 rows 48 KiB."""
VLLM = Path(__file__).resolve().parents[1] / ".peers" / "vllm"
PADDING = 64
"""Rows of a block of DeepGEMM's masked GEMM are a multiple of this (its issue 268)."""


@dataclass(frozen=True)
class Sorted:
    """Assignments of a routing by expert, each expert's at the start of a block of rows."""

    target: Tensor
    """int64 (N,): the row of each kept assignment, in the order of experts."""
    source: Tensor
    """int64 (N,): its token."""
    weights: Tensor
    """f32 (N,)."""
    expert: Tensor
    counts: Tensor
    rows: int


def by_expert(tokens: RowTokens, block_of: Callable[[Tensor], Tensor]) -> Sorted:
    """Sort on the host's side of the clock; block_of: rows of every expert's block, from its count."""
    ids = tokens.ids_RK.flatten().long()
    order = torch.argsort(torch.where(ids < 0, tokens.num_slots, ids), stable=True)[: int((ids >= 0).sum())]
    expert, counts = ids[order], torch.bincount(ids[ids >= 0], minlength=tokens.num_slots)
    blocks = block_of(counts)
    starts, before = torch.cumsum(blocks, 0) - blocks, torch.cumsum(counts, 0) - counts
    target = starts[expert] + torch.arange(len(order), device=order.device) - before[expert]
    source = order // tokens.ids_RK.shape[1]
    return Sorted(target, source, tokens.weights_RK.flatten()[order], expert, counts, int(blocks.sum()))


def summed(y: Tensor, placed: Sorted, rows: int) -> Tensor:
    """Weighted sums per token, for the comparison with the exact result; outside the clock."""
    total = torch.zeros((rows, y.shape[1]), dtype=torch.float32, device=y.device)
    return total.index_add_(0, placed.source, y[placed.target].float() * placed.weights[:, None])


def spread(tokens: RowTokens, placed: Sorted) -> tuple[Tensor, Tensor]:
    """Rows and scales where the sorted assignments belong; padding is zero."""
    hidden, device = tokens.x_RH.values.shape[1], placed.target.device
    x = torch.zeros((placed.rows, hidden), dtype=torch.uint8, device=device)
    x[placed.target] = tokens.x_RH.values.view(torch.uint8)[placed.source]
    scales = torch.ones((placed.rows, hidden // 128), dtype=torch.float32, device=device)
    assert tokens.x_RH.scales is not None
    scales[placed.target] = tokens.x_RH.scales[placed.source]
    return x.view(torch.float8_e4m3fn), scales


def deep_gemm_contiguous(weights: ExpertWeights, tokens: RowTokens) -> Call:
    """Both contiguous grouped GEMMs of DeepGEMM with our activation and quantisation between them.

    Sorting, padding each expert to the library's alignment, and the sum are outside the clock: less work than ours, in
    the library's favour. Read at sgl-deep-gemm 0.1.5 (deepseek-ai/DeepGEMM).
    """
    import deep_gemm

    from moe_mk.kernels.triton.quantize_rows import activation_quantize

    alignment = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    placed = by_expert(tokens, lambda counts: (counts + alignment - 1) // alignment * alignment)
    x, scales = spread(tokens, placed)
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    experts = torch.full((placed.rows,), -1, dtype=torch.int32, device=x.device)
    experts[placed.target] = placed.expert.int()
    wide = torch.empty((placed.rows, weights.w13.shape[1]), dtype=torch.bfloat16, device=x.device)
    y = torch.empty((placed.rows, x.shape[1]), dtype=torch.bfloat16, device=x.device)

    def call() -> Tensor:
        first, second = (weights.w13.values, weights.w13.scales), (weights.w2.values, weights.w2.scales)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, scales), first, wide, experts)
        values, made = activation_quantize(wide, "silu", 128)
        made = deep_gemm.get_mn_major_tma_aligned_tensor(made)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((values, made), second, y, experts)
        return y

    call.result = lambda: summed(y, placed, len(tokens.ids_RK))  # type: ignore[attr-defined]
    return call


def deep_gemm_masked(weights: ExpertWeights, tokens: RowTokens) -> Call:
    """DeepGEMM's masked layout, for decoding: every expert has a block of the maximum number of rows."""
    import deep_gemm

    from moe_mk.kernels.triton.quantize_rows import activation_quantize

    slots = weights.num_slots
    fullest = int(torch.bincount(tokens.ids_RK[tokens.ids_RK >= 0].long(), minlength=slots).max())
    room = -(-fullest // PADDING) * PADDING
    placed = by_expert(tokens, lambda counts: torch.full_like(counts, room))
    x, scales = spread(tokens, placed)
    x, scales = x.view(slots, room, -1), scales.view(slots, room, -1)
    scales = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
    counts, expected = placed.counts.int(), max(-(-len(placed.target) // slots), 1)
    wide = torch.empty((slots, room, weights.w13.shape[1]), dtype=torch.bfloat16, device=x.device)
    y = torch.empty((slots, room, x.shape[2]), dtype=torch.bfloat16, device=x.device)

    def call() -> Tensor:
        first, second = (weights.w13.values, weights.w13.scales), (weights.w2.values, weights.w2.scales)
        deep_gemm.m_grouped_fp8_gemm_nt_masked((x, scales), first, wide, counts, expected)
        values, made = activation_quantize(wide.flatten(0, 1), "silu", 128)
        made = deep_gemm.get_mn_major_tma_aligned_tensor(made.view(slots, room, -1))
        deep_gemm.m_grouped_fp8_gemm_nt_masked((values.view(slots, room, -1), made), second, y, counts, expected)
        return y

    call.result = lambda: summed(y.flatten(0, 1), placed, len(tokens.ids_RK))  # type: ignore[attr-defined]
    return call


def vllm_kernel(folder: Path) -> Any:
    """vLLM's Triton MoE kernel, compiled from the functions of its own file; nothing else of vLLM is imported.

    Raises FileNotFoundError without the file, which `tools/gpu_carry.py --vllm` takes from a wheel.
    """
    for file in sorted(folder.glob("*.py")) if folder.is_dir() else []:
        text = file.read_text(encoding="utf-8")
        wanted = [
            ast.get_source_segment(text, node)
            for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef) and node.name in ("write_zeros_to_output", "fused_moe_kernel")
        ]
        if len(wanted) == 2:
            # ast leaves out decorators, and Triton reads the source of a kernel from a real file.
            head = "import triton\nimport triton.language as tl\n\n\n"
            body = "\n\n\n".join(f"@triton.jit\n{each}" for each in wanted)
            return _imported("vllm_fused_moe", head + body + "\n").fused_moe_kernel
    raise FileNotFoundError(f"{folder} has no file with fused_moe_kernel; run tools/gpu_carry.py --vllm WHEEL")


def _imported(name: str, source: str) -> ModuleType:
    file = Path(tempfile.mkdtemp()) / f"{name}.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def vllm_config(folder: Path, experts: int, inner: int, tokens: int) -> dict[str, int]:
    """vLLM's tuned parameters for the nearest number of tokens, or its defaults where it has no file for the shape."""
    for file in sorted(folder.glob(f"E={experts},N={inner},*.json")) if folder.is_dir() else []:
        found = {int(key): value for key, value in json.loads(file.read_text()).items() if key.isdigit()}
        return dict(found[min(found, key=lambda key: abs(key - tokens))])
    rows = 16 if tokens * 8 <= 16 * experts else 64
    return {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "GROUP_SIZE_M": 32, "num_warps": 4,
            "num_stages": 3}  # fmt: skip


def launch_arguments(names: list[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a version of the kernel by name. Raises UnsupportedError for a name that this file does not know."""
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UnsupportedError("vLLM's kernel is of another version", [f"it has the arguments {', '.join(unknown)}"])
    return {name: known[name] for name in names}


def gemm_arguments(
    a: Tensor, a_scales: Tensor, w: Any, c: Tensor, share: Tensor, lists: tuple[Tensor, Tensor, Tensor],
    config: Mapping[str, int], top_k: int, weighted: bool, compute_type: Any, valid: int,
) -> dict[str, Any]:  # fmt: skip
    """Everything that vLLM's kernel may ask for, at the versions 0.9 to 0.33."""
    order, experts, padded = lists
    b, b_scales, (_, n, k) = w.values, w.scales, w.shape
    strides = {"stride_am": a.stride(0), "stride_ak": a.stride(1), "stride_be": b.stride(0), "stride_bk": b.stride(2)}
    strides |= {"stride_bn": b.stride(1), "stride_cm": c.stride(0), "stride_cn": c.stride(1)}
    strides |= {"stride_asm": a_scales.stride(0), "stride_ask": a_scales.stride(1), "stride_bse": b_scales.stride(0)}
    strides |= {"stride_bsk": b_scales.stride(2), "stride_bsn": b_scales.stride(1), "stride_bbe": 0, "stride_bbn": 0}
    rows = config["BLOCK_SIZE_M"]
    known: dict[str, Any] = {
        "a_ptr": a, "b_ptr": b, "c_ptr": c, "b_bias_ptr": None, "a_scale_ptr": a_scales, "b_scale_ptr": b_scales,
        "topk_weights_ptr": share, "sorted_token_ids_ptr": order, "expert_ids_ptr": experts,
        "num_tokens_post_padded_ptr": padded, "N": n, "K": k, "EM": len(order), "num_valid_tokens": valid, **strides,
        "group_n": 128, "group_k": 128, "naive_block_assignment": False, "MUL_ROUTED_WEIGHT": weighted, "top_k": top_k,
        "compute_type": compute_type, "use_fp8_w8a8": True, "use_int8_w8a8": False, "use_int8_w8a16": False,
        "per_channel_quant": False, "HAS_BIAS": False, "SPLIT_K": 1,
        "SWAP_AB": rows < 64 and config["BLOCK_SIZE_N"] >= 64,
    }  # fmt: skip
    return (
        known
        | {name: value for name, value in config.items() if name.startswith(("BLOCK", "GROUP"))}
        | {"BLOCK_SIZE_K": min(config["BLOCK_SIZE_K"], 128)}
    )


def vllm_triton(weights: ExpertWeights, tokens: RowTokens) -> Call:
    """vLLM's grouped GEMM kernel with its H200 parameters; activation, quantisation and sum are ours.

    The sort is outside the clock and tokens arrive in FP8, both in its favour.
    """
    import triton.language as tl

    from moe_mk.kernels.triton.experts import combine
    from moe_mk.kernels.triton.quantize_rows import activation_quantize

    kernel = vllm_kernel(VLLM)
    (rows, top_k), (slots, wide, _) = tokens.ids_RK.shape, weights.w13.shape
    kept = int((tokens.ids_RK >= 0).sum())
    config = vllm_config(VLLM, slots, wide // 2, max(kept // 8, 1))
    block = config["BLOCK_SIZE_M"]
    lists = vllm_lists(tokens, block)
    share, valid = tokens.weights_RK.contiguous(), rows * top_k
    first = torch.empty((valid, wide), dtype=torch.bfloat16, device=share.device)
    y = torch.empty((valid, weights.w2.shape[1]), dtype=torch.bfloat16, device=share.device)
    options = {name: value for name, value in config.items() if name.startswith("num_")}
    assert tokens.x_RH.scales is not None

    def multiply(a: Tensor, a_scales: Tensor, w: Any, c: Tensor, k: int, weighted: bool) -> None:
        known = gemm_arguments(a, a_scales, w, c, share, lists, config, k, weighted, tl.bfloat16, valid)
        grid = (-(-len(lists[0]) // block) * -(-w.shape[1] // config["BLOCK_SIZE_N"]),)
        kernel[grid](**launch_arguments(kernel.arg_names, known), **options)

    def call() -> Tensor:
        multiply(tokens.x_RH.values, tokens.x_RH.scales, weights.w13, first, top_k, False)
        values, made = activation_quantize(first, "silu", 128)
        multiply(values, made, weights.w2, y, 1, True)
        return combine(y, tokens.ids_RK)

    call.result = call  # type: ignore[attr-defined]
    return call


def vllm_lists(tokens: RowTokens, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """What vLLM's moe_align_block_size returns: sorted assignments, padded per expert, and the expert of each block."""
    placed = by_expert(tokens, lambda counts: (counts + block - 1) // block * block)
    ids = tokens.ids_RK.flatten()
    kept = torch.argsort(torch.where(ids < 0, tokens.num_slots, ids), stable=True)[: len(placed.target)]
    order = torch.full((max(placed.rows, block),), ids.numel(), dtype=torch.int32, device=ids.device)
    order[placed.target] = kept.int()
    experts = torch.zeros((len(order) // block,), dtype=torch.int32, device=ids.device)
    experts[placed.target // block] = placed.expert.int()
    return order, experts, torch.tensor([placed.rows], dtype=torch.int32, device=ids.device)


def ours(case: Case, weights: ExpertWeights, tuned: Tuned[Tile] | None = None) -> tuple[TritonExperts, Calls]:
    """The backend for a case with given tiles, and what calls it."""
    sizes = (case.experts, case.shape.hidden_size, case.shape.intermediate_size)
    backend = TritonExperts(ExpertsContext(BF16, FP8_1x128, "silu", *sizes, torch.device("cuda")))
    backend.tuned, own = tuned, backend.relayout(weights)
    return backend, lambda tokens: lambda: backend.run(tokens, own).y


def built_in(tiles: tuple[tuple[float, Tile], ...]) -> Callable[[ExpertWeights, RowTokens], Call]:
    """A contender of this project, with built-in tiles."""
    return lambda weights, tokens: ours(Case(tokens.num_slots), weights, Tuned((), tiles))[1](tokens)


def measured(folder: Path, weights: ExpertWeights, tokens: RowTokens) -> Call:
    """A contender of this project, with tuned tiles."""
    case = Case(tokens.num_slots)
    sizes = (case.shape.hidden_size, case.shape.intermediate_size, case.experts)
    known = TunedCase(*sizes, FP8_128x128.name, FP8_1x128.name)
    return ours(case, weights, load_tuned(profile_here(torch.device("cuda")).name, known, folder))[1](tokens)


OURS, GLUON_NAME = "moe_mk, Triton", "moe_mk, Gluon"
PEERS: Mapping[str, Callable[[ExpertWeights, RowTokens], Call]] = {
    "vLLM, Triton": vllm_triton,
    "DeepGEMM, contiguous": deep_gemm_contiguous,
    "DeepGEMM, masked": deep_gemm_masked,
}


class Contestant:
    """One contender on one layer. folder: of tuned tiles."""

    def __init__(self, name: str, experts: int, folder: Path) -> None:
        own = {OURS: built_in(BUILT_IN), GLUON_NAME: built_in(GLUON), "moe_mk, tuned": partial(measured, folder)}
        self.build, self.case, self.device = (own | PEERS)[name], Case(experts), torch.device("cuda")
        self.weights = self.case.weights(self.device)
        self.graph: Callable[[], None] | None = None
        self.sets = 0

    def prepare(self, tokens: int) -> float:
        """Build the calls for a number of tokens; returns the error against f64."""
        self.graph = None
        torch.cuda.empty_cache()
        sets = self.case.tokens(tokens, self.device, sets=4 if tokens < 1024 else 2)
        calls = [self.build(self.weights, each) for each in sets]
        got, expected = calls[0](), exact(self.weights, sets[0])
        got = getattr(calls[0], "result", lambda: got)()
        self.graph, self.sets = captured(calls), len(sets)
        return round(relative_error(got[: len(expected)], expected), 5)

    def replay(self) -> float:
        """Microseconds of a call."""
        assert self.graph is not None
        return replayed(self.graph, self.sets)
