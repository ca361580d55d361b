"""Transports and kernels for `moe_mk` that have not run with the libraries or devices they are written for.

Installing the distribution registers them by entry points, as any plugin does; the names of its backends are those of
`pyproject.toml`. `auto` selects one that `kernel.trust` names.
"""
