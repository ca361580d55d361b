"""What a layer on native CPU kernels states it will take, measured in a process of its own."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint

pytestmark = [
    pytest.mark.skipif(
        not any(shutil.which(name) for name in ("c++", "g++", "clang++")), reason="no C++ compiler on this machine"
    ),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc/self/clear_refs"),
]

# A small layer first: what the libraries allocate once is not the layer's.
MEASURE = """
import gc, json, sys, torch
from pathlib import Path
from moe_mk import DeepseekV3MoE, MoEConfig

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

def measured(path):
    layer = DeepseekV3MoE(MoEConfig.from_hf(path, experts="cpu_native", activations="plain", max_num_tokens=32))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")   # the high-water mark starts again from here
    before = status("VmRSS")
    layer.load_from_safetensors(path, 3)
    peak = status("VmHWM") - before
    layer(torch.ones(32, layer.config.model.hidden_size, dtype=torch.bfloat16))
    gc.collect()
    return layer.memory_report().as_dict() | {"measured_peak": peak, "measured": status("VmRSS") - before}

torch.set_num_threads(1)
measured(sys.argv[1])
print(json.dumps(measured(sys.argv[2])))
"""


@pytest.mark.thorough
def test_loading_and_serving_take_what_was_predicted_within_five_per_cent(tmp_path: Path) -> None:
    paths = []
    for name, (experts, hidden, inter) in {"small": (4, 128, 128), "large": (20, 1024, 1536)}.items():
        paths.append(tmp_path / name)
        shape = CheckpointShape(
            num_experts=experts, top_k=2, num_groups=2, top_k_groups=1, hidden_size=hidden, intermediate_size=inter,
            quant="fp8",
        )  # fmt: skip
        write_checkpoint(paths[-1], shape)
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    # 20 experts and a shared one of 4.7 MB: held once, never the packed ones and the checkpoint's pages together.
    assert seen["total"] > 95e6
    assert seen["measured_peak"] == pytest.approx(seen["peak"], rel=0.05)
    assert seen["measured"] == pytest.approx(seen["total"], rel=0.05)
