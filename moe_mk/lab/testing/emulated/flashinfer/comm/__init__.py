"""`flashinfer.comm`: one-sided all-to-all in a shared workspace, two-sided all-to-all through FIFOs."""

import moe_mk.lab.testing.emulated.flashinfer.comm.trtllm_alltoall as trtllm_alltoall
from moe_mk.lab.testing.emulated.flashinfer.comm import mnnvl, trtllm_moe_alltoall
from moe_mk.lab.testing.emulated.flashinfer.comm.mapping import Mapping
from moe_mk.lab.testing.emulated.flashinfer.comm.moe_alltoall import MoeAlltoAll

__all__ = ["Mapping", "MoeAlltoAll", "mnnvl", "trtllm_alltoall", "trtllm_moe_alltoall"]
