"""Experts of ggml (llama.cpp) and of ik_llama.cpp over the blocks of ours, by ctypes; see peers/README.md.

ggml's come from the prebuilt libraries of an npm package. The graph is llama.cpp's of a mixture of experts:
`ggml_mul_mat_id` for gate, up and down, swiglu, the routing weights and the sum over experts. ggml rounds the rows of x
and h to INT8 blocks (Q8_K or Q8_0). Weights are in its ordinary buffers or, repacked, in those that it offers for types
and processors with interleaved kernels.

ik_llama.cpp has ggml functions of its own, in one library. Its graph is that of its `llm_build_moe_ffn`: gate, up and
the activation in `ggml_moe_up_gate`, down, and the weighted sum in `ggml_mul_multi_add`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_mk.kernels.native.library import Isa
from moe_mk.lab.checkpoints.gguf_checkpoint import mxfp4_to_gguf
from moe_mk.quant.tensor import QuantTensor

if TYPE_CHECKING:
    from experts_cpu_peers import Experts

TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14, "bf16": 30, "mxfp4": 39}
"""`ggml_type` of the names of our formats."""
F32, I32, SILU = 0, 26, 10
"""`ggml_type` and, of ik_llama.cpp, `ggml_unary_op`."""
VARIANTS = {
    "sapphirerapids": Isa.AMX_BF16,
    "zen4": Isa.AVX512_BF16,
    "cooperlake": Isa.AVX512_BF16,
    "icelake": Isa.AVX512_VNNI,
    "cascadelake": Isa.AVX512_VNNI,
    "skylakex": Isa.AVX512_VNNI,
    "alderlake": Isa.AVX2,
    "haswell": Isa.AVX2,
    "x64": Isa.SCALAR,
}
"""Libraries of the package, the most demanding processors first, and the least Isa that has their instructions."""


Slot = tuple[QuantTensor, ...]


class _Init(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "init": (c_void_p, (_Init,)),
    "tensor_overhead": (c_size_t, ()),
    "graph_overhead": (c_size_t, ()),
    "nbytes": (c_size_t, (c_void_p,)),
    "get_data": (c_void_p, (c_void_p,)),
    "new_tensor_2d": (c_void_p, (c_void_p, c_int, c_int64, c_int64)),
    "new_tensor_3d": (c_void_p, (c_void_p, c_int, c_int64, c_int64, c_int64)),
    "mul_mat_id": (c_void_p, (c_void_p,) * 4),
    "new_graph": (c_void_p, (c_void_p,)),
    "build_forward_expand": (None, (c_void_p, c_void_p)),
    "backend_alloc_ctx_tensors": (c_void_p, (c_void_p, c_void_p)),
    "backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "backend_graph_compute": (c_int, (c_void_p, c_void_p)),
}
_LLAMA_CPP: dict[str, tuple[object, tuple[object, ...]]] = {
    "swiglu_split": (c_void_p, (c_void_p,) * 3),
    "mul": (c_void_p, (c_void_p,) * 3),
    "add": (c_void_p, (c_void_p,) * 3),
    "view_2d": (c_void_p, (c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t)),
    "backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    "backend_reg_dev_get": (c_void_p, (c_void_p, c_size_t)),
    "backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "backend_dev_init": (c_void_p, (c_void_p, c_char_p)),
    "backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    "backend_buft_name": (c_char_p, (c_void_p,)),
    "backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)),
}
_IK_LLAMA_CPP: dict[str, tuple[object, tuple[object, ...]]] = {
    "moe_up_gate": (c_void_p, (*(c_void_p,) * 5, c_int)),
    "mul_multi_add": (c_void_p, (c_void_p,) * 3),
    "backend_cpu_init": (c_void_p, ()),
    "backend_cpu_set_n_threads": (None, (c_void_p, c_int)),
}
BUFFER_OFFSET = 8
"""Of `ggml_tensor.buffer`, behind the type."""


def _functions(library: ctypes.CDLL, own: Mapping[str, tuple[object, tuple[object, ...]]]) -> SimpleNamespace:
    """The functions of ggml that both projects have, and those of one."""
    found = SimpleNamespace()
    for name, (result, arguments) in (_FUNCTIONS | dict(own)).items():
        function = getattr(library, f"ggml_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(found, name, function)
    return found


class _Library:
    project: str
    f: SimpleNamespace
    backend: int
    repacked: int | None = None

    def context(self, tensors: int) -> int:
        """A context for descriptions of tensors and one graph."""
        size = tensors * self.f.tensor_overhead() + self.f.graph_overhead()
        return int(self.f.init(_Init(size, None, True)))

    def repacks(self, kind: str, hidden: int, inter: int) -> bool:
        """Whether a weight of this type has interleaved kernels on this processor."""
        return False


class IkLlama(_Library):
    """The CPU backend of ik_llama.cpp, built for this processor."""

    project = "ik_llama.cpp"

    def __init__(self, folder: Path, threads: int) -> None:
        """folder: holds libggml.so, or the build folder that does. Raises FileNotFoundError without it."""
        library = next(folder.rglob("libggml.so"), None)
        if library is None:
            raise FileNotFoundError(f"{folder} holds no libggml.so: benchmarks/peers/README.md")
        own_first = os.RTLD_LOCAL | os.RTLD_DEEPBIND  # functions of the same names may be loaded from llama.cpp
        self.f = _functions(ctypes.CDLL(str(library), mode=own_first), _IK_LLAMA_CPP)
        self.context(1)  # the first one makes tables that kernels read
        self.backend = self.f.backend_cpu_init()
        self.f.backend_cpu_set_n_threads(self.backend, threads)

    def layer(
        self, context: int, weights: Sequence[int], x: int, ids: int, routing: int, shape: tuple[int, int, int]
    ) -> int:
        """The output of a graph of one layer; weights of gate, up and down."""
        h = self.f.moe_up_gate(context, weights[1], weights[0], x, ids, SILU)
        y = self.f.mul_mat_id(context, weights[2], h, ids)
        return int(self.f.mul_multi_add(context, y, routing))


class Ggml(_Library):
    """ggml with the CPU backend that fits this processor."""

    project = "ggml"

    def __init__(self, folder: Path, threads: int, best: Isa) -> None:
        """folder: holds libggml-base.so, or the unpacked package that does. best: the best instruction set to use."""
        (base,) = folder.rglob("libggml-base.so")
        self.f = _functions(ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL), _LLAMA_CPP)
        self.variant, entry = self._best(base.parent, best)
        entry.restype = c_void_p
        registry = entry()
        self.device = device = self.f.backend_reg_dev_get(registry, 0)
        self.backend = self.f.backend_dev_init(device, None)
        self._procedure(registry, b"ggml_backend_set_n_threads", None, c_void_p, c_int)(self.backend, threads)
        extra = self._procedure(registry, b"ggml_backend_dev_get_extra_bufts", POINTER(c_void_p), c_void_p)(device)
        self.repacked: int | None = None
        for place in range(8):
            if not extra or not extra[place]:
                break
            if self.f.backend_buft_name(extra[place]) == b"CPU_REPACK":
                self.repacked = extra[place]

    def repacks(self, kind: str, hidden: int, inter: int) -> bool:
        """Whether a weight of this type has interleaved kernels on this processor; asked as llama.cpp does."""
        if self.repacked is None:
            return False
        context = self.context(4)
        weight = self.f.new_tensor_3d(context, TYPES[kind], hidden, inter, 2)
        x = self.f.new_tensor_3d(context, F32, hidden, 1, 1)
        product = self.f.mul_mat_id(context, weight, x, self.f.new_tensor_2d(context, I32, 1, 1))
        buffer = self.f.backend_buft_alloc_buffer(self.repacked, 0)
        c_void_p.from_address(weight + BUFFER_OFFSET).value = buffer
        return bool(self.f.backend_dev_supports_op(self.device, product))

    def _best(self, folder: Path, best: Isa) -> tuple[str, ctypes._FuncPointer]:
        """The library with the highest score, which is 0 where the processor cannot run it."""
        found: list[tuple[int, str, ctypes._FuncPointer]] = []
        for variant, isa in VARIANTS.items():
            file = folder / f"libggml-cpu-{variant}.so"
            if isa <= best and file.exists():
                library = ctypes.CDLL(str(file))
                found.append((library.ggml_backend_score(), variant, library.ggml_backend_init))
        _, variant, entry = max(found, key=lambda one: one[0])
        return variant, entry

    def _procedure(self, registry: int, name: bytes, result: object, *arguments: object) -> Callable[..., object]:
        address = self.f.backend_reg_get_proc_address(registry, name)
        return ctypes.CFUNCTYPE(result, *arguments)(address)  # type: ignore[arg-type]

    def layer(
        self, context: int, weights: Sequence[int], x: int, ids: int, routing: int, shape: tuple[int, int, int]
    ) -> int:
        """The output of a graph of one layer; weights of gate, up and down. shape: rows, choices and hidden size."""
        g, (rows, top_k, hidden) = self.f, shape
        gate, up = (g.mul_mat_id(context, w, x, ids) for w in weights[:2])
        h = g.swiglu_split(context, gate, up)
        y = g.mul(context, g.mul_mat_id(context, weights[2], h, ids), routing)
        row_bytes = 4 * hidden
        total = None
        for choice in range(top_k):
            view = g.view_2d(context, y, hidden, rows, row_bytes * top_k, row_bytes * choice)
            total = view if total is None else g.add(context, total, view)
        assert total is not None
        return int(total)


class GgmlExperts:
    """The experts of one layer in blocks of one type; a graph per number of rows."""

    def __init__(self, ggml: Ggml | IkLlama, kind: str, slots: Sequence[Slot], *, repacked: bool) -> None:
        """slots: gate, up and down of each expert, which are copied. Raises MemoryError without memory for them."""
        self.ggml, self.f, self.experts = ggml, ggml.f, len(slots)
        self.inter, self.hidden = slots[0][0].shape
        context = ggml.context(4)
        shapes = ((self.hidden, self.inter), (self.hidden, self.inter), (self.inter, self.hidden))
        self.weights = [
            ggml.f.new_tensor_3d(context, TYPES[kind], columns, rows, self.experts) for columns, rows in shapes
        ]
        if repacked:
            buffer = ggml.f.backend_alloc_ctx_tensors_from_buft(context, ggml.repacked)
        else:
            buffer = ggml.f.backend_alloc_ctx_tensors(context, ggml.backend)
        if not buffer:
            raise MemoryError(f"ggml has no memory for {kind} weights")
        for index, weight in enumerate(self.weights):
            stacked = torch.stack([blocks_of_ggml(slot[index], kind) for slot in slots])
            assert stacked.nbytes == ggml.f.nbytes(weight)
            ggml.f.backend_tensor_set(weight, stacked.data_ptr(), 0, stacked.nbytes)
        self.graphs: dict[tuple[int, int], tuple[int, tuple[int, int, int], int]] = {}

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """bf16 (T, H), int32 ids (T, K), f32 weights (T, K) -> bf16 (T, H)."""
        rows, top_k = ids.shape
        if (rows, top_k) not in self.graphs:
            self.graphs[rows, top_k] = self._graph(rows, top_k)
        graph, inputs, output = self.graphs[rows, top_k]
        for tensor, source in zip(inputs, (x.float(), ids.contiguous(), weights.contiguous()), strict=True):
            ctypes.memmove(self.f.get_data(tensor), source.data_ptr(), source.nbytes)
        status = self.f.backend_graph_compute(self.ggml.backend, graph)
        assert status == 0, f"ggml_backend_graph_compute: {status}"
        values = (ctypes.c_float * (rows * self.hidden)).from_address(self.f.get_data(output))
        return torch.frombuffer(values, dtype=torch.float32).view(rows, self.hidden).bfloat16()

    def _graph(self, rows: int, top_k: int) -> tuple[int, tuple[int, int, int], int]:
        """The graph, its inputs (x, ids, weights) and its output."""
        g, context = self.f, self.ggml.context(16 + 2 * top_k)
        x = g.new_tensor_3d(context, F32, self.hidden, 1, rows)
        ids = g.new_tensor_2d(context, I32, top_k, rows)
        weights = g.new_tensor_3d(context, F32, 1, top_k, rows)
        total = self.ggml.layer(context, self.weights, x, ids, weights, (rows, top_k, self.hidden))
        graph = g.new_graph(context)
        g.build_forward_expand(graph, total)
        if not g.backend_alloc_ctx_tensors(context, self.ggml.backend):
            raise MemoryError(f"ggml has no memory for a graph of {rows} rows")
        return graph, (x, ids, weights), total


def blocks_of_ggml(q: QuantTensor, kind: str) -> Tensor:
    """Rows of ggml blocks, as in a GGUF file."""
    return mxfp4_to_gguf(q) if kind == "mxfp4" else q.values


def ggml_candidates(library: Ggml | IkLlama, kind: str, slots: Sequence[Slot]) -> dict[str, Experts]:
    """The experts of a format that a library reads, and once more repacked where it offers that on this processor."""
    if kind not in TYPES:
        return {}
    (inter, hidden), name = slots[0][0].shape, f"{library.project} {kind.replace('_', ' ')}"
    made: dict[str, Experts] = {name: GgmlExperts(library, kind, slots, repacked=False)}
    if library.repacks(kind, hidden, inter):
        made[f"{name} repacked"] = GgmlExperts(library, kind, slots, repacked=True)
    return made
