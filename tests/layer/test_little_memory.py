"""Calls in a process whose address space ends: an error that states it, and the layer is right again afterwards."""

import os
import shutil
import subprocess
import sys

import pytest

CHILD = """
import copy, gc, random, resource, sys, traceback

import torch

from moe_mk import MoEConfig, MoELayer, jobs
from moe_mk.errors import MoEMKError
from moe_mk.layer.hot_swap import swap_backends

backend, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
jobs.BEGIN_S = 0.05
H, I, E, K = 256, 128, 8, 2
draw, rng = torch.Generator().manual_seed(seed), random.Random(seed)
matrix = lambda *shape: (torch.randn(*shape, generator=draw) / shape[1] ** 0.5).bfloat16()
weights = {"gate.weight": matrix(E, H)}
for e in range(E):
    weights |= {f"experts.{e}.{name}_proj.weight": matrix(*shape) for name, shape in
                (("gate", (I, H)), ("up", (I, H)), ("down", (H, I)))}
model = {"hidden_size": H, "moe_intermediate_size": I, "num_experts": E, "quant": {"weights": "bf16"}}
config = MoEConfig.parse({"model": model, "router": {"top_k": K}, "kernel": {"experts": backend}}, "settings")
build = lambda: MoELayer(config).load_weights(weights)
few, many, layer = matrix(8, H), matrix(8000, H), build()

def ends_well(error):
    of_torch = ("can't allocate memory", "could not create a ", "could not execute a primitive")  # the last two: oneDNN
    return isinstance(error, (MoEMKError, MemoryError)) or any(words in str(error) for words in of_torch)

verbs = {
    "build": build,
    "few": lambda: layer(few),
    "many": lambda: layer(many),
    "copy": lambda: copy.deepcopy(layer)(few),
    "explain": lambda: layer.explain(),
    "report": lambda: layer.report(),
    "load": lambda: layer.load_weights(weights),
    "swap": lambda: swap_backends(layer, few, experts="reference"),
    "swap back": lambda: swap_backends(layer, few, experts=backend),
}
with torch.no_grad():
    for verb in verbs.values():  # what is imported at first use is imported
        verb()
    right, of_other = build()(few), None
    swap_backends(layer, few, experts="reference")
    of_other = layer(few)
    swap_backends(layer, few, experts=backend)
    ended = 0
    for _ in range(rounds):
        name = rng.choice([*verbs])
        gc.collect()
        size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) << 10
        resource.setrlimit(resource.RLIMIT_AS, (size + int(2 ** rng.uniform(0, 22)), -1))
        try:
            verbs[name]()
        except BaseException as error:
            resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            ended += 1
            if not ends_well(error):
                traceback.print_exc()
                sys.exit(f"{name} ended with {type(error).__name__}")
        resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
        y = layer(few)
        assert torch.equal(y, right) or torch.equal(y, of_other), f"other numbers after {name}"
print(ended)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["cpu_native", "torch_cpu"])
def test_a_call_without_memory_ends_in_an_error_and_the_layer_is_right_afterwards(backend: str) -> None:
    gives_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    for seed in map(str, range(3, 15)):  # how much a process holds back for later calls differs from run to run
        child = [sys.executable, "-W", "ignore", "-c", CHILD, backend, seed, "30"]
        done = subprocess.run(child, capture_output=True, text=True, timeout=200, env=os.environ | gives_back)
        if "cannot allocate memory for thread-local data" in done.stderr:
            continue  # glibc aborts if it cannot allocate thread-local storage
        assert done.returncode == 0, done.stderr[-3000:]
        if int(done.stdout):
            return
    pytest.fail("no call has met the limit")


SHARED = """
import sys

from moe_mk.lab.testing.on_ranks import RankWorld
from tests.layer.little_shared_memory_ranks import serve

with RankWorld(2) as world:
    for found in zip(*world.call(serve, sys.argv[1], int(sys.argv[2]), timeout_s=160.0)):
        print(*found, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["one_sided", "all_to_all", "one_sided_network"])
def test_calls_end_in_an_error_or_serve_while_shared_memory_is_full(transport: str) -> None:
    """In a mount namespace with a /dev/shm of 1 MiB, of which a file takes all but a few pages."""
    mounted = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*mounted, "true"], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted in a namespace of its own here")
    child = [sys.executable, "-W", "ignore", "-c", SHARED, transport, "8"]
    done = subprocess.run([*mounted, *child], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 8 and not [line for line in lines if "bad" in line], done.stdout
    assert any("CommError" in line for line in lines) == (transport == "one_sided"), "only windows are in shared memory"
