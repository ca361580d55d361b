"""The bindings under the real Python of NCCL EP, replaced by the emulation: descriptors are read at their addresses.
`load_wheel` unpacks the Python of nccl-extensions and imports it; its Cython modules and nccl4py are not needed."""

import ctypes
import importlib
import sys
import zipfile
from itertools import count
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from moe_mk_contrib.emulated.nccl import core, ep
from moe_mk_contrib.emulated.nccl.ep.interop.torch import get_nccl_comm_from_group

TORCH_OF = {number: dtype for dtype, number in core.OF_TORCH.items() if dtype is not torch.bool}
KNOWN: dict[int, Any] = {}
NUMBERS = count(1)


class Lowered:
    """A struct of the bindings: attributes at an address."""

    def __init__(self) -> None:
        self.ptr = next(NUMBERS)
        KNOWN[self.ptr] = self


STRUCTS: dict[str, list[str]] = {
    "Tensor": ["size_", "magic", "ndim_", "datatype", "data_", "sizes", "win_hdl", "win_offset"],
    "AllocConfig": ["alloc_fn", "free_fn", "context"],
    "GroupConfig": [*ep.GroupConfig.__dataclass_fields__],
    "HandleConfig": [*ep.HandleConfig.__dataclass_fields__],
    "DispatchConfig": ["send_only", "round_scales", "pass_direction", "quant_recipe"],
    "CombineConfig": ["send_only", "pass_direction", "quant_recipe"],
    **{
        name: [*getattr(ep, name).__dataclass_fields__]
        for name in ("LayoutInfo", "DispatchInputs", "DispatchOutputs", "CombineInputs", "CombineOutputs")
    },
}
"""Fields by struct, as nccl_ep.h has them."""


def tensor_at(address: int) -> ep.Tensor:
    """The emulation's descriptor of the memory that a descriptor of the bindings names."""
    low = KNOWN[address]
    assert low.magic == 0xCAFECAFE
    shape = list((ctypes.c_size_t * low.ndim_).from_address(low.sizes))
    dtype = TORCH_OF[core.NcclDataType(low.datatype)]
    num_bytes = prod(shape) * dtype.itemsize
    if num_bytes == 0:
        made = torch.empty(shape, dtype=dtype)
    else:
        memory = (ctypes.c_uint8 * num_bytes).from_address(low.data_)
        made = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
    low.kept = made  # the library keeps the address alone; here the view lives as long as its descriptor
    return ep.Tensor(made)


def lifted(name: str, address: int) -> Any:
    """The emulation's struct of a struct of the bindings; None for a null pointer."""
    if not address:
        return None
    low, kind = KNOWN[address], getattr(ep, name)
    given = {}
    for field in kind.__dataclass_fields__:
        value = getattr(low, "quant_recipe" if field == "quantization_recipe" else field, None)
        if value is None or isinstance(value, Lowered):
            continue
        is_tensor = "Tensor" in str(kind.__dataclass_fields__[field].type)
        given[field] = tensor_at(value) if is_tensor else value
    return kind(**given)


def bindings() -> ModuleType:
    """`nccl._extensions.bindings.nccl_ep`."""
    made: Any = ModuleType("nccl._extensions.bindings.nccl_ep")
    for name, fields in STRUCTS.items():
        setattr(made, name, type(name, (Lowered,), dict.fromkeys(fields)))
    made.tensor_dtype = SimpleNamespace(itemsize=48)

    def known(value: Any) -> int:
        number = next(NUMBERS)
        KNOWN[number] = value
        return number

    def handled(number: int) -> Any:
        return KNOWN[number]

    made.create_group = lambda comm, config: known(ep.Group.create(KNOWN[comm], lifted("GroupConfig", config)))
    made.create_handle = lambda group, layout, ids, info, config, stream: known(
        handled(group).create_handle(
            ep.Layout(layout), tensor_at(ids), layout_info=lifted("LayoutInfo", info),
            config=lifted("HandleConfig", config), stream=stream,
        )
    )  # fmt: skip
    made.update_handle = lambda handle, ids, info, stream: handled(handle).update(
        tensor_at(ids), layout_info=lifted("LayoutInfo", info), stream=stream
    )
    made.dispatch = lambda handle, given, out, info, config, stream: handled(handle).dispatch(
        lifted("DispatchInputs", given), lifted("DispatchOutputs", out), layout_info=lifted("LayoutInfo", info),
        config=lifted("DispatchConfig", config), stream=stream,
    )  # fmt: skip
    made.combine = lambda handle, given, out, config, stream: handled(handle).combine(
        lifted("CombineInputs", given), lifted("CombineOutputs", out), config=lifted("CombineConfig", config),
        stream=stream,
    )  # fmt: skip
    made.complete = lambda handle, config, stream: handled(handle).complete(config=config, stream=stream)
    return made


def communicator(group: Any) -> Any:
    """A communicator with an address, as nccl4py gives one."""
    comm = get_nccl_comm_from_group(group)
    number = next(NUMBERS)
    KNOWN[number] = comm
    return SimpleNamespace(ptr=number)


def load_wheel(wheel: Path, folder: Path) -> SimpleNamespace:
    """The real `nccl.ep` over the emulated bindings, and its way to a communicator replaced."""
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.endswith(".py")])

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        made.__path__ = [str(folder.joinpath(*name.split(".")))]
        made.__dict__.update(content)
        sys.modules[name] = made

    low = bindings()
    module("nccl")
    module("nccl._extensions")
    module("nccl._extensions.bindings", nccl_ep=low)
    sys.modules[low.__name__] = low
    module("nccl.core", Communicator=object)
    module("nccl.core.cuda", get_stream_ptr=int)
    typing = {"NcclInvalid": core.NcclInvalid, "NcclStreamSpec": object, "NcclDataType": core.NcclDataType}
    module("nccl.core.typing", **typing)
    module("nccl.core.resources", RegisteredWindowHandle=object)
    module("nccl.core.interop")
    resolve = {"resolve_tensor": lambda t: (t.data_ptr(), t.numel(), core.data_type(t.dtype), 0)}
    module("nccl.core.interop.torch", **resolve)
    real = importlib.import_module("nccl.ep")
    return SimpleNamespace(ep=real, interop=SimpleNamespace(get_nccl_comm_from_group=communicator))


def unload_wheel() -> None:
    KNOWN.clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "nccl"]:
        del sys.modules[name]
