"""Chunk sizes of the high-throughput kernels, and the buffers that follow from them."""

from __future__ import annotations

from moe_mk.external.deepep_limits import HIGH_THROUGHPUT_CHUNKS, NVLINK_PEERS, nvlink_bytes, rdma_bytes
from moe_mk.lab.testing.emulated.events import host_assert


class Config:
    """Multiprocessors, and tokens that queues send and hold."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        host_assert(num_sms >= 0, "num_sms >= 0")
        host_assert(num_max_nvl_chunked_send_tokens < num_max_nvl_chunked_recv_tokens, "nvl send < nvl recv")
        host_assert(num_max_rdma_chunked_send_tokens <= num_max_rdma_chunked_recv_tokens // 2, "rdma send <= recv / 2")
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = num_max_rdma_chunked_send_tokens
        self.num_max_rdma_chunked_recv_tokens = num_max_rdma_chunked_recv_tokens

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the NVLink buffer."""
        self._check_ranks(num_ranks)
        return nvlink_bytes(self.num_max_nvl_chunked_recv_tokens, hidden_bytes, num_ranks, self.num_sms)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of the RDMA buffer; 0 inside a node."""
        self._check_ranks(num_ranks)
        return rdma_bytes(self.num_max_rdma_chunked_recv_tokens, hidden_bytes, num_ranks, self.num_sms)

    def _check_ranks(self, num_ranks: int) -> None:
        host_assert(num_ranks < NVLINK_PEERS or num_ranks % NVLINK_PEERS == 0, "num_ranks < 8 or num_ranks % 8 == 0")


def tuned(num_ranks: int, num_sms: int, *, combine: bool) -> Config:
    """The recommended config of some number of ranks."""
    assert num_ranks in HIGH_THROUGHPUT_CHUNKS, f"Unsupported number of EP ranks: {num_ranks}"
    return Config(num_sms, *HIGH_THROUGHPUT_CHUNKS[num_ranks][combine])
