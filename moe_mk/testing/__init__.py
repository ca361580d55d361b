"""The conformance kit, for tests of this library and of plugins."""

from moe_mk.testing.certify import backend_conformance, certify

__all__ = ["backend_conformance", "certify"]
