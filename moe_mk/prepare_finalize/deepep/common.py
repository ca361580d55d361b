"""What the adapters of the DeepEP family share: rows as libraries want them, and the limits of number formats."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_mk.config.problem import Problem, Reason
from moe_mk.errors import ShapeError, UnsupportedError
from moe_mk.external.deepep_limits import SCALE_GROUP, up_to
from moe_mk.prepare_finalize.base import Volume
from moe_mk.quant.fp8_block import Fp8Block
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme, QuantTensor

SCALES_IN_WORD = 4
"""UE8M0 exponents in an element that libraries carry."""


def no_more_tokens(x_TH: Tensor, most: int) -> None:
    """Raise ShapeError for more tokens than the buffer was made for."""
    if len(x_TH) > most:
        raise ShapeError(f"{len(x_TH)} tokens exceed kernel.max_num_tokens={most}; raise it or bring fewer")


def expect_wire(wire: QuantScheme, library: str) -> None:
    """Raise UnsupportedError for rows in a format that the kernels do not know."""
    if isinstance(wire, Plain) or (isinstance(wire, Fp8Block) and wire.block == (1, SCALE_GROUP)):
        return
    carried = f"it carries bf16, and FP8 with a scale for every {SCALE_GROUP} channels"
    raise UnsupportedError(f"{library} cannot carry {wire.name} rows", [f"{carried} [kernel.wire = plain]"])


def to_library(x_TH: QuantTensor, hidden: int) -> Tensor | tuple[Tensor, Tensor]:
    """Rows padded to `hidden`, and with their scales as elements of 4 bytes where they have any."""
    missing = hidden - x_TH.shape[-1]
    if x_TH.scales is None:
        return pad(x_TH.values, (0, missing)).contiguous()
    as_bytes = pad(x_TH.values.view(torch.uint8), (0, missing)).contiguous()
    scales = x_TH.scales
    if scales.element_size() == 1:
        scales = pad(scales.view(torch.uint8), (0, -scales.shape[1] % SCALES_IN_WORD)).contiguous().view(torch.int32)
    return as_bytes.view(x_TH.values.dtype), scales.contiguous()


def from_library(rows: Tensor | tuple[Tensor, Tensor], wire: QuantScheme, hidden_size: int) -> QuantTensor:
    """The way back: rows without their padding."""
    if isinstance(rows, Tensor):
        return QuantTensor(rows[:, :hidden_size], None, wire)
    values, scales = rows
    if scales.dtype == torch.int32:
        scales = scales.contiguous().view(torch.uint8).view(torch.float8_e8m0fnu)
    return QuantTensor(values[:, :hidden_size], scales[:, : -(-hidden_size // SCALE_GROUP)].contiguous(), wire)


def padded_row(hidden_size: int, row_bytes: int) -> int:
    """Elements of a bf16 row that fills a multiple of some bytes."""
    return up_to(2 * hidden_size, row_bytes) // 2


def bf16_reasons(problem: Problem) -> list[Reason]:
    """Libraries carry and sum bf16 rows."""
    if problem.dtype == BF16:
        return []
    return [Reason("dtype", f"carries bf16 rows, this layer computes in {problem.dtype.name}", "dtype = bf16")]


def fp8_reasons(problem: Problem) -> list[Reason]:
    """FP8 rows have a scale for every 128 channels, or do not travel."""
    asked = problem.activations
    if not isinstance(asked, Fp8Block) or asked.block == (1, SCALE_GROUP) or problem.config.kernel.wire == "plain":
        return []
    return [Reason("wire", f"carries FP8 in groups of 1x{SCALE_GROUP}, not {asked.name}", "kernel.wire = plain")]


def one_row_a_rank(problem: Problem, *, collectives: int) -> Volume:
    """A row to each distinct rank and back; between nodes one to each node, which hands it on. Uniform routing."""
    tokens, ranks, nodes = problem.num_tokens, problem.ranks, problem.nodes
    if nodes == 1:
        remote = tokens * problem.ranks_per_token * (ranks - 1) / ranks
        return Volume(remote, remote, collectives)
    per_node = ranks / nodes
    far = tokens * problem.nodes_per_token * (nodes - 1) / nodes
    near = tokens * problem.ranks_per_token * (per_node - 1) / per_node
    return Volume(far + near, far + near, collectives, far_rows=far, pipelined=True)
