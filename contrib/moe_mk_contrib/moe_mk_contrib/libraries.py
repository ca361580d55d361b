"""The libraries of these transports, for `moe-mk doctor` and for the error where one is missing."""

from moe_mk.external.library import Library

EMULATED = "moe_mk_contrib.emulated"

MORI = Library("mori", "MoRI transport on AMD", "build it from its repository", ("mori",), emulation=f"{EMULATED}.mori")
NCCL = Library(
    "nccl",
    "NCCL EP transports",
    "pip install 'nccl-extensions[cu13]'",
    ("nccl-extensions",),
    part="ep",
    emulation=f"{EMULATED}.nccl",
)
NIXL_EP = Library(
    "nixl_ep",
    "NIXL EP transport",
    "build it from nixl, examples/device/ep",
    ("nixl_ep", "nixl"),
    emulation=f"{EMULATED}.nixl_ep",
)
