"""The moe_ep adapters against the Python of the real library: its checks, arguments and results are its own. The wheel
is read where it is stored: `pip download --no-deps --dest build/wheels flashinfer-python`. Its kernels need GPUs; below
`flashinfer.moe_ep` the emulation of `flashinfer.comm` takes their place. Nothing of the wheel is kept."""

import importlib
import inspect
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from moe_mk_contrib import moe_ep as adapter
from moe_mk_contrib.emulated import flashinfer_moe_ep as emulated

from moe_mk.lab.testing.conformance import check_transport
from moe_mk.lab.testing.emulated.flashinfer.comm import (
    mapping,
    mnnvl,
    moe_alltoall,
    trtllm_alltoall,
    trtllm_moe_alltoall,
)
from moe_mk.quant import BF16, MXFP8, FP8_1x128
from moe_mk.quant.tensor import QuantScheme

WHEELS = sorted((Path(__file__).parents[3] / "build" / "wheels").glob("flashinfer_python-0.[7-9]*.whl"))
pytestmark = pytest.mark.skipif(
    not WHEELS, reason="no wheel of flashinfer-python in build/wheels (see the file's head)"
)
SPLIT = "flashinfer.moe_ep.backends.split.comm"
KINDS = ("nvlink_one_sided", "cake", "nvlink_two_sided")
PACKAGES = [
    "flashinfer", "flashinfer.moe_ep", "flashinfer.moe_ep.core", "flashinfer.moe_ep.core.comm",
    "flashinfer.moe_ep.backends", "flashinfer.moe_ep.backends.split", SPLIT, *(f"{SPLIT}.{kind}" for kind in KINDS),
]  # fmt: skip
BELOW: dict[str, dict[str, Any]] = {
    "trtllm_moe_alltoall": {
        "MoeAlltoAll": moe_alltoall.MoeAlltoAll,
        "moe_a2a_get_workspace_size_per_rank": trtllm_moe_alltoall.moe_a2a_get_workspace_size_per_rank,
    },
    "trtllm_alltoall": {"MnnvlMoe": trtllm_alltoall.MnnvlMoe},
    "mnnvl": {"MnnvlMemory": mnnvl.MnnvlMemory, "MnnvlConfig": mnnvl.MnnvlConfig},
    "comm_backend": {"TorchDistBackend": mnnvl.TorchDistBackend},
    "mapping": {"Mapping": mapping.Mapping},
}
"""Modules of `flashinfer.comm` that the real Python imports."""


def module(name: str, path: Path | None = None, **content: Any) -> None:
    """A package of the wheel without what its `__init__` imports, or a module of the emulation."""
    made = ModuleType(name)
    made.__path__ = [] if path is None else [str(path)]
    made.__dict__.update(content)
    sys.modules[name] = made


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    root = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(WHEELS[-1]) as wheel:
        wheel.extractall(root, [name for name in wheel.namelist() if name.startswith("flashinfer/moe_ep/")])
    before = {name: found for name, found in sys.modules.items() if name.split(".")[0] == "flashinfer"}
    for name in PACKAGES:
        module(name, root.joinpath(*name.split(".")))
    module("flashinfer.comm")
    for name, content in BELOW.items():
        module(f"flashinfer.comm.{name}", **content)
    found = SimpleNamespace()
    files = [f"{SPLIT}.{kind}.{file}" for kind in KINDS for file in ("config", "communication")]
    for name in [
        "flashinfer.moe_ep.core.comm.communication",
        "flashinfer.moe_ep.config",
        f"{SPLIT}.nvlink_common",
        *files,
    ]:
        loaded = importlib.import_module(name)
        if hasattr(loaded, "nvlink_platform_supported"):
            loaded.nvlink_platform_supported = lambda: True  # there are no NVLinks here
        found.__dict__.update({key: value for key, value in vars(loaded).items() if not key.startswith("_")})
    found.CakeAlltoAll.is_platform_supported = classmethod(lambda cls: True)
    yield found
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("wire", [BF16, FP8_1x128, MXFP8], ids=lambda wire: wire.name)
@pytest.mark.parametrize("name", ["moe_ep_one_sided", "moe_ep_cake", "moe_ep_two_sided"])
def test_adapters_pass_every_hostile_case_through_the_real_python(
    real: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, name: str, wire: QuantScheme
) -> None:
    monkeypatch.setattr(adapter, "load", lambda name, allow_emulated, emulation: real)
    assert real.NVLinkOneSidedAlltoAll.__module__.startswith(SPLIT)
    assert check_transport(name, num_ranks=2, wire=wire, dtype=BF16) >= 12


@pytest.mark.parametrize("name", emulated.__all__)
def test_the_emulation_has_the_signatures_of_the_real_library(real: SimpleNamespace, name: str) -> None:
    ours, theirs = getattr(emulated, name), getattr(real, name)
    methods = ["__init__", *(m for m in vars(ours) if not m.startswith("_") and callable(getattr(ours, m)))]
    for method in methods if inspect.isclass(ours) else [""]:
        mine, its = (
            {key: p.default for key, p in inspect.signature(getattr(c, method) if method else c).parameters.items()}
            for c in (ours, theirs)
        )
        assert all(
            mine[key] == its[key] for key in mine if type(mine[key]).__name__ not in ("_HAS_DEFAULT_FACTORY_CLASS",)
        )
