"""The compiled kernels, once a session; another copy emulates AMX's tile instructions."""

import shutil

import pytest
import torch

from moe_mk.kernels.native.build import processor_has
from moe_mk.kernels.native.library import Isa, Native
from moe_mk.kernels.native.selfcheck import load

IsaHere = tuple[Native, Isa]


@pytest.fixture(scope="session", autouse=True)
def compiler() -> None:
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        pytest.skip("no C++ compiler on this machine")


@pytest.fixture(scope="session")
def native(compiler: None) -> Native:
    return sound(load())


@pytest.fixture(scope="session")
def emulated(compiler: None) -> Native:
    """AMX with emulated tiles; the code around them is that of a processor with AMX, where this one can run it."""
    return sound(load(emulate_amx=True, tiles_only=decodes_as_amx()))


@pytest.fixture(scope="session")
def all_emulated(compiler: None) -> Native:
    """AMX with emulated tiles, AVX-512 and GFNI."""
    return sound(load(emulate_amx=True))


def decodes_as_amx() -> bool:
    """Whether this processor has what the AMX kernels use next to the tiles."""
    return processor_has("gfni", "avx512_bf16", "avx512vbmi", "avx512_vnni")


def sound(native: Native) -> Native:
    """What is loaded, if its instruction sets agree: one that gives wrong answers is no reason to skip its tests."""
    wrong = {isa.name: why for isa, why in native.refused.items() if "self-check" in why}
    assert not wrong, wrong
    return native


@pytest.fixture(params=[*Isa, "AMX emulated"], ids=lambda p: p.name if isinstance(p, Isa) else "AMX_EMULATED")
def isa_here(request: pytest.FixtureRequest) -> IsaHere:
    """Every instruction set of this machine, and AMX in software everywhere."""
    if isinstance(request.param, Isa):
        native = request.getfixturevalue("native")
        if request.param not in native.isas:
            pytest.skip(f"{request.param.name}: {native.refused[request.param]}")
        return native, request.param
    emulated = request.getfixturevalue("emulated")
    if Isa.AMX_BF16 not in emulated.isas:
        pytest.skip(f"emulated AMX: {emulated.refused[Isa.AMX_BF16]}")
    return emulated, Isa.AMX_BF16


@pytest.fixture(scope="session")
def isas(native: Native, emulated: Native) -> list[IsaHere]:
    """The same as a list, for tests whose reference is dearer than what it is compared with."""
    imitated = [(emulated, Isa.AMX_BF16)] if Isa.AMX_BF16 in emulated.isas else []
    return [*((native, isa) for isa in native.isas), *imitated]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator("cpu").manual_seed(20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test that asks for emulated tiles compiles every source, in minutes on busy cores."""
    for item in items:
        if {"emulated", "all_emulated", "isas", "isa_here"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.timeout(600))
