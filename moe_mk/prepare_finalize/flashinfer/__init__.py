"""Transports of FlashInfer over NVLink, one-sided and two-sided."""
