"""Doors to other projects. Each file speaks one host's language; nothing here is imported until a host asks."""
