"""`mori.ops`: rows to a fixed room at the ranks of their experts, and sums back.

Everything returned is in memory of the operator and is overwritten by its next call. Rows arrive in any order, of all
sources mixed; behind `total` they are whatever was there. An id of -1 goes nowhere, ids arrive as they were sent, and
combine wants this rank's own ids, not those that arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from moe_mk.lab.testing.emulated.pending import poison
from moe_mk_contrib.emulated.mori import shmem

MAX_EXPERTS_PER_TOKEN = 9
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class EpDispatchCombineKernelType(Enum):
    """Which kernels serve."""

    IntraNode = 0
    InterNode = 1
    InterNodeV1 = 2
    InterNodeV1LL = 3
    AsyncLL = 4


@dataclass
class EpDispatchCombineConfig:
    """Sizes of an operator, equal on all ranks."""

    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: EpDispatchCombineKernelType = EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: str = "none"


class EpDispatchCombineOp:
    """One dispatch, then its combine."""

    def __init__(self, config: EpDispatchCombineConfig) -> None:
        c = self.config = config
        exchange = shmem.PROCESS.exchange
        assert exchange is not None, "shmem is not initialized"
        assert (c.rank, c.world_size) == (exchange.rank, exchange.size), "rank and world_size are not those of shmem"
        power_of_two = c.gpu_per_node > 0 and c.gpu_per_node & (c.gpu_per_node - 1) == 0
        assert power_of_two and c.world_size % c.gpu_per_node == 0, f"gpu_per_node={c.gpu_per_node}"
        assert c.kernel_type is not EpDispatchCombineKernelType.IntraNode or c.world_size <= c.gpu_per_node
        assert c.num_experts_per_token <= MAX_EXPERTS_PER_TOKEN, f"top-k {c.num_experts_per_token}"
        if c.quant_type not in ("none",):
            raise ValueError(f"invalid quant_type '{c.quant_type}', only 'none' is emulated")
        if c.max_total_recv_tokens:
            raise NotImplementedError("a cap on received tokens is not emulated")
        self._exchange = exchange
        self._draw = torch.Generator("cpu").manual_seed(c.rank)
        self._rows, self._scales = (
            self._room(c.max_token_type_size * c.hidden_dim),
            self._room(c.scale_dim * c.scale_type_size),
        )
        self._weights, self._ids = self._room(4 * c.num_experts_per_token), self._room(4 * c.num_experts_per_token)
        self._total = torch.zeros(1, dtype=torch.int32, device="cpu")
        out_bytes = c.max_num_inp_token_per_rank * c.hidden_dim * c.max_token_type_size
        self._out = torch.empty(out_bytes, dtype=torch.uint8, device="cpu")
        self._sent: tuple[Tensor, list[Tensor], Tensor, list[int]] | None = None

    def max_num_tokens_to_recv(self) -> int:
        """Rows of what dispatch returns."""
        return self.config.world_size * self.config.max_num_inp_token_per_rank

    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: Any = None,
        return_routing: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """(rows, weights, scales or None, ids, total), all with room for every token of every rank."""
        if routing is not None or return_routing:
            raise NotImplementedError("routing handles are not emulated")
        self._check_dispatch(input, weights, scales, indices)
        rank_TK = torch.div(indices, self.config.num_experts_per_rank, rounding_mode="trunc").masked_fill(
            indices < 0, -1
        )
        order_of_W = [torch.nonzero((rank_TK == rank).any(dim=1)).flatten() for rank in range(self.config.world_size)]
        sent = [input, indices, *(part for part in (weights, scales) if part is not None)]
        arrived = self._exchange.swap([[part[order] for part in sent] for order in order_of_W], "dispatch")
        counts = [len(parts[0]) for parts in arrived]
        place = torch.randperm(sum(counts), generator=self._draw, dtype=torch.int64, device="cpu")
        self._sent = (indices.clone(), order_of_W, place, counts)
        self._total.fill_(len(place))
        columns = iter(zip(*arrived, strict=True))

        def received(room: Tensor, like: Tensor) -> Tensor:
            held, rows = self._held(room, like), torch.cat(next(columns))
            if held.element_size() == 1:  # torch writes some one-byte floats by index only as bytes (2.13)
                held.view(torch.uint8)[place] = rows.view(torch.uint8)
            else:
                held[place] = rows
            return held

        x, ids = received(self._rows, input), received(self._ids, indices)
        # What was there behind the last row are ids of an earlier call: any.
        experts = self.config.num_experts_per_rank * self.config.world_size
        left = torch.randint(experts, ids[len(place) :].shape, generator=self._draw, dtype=torch.int32, device="cpu")
        ids[len(place) :] = left
        no_weights = torch.empty((0, self.config.num_experts_per_token), dtype=torch.float32, device="cpu")
        got = self._held(self._weights, no_weights) if weights is None else received(self._weights, weights)
        return x, got, None if scales is None else received(self._scales, scales), ids, self._total

    def combine(
        self,
        input: Tensor,
        weights: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: int = -1,
        call_reset: bool = False,
        *,
        routing: Any = None,
    ) -> tuple[Tensor, None]:
        """(M, H): the sums of this rank's tokens, whatever was there behind them; no weights come back."""
        if weights is not None or routing is not None:
            raise NotImplementedError("weights and routing handles in combine are not emulated")
        assert self._sent is not None, "combine without a dispatch"
        ids_TK, order_of_W, place, counts = self._sent
        if indices.shape[0] != len(ids_TK):
            raise ValueError(f"combine() indices has {len(indices)} rows but this rank dispatched {len(ids_TK)} tokens")
        # The library would reduce rows of other tokens (ROCm/mori#475).
        assert torch.equal(indices, ids_TK), "combine() wants the ids that this rank dispatched"
        assert input.is_contiguous() and input.dtype in (torch.float32, torch.bfloat16), f"input {input.dtype}"
        assert len(input) >= len(place), f"input has {len(input)} rows, {len(place)} were dispatched here"
        self._sent = None
        combined = [[part] for part in torch.split(input[place], counts)]
        total = torch.zeros((len(ids_TK), input.shape[1]), dtype=torch.float32, device=input.device)
        for order, (part,) in zip(order_of_W, self._exchange.swap(combined, "combine"), strict=True):
            total.index_add_(0, order, part.to(torch.float32))
        for room in (self._rows, self._scales, self._weights, self._ids):
            poison(room)
        used = self.config.max_num_inp_token_per_rank * input.shape[1] * input.element_size()
        out = poison(self._out[:used].view(input.dtype).view(-1, input.shape[1]))
        out[: len(total)] = total.to(input.dtype)
        return out, None

    def reset(self) -> None:
        """Forget a dispatch that will not be combined."""
        self._sent = None

    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> Tensor:
        """Not emulated: combine copies from wherever its input is."""
        raise NotImplementedError("zero-copy combine is not emulated")

    def _check_dispatch(self, x: Tensor, weights: Tensor | None, scales: Tensor | None, indices: Tensor) -> None:
        c = self.config
        assert self._sent is None, "dispatch before the combine of the last one"
        poison(self._out)  # the last result, if it has not been copied
        if x.dtype not in DTYPES:
            raise KeyError(x.dtype)
        assert x.dim() == 2 and x.is_contiguous() and indices.is_contiguous(), "dispatch reads dense rows"
        assert len(x) == len(indices) <= c.max_num_inp_token_per_rank, f"{len(x)} tokens"
        assert x.shape[1] <= c.hidden_dim and x.element_size() <= c.max_token_type_size, f"rows of {x.shape[1]}"
        assert indices.dtype == torch.int32 and indices.shape[1] == c.num_experts_per_token, f"ids {indices.dtype}"
        assert bool((indices < c.num_experts_per_rank * c.world_size).all()), "an id of no rank"
        assert weights is None or (weights.dtype == torch.float32 and weights.is_contiguous()), "weights must be f32"
        assert (scales is not None) == (c.scale_dim > 0), f"scale_dim={c.scale_dim}"
        if scales is not None:
            assert (scales.shape[1], scales.element_size()) == (c.scale_dim, c.scale_type_size), "scales"
            assert scales.is_contiguous(), "scales must be contiguous"

    def _room(self, row_bytes: int) -> Tensor:
        return torch.empty(self.max_num_tokens_to_recv() * row_bytes, dtype=torch.uint8, device="cpu")

    def _held(self, room: Tensor, like: Tensor) -> Tensor:
        """The room as rows like some tensor's, poisoned."""
        rows = self.max_num_tokens_to_recv()
        used = rows * like.shape[1] * like.element_size()
        return poison(room[:used].view(like.dtype).view(rows, like.shape[1]))
