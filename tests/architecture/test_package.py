"""The wheel and the sdist hold what an installation needs, and nothing that was built."""

from __future__ import annotations

import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]


def files_below(folder: str) -> set[str]:
    """Source files below a folder of the repository, relative to it."""
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so", ".o"))
    return {path.relative_to(ROOT / folder).as_posix() for path in found}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Without compiled kernels: they have a test of their own, tests/kernels/native/test_prebuilt.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HATCH_BUILD_NO_HOOKS", "true")
        built = next(
            iter(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"]))
        )
    return zipfile.ZipFile(built)


def test_the_wheel_holds_the_package_and_its_configurations(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    expected = {f"moe_mk/{name}" for name in files_below("moe_mk")} | {
        f"moe_mk/configs/{name}" for name in files_below("configs")
    }
    assert {"moe_mk/py.typed", "moe_mk/errors.py", "moe_mk/configs/models/deepseek_v3.yaml"} <= expected
    assert {name for name in names if ".dist-info/" not in name} == expected


def test_the_wheel_brings_a_command_a_licence_and_its_requirements(wheel: zipfile.ZipFile) -> None:
    info = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
    assert "moe-mk = moe_mk.cli:app" in wheel.read(f"{info}/entry_points.txt").decode()
    assert b"Apache License" in wheel.read(f"{info}/licenses/LICENSE")
    metadata = message_from_string(wheel.read(f"{info}/METADATA").decode())
    always = [need for need in metadata.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert len(always) == 8
    assert any(need.startswith("torch<2.14") for need in always)


def test_the_sdist_can_be_built_and_tested(tmp_path: Path) -> None:
    with tarfile.open(
        next(iter(SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])))
    ) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames()}
    expected = {"pyproject.toml", "constraints.txt", "hatch_build.py", "Makefile", "LICENSE", "tests/rows.yaml"}
    assert expected | {"tools/features.py"} <= names
    assert {f"configs/{name}" for name in files_below("configs")} <= names
    assert not [name for name in names if name.startswith((".venv", "build")) or "__pycache__" in name]
