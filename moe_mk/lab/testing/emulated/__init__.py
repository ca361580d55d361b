"""Emulations of communication libraries: each imitates a library's own API over the ranks' group, on any device.

They let the real adapters run where the libraries cannot: same signatures, same refusals, same shapes and strides, and
everything a library leaves uninitialised is poisoned. Slow on purpose; an oracle chooses them only where
`kernel.allow_emulated` states so.
"""
