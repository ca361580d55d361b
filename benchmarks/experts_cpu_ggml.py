"""ggml's CPU experts over blocks that are quantised already, from the prebuilt libraries of an npm package.

The graph is llama.cpp's of a mixture of experts: `ggml_mul_mat_id` for gate, up and down, swiglu, the routing weights
and the sum over experts. ggml rounds the rows of x and h to INT8 blocks (Q8_K or Q8_0). Weights are in its ordinary
buffers or, repacked, in those that it offers for types and processors with interleaved kernels. Calls through ctypes;
peers/README.md states how to get the libraries.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace

import torch
from experts_cpu_peers import Experts
from torch import Tensor

from moe_mk.kernels.native.library import Isa
from moe_mk.lab.checkpoints.gguf_checkpoint import mxfp4_to_gguf
from moe_mk.quant.tensor import QuantTensor

TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14, "mxfp4": 39}
"""`ggml_type` of the names of our formats."""
F32, I32 = 0, 26
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
    "swiglu_split": (c_void_p, (c_void_p,) * 3),
    "mul": (c_void_p, (c_void_p,) * 3),
    "add": (c_void_p, (c_void_p,) * 3),
    "view_2d": (c_void_p, (c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t)),
    "new_graph": (c_void_p, (c_void_p,)),
    "build_forward_expand": (None, (c_void_p, c_void_p)),
    "backend_alloc_ctx_tensors": (c_void_p, (c_void_p, c_void_p)),
    "backend_alloc_ctx_tensors_from_buft": (c_void_p, (c_void_p, c_void_p)),
    "backend_tensor_set": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
    "backend_graph_compute": (c_int, (c_void_p, c_void_p)),
    "backend_reg_dev_get": (c_void_p, (c_void_p, c_size_t)),
    "backend_reg_get_proc_address": (c_void_p, (c_void_p, c_char_p)),
    "backend_dev_init": (c_void_p, (c_void_p, c_char_p)),
    "backend_dev_supports_op": (c_bool, (c_void_p, c_void_p)),
    "backend_buft_name": (c_char_p, (c_void_p,)),
    "backend_buft_alloc_buffer": (c_void_p, (c_void_p, c_size_t)),
}
BUFFER_OFFSET = 8
"""Of `ggml_tensor.buffer`, behind the type."""


class Ggml:
    """ggml with the CPU backend that fits this processor."""

    def __init__(self, folder: Path, threads: int, best: Isa) -> None:
        """folder: holds libggml-base.so, or the unpacked package that does. best: the best instruction set to use."""
        (base,) = folder.rglob("libggml-base.so")
        library, self.f = ctypes.CDLL(str(base), mode=ctypes.RTLD_GLOBAL), SimpleNamespace()
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, f"ggml_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self.f, name, function)
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

    def context(self, tensors: int) -> int:
        """A context for descriptions of tensors and one graph."""
        size = tensors * self.f.tensor_overhead() + self.f.graph_overhead()
        return int(self.f.init(_Init(size, None, True)))


class GgmlExperts:
    """The experts of one layer in blocks of one type; a graph per number of rows."""

    def __init__(self, ggml: Ggml, kind: str, slots: list[tuple[QuantTensor, ...]], *, repacked: bool) -> None:
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
        gate, up = (g.mul_mat_id(context, w, x, ids) for w in self.weights[:2])
        h = g.swiglu_split(context, gate, up)
        y = g.mul(context, g.mul_mat_id(context, self.weights[2], h, ids), weights)
        row_bytes = 4 * self.hidden
        total = None
        for choice in range(top_k):
            view = g.view_2d(context, y, self.hidden, rows, row_bytes * top_k, row_bytes * choice)
            total = view if total is None else g.add(context, total, view)
        graph = g.new_graph(context)
        g.build_forward_expand(graph, total)
        if not g.backend_alloc_ctx_tensors(context, self.ggml.backend):
            raise MemoryError(f"ggml has no memory for a graph of {rows} rows")
        return graph, (x, ids, weights), total


def blocks_of_ggml(q: QuantTensor, kind: str) -> Tensor:
    """Rows of ggml blocks, as in a GGUF file."""
    return mxfp4_to_gguf(q) if kind == "mxfp4" else q.values


def ggml_candidates(
    folder: Path, threads: int, slots_of: Mapping[str, Callable[[], list[tuple[QuantTensor, ...]]]], best: Isa
) -> dict[str, dict[str, Experts]]:
    """By format that ggml reads: its experts, and once more repacked where it offers that on this processor.

    best: the best instruction set that may be used.
    """
    library = Ggml(folder, threads, best)
    print(f"ggml: the {library.variant} build of its CPU backend", flush=True)
    calls: dict[str, dict[str, Experts]] = {}
    for kind, slots in slots_of.items():
        if kind not in TYPES:
            continue
        held, name = slots(), f"ggml {kind.replace('_', ' ')}"
        inter, hidden = held[0][0].shape
        calls[kind] = {name: GgmlExperts(library, kind, held, repacked=False)}
        if library.repacks(kind, hidden, inter):
            calls[kind][f"{name} repacked"] = GgmlExperts(library, kind, held, repacked=True)
    return calls
