"""DeepEP's `Buffer` over the network engine of this library, for CPU processes.

A script written for DeepEP runs without a GPU if it takes `Buffer` from here:

    from moe_mk.lab.deepep_buffer import Buffer        # from deep_ep import Buffer

    buffer = Buffer(group, low_latency_mode=True)
    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(x, topk_idx, M, E, return_recv_hook=True)
    hook()
    y, event, hook = buffer.low_latency_combine(experts(recv_x), topk_idx, topk_weights, handle)

Rows and flags are sent by the transport `one_sided_network`: puts that the CPU proxy of each rank executes over TCP.
Names, argument order, shapes and dtypes are those of `deep_ep.Buffer` (DeepEP V1, source of 2026-07). Differences:

- Received rows are deterministic in both modes: by source rank, then by token. Padding of blocks is zero.
- Windows are opened by the first call of each shape, on all ranks together, and `num_nvl_bytes` and `num_rdma_bytes`
  have no effect; `BufferSettings.max_num_tokens` limits the tokens of a normal call.
- There are no streams: a call without a hook is complete when it returns, and events are done.
- One combine per dispatch: repeat `dispatch(x, handle=handle)` before the next `combine` of the same handle.
- Handles are opaque. Arguments without a counterpart here raise UnsupportedError before anything is sent.
"""

from moe_mk.lab.deepep_buffer.buffer import Buffer
from moe_mk.lab.deepep_buffer.calls import (
    BufferSettings,
    Config,
    DispatchHandle,
    EventOverlap,
    LowLatencyHandle,
)

__all__ = ["Buffer", "BufferSettings", "Config", "DispatchHandle", "EventOverlap", "LowLatencyHandle"]
