"""The adapters against the Python of the real library: calls, arguments, handles and defaults are its own. The wheel is
read from a folder: `pip download --no-deps --dest build/wheels sgl-deep-ep`. Its native module needs a GPU and is
replaced; nothing of it is kept."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from moe_mk.comm.threads import ThreadCommunicator
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.lab.testing.emulated import deep_ep as emulated
from moe_mk.prepare_finalize.deepep import high_throughput, low_latency
from moe_mk.quant import BF16, FP8_1x128, FP8_1x128_UE8M0
from moe_mk.quant.tensor import QuantScheme
from tests.support.native_deep_ep import Group, load_wheel, unload_wheel

WHEELS = sorted((Path(__file__).parents[3] / "build" / "wheels").glob("sgl_deep_ep-*.whl"))
pytestmark = pytest.mark.skipif(not WHEELS, reason="no wheel of sgl-deep-ep in build/wheels (see the file's head)")
ONLY_THERE = {"x_global_scale", "use_nvfp4", "overlap", "src_signals", "src_signal_expect_value", "use_fabric"}
"""Arguments that SGLang's build adds."""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    yield load_wheel(WHEELS[-1], tmp_path_factory.mktemp("wheel"))
    unload_wheel()


@pytest.fixture
def in_use(real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (low_latency, high_throughput):
        monkeypatch.setattr(module, "load", lambda name, allow_emulated: real)
    monkeypatch.setattr(ThreadCommunicator, "library_group", lambda comm: Group(comm))


@pytest.mark.usefixtures("in_use")
@pytest.mark.parametrize("wire", [BF16, FP8_1x128, FP8_1x128_UE8M0], ids=lambda wire: wire.name)
@pytest.mark.parametrize("name", ["deepep_ll", "deepep_ht"])
def test_adapters_carry_every_hostile_case_through_the_real_python(name: str, wire: QuantScheme) -> None:
    assert check_transport(name, num_ranks=2, wire=wire, dtype=BF16) >= 12


def test_the_emulation_has_the_signatures_of_the_real_library(real: SimpleNamespace) -> None:
    expect_signatures(emulated.Buffer, real.Buffer)


def expect_signatures(ours: type, theirs: type) -> None:
    for method in [m for m in vars(ours) if not m.startswith("_") or m == "__init__"]:
        if callable(getattr(ours, method)):
            mine, its = (inspect.signature(getattr(c, method)).parameters for c in (ours, theirs))
            wanted = {key: p.default for key, p in its.items() if key not in ONLY_THERE}
            assert {key: p.default for key, p in mine.items()} == wanted, method
