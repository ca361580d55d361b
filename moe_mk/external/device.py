"""The one place that asks what device is here, and turns the answer into a profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import ParamSpec, TypeAlias, TypeVar
from weakref import finalize

import torch
from torch import Tensor

from moe_mk.config.device import DeviceProfile
from moe_mk.config.shipped import device_profile, shipped_devices
from moe_mk.errors import ConfigError, UnsupportedError, unless_signalled

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(call: Callable[P, R]) -> Callable[P, R]:
    """The function as it is outside of torch.autocast, on every device: the layer's configuration sets its dtypes."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled() or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        with torch._C._DisableAutocast():
            return call(*args, **kwargs)

    return wrapped


def usable_device(device: torch.device | str) -> torch.device:
    """The device, with an index where it needs one.

    Raises UnsupportedError if it is not there, ConfigError for what is not the name of a device.
    """
    wanted = parsed_device(device)
    if wanted.type == "cpu":
        return wanted
    if wanted.type != "cuda":
        raise UnsupportedError(f"device {wanted} cannot be used", ["this library runs on cpu and cuda devices"])
    if not torch.cuda.is_available():
        built_for_gpus = torch.version.cuda is not None or torch.version.hip is not None
        why = "no GPU is visible" if built_for_gpus else "this torch is a CPU build"
        raise UnsupportedError(f"device {wanted} cannot be used", [why, "use --device cpu, or device='cpu'"])
    if wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if wanted.index >= torch.cuda.device_count():
        raise UnsupportedError(f"device {wanted} cannot be used", [f"{torch.cuda.device_count()} GPUs are visible"])
    return wanted


def wanted_device(device: torch.device | str | None) -> torch.device:
    """The device of a name; None: torch's default device, which `with torch.device(...)` sets."""
    return torch.get_default_device() if device is None else parsed_device(device)


def device_of_rank(device: str, rank: int) -> torch.device:
    """The device of one local rank: ranks take turns on the GPUs that are there."""
    wanted = parsed_device(device)
    if wanted.type == "cuda" and wanted.index is None and torch.cuda.is_available():
        wanted = torch.device("cuda", rank % torch.cuda.device_count())
    return usable_device(wanted)


def collective_backend(device: str, ranks: int) -> str:
    """NCCL where every rank has a GPU of its own, else gloo: NCCL refuses two ranks on one device."""
    return "nccl" if parsed_device(device).type == "cuda" and ranks <= torch.cuda.device_count() else "gloo"


def is_here(device: torch.device) -> bool:
    """Whether this machine has a device of that type."""
    return device.type != "cuda" or torch.cuda.is_available()


def profile_here(device: torch.device) -> DeviceProfile:
    """The profile of a device of this machine: the shipped one nearest to it, with the memory that is really there."""
    if device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return device_profile("cpu").model_copy(update={"memory_gib": memory / 2**30})
    properties = torch.cuda.get_device_properties(device)
    update: dict[str, object] = {"memory_gib": properties.total_memory / 2**30}
    if torch.version.hip is not None:
        return device_profile("mi300x").model_copy(update=update | {"gfx": properties.gcnArchName.split(":")[0]})
    arch = (properties.major, properties.minor)
    names = [name for name in shipped_devices() if name.upper() in properties.name.upper()]
    nearest = names[0] if names else ("b200" if arch >= (10, 0) else "h100")
    name = nearest if names else properties.name.lower().replace(" ", "_")
    return device_profile(nearest).model_copy(update=update | {"arch": arch, "name": name})


@cache
def has_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels that route, group and sum rows run on a device: NVIDIA GPUs from sm_90 on."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    profile = profile_here(device)
    return profile.kind == "cuda" and profile.arch is not None and profile.arch >= (9, 0)


def describe(device: torch.device) -> str:
    """Return the name of a device for messages."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {torch.get_num_threads()} threads"


@cache
def processor() -> str:
    """The processor of this machine, as it is called in the paths of tuned files."""
    return describe(torch.device("cpu")).split(",")[0]


def synchronize(device: torch.device) -> None:
    """Wait for everything queued on the device, so that a clock read after it is meaningful."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def identity(device: torch.device) -> str:
    """An identifier of the physical device, independent of its index in each process."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def stream_of(device: torch.device) -> int:
    """An identifier of the current queue: work on one stream runs in order; a CPU has one queue."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


def pinned(memory: Tensor, device: torch.device) -> Tensor:
    """Host memory, locked where a GPU copies from it while its kernels run; keep this object, views do not.

    The allocator of torch rounds pinned memory up to a power of two. Raises MemoryError where it cannot be locked.
    """
    if device.type == "cuda" and memory.numel():
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if error := int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            raise MemoryError(f"{memory.nbytes} bytes of host memory cannot be locked for {device}: CUDA error {error}")
        finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
    return memory


Mark: TypeAlias = torch.cuda.Event | None
"""A point in what is queued; None on a CPU, where it has passed."""


class Queues:
    """Streams of one device for several threads, and marks that other streams wait for.

    On a CPU there is nothing to wait for: what a thread has called is done when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, torch.cuda.Stream] = {}

    @property
    def run_later(self) -> bool:
        """Whether work is queued, so that what it reads must not be freed when a call returns."""
        return self.device.type == "cuda"

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        """Queue what this thread calls within on the stream of that name, the same one in every call."""
        if not self.run_later:
            yield
            return
        with torch.cuda.device(self.device):
            if name not in self._streams:
                self._streams[name] = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._streams[name]):
                yield

    def mark(self) -> Mark:
        """The end of what this thread has queued so far; None on a CPU."""
        return torch.cuda.current_stream(self.device).record_event() if self.run_later else None

    def after(self, mark: Mark) -> None:
        """Let what this thread queues from here on wait for a mark, on the device alone."""
        if mark is not None:
            torch.cuda.current_stream(self.device).wait_event(mark)


def capturing(device: torch.device) -> bool:
    """Whether what is called now becomes part of a CUDA graph, so that nothing may be read on the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def graph_of(calls: Sequence[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """A CUDA graph of calls, each run once before on the stream it is captured on; a call of it replays them."""
    with torch.cuda.device(device):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call() for call in calls]

    def replay() -> object:
        graph.replay()
        return kept  # their memory is that of the graph

    return replay


def parsed_device(device: torch.device | str) -> torch.device:
    """The device of a name, here or not; raises ConfigError for what is not one."""
    try:
        return torch.device(device)
    except unless_signalled(RuntimeError, TypeError, ValueError) as problem:
        raise ConfigError(f"{device!r} is not a device: {str(problem).splitlines()[0]}") from problem
