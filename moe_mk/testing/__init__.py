"""What tests of this library and of its plugins share."""

from moe_mk.testing.certify import backend_conformance, certify

__all__ = ["backend_conformance", "certify"]
