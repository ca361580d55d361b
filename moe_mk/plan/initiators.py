"""Who posts work to the network card, a proxy thread on the CPU (IBRC) or the GPU itself (IBGDA), and what it costs.

    t = alpha + sigma log2(nodes) + max(near copies, far messages)
    near    nu for each row to a rank of the own node: SMs copy it
    far     gamma a message from the GPU, many queue pairs at once;
            tau sqrt(remote nodes) a message through the proxy, one after the other: the serial term

Semi-empirical. The constants are a least-squares fit to the 16 dispatch times that the README of pplx-kernels gives for
1 and 128 tokens a GPU, top-8, on 16 to 128 GPUs. Ratios of the two come out within 19 %. Outside that range, and where
messages are much longer than a row, it says nothing: there the proxy can win, as it does by 5 % in the combine of 128
tokens on 16 GPUs (633 against 668 us).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, sqrt
from typing import Literal

from moe_mk.errors import ConfigError

Initiator = Literal["cpu_proxy", "gpu"]


@dataclass(frozen=True)
class Constants:
    """Microseconds."""

    alpha: float
    """Of a call between two nodes."""
    sigma: float
    """Of each doubling of nodes."""
    message: float
    """Of a message to another node; of the proxy, times the root of the remote nodes."""


FITTED: dict[Initiator, Constants] = {
    "cpu_proxy": Constants(alpha=208.0, sigma=85.0, message=0.45),
    "gpu": Constants(alpha=96.0, sigma=7.8, message=0.20),
}
NEAR_US = 1.0
"""A row to a rank of the own node."""


def dispatch_us(initiator: Initiator, tokens: int, ranks: int, *, top_k: int = 8, ranks_per_node: int = 8) -> float:
    """One dispatch of so many tokens a rank; raises ConfigError unless there are two nodes or more, all full."""
    if tokens < 0 or ranks < 2 * ranks_per_node or ranks % ranks_per_node:
        least = f"give tokens of at least 0 and two full nodes of {ranks_per_node} or more"
        raise ConfigError(f"tokens={tokens} on {ranks} ranks: {least}")
    nodes, messages, fitted = ranks // ranks_per_node, tokens * top_k, FITTED[initiator]
    near = messages / nodes
    serial = sqrt(nodes - 1) if initiator == "cpu_proxy" else 1.0
    far = (messages - near) * fitted.message * serial
    return fitted.alpha + fitted.sigma * log2(nodes) + max(near * NEAR_US, far)


def proxy_over_gpu(tokens: int, ranks: int, *, top_k: int = 8) -> float:
    """How many times longer a dispatch takes through the proxy."""
    return dispatch_us("cpu_proxy", tokens, ranks, top_k=top_k) / dispatch_us("gpu", tokens, ranks, top_k=top_k)
