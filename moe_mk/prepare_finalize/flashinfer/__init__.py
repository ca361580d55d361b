"""Transports of FlashInfer over NVLink, one-sided and two-sided, and those of its moe_ep."""
