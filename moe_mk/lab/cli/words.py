"""Words listed in help texts, copied because the modules that define them import torch; a test compares both."""

from __future__ import annotations

FORMATS = (
    "fp8, bf16, fp8_channel, fp8_tensor, int8, int8_block, mxfp8, mxfp4, nvfp4, gptq, awq, int4_g32, int4_g64, "
    "int4_g128, int4_row, int4_g32_zp, int4_g64_zp, int4_g128_zp, int4_row_zp, int8_g32, int8_g64, int8_g128, "
    "int8_row, int8_g32_zp, int8_g64_zp, int8_g128_zp, int8_row_zp, q4_0, q4_1, q5_0, q5_1, q8_0, "
    "iq4_nl, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, q4_k_m, mxfp4_gguf"
)
"""`lab.checkpoints.checkpoint_shape.FORMATS`."""
TARGETS = (
    "bf16, fp8, fp8_channel, int8, mxfp8, mxfp4, nvfp4, gptq, awq, int4_g32, int4_g64, int4_g128, int4_row, "
    "int4_g32_zp, int4_g64_zp, int4_g128_zp, int4_row_zp, int8_g32, int8_g64, int8_g128, int8_row, int8_g32_zp, "
    "int8_g64_zp, int8_g128_zp, int8_row_zp, q4_0, q4_1, q5_0, q5_1, q8_0, "
    "iq4_nl, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, q4_k_m, mxfp4_gguf"
)
"""`lab.checkpoints.convert.TARGETS`."""
EXPERTS = "cpu_native, deep_gemm, flashinfer_cutlass, flashinfer_trtllm, reference, torch_cpu, triton"
"""`experts.base.EXPERTS`."""
TRANSPORTS = (
    "all_gather, all_to_all, all_to_all_p2p, all_to_all_v, deepep_ht, deepep_ll, uccl_ep, uccl_ep_ht, "
    "nvlink_one_sided, nvlink_two_sided, hierarchical, no_ep, one_sided, one_sided_network, one_sided_gpu, replicated"
)
"""`prepare_finalize.base.PREPARE_FINALIZE`."""
WIRES = "bf16, fp8, fp8_ue8m0, mxfp8, nvfp4, int8"
"""`plan.exchange.WIRES`."""
TIMED = "all_to_all, all_to_all_p2p, all_to_all_v, all_gather, hierarchical, one_sided_network"
"""`testing.virtual_time.TRANSPORTS`."""
SIMULATED = "nvlink, ibgda, ibrc, efa, ascend_hccs, ascend_rdma"
"""`plan.timeline.LINKS`."""
