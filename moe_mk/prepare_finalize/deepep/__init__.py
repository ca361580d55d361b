"""Transports of DeepEP and of the libraries with its interface: low latency, high throughput, V2, NIXL, UCCL."""

from moe_mk.prepare_finalize.deepep import nixl, v2

__all__ = ["nixl", "v2"]
