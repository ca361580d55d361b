"""Transports of DeepEP and of the libraries with its interface: high throughput, low latency, V2, NIXL, UCCL."""
