"""Transfers between hosts: a producer packs commands, a CPU proxy executes them over TCP or NIXL."""

from moe_mk.comm.network import nixl as nixl  # registers its link
from moe_mk.comm.network.command import CommandRing, Op, TransferCommand
from moe_mk.comm.network.link import LINKS
from moe_mk.comm.network.proxy import Proxy, ProxySettings

__all__ = ["LINKS", "CommandRing", "Op", "Proxy", "ProxySettings", "TransferCommand"]
