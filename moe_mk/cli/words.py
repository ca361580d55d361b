"""Words listed in help texts, copied because the modules that define them import torch; a test compares both."""

from __future__ import annotations

FORMATS = "fp8, bf16, fp8_channel, fp8_tensor, int8, int8_block, mxfp8, mxfp4, nvfp4"
"""`weights.checkpoint_shape.FORMATS`."""
TARGETS = "bf16, fp8, fp8_channel, int8, mxfp8, mxfp4, nvfp4"
"""`weights.convert.TARGETS`."""
STRATEGIES = "data, model, model+data, expert+data, expert+model+data"
"""`plan.layouts.Strategy`."""
WIRES = "bf16, fp8, fp8_ue8m0, mxfp8, nvfp4, int8"
"""`plan.exchange.WIRES`."""
