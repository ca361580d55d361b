"""Transfers between hosts without a library: a producer packs commands, a CPU proxy carries them out over TCP."""

from moe_mk.comm.network.command import CommandRing, Op, TransferCommand
from moe_mk.comm.network.proxy import Proxy, ProxySettings

__all__ = ["CommandRing", "Op", "Proxy", "ProxySettings", "TransferCommand"]
