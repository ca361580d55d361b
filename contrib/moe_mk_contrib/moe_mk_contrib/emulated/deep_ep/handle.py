"""What a V2 dispatch remembers for its combine. Users may read the counts; the rest is the library's own."""

from __future__ import annotations

from torch import Tensor


class EPHandle:
    """One dispatch of an elastic buffer."""

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        num_unaligned_recv_tokens_per_expert: Tensor | None,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: Tensor | None,
        channel_linked_list: Tensor | None,
    ) -> None:
        assert topk_idx is not None
        self.do_expand, self.num_experts, self.expert_alignment = do_expand, num_experts, expert_alignment
        self.num_max_tokens_per_rank, self.num_sms, self.topk_idx = num_max_tokens_per_rank, num_sms, topk_idx
        self.num_recv_tokens, self.num_expanded_tokens = num_recv_tokens, num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata, self.dst_buffer_slot_idx = recv_src_metadata, dst_buffer_slot_idx
        self.token_metadata_at_forward, self.channel_linked_list = token_metadata_at_forward, channel_linked_list
