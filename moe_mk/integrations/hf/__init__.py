"""Parts of `moe_mk.integrations.transformers`."""
