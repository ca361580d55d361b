"""The adapter against the Python of the real NCCL EP: classes, fields, descriptors and arguments are its own. The wheel
is read where it is stored: `pip download --no-deps --dest build/wheels nccl-extensions`. Below its Python the emulation
takes the place of the bindings, and reads memory at the addresses that descriptors have."""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from moe_mk_contrib import nccl_ep as adapter
from moe_mk_contrib.emulated.nccl import ep as emulated

from contrib.moe_mk_contrib.tests.native_nccl_ep import load_wheel, unload_wheel
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.quant import BF16, FP8_1x128
from moe_mk.quant.tensor import QuantScheme

WHEELS = sorted((Path(__file__).parents[3] / "build" / "wheels").glob("nccl_extensions-*.whl"))
pytestmark = pytest.mark.skipif(not WHEELS, reason="no wheel of nccl-extensions in build/wheels (see the file's head)")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    before = dict(os.environ)  # the library names its headers there when it is imported
    yield load_wheel(WHEELS[-1], tmp_path_factory.mktemp("wheel"))
    unload_wheel()
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("wire", [BF16, FP8_1x128], ids=lambda wire: wire.name)
@pytest.mark.parametrize("name", ["nccl_ep", "nccl_ep_ht"])
def test_the_adapter_passes_every_hostile_case_through_the_real_python(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, wire: QuantScheme
) -> None:
    of = {"nccl.ep": real.ep, "nccl.ep.interop.torch": real.interop}
    monkeypatch.setattr(adapter, "load", lambda name, allow_emulated: of[name])
    assert check_transport(name, num_ranks=2, wire=wire, dtype=BF16) >= 12


@pytest.mark.parametrize("name", emulated.__all__)
def test_the_emulation_has_the_signatures_of_the_real_library(real: SimpleNamespace, name: str) -> None:
    ours, theirs = getattr(emulated, name), getattr(real.ep, name)
    if hasattr(ours, "__members__"):
        assert {key: int(value) for key, value in ours.__members__.items()} == {
            key: int(value) for key, value in theirs.__members__.items()
        }
        return
    for method in ["__init__", *(m for m in vars(ours) if not m.startswith("_") and callable(getattr(ours, m)))]:
        mine, its = (
            {key: (p.kind, repr(p.default)) for key, p in inspect.signature(getattr(c, method)).parameters.items()}
            for c in (ours, theirs)
        )
        assert mine == its, method
