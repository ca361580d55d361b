"""`flashinfer.moe_ep`, as far as its NVLink communication goes: one object with its workspace for each group."""

from moe_mk_contrib.emulated.flashinfer_moe_ep.communication import (
    BootstrapConfig,
    MoEEpCommParams,
    MoEEpCommunication,
    MoEEpDispatchResult,
    create_communication,
)
from moe_mk_contrib.emulated.flashinfer_moe_ep.nvlink import (
    CakeAlltoAll,
    CakeAlltoAllConfig,
    NVLinkOneSidedAlltoAll,
    NVLinkOneSidedConfig,
    NVLinkTwoSidedAlltoAll,
    NVLinkTwoSidedConfig,
)

__all__ = [
    "BootstrapConfig", "CakeAlltoAll", "CakeAlltoAllConfig", "MoEEpCommParams", "MoEEpCommunication",
    "MoEEpDispatchResult", "NVLinkOneSidedAlltoAll", "NVLinkOneSidedConfig", "NVLinkTwoSidedAlltoAll",
    "NVLinkTwoSidedConfig", "create_communication",
]  # fmt: skip
