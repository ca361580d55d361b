"""Where UCCL-EP differs from deep_ep."""

import pytest

from moe_mk.lab.testing.emulated import uccl
from tests.testing.emulated.deepep_worlds import differences


def test_uccl_has_the_calls_of_v1_and_neither_masks_nor_v2() -> None:
    wrong, absent = differences("uccl")
    assert wrong == []
    assert absent == {
        "Buffer.reset_rdma_buffer", "Buffer.connect_atomic_buffer", "Buffer.get_comm_stream",
        "Buffer.get_local_buffer_tensor", "Buffer.internode_dispatch", "Buffer.internode_combine",
    }  # fmt: skip
    assert not hasattr(uccl, "topk_idx_t") and not hasattr(uccl, "ElasticBuffer")
    assert not hasattr(uccl.Buffer, "low_latency_update_mask_buffer")
    with pytest.raises(TypeError, match="enable_shrink"):
        uccl.Buffer(None, enable_shrink=True)  # type: ignore[call-arg]
