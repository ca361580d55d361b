"""Transports of DeepEP and of the libraries with its interface: high throughput, low latency, V2, NIXL, UCCL."""

from moe_mk.prepare_finalize.deepep import high_throughput, low_latency, nixl, v2

__all__ = ["high_throughput", "low_latency", "nixl", "v2"]
