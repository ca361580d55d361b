"""Formats of vLLM's routed experts: parameters as vLLM's loaders leave them are the experts that were quantised."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_mk.errors import UnsupportedError, WeightError
from moe_mk.integrations.engine_experts import EngineExperts
from moe_mk.integrations.vllm_formats import ACTIVATIONS, CLAMPED, FORMATS, format_of, weights_of
from moe_mk.lab.checkpoints.like import tensors_of
from moe_mk.lab.checkpoints.packing import pack
from moe_mk.quant import NVFP4
from moe_mk.quant.kinds import scheme_of_kind
from moe_mk.weights import CONVENTIONS, LayerSpec, MappingSource, load_layer
from tests.integrations.engines.cases import CLOSE, EXPERTS, Tiny, call, error
from tests.integrations.engines.stand_ins import Activation, moe_config
from tests.layer.native import NEEDS_COMPILER
from tests.support.alone import NEEDS_PEAKS, alone, peak_above

HIDDEN, INNER = 256, 128
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("UnquantizedFusedMoEMethod", "fp32", {}),
    ("Fp8MoEMethod", "fp8_block", {"block_quant": True, "moe_block_shape": [64, 32],
                                   "weight_scale_name": "weight_scale_inv"}),
    ("Fp8MoEMethod", "fp8_tensor", {"block_quant": False, "moe_block_shape": None,
                                    "weight_scale_name": "weight_scale"}),
    *(("CompressedTensorsW8A8Fp8MoEMethod", f"fp8_{each}",
       {"weight_quant": SimpleNamespace(strategy=each), "weight_block_size": [64, 32] if each == "block" else None})
      for each in ("block", "channel", "tensor")),
    ("CompressedTensorsW8A8Int8MoEMethod", "int8", {"weight_block_size": [64, 32]}),
    ("CompressedTensorsW4A8Int8MoEMethod", "int4_g32", {"group_size": 32}),
    ("CompressedTensorsWNA16MoEMethod", "int4_g32_zp", {"num_bits": 4, "group_size": 32, "symmetric": False}),
    ("CompressedTensorsWNA16MoEMethod", "int8_g128", {"num_bits": 8, "group_size": 128, "symmetric": True}),
    ("CompressedTensorsW4A4Nvfp4MoEMethod", "nvfp4", {}),
    ("CompressedTensorsW4A4Mxfp4MoEMethod", "mxfp4", {}),
    ("CompressedTensorsW8A8Mxfp8MoEMethod", "mxfp8", {}),
    *(("AutoGPTQMoEMethod", f"int{bits}_g64{'' if sym else '_zp'}",
       {"quant_config": SimpleNamespace(weight_bits=bits, group_size=64, is_sym=sym)})
      for bits, sym in ((4, True), (8, True), (4, False))),
    *(("AutoAWQMoEMethod", f"int4_g64{'_zp' * zeros}",
       {"quant_config": SimpleNamespace(weight_bits=4, group_size=64, zero_point=zeros)}) for zeros in (True, False)),
    ("GptOssMxfp4MoEMethod", "mxfp4", {}),
    ("Mxfp4MoEMethod", "mxfp4", {}),
    ("CompressedTensorsW4A8Mxfp4MoEMethod", "mxfp4", {}),
    ("ModelOptFp8MoEMethod", "fp8_tensor", {}),
    ("ModelOptNvFp4FusedMoE", "nvfp4", {}),
    ("ModelOptMxFp8FusedMoE", "mxfp8", {}),
    ("QuarkW8A8Mxfp8MoEMethod", "mxfp8", {}),
)  # fmt: skip
"""Methods of vLLM, each with a format and the attributes that name it."""


def loaded(name: str, kind: str, matrices: list[Tensor], order: str) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a projection of one expert by field of `MoeFormat`, and its matrices (gate and up) decoded."""
    found, scheme = FORMATS[name], scheme_of_kind(kind, (64, 32))
    parts = [scheme.quantize(matrix) for matrix in matrices]
    decoded = torch.cat([scheme.dequantize(q, torch.float32) for q in parts])
    if found.packing:
        given = [pack(found.packing, q) for q in parts]
        across = 1 if found.zeros == "qzeros" else 0  # the axis of outputs
        sides = given[0].keys() & {"", "scale", "zeros"}
        return {side: torch.cat([each[side] for each in given], across) for side in sides}, decoded
    out = {"": torch.cat([q.values for q in parts])}
    scales = [q.scales for q in parts if q.scales is not None]
    if scales:
        out["scale"] = torch.cat([each.reshape(1) for each in scales] if kind == "fp8_tensor" else scales)
        if out["scale"].dtype is torch.float8_e8m0fnu:
            out["scale"] = out["scale"].view(torch.uint8)
    if parts[0].global_scale is not None:
        above = torch.cat([q.global_scale.reshape(1) for q in parts if q.global_scale is not None])
        out["global_scale"] = 1.0 / above if found.divides else above
    if order == "interleaved":
        out = {
            part: tensor.reshape(2, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1) for part, tensor in out.items()
        }
    return out, decoded


def test_what_is_not_known_of_a_method_is_refused_by_name() -> None:
    known = type("CompressedTensorsWNA16MoEMethod", (), {"num_bits": 4, "group_size": None, "symmetric": True})
    assert format_of(known()).kind(known()) == "int4_row"
    with pytest.raises(UnsupportedError, match=r"no experts of vLLM's WNA16V2\n.*it computes those of .*Fp8MoEMethod"):
        format_of(type("WNA16V2", (known,), {})())
    three: Any = type(known.__name__, (), {"num_bits": 3, "group_size": 32, "symmetric": True})()
    with pytest.raises(UnsupportedError, match=r"WNA16MoEMethod\n.*3-bit weights with groups of 32 are not supported"):
        format_of(three)
    layer: Any = nn.Module()
    vars(layer).update(layer_name="layers.1", swiglu_limit=None, swiglu_alpha=None)
    for side in ("w13", "w2"):
        layer.register_parameter(f"{side}_weight", nn.Parameter(torch.full((2, 32, 32), 8, dtype=torch.int8), False))
        layer.register_parameter(f"{side}_weight_scale", nn.Parameter(torch.ones((2, 32, 1)), False))
    method = type("CompressedTensorsW4A8Int8MoEMethod", (), {"moe": moe_config(), "group_size": -1})()
    with pytest.raises(WeightError, match=r"layers.1.w13_ has 8 to 8, beyond 4 bits with sign"):
        weights_of(layer, method, format_of(method))
    layer.w13_weight.data.fill_(7)
    layer.w2_weight.data.fill_(-8)
    given = weights_of(layer, method, format_of(method))
    assert (given.quant, given.tokens, given.w13[0, 0, 0], given.w2[0, 0, 0]) == ("int4_row", "int8", 0xFF, 0)
    layer.w13_g_idx = nn.Parameter(torch.zeros(32), False)
    with pytest.raises(UnsupportedError, match=r"layers.1\n.*w13_g_idx of CompressedTensorsW4A8Int8MoEMethod is not"):
        weights_of(layer, method, format_of(method))


BIASES = "none", "stated", "loaded", "unused"
"""Of the model's configuration, of the checkpoint alone (AWQ and GPTQ of Marlin), or created and left empty."""


@pytest.mark.parametrize(
    ("name", "kind", "facts", "biases"), [(*case, BIASES[number % 4]) for number, case in enumerate(CASES)]
)
def test_the_experts_are_those_that_were_quantised(name: str, kind: str, facts: dict[str, Any], biases: str) -> None:
    order, draw = "interleaved" if name.startswith("GptOss") else "gate_up", torch.Generator().manual_seed(0)
    activation = Activation.SWIGLUOAI if order == "interleaved" else Activation.SILU
    method = SimpleNamespace(moe=moe_config(activation=activation, has_bias=biases == "stated"), **facts)
    layer: Any = nn.Module()
    vars(layer).update(layer_name="layers.1", swiglu_limit=None, swiglu_alpha=None)
    layer._loaded_expert_biases = {"w13_bias", "w2_bias"} if biases == "loaded" else set()
    stems = {"": FORMATS[name].values, "scale": facts.get("weight_scale_name", FORMATS[name].scale)}
    stems |= {"global_scale": FORMATS[name].above, "zeros": FORMATS[name].zeros}
    wanted, shapes = dict[str, list[Tensor]](), {"w13": [(INNER, HIDDEN)] * 2, "w2": [(HIDDEN, INNER)]}
    stacks: dict[str, list[Tensor]] = {}
    for side, each in (*shapes.items(),) * EXPERTS:
        drawn = [torch.randn(shape, generator=draw) / 4 for shape in each]
        tensors, decoded = loaded(name, kind, drawn, order if side == "w13" else "gate_up")
        wanted.setdefault(side, []).append(decoded)
        for part, tensor in tensors.items():
            one = side == "w2" and (part == "global_scale" or (kind == "fp8_tensor" and part == "scale"))
            stacks.setdefault(f"{side}_{stems[part]}", []).append(tensor.reshape(()) if one else tensor)
    drawn = [torch.randn((EXPERTS, size), generator=draw) for size in (2 * INNER, HIDDEN)]
    inputs = {f"{side}_input_{scale}": [torch.ones(2)] for side in shapes for scale in ("scale", "global_scale")}
    unread = {"w13_weight_shape": [torch.ones(2)], "w2_g_idx": [torch.empty(0)]}
    bias = {} if biases == "none" else {"w13_bias": [*drawn[0]], "w2_bias": [*drawn[1]]}
    for path, values in {**stacks, **bias, **inputs, **unread}.items():
        layer.register_parameter(path, nn.Parameter(torch.stack(values), requires_grad=False))
    rows = torch.stack(wanted["w13"])
    if order == "interleaved":
        rows = torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)
    tiny = Tiny(rows, torch.stack(wanted["w2"]), activation=activation.value)
    x_TH, weights_TK, ids_TK = call(5, hidden=HIDDEN)
    for method.moe.moe_parallel_config.tp_rank in (0, 1):
        given = weights_of(layer, method, FORMATS[name])
        if biases in ("stated", "loaded"):  # vLLM sums over ranks
            tiny = replace(tiny, b13=drawn[0], b2=drawn[1] * (method.moe.moe_parallel_config.tp_rank == 0))
        here = EngineExperts("tiny", given, top_k=2, settings={"experts": "reference", "activations": "plain"})
        assert error(here(x_TH, weights_TK, ids_TK), tiny.loops(x_TH, weights_TK, ids_TK)) < CLOSE
        assert given.quant == kind.removeprefix("fp32")
        computed = FORMATS[name].packing or FORMATS[name].divides
        names = {*stacks, *(() if biases == "unused" and not computed else bias), *(inputs if computed else ())}
        if not computed and tiny.b2 is not None and not tiny.b2.any():
            names |= {*inputs}
        held = {name for name, each in layer.named_parameters() if any(each is tensor for tensor in given.tensors)}
        assert held == names, "all of vLLM's tensors are freed with it"


@pytest.mark.parametrize(
    ("name", "limit", "alpha"),
    [*((name, None, None) for name in sorted({*ACTIVATIONS, *CLAMPED})), *((name, 1.5, 1.2) for name in CLAMPED)],
)
def test_every_activation_of_vllm_reads_rows_in_the_order_of_vllm(
    name: str, limit: float | None, alpha: float | None
) -> None:
    gated, tokens = name != "relu2", call()
    tiny = replace(Tiny.drawn(gated=gated), activation=name, limit=limit, alpha=alpha or 1.702)
    tiny = replace(tiny, w13=4 * tiny.w13)
    layer: Any = nn.Module()
    vars(layer).update(layer_name="layers.1", swiglu_limit=limit, swiglu_alpha=alpha)
    layer.w13_weight, layer.w2_weight = nn.Parameter(tiny.w13, False), nn.Parameter(tiny.w2, False)
    stated = SimpleNamespace(value=name if gated else f"{name}_no_mul")
    method = SimpleNamespace(moe=moe_config(activation=stated, is_act_and_mul=gated))
    given = weights_of(layer, method, FORMATS["UnquantizedFusedMoEMethod"])
    here = EngineExperts("tiny", given, top_k=2, settings={"experts": "reference"})
    assert error(here(*tokens), tiny.loops(*tokens)) < CLOSE


def peak_of_packing(name: str, count: int, experts: int) -> float:
    """The peak while some layers of about 3 MB an expert are packed and freed, above the start, in layers."""
    hidden, inner, words = 1024, 512, name != "UnquantizedFusedMoEMethod"
    method = SimpleNamespace(moe=moe_config(in_dtype=torch.bfloat16), num_bits=4, group_size=128, symmetric=True)
    layers: list[Any] = []
    for _ in range(count):
        layer: Any = nn.Module()
        vars(layer).update(layer_name="layers.1", swiglu_limit=None, swiglu_alpha=None)
        for side, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            if words:
                held = {"weight_packed": torch.full((4 * experts, n, k // 8), 0x59A6B7C8, dtype=torch.int32)}
                held["weight_scale"] = torch.full((4 * experts, n, k // 128), 0.01, dtype=torch.bfloat16)
            else:
                held = {"weight": torch.full((experts, n, k), 0.01, dtype=torch.bfloat16)}
            for stem, tensor in held.items():
                layer.register_parameter(f"{side}_{stem}", nn.Parameter(tensor, requires_grad=False))
        layers.append(layer)
    num_bytes = sum(parameter.nbytes for parameter in layers[0].parameters())
    given: dict[str, Any] = {"top_k": 2, "release": True}
    peak, _ = peak_above(lambda: [EngineExperts("0", weights_of(_, method, FORMATS[name]), **given) for _ in layers])
    return peak / num_bytes


@NEEDS_COMPILER
@NEEDS_PEAKS
@pytest.mark.slow
@pytest.mark.timeout(300)  # the first one compiles the kernels
@pytest.mark.parametrize("name", ["UnquantizedFusedMoEMethod", "CompressedTensorsWNA16MoEMethod"])
def test_the_peak_while_layers_are_packed_is_one_layer_above_the_end(name: str) -> None:
    # Layers of about 100 MB: torch returns storages of more than 32 MB to the system.
    above = alone(peak_of_packing, name, 2, 32, first=(name, 1, 2))
    assert 0.5 < above < 1.5, "of a layer: the copy of one, and no second one"


@pytest.mark.external
def test_nvfp4_of_a_checkpoint_is_what_compressed_tensors_decodes() -> None:
    library: Any = pytest.importorskip("compressed_tensors.compressors.nvfp4", reason="`make engines` installs it")
    spec = LayerSpec(2, 64, 32, NVFP4, 1, 32)
    tensors = tensors_of(spec, CONVENTIONS["packed"], seed=1)
    slot = load_layer(MappingSource(tensors), 0, spec, owned=[1], prefix="").experts.slot(0)
    for name, q in (("gate", slot.gate_IH), ("up", slot.up_IH), ("down", slot.down_HI)):
        stem = f"experts.1.{name}_proj."
        given = {key.removeprefix(stem): tensor for key, tensor in tensors.items() if key.startswith(stem)}
        wanted = library.NVFP4PackedCompressor.decompress(given, None)["weight"]
        assert q is not None
        torch.testing.assert_close(q.dequantize(torch.float32), wanted.float(), rtol=2**-7, atol=0.0)  # theirs in bf16
