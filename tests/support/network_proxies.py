"""Proxies with threads and sockets in one process, a rank each."""

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moe_mk.comm.network.events import OnStep
from moe_mk.comm.network.exchange import no_step
from moe_mk.comm.network.proxy import Proxy, ProxySettings
from moe_mk.comm.network.tcp import LOOPBACK, listen
from moe_mk.trace.clock import now
from tests.support.network_ends import FLAG_BYTES, links_of, own_window

Steps = dict[int, OnStep]


@contextmanager
def proxies(
    ranks: int, settings: ProxySettings | None = None, steps: Steps | None = None, data_bytes: int = 1 << 20,
    resume_s: float = 30.0, link: str = "",
) -> Iterator[list[Proxy]]:  # fmt: skip
    """Every rank connected to every other; all are ended on the way out."""
    made: list[Proxy] = []
    for rank in range(ranks):
        window = own_window(data_bytes)
        made.append(
            Proxy(
                rank, [peer for peer in range(ranks) if peer != rank], window, listen(LOOPBACK), now,
                settings or ProxySettings(), links_of(window, link), (steps or {}).get(rank, no_step), resume_s,
            )
        )  # fmt: skip
    addresses = {proxy.rank: proxy.address for proxy in made}
    metadata = {proxy.rank: proxy.links.metadata for proxy in made}
    try:
        for proxy in made:
            proxy.links.connect({rank: metadata[rank] for rank in metadata if rank != proxy.rank})
        for proxy in made:
            proxy.start(addresses)
        for proxy in made:
            proxy.connect()
        wait_for(lambda: not any(proxy.missing or proxy.links.unreached for proxy in made))
        yield made
    finally:
        for proxy in made:
            proxy.close(0.0)


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Fails if it does not become true in time."""
    until = now() + seconds
    while not condition():
        assert now() < until, "waited in vain"
        time.sleep(0.001)


def cut(proxy: Proxy, channel: int, peer: int) -> bool:
    """End the connection of a link under both ranks, as a network may; whether there was one."""
    link = proxy.channels[channel].streams[peer].link
    if link is None or link.fileno() < 0:
        return False
    try:
        with socket.socket(fileno=os.dup(link.fileno())) as connected:
            connected.shutdown(socket.SHUT_RDWR)
    except OSError:  # it has ended meanwhile
        return False
    return True


def flag_of(proxy: Proxy, flag: int) -> int:
    return proxy.window.words.load(flag * FLAG_BYTES)
