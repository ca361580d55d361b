"""Modules behind `moe_mk.integrations.transformers`, one for each question."""
