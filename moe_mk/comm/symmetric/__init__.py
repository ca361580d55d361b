"""Symmetric memory: windows of one shape on every rank, which every rank reads and writes."""
