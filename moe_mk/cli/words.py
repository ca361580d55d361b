"""Words that help texts list. They stand here because their homes import torch; a test compares the two."""

from __future__ import annotations

FORMATS = "fp8, bf16, fp8_channel, fp8_tensor, int8, int8_block, mxfp8, mxfp4, nvfp4"
"""`weights.checkpoint_shape.FORMATS`."""
TARGETS = "bf16, fp8, fp8_channel, int8, mxfp8, mxfp4, nvfp4"
"""`weights.convert.TARGETS`."""
STRATEGIES = "data, model, model+data, expert+data, expert+model+data"
"""`plan.layouts.Strategy`."""
