"""The configurations that come with the library: models and devices by name."""

from __future__ import annotations

from pathlib import Path

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError
from moe_mk.registry import did_you_mean


def config_folder() -> Path:
    """The folder `configs/`: inside an installed package, or next to it in a source tree."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def shipped_models() -> dict[str, Path]:
    """Model configurations by name."""
    return {path.stem: path for path in sorted((config_folder() / "models").glob("*.yaml"))}


def shipped_devices() -> dict[str, Path]:
    """Device profiles by name."""
    return {path.stem: path for path in sorted((config_folder() / "devices").glob("*.yaml"))}


def load_config(name_or_path: str | Path) -> MoEConfig:
    """A shipped model by name, or a YAML or JSON file of ours, or a transformers config.json."""
    models = shipped_models()
    path = models.get(str(name_or_path), Path(name_or_path))
    if not path.exists() and path.parts == ("configs", "models", path.name):  # as in a source tree
        path = models.get(path.stem, path)
    if not path.exists():
        raise ConfigError(
            f"{name_or_path} is neither a file nor a shipped model{did_you_mean(str(name_or_path), list(models))}"
        )
    is_hf = path.is_dir() or path.name == "config.json"
    return MoEConfig.from_hf(path) if is_hf else MoEConfig.load(path)


def device_profile(name_or_path: str | Path) -> DeviceProfile:
    """A shipped device by name, or a profile file."""
    devices = shipped_devices()
    path = devices.get(str(name_or_path), Path(name_or_path))
    if not path.is_file():
        raise ConfigError(
            f"{name_or_path} is neither a file nor a shipped device{did_you_mean(str(name_or_path), list(devices))}"
        )
    return DeviceProfile.load(path)
