"""The conformance kit, for tests of this library and of plugins.

`certify` and `backend_conformance` judge a backend by name. Single checks, to run in a test of your own:

    from moe_mk.lab.testing.conformance import check_experts, check_transport
"""

from moe_mk.lab.testing.certify import backend_conformance, certify

__all__ = ["backend_conformance", "certify"]
