"""Settings: frozen, checked across fields, from YAML, JSON or a transformers config.json."""

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import KernelConfig, ModelConfig, MoEConfig, ParallelConfig
from moe_mk.config.quant import QuantConfig
from moe_mk.config.router import RouterConfig
from moe_mk.config.shipped import config_folder, device_profile, load_config, shipped_devices, shipped_models

__all__ = [
    "DeviceProfile", "KernelConfig", "MoEConfig", "ModelConfig", "ParallelConfig", "QuantConfig", "RouterConfig",
    "config_folder", "device_profile", "load_config", "shipped_devices", "shipped_models",
]  # fmt: skip
