"""Layers of SGLang's wheel on a CPU, whose experts are this library's; started as a program of its own.

SGLANG_PLUGINS=moe_mk python sglang_host.py

Nothing of SGLang is replaced. Of what it imports, torchvision is, whose wheels do not load next to torch for CPUs;
nothing here calls it.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import json
import socket
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers.utils.import_utils

from moe_mk.errors import UnsupportedError
from moe_mk.lab.judge import read_case, record_sglang
from moe_mk.lab.judge.verdict import judge
from moe_mk.quant.kinds import scheme_of_kind
from tests.integrations.engines.cases import Tiny, error

EXPERTS, HIDDEN, INNER, TOP_K, TOKENS = 8, 64, 32, 2, 9


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision in which every name is an empty class."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        wanted = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> type:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {})

        return Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def prepare() -> None:
    """What SGLang's scheduler does before it builds a model: plugins, configuration, groups of one rank."""
    transformers.utils.import_utils.is_torchvision_available()  # before there is something to find
    sys.meta_path.insert(0, Absent())
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.layers.moe import initialize_moe_config

    runtime_context.get_context().override_server_args(device="cpu", moe_runner_backend="triton").install()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=address
    )
    parallel_state.initialize_model_parallel(backend="gloo")
    runtime_context.get_parallel().override_permanently(moe_ep_rank=0, moe_tp_rank=0)
    initialize_moe_config()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAW) * 0.3


def call(dtype: torch.dtype) -> tuple[torch.Tensor, Any]:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    ids = torch.rand(TOKENS, EXPERTS, generator=DRAW).argsort(dim=1)[:, :TOP_K].to(torch.int32)
    weights = torch.rand(TOKENS, TOP_K, generator=DRAW) + 0.1
    return drawn(TOKENS, HIDDEN).to(dtype), StandardTopKOutput(weights, ids, torch.empty(0))


def unquantised(**changes: Any) -> float:
    """The layer that SGLang's models contain, called as they call it, against loops."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 0, top_k=TOP_K, params_dtype=torch.bfloat16, **changes)
    assert type(layer.quant_method.runner.runner_core).__name__ == "MoeMkRunnerCore"
    for weight in layer.parameters():
        weight.data.copy_(drawn(*weight.shape))
    layer.quant_method.process_weights_after_loading(layer)
    x, topk = call(torch.bfloat16)
    activation = changes.get("activation", "silu")
    tiny = Tiny(layer.w13_weight.data.float(), layer.w2_weight.data.float(), activation=activation)
    scale = changes.get("routed_scaling_factor") or 1.0
    return error(layer(x, topk), scale * tiny.loops(x.float(), topk.topk_weights, topk.topk_ids))


def quantised(quant: str, block: tuple[int, int], **flags: Any) -> float:
    """SGLang's runner with its own records: what its FP8 and INT8 methods pass, which do not load on this processor."""
    from sglang.srt.layers.moe.moe_runner import MoeRunner, MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.token_dispatcher import StandardDispatchOutput
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    scheme = scheme_of_kind(quant, block)
    w13, w2 = scheme.quantize(drawn(EXPERTS, 2 * INNER, HIDDEN)), scheme.quantize(drawn(EXPERTS, HIDDEN, INNER))
    info = TritonMoeQuantInfo(w13.values, w2.values, w13_scale=w13.scales, w2_scale=w2.scales, **flags)
    runner = MoeRunner(MoeRunnerBackend.TRITON, MoeRunnerConfig(num_experts=EXPERTS, num_local_experts=EXPERTS))
    x, topk = call(torch.bfloat16)
    out = runner.run(StandardDispatchOutput(x, None, topk), info).hidden_states
    tiny = Tiny(w13.dequantize(torch.float32), w2.dequantize(torch.float32))
    return error(out, tiny.loops(x.float(), topk.topk_weights, topk.topk_ids))


def integers(method: str, bits: int, group: int, *, zeros: bool) -> float:
    """SGLang's own method and loader for GPTQ and AWQ, against the weights that the checkpoint's integers state."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Config

    stated = {"bits": bits, "group_size": group, "quant_method": method, "sym": not zeros, "zero_point": zeros}
    config = MoeWNA16Config("gptq", bits, group, zeros, False, [], stated | {"desc_act": False})
    config.linear_quant_method = method  # the constructor asks for a CUDA device if it is AWQ
    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 0, top_k=TOP_K, params_dtype=torch.bfloat16, quant_config=config)
    tiny = Tiny(torch.empty(EXPERTS, 2 * INNER, HIDDEN), torch.empty(EXPERTS, HIDDEN, INNER))
    load = layer.w13_qweight.weight_loader
    for e, shard in ((e, shard) for e in range(EXPERTS) for shard in ("w1", "w2", "w3")):
        rows, columns = (HIDDEN, INNER) if shard == "w2" else (INNER, HIDDEN)
        codes = torch.randint(0, 2**bits, (rows, columns), generator=DRAW)
        zero = torch.randint(1, 2**bits, (rows, columns // group), generator=DRAW) if zeros else None
        scales = (torch.rand(rows, columns // group, generator=DRAW) * 0.02 + 0.01).to(torch.bfloat16)
        name = "w2" if shard == "w2" else "w13"
        for kind, tensor in stored(method, bits, codes, zero, scales):
            load(getattr(layer, f"{name}_{kind}"), tensor, f"{name}_{kind}", shard, e)
        centre = 2 ** (bits - 1) if zero is None else zero.repeat_interleave(group, dim=1)
        weight = (codes - centre) * scales.float().repeat_interleave(group, dim=1)
        {"w1": tiny.w13[e, :INNER], "w3": tiny.w13[e, INNER:], "w2": tiny.w2[e]}[shard].copy_(weight)
    layer.quant_method.process_weights_after_loading(layer)
    x, topk = call(torch.bfloat16)
    return error(layer(x, topk), tiny.loops(x.float(), topk.topk_weights, topk.topk_ids))


def stored(
    method: str, bits: int, codes: torch.Tensor, zero: torch.Tensor | None, scales: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a checkpoint for one matrix (rows, columns): GPTQ packs inputs, AWQ outputs in its own order."""
    yield "scales", scales.T.contiguous()
    if method == "gptq":
        yield "qweight", packed(codes.T, bits, dim=0)
        if zero is not None:
            yield "qzeros", packed((zero - 1).T, bits, dim=1)
        return
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    shuffled = [t.T.reshape(-1, 8)[:, order].reshape(t.T.shape) for t in (codes, zero) if t is not None]
    yield "qweight", packed(shuffled[0], bits, dim=1)
    yield "qzeros", packed(shuffled[1], bits, dim=1)


def packed(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Codes along a dimension in int32 words, the first in the low bits."""
    count = 32 // bits
    parts = codes.long().unflatten(dim, (-1, count))
    shape = [1] * parts.dim()
    shape[dim + 1] = count
    words = (parts << (bits * torch.arange(count)).view(shape)).sum(dim=dim + 1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def recorded() -> bool:
    """Whether the layer's call as a case file is right."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    layer = FusedMoE(EXPERTS, HIDDEN, INNER, 0, top_k=TOP_K, params_dtype=torch.bfloat16, routed_scaling_factor=2.5)
    for weight in layer.parameters():
        weight.data.copy_(drawn(*weight.shape))
    weights = {"w13": layer.w13_weight.data.clone(), "w2": layer.w2_weight.data.clone()}
    layer.quant_method.process_weights_after_loading(layer)
    with TemporaryDirectory() as folder:
        (file,) = record_sglang(layer, folder, checkpoint="", norm=0.0)
        layer(*call(torch.bfloat16))
        case = read_case(Path(file))
    return judge(replace(case, experts=torch.arange(EXPERTS), **weights)).right


def refused(**changes: Any) -> str:
    try:
        unquantised(**changes)
    except UnsupportedError as problem:
        return str(problem)
    return ""


DRAW = torch.Generator().manual_seed(0)


def main() -> None:
    prepare()
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig

    print(
        json.dumps(
            {
                "settings": sorted(field.name for field in dataclasses.fields(MoeRunnerConfig)),
                "errors": {
                    "bf16": unquantised(),
                    "bf16 scaled": unquantised(routed_scaling_factor=2.5),
                    "relu2": unquantised(is_gated=False, activation="relu2"),
                    "fp8 blocks": quantised("fp8_block", (16, 16), use_fp8_w8a8=True, block_shape=[16, 16]),
                    "fp8 channels": quantised("fp8_channel", (1, 1), use_fp8_w8a8=True, per_channel_quant=True),
                    "fp8 tensors": quantised("fp8_tensor", (1, 1), use_fp8_w8a8=True, a13_scale=torch.ones(EXPERTS)),
                    "int8": quantised("int8", (1, 1), use_int8_w8a8=True),
                    "gptq int4": integers("gptq", 4, 32, zeros=False),
                    "gptq int4 zeros": integers("gptq", 4, 32, zeros=True),
                    "gptq int8": integers("gptq", 8, 32, zeros=False),
                    "awq int4": integers("awq", 4, 32, zeros=True),
                },
                "refused": refused(swiglu_limit=7.0),
                "recorded": recorded(),
            }
        )
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
