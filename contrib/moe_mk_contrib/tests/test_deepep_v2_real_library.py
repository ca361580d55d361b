"""The adapters of DeepEP V2 against the Python of the real library, as the core's are in `deepep/test_real_library`."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from moe_mk_contrib import deepep_v2
from moe_mk_contrib.emulated import deep_ep as emulated

from contrib.moe_mk_contrib.tests.native_deep_ep import load_wheel
from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.quant import BF16, FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.tensor import QuantScheme
from tests.prepare_finalize.deepep.test_real_library import WHEELS, expect_signatures
from tests.support.native_deep_ep import Group, unload_wheel

pytestmark = pytest.mark.skipif(not WHEELS, reason="no wheel of sgl-deep-ep in build/wheels (see the core's test)")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    yield load_wheel(WHEELS[-1], tmp_path_factory.mktemp("wheel"))
    unload_wheel()


@pytest.mark.parametrize("wire", [BF16, FP8_1x128, FP8_1x128_UE8M0], ids=lambda wire: wire.name)
@pytest.mark.parametrize("name", ["deepep_v2", "deepep_v2_grouped"])
def test_adapters_carry_every_hostile_case_through_the_real_python(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, wire: QuantScheme
) -> None:
    monkeypatch.setattr(deepep_v2, "load", lambda name, allow_emulated, emulation: real)
    monkeypatch.setattr(ThreadCommunicator, "library_group", lambda comm: Group(comm))
    assert check_transport(name, num_ranks=2, wire=wire, dtype=BF16) >= 12


def test_the_emulation_has_the_signatures_of_the_real_library(real: SimpleNamespace) -> None:
    expect_signatures(emulated.ElasticBuffer, real.ElasticBuffer)
