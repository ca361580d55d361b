"""vLLM's and kt-kernel's CPU experts over weights that are quantised already, with the codes and scales of ours.

Layouts and operators were read in vLLM 0.32.0 (csrc/cpu/sgl-kernels, fused_moe/experts/cpu_moe.py) and kt-kernel 0.7.2
(operators/amx, operators/llamafile, utils/amx.py). `slots` are gate, up and down of each expert; peers/README.md states
how to get the libraries, and what is rounded.

ggml's experts come from the prebuilt libraries of an npm package.

The graph is llama.cpp's of a mixture of experts: `ggml_mul_mat_id` for gate, up and down, swiglu, the routing weights
and the sum over experts. ggml rounds the rows of x and h to INT8 blocks (Q8_K or Q8_0). Weights are in its ordinary
buffers or, repacked, in those that it offers for types and processors with interleaved kernels. Calls through ctypes.

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

import torch
from experts_cpu_peers import Experts, KtKernel
from torch import Tensor

from moe_mk.kernels.native.library import Isa
from moe_mk.lab.checkpoints.gguf_checkpoint import mxfp4_to_gguf
from moe_mk.quant.grouped import GROUPED, Grouped
from moe_mk.quant.tensor import QuantTensor

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

    def __init__(self, ggml: Ggml | IkLlama, kind: str, slots: list[Slot], *, repacked: bool) -> None:
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


def ggml_candidates(
    folder: Path, threads: int, slots_of: Mapping[str, Callable[[], list[Slot]]], best: Isa
) -> dict[str, dict[str, Experts]]:
    """By format that ggml reads: its experts, and once more repacked where it offers that on this processor.

    best: the best instruction set that may be used.
    """
    library = Ggml(folder, threads, best)
    print(f"ggml: the {library.variant} build of its CPU backend", flush=True)
    return _held_by(library, "ggml", slots_of)


def ik_candidates(
    folder: Path, threads: int, slots_of: Mapping[str, Callable[[], list[Slot]]]
) -> dict[str, dict[str, Experts]]:
    """By format that ik_llama.cpp reads: its experts."""
    return _held_by(IkLlama(folder, threads), "ik_llama.cpp", slots_of)


def _held_by(
    library: Ggml | IkLlama, project: str, slots_of: Mapping[str, Callable[[], list[Slot]]]
) -> dict[str, dict[str, Experts]]:
    calls: dict[str, dict[str, Experts]] = {}
    for kind, slots in slots_of.items():
        if kind not in TYPES:
            continue
        held, name = slots(), f"{project} {kind.replace('_', ' ')}"
        inter, hidden = held[0][0].shape
        calls[kind] = {name: GgmlExperts(library, kind, held, repacked=False)}
        if library.repacks(kind, hidden, inter):
            calls[kind][f"{name} repacked"] = GgmlExperts(library, kind, held, repacked=True)
    return calls


INT8_W8A8, INT4_W4A8, MXFP4 = 1, 3, 4
"""Methods of vLLM's `fused_experts_cpu`."""
AWQ = 0
"""Layout of what `convert_weight_packed_scale_zp` reads; that of GPTQ, 1, stores zero points minus one."""
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibbles of an int32 that hold 8 consecutive output columns."""
VLLM_GROUPS = (32, 64, 128)
"""Columns under one scale that vLLM's INT4 experts apply; with longer groups 0.32.0 computes other values."""
KT_GROUPED = {
    "int4_g32": (("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"), 4),
    "mxfp4": (("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE"), 4),
    "mxfp8": (("AMXMXFP8_KGroup_MOE", "AVX2MXFP8_MOE"), 8),
}
"""Classes of kt-kernel that read stored codes with scales of 32 columns, of which an extension has one, and bits. In
0.7.2 AMXInt4_KGroup_MOE crashes with groups of 128 and computes NaN with groups of 64."""
KT_ROWS = {"int4_row": "AMXInt4_MOE", "int8": "AMXInt8_MOE"}
"""Classes that quantise rows of bf16 weights themselves. AMXInt4_1_MOE and AMXInt4_1KGroup_MOE, with zero points, are
left out: they make other codes of weights that 4 bits hold exactly, with errors of about 0.25 and more."""
KT_GGML = "MOE"


def vllm_candidates(kind: str, slots: Sequence[Slot], *, amx: bool) -> dict[str, Experts]:
    """vLLM's experts for a format, empty for others. amx: whether the processor has it; INT4 and MXFP4 need it."""
    scheme = GROUPED.get(kind)
    if kind == "int8" and hasattr(torch.ops._C, "fused_experts_cpu"):
        return {"vllm int8 w8a8": vllm_int8(slots)}
    if amx and scheme is not None and scheme.bits == 4 and scheme.columns in VLLM_GROUPS:
        return {f"vllm {_spoken(kind)}": vllm_int4(scheme, slots)}
    return {"vllm mxfp4": vllm_mxfp4(slots)} if amx and kind == "mxfp4" else {}


def kt_candidates(library: KtKernel, kind: str, slots: Sequence[Slot]) -> dict[str, Experts]:
    """kt-kernel's experts for a format, empty for others and for classes that its extension lacks."""
    name, stored = f"kt-kernel {_spoken(kind)}", [list(part) for part in zip(*slots, strict=True)]
    if kind in KT_GROUPED and any(map(library.has, KT_GROUPED[kind][0])):
        return {name: kt_grouped(library, kind, stored)}
    if kind in KT_ROWS and library.has(KT_ROWS[kind]):
        return {name: kt_rows(library, kind, stored)}
    if kind in TYPES and kind not in KT_GROUPED and library.has(KT_GGML):
        return {name: kt_ggml(library, kind, stored)}
    return {}


def vllm_int8(slots: Sequence[Slot]) -> Experts:
    """vLLM's INT8 experts: scales of channels, tokens rounded to INT8 as they come."""
    codes13 = torch.stack([torch.cat([gate.values, up.values]) for gate, up, _ in slots])
    codes2 = torch.stack([down.values for _, _, down in slots])
    scales13 = torch.stack([torch.cat([_scales(gate)[:, 0], _scales(up)[:, 0]]) for gate, up, _ in slots])
    scales2 = torch.stack([_scales(down)[:, 0] for _, _, down in slots])
    w13, w2 = (torch.ops._C.convert_weight_packed(codes) for codes in (codes13, codes2))
    return _fused(INT8_W8A8, (w13, w2), (scales13, scales2))


def vllm_int4(scheme: Grouped, slots: Sequence[Slot]) -> Experts:
    """vLLM's INT4 experts with scales and zero points of groups: rows of x and h are rounded to INT8."""
    w13, zeros13, scales13 = _packed_int4(scheme, [slot[:2] for slot in slots])
    w2, zeros2, scales2 = _packed_int4(scheme, [slot[2:] for slot in slots])
    return _fused(INT4_W4A8, (w13, w2), (scales13, scales2), (zeros13, zeros2))


def vllm_mxfp4(slots: Sequence[Slot]) -> Experts:
    """vLLM's MXFP4 experts with bf16 activations."""
    codes = [torch.stack([torch.cat([q.values for q in slot[part]]) for slot in slots]) for part in _PARTS]
    scales = [
        torch.stack([torch.cat([_scales(q).view(torch.uint8) for q in slot[part]]) for slot in slots])
        for part in _PARTS
    ]
    w13, w2 = (torch.ops._C.convert_weight_packed(matrix) for matrix in codes)
    scales13, scales2 = (torch.ops._C.convert_scale_packed(each) for each in scales)
    return _fused(MXFP4, (w13, w2), (scales13, scales2))


_PARTS = (slice(0, 2), slice(2, 3))
"""Of a slot: gate and up, and down."""


def _fused(
    method: int,
    weights: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    zeros: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Experts:
    def run(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
        out, nothing = torch.empty_like(x), (None,) * 6
        torch.ops._C.fused_experts_cpu(out, x, *weights, routing, ids, method, *scales, *zeros, *nothing, True)
        return out

    return run


def _packed_int4(scheme: Grouped, slots: Sequence[Slot]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes in tiles, zero points and f32 scales of all experts, packed one by one: the operator unpacks to int32."""
    packed = []
    for slot in slots:
        codes = torch.cat([scheme.codes(q) for q in slot])
        scales = torch.cat([_scales(q) for q in slot])
        zeros = torch.cat([_zeros(scheme, q) for q in slot])
        stored = (awq(codes.T), awq(zeros.T), scales.T.contiguous())
        packed.append(torch.ops._C.convert_weight_packed_scale_zp(*(part[None] for part in stored), AWQ))
    weights, zero_points, scales = (torch.cat(parts) for parts in zip(*packed, strict=True))
    return weights, zero_points, scales


def awq(codes: Tensor) -> Tensor:
    """uint8 codes of 4 bits, (inputs, outputs) -> int32 (inputs, outputs / 8) in AutoAWQ's order of nibbles."""
    shifts = 4 * torch.tensor(AWQ_NIBBLES, dtype=torch.int32)
    return (codes.to(torch.int32).unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def kt_grouped(library: KtKernel, kind: str, stored: Sequence[Sequence[QuantTensor]]) -> Experts:
    """kt-kernel's experts of stored codes: INT4, whose tokens it rounds to INT8, MXFP4 and MXFP8 with bf16 tokens."""
    names, bits = KT_GROUPED[kind]
    config, alive = library.config(*_shape(stored)), []
    for matrix, tensors in zip(KtKernel.MATRICES, stored, strict=True):
        codes, scales = [q.values.contiguous() for q in tensors], [kt_scales(kind, _scales(q)) for q in tensors]
        setattr(config, f"{matrix}_projs", [[each.data_ptr() for each in codes]])
        setattr(config, f"{matrix}_scales", [[each.data_ptr() for each in scales]])
        alive += codes + scales
    quant = config.quant_config
    quant.bits, quant.group_size, quant.zero_point = bits, 32, False
    return library.loaded(next(name for name in names if library.has(name)), config)


def kt_scales(kind: str, scales: Tensor) -> Tensor:
    """As kt-kernel reads them: exponents of MXFP8 as bytes, others in bf16, which holds E8M0 exactly."""
    return (scales.view(torch.uint8) if kind == "mxfp8" else scales.to(torch.bfloat16)).contiguous()


def kt_rows(library: KtKernel, kind: str, stored: Sequence[Sequence[QuantTensor]]) -> Experts:
    """kt-kernel's INT4 and INT8 experts with one scale for a row of weights, and tokens rounded to INT8."""
    config, alive = library.config(*_shape(stored)), []
    for matrix, tensors in zip(KtKernel.MATRICES, stored, strict=True):
        alive.append(torch.stack([q.dequantize(torch.bfloat16) for q in tensors]))
        setattr(config, f"{matrix}_proj", alive[-1].data_ptr())
    return library.loaded(KT_ROWS[kind], config)


def kt_ggml(library: KtKernel, kind: str, stored: Sequence[Sequence[QuantTensor]]) -> Experts:
    """kt-kernel's experts of ggml blocks (llamafile): rows of x and h are rounded to INT8 blocks."""
    config, alive = library.config(*_shape(stored)), []
    # As its own LlamafileMoEWrapper sets them.
    config.m_block, config.group_min_len, config.group_max_len, config.hidden_type = 32, 10, library.most, TYPES["bf16"]
    for matrix, tensors in zip(KtKernel.MATRICES, stored, strict=True):
        alive.append(torch.stack([blocks_of_ggml(q, kind) for q in tensors]))
        setattr(config, f"{matrix}_proj", alive[-1].data_ptr())
        setattr(config, f"{matrix}_type", TYPES[kind])
    library.alive += alive  # with one NUMA node the layer reads them where they are
    return library.loaded(KT_GGML, config)


def _shape(stored: Sequence[Sequence[QuantTensor]]) -> tuple[int, int, int]:
    hidden, inter = stored[2][0].shape
    return len(stored[2]), hidden, inter


def _scales(q: QuantTensor) -> Tensor:
    assert q.scales is not None
    return q.scales


def _zeros(scheme: Grouped, q: QuantTensor) -> Tensor:
    """The zero point of each group, uint8; the middle of the codes where the format has none."""
    return torch.full_like(_scales(q), scheme.middle, dtype=torch.uint8) if q.zeros is None else q.zeros


def _spoken(kind: str) -> str:
    return kind.replace("_", " ")
