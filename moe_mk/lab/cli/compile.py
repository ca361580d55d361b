"""`moe-mk compile MODEL`: compile the Triton kernels of a layer for a GPU that this machine does not have."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from moe_mk.config.shipped import device_profile, load_config
from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.screen import Screen
from moe_mk.lab.files import errors_named, new_folders
from moe_mk.lab.tuning.ahead import AheadOrder, compile_layer


def compile_kernels(
    screen: Screen, config: str, device: str, ranks: int, tokens: tuple[int, ...], out: Path, *, as_json: bool
) -> int:
    """Compile, and print what the folder has."""
    order = AheadOrder(load_config(config), device_profile(device), ranks, tokens)
    with new_folders(out), errors_named(out):
        out.mkdir(parents=True, exist_ok=True)
        kernels = compile_layer(order, out)
    if as_json:
        return print_json({"folder": str(out), "kernels": [asdict(each) for each in kernels]})
    new = [each for each in kernels if not each.was_there]
    screen.fact("compiled", f"{len(new)} kernels in {sum(each.seconds for each in new):.1f} s")
    screen.fact("found", f"{len(kernels) - len(new)} kernels from earlier runs")
    screen.fact("folder", f"{out}; on the GPU: TRITON_CACHE_DIR={out}, with the same wheel of Triton")
    screen.fact("moved", "run the same command again where the folder is now: it corrects the paths inside")
    return OK
