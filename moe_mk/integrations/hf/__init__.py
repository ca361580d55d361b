"""What `moe_mk.integrations.transformers` is made of: one file a question."""
