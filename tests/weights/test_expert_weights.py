"""One rank's experts: a stack, or views of files; both give the same matrices."""

import random

import pytest
import torch
from torch import Tensor

from moe_mk.errors import ConfigError, ShapeError, WeightError
from moe_mk.quant import BF16, FP8_128x128, FP8_128x128_UE8M0, QuantScheme, weight_scheme
from moe_mk.quant.kinds import KINDS, scheme_of_kind
from moe_mk.weights.expert_weights import ExpertWeights, MappedExpertWeights, digest, on_device
from moe_mk.weights.slices import narrow_columns, narrow_rows

SCHEMES = [BF16, FP8_128x128, FP8_128x128_UE8M0]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32)


def stacked(scheme: QuantScheme, *, gated: bool = True, width: int = 256, hidden: int = 384) -> ExpertWeights:
    w13 = scheme.quantize(normal(3, 2 * width if gated else width, hidden))
    return ExpertWeights(w13, scheme.quantize(normal(3, hidden, width)), gated=gated)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_slot_is_gate_rows_then_up_rows_then_down(scheme: QuantScheme) -> None:
    weights = stacked(scheme)
    w13, w2 = weights.w13.dequantize(torch.float32), weights.w2.dequantize(torch.float32)
    for index in range(weights.num_slots):
        slot = weights.slot(index)
        assert slot.gate_IH is not None and slot.gate_IH.values.data_ptr() == weights.w13.values[index].data_ptr()
        assert torch.equal(slot.gate_IH.dequantize(torch.float32), w13[index, :256])
        assert torch.equal(slot.up_IH.dequantize(torch.float32), w13[index, 256:])
        assert torch.equal(slot.down_HI.dequantize(torch.float32), w2[index])
    assert weights.scheme == scheme and weights.gated and weights.num_slots == 3
    assert ExpertWeights(weights.w13, weights.w2).gated
    assert weights.num_bytes == 3 * (scheme.num_bytes(512, 384) + scheme.num_bytes(384, 256))


@pytest.mark.parametrize("quant", [*KINDS, "int4_g32_zp", "int8_row_zp"])
def test_a_digest_depends_on_every_tensor_of_every_expert_and_on_nothing_else(quant: str) -> None:
    biases = {"w13_bias": torch.arange(384.0).view(3, 128), "w2_bias": torch.ones(3, 96)}
    given = of_engine(quant, "gate_up")[1] | biases
    weights = ExpertWeights.from_engine(**given)
    found, names = {digest(weights)}, [name for name, part in given.items() if isinstance(part, Tensor)]
    for name in names:
        for slot in (0, 2):
            other = given[name].clone()
            octets = other[slot].reshape(-1).view(torch.uint8)
            octets[-1] ^= 1
            found.add(digest(ExpertWeights.from_engine(**(given | {name: other}))))
    assert len(found) == 1 + 2 * len(names)
    # The name of the format counts; strides do not: rows of gate and up that alternate are the same experts.
    named = MappedExpertWeights(weights.slots, BF16 if weights.scheme != BF16 else FP8_128x128)
    assert digest(named) not in found
    if not quant.endswith("_block"):
        halves = biases["w13_bias"].view(3, 2, 64)
        mixed = of_engine(quant, "interleaved")[1] | biases | {"w13_bias": halves.transpose(1, 2).reshape(3, 128)}
        assert digest(ExpertWeights.from_engine(**mixed)) == digest(weights)


def test_views_of_files_move_to_a_device_with_their_biases() -> None:
    w13, w2 = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    stack = ExpertWeights.from_engine(w13, w2, w13_bias=torch.ones(2, 8), w2_bias=torch.ones(2, 4))
    mapped = MappedExpertWeights([stack.slot(0), stack.slot(1)], stack.scheme)
    assert on_device(mapped, torch.device("cpu")) is mapped
    for moved in (on_device(mapped, torch.device("meta")), on_device(stack, torch.device("meta"))):
        slot = moved.slot(1)
        assert slot.gate_IH is not None
        assert {q.values.device.type for q in (slot.gate_IH, slot.up_IH, slot.down_HI)} == {"meta"}
        assert slot.up_IH.shape == (4, 4) and moved.num_slots == 2
    moved = on_device(mapped, torch.device("meta"))
    assert moved.slot(0).biases is not None
    assert [bias.device.type for bias in moved.slot(0).biases.tensors] == ["meta"] * 3


def test_a_private_layout_cannot_be_read_by_slot() -> None:
    weights = stacked(BF16)
    private = ExpertWeights(weights.w13, weights.w2, layout="swizzled")
    with pytest.raises(AssertionError, match="layout 'swizzled' is private"):
        private.slot(0)


@pytest.mark.parametrize(
    "scheme", [BF16, weight_scheme((2, 3)), weight_scheme((2, 3), ue8m0=True)], ids=lambda s: s.name
)
def test_narrowing_at_block_edges_keeps_the_right_scales(scheme: QuantScheme) -> None:
    # Blocks of 2 x 3 on a 7 x 10 matrix; the last ones are ragged.
    q = scheme.quantize(normal(7, 10) * torch.arange(1, 11) * torch.arange(1, 8)[:, None])
    whole = q.dequantize(torch.float32)
    for start, length in ((0, 7), (0, 2), (4, 3), (6, 1), (2, 3), (0, 0)):
        part = narrow_rows(q, start, length)
        assert part.values.data_ptr() == q.values[start:].data_ptr() or length == 0
        assert torch.equal(part.dequantize(torch.float32), whole[start : start + length])
        assert part.num_bytes == scheme.num_bytes(length, 10)
    for start, length in ((0, 10), (3, 3), (6, 4), (9, 1), (3, 5)):
        part = narrow_columns(q, start, length)
        assert torch.equal(part.dequantize(torch.float32), whole[:, start : start + length])


@pytest.mark.parametrize("kind", ["int4_g32", "int4_g64_zp", "int8_g32_zp", "int4_row"])
def test_columns_of_groups_are_cut_at_edges_and_after_the_last_one(kind: str) -> None:
    q = scheme_of_kind(kind).quantize(normal(4, 80))  # the last group of a row is shorter
    whole, tried = q.dequantize(torch.float32), 0
    side = {"int4_g32": 32, "int8_g32_zp": 32, "int4_g64_zp": 64}.get(kind, 2)
    for start in range(0, 80, 8):
        for end in range(start + 8, 81, 8):
            if start % side or (end % side and end != 80):
                with pytest.raises(ShapeError, match=f"columns {start} to {end} of 80 would cut a group of {side} "):
                    narrow_columns(q, start, end - start)
                continue
            part, tried = narrow_columns(q, start, end - start), tried + 1
            assert torch.equal(part.dequantize(torch.float32), whole[:, start:end])
    assert tried >= 3


def test_a_start_inside_a_block_is_a_mistake_of_ours() -> None:
    q = weight_scheme((2, 3)).quantize(normal(7, 10))
    with pytest.raises(AssertionError, match="1 is not a multiple of the block side 2"):
        narrow_rows(q, 1, 2)
    with pytest.raises(AssertionError, match="4 is not a multiple of the block side 3"):
        narrow_columns(q, 4, 2)


# Weights that an engine has split already.


def of_engine(
    quant: str, order: str, *, inner: int = 64, hidden: int = 96, block: tuple[int, int] = (32, 32)
) -> tuple[list, dict]:
    """Gate, up and down of three experts, and the tensors in which an engine holds them."""
    scheme, draw = scheme_of_kind(quant, block), torch.Generator().manual_seed(4)
    sizes = (inner, hidden), (inner, hidden), (hidden, inner)
    experts = [[scheme.quantize(torch.randn(size, generator=draw)) for size in sizes] for _ in range(3)]

    def rows(pick: str) -> Tensor | None:
        if getattr(experts[0][0], pick) is None:
            return None
        both = []
        for gate, up, _ in experts:
            first, second = getattr(gate, pick), getattr(up, pick)
            if order == "interleaved":
                octets = torch.stack([each.view(torch.uint8) for each in (first, second)], 1)
                both.append(octets.flatten(0, 1).view(first.dtype))
            else:
                both.append(torch.cat((first, second) if order == "gate_up" else (second, first)))
        return torch.stack(both)

    def down(pick: str) -> Tensor | None:
        parts = [getattr(expert[2], pick) for expert in experts]
        return None if parts[0] is None else torch.stack(parts)

    given = {"quant": quant, "block": block, "order": order, "w13": rows("values"), "w2": down("values")}
    given |= {"w13_scale": rows("scales"), "w2_scale": down("scales")}
    given |= {"w13_global_scale": rows("global_scale"), "w2_global_scale": down("global_scale")}
    return experts, given | {"w13_zeros": rows("zeros"), "w2_zeros": down("zeros")}


@pytest.mark.parametrize("order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("quant", [*KINDS, "int4_g32", "int4_g32_zp", "int8_row_zp"])
def test_tensors_of_an_engine_are_read_in_every_format_and_order_without_a_copy(quant: str, order: str) -> None:
    experts, given = of_engine(quant, order)
    if order == "interleaved" and quant.endswith("_block"):
        with pytest.raises(ConfigError, match="rows of gate and up alternate, but 32 rows of .* share a scale"):
            ExpertWeights.from_engine(**given)
        return
    weights = ExpertWeights.from_engine(**given)
    assert (weights.num_slots, weights.scheme.name) == (3, scheme_of_kind(quant, (32, 32)).name)
    assert isinstance(weights, ExpertWeights) == (order == "gate_up")  # a stack where nothing has to be reordered
    ends = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (given["w13"], given["w2"])]
    for index, expert in enumerate(experts):
        slot = weights.slot(index)
        for found, wanted, (start, end) in zip(
            (slot.gate_IH, slot.up_IH, slot.down_HI), expert, (ends[0], *ends), strict=True
        ):
            assert found is not None and torch.equal(found.dequantize(torch.float32), wanted.dequantize(torch.float32))
            assert start <= found.values.data_ptr() < end


@pytest.mark.parametrize("hidden", [48, 96])
@pytest.mark.parametrize("inner", [32, 48, 64, 80])
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_a_stack_of_an_engine_is_one_of_blocks_only_where_gate_fills_whole_ones(
    order: str, inner: int, hidden: int
) -> None:
    experts, given = of_engine("fp8_block", order, inner=inner, hidden=hidden)
    last, rows = experts[1][order == "gate_up"], (inner - 1) // 32 * 32 - inner  # a block of zeros, under a scale of 0
    for values, scales in ((last.values, last.scales), (given["w13"][1], given["w13_scale"][1])):
        values[rows:, :32], scales[-1, 0] = 0, 0
    made = ExpertWeights.from_engine(**given)
    for index, wanted in enumerate(experts):
        slot = made.slot(index)
        for q, matrix in zip((slot.gate_IH, slot.up_IH, slot.down_HI), wanted, strict=True):
            assert q is not None and torch.equal(q.dequantize(torch.float32), matrix.dequantize(torch.float32))
        if isinstance(made, ExpertWeights):  # backends that read the stack see the same
            halves = torch.cat([each.dequantize(torch.float32) for each in wanted[:2]])
            assert torch.equal(made.w13[index].dequantize(torch.float32), halves)


def test_scales_and_shapes_of_engines_that_differ_in_the_writing() -> None:
    experts, given = of_engine("fp8_tensor", "up_gate")
    flat = {
        name: t.flatten(1) if name == "w13_scale" else t.flatten()
        for name, t in given.items()
        if name.endswith("2_scale") or name == "w13_scale"
    }
    slot = ExpertWeights.from_engine(**(given | flat)).slot(1)
    assert slot.gate_IH is not None
    assert torch.equal(slot.gate_IH.dequantize(torch.float32), experts[1][0].dequantize(torch.float32))
    one = ExpertWeights.from_engine(**(given | {"w13_scale": torch.tensor([1.0, 2.0, 3.0])})).slot(2)
    assert one.gate_IH is not None and one.gate_IH.scales is not None and float(one.gate_IH.scales) == 3.0
    experts, given = of_engine("fp8_block", "gate_up")
    powers = {name: given[name].to(torch.float8_e8m0fnu) for name in ("w13_scale", "w2_scale")}
    assert ExpertWeights.from_engine(**(given | powers)).scheme.name == "fp8_32x32_ue8m0"
    experts, given = of_engine("mxfp4", "gate_up")
    given |= {name: given[name].view(torch.uint8) for name in ("w13_scale", "w2_scale")}
    given |= {name: given[name].view(torch.int8) for name in ("w13", "w2")}
    assert torch.equal(
        ExpertWeights.from_engine(**given).slot(0).up_IH.dequantize(torch.float32),
        experts[0][1].dequantize(torch.float32),
    )


def test_biases_and_experts_without_a_gate() -> None:
    w13, w2, bias = torch.randn(2, 8, 4), torch.randn(2, 4, 4), torch.arange(16.0).view(2, 8)
    slot = ExpertWeights.from_engine(w13, w2, w13_bias=bias, w2_bias=torch.ones(2, 4), order="interleaved").slot(1)
    assert slot.biases is not None and slot.biases.gate_I.tolist() == [8, 10, 12, 14]
    assert slot.biases is not None and slot.biases.up_I.tolist() == [9, 11, 13, 15]
    ungated = ExpertWeights.from_engine(w13[:, :4], w2, gated=False)
    assert not ungated.gated and ungated.slot(0).gate_IH is None
    biases = ExpertWeights.from_engine(w13[:, :4], w2, gated=False, w13_bias=bias[:, :4], w2_bias=bias[:, 4:]).slot(1)
    assert (
        biases.biases is not None and [each.tolist() for each in biases.biases.tensors] == bias[1].view(2, 4).tolist()
    )
    assert not MappedExpertWeights([ungated.slot(0)], ungated.scheme).gated
    assert torch.equal(ungated.slot(0).up_IH.values, w13[0, :4])


@pytest.mark.parametrize(("quant", "zeros", "complaint"), [
    ("int4_g32_zp", None, "w2_zeros is missing, and int4_g32_zp has zero points"),
    ("int4_g32", torch.zeros(3, 96, 2, dtype=torch.uint8), "w2_zeros is given, and int4_g32 has no zero points"),
    ("int4_g32_affine", None, "w2_zeros is missing, and int4_g32_affine has biases"),
    ("int4_g32_zp", torch.zeros(3, 96, 2, dtype=torch.int8), r"is torch.int8 \[3, 96, 2\], expected torch.uint8"),
    ("int4_g32_zp", torch.zeros(3, 96, 3, dtype=torch.uint8), r"\[3, 96, 3\], expected torch.uint8 \[3, 96, 2\]"),
    ("int4_g32_zp", torch.full((3, 96, 2), 16, dtype=torch.uint8), "w2_zeros holds 16, .* are below 16"),
])  # fmt: skip
def test_zero_points_that_do_not_fit_are_refused(quant: str, zeros: Tensor | None, complaint: str) -> None:
    with pytest.raises(ShapeError, match=complaint):
        ExpertWeights.from_engine(**(of_engine(quant, "gate_up")[1] | {"w2_zeros": zeros}))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"w13": torch.zeros(3, 127, 96)}, r"w13 has R=127 \(axis 1\), expected R=128; has dtype torch.float32"),
        ({"w2_scale": None}, r"w2_scale is missing, expected \[3, 3, 2\]"),
        ({"w13_scale": torch.zeros(3, 3, 3)}, r"w13_scale is \[3, 3, 3\], expected \[3, 4, 3\]"),
        ({"w13_scale": torch.zeros(3, 4, 3, dtype=torch.int32)}, "w13_scale has dtype torch.int32, expected"),
        ({"w13_global_scale": torch.zeros(3)}, "fp8_32x32.* has no global scale, but w13_global_scale is given"),
        ({"quant": ""}, "w2 has dtype torch.float8_e4m3fn; state its format with quant="),
        ({"quant": "fp8_blok"}, "'fp8_blok'; did you mean 'fp8_block'"),
        ({"order": "gate-up"}, "order 'gate-up' is unknown; did you mean 'gate_up'"),
        ({"w2_bias": torch.zeros(3, 96)}, "w13_bias and w2_bias belong together"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(change: dict[str, object], complaint: str) -> None:
    with pytest.raises((ShapeError, ConfigError), match=complaint):
        ExpertWeights.from_engine(**(of_engine("fp8_block", "gate_up")[1] | change))


def test_scales_of_plain_values_are_refused() -> None:
    given, ones = {"w13": torch.randn(2, 8, 4), "w2": torch.randn(2, 4, 4)}, torch.ones(2)
    for name in ("w2_scale", "w13_scale", "w2_global_scale", "w13_global_scale"):
        complaint = rf"{name[: name.index('_')]} has a scale but torch.float32 values without"
        with pytest.raises(ShapeError, match=complaint):
            ExpertWeights.from_engine(**given, **{name: ones})


ENGINE_KINDS = [*KINDS, "int4_g32", "int4_g32_zp", "int8_row_zp", "int4_g32_affine"]
BAD = (0.0, -1.0, float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("quant", ENGINE_KINDS)
def test_numbers_that_a_checkpoint_may_not_have_are_refused_with_tensor_expert_and_value(quant: str) -> None:
    draw, tried = random.Random(quant), 0
    _, given = of_engine(quant, "gate_up")
    held = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.dtype.is_floating_point}
    held |= {name: torch.ones(3, rows) for name, rows in (("w13_bias", 128), ("w2_bias", 96))}
    for name, tensor in held.items():
        # Scales of integers in groups may be 0 and negative, as in files of GPTQ and AWQ.
        is_value = "scale" not in name or quant.startswith(("int4_", "int8_row", "int8_g"))
        for value in BAD:
            place = tuple(draw.randrange(size) for size in tensor.shape)
            changed = tensor.clone()
            changed.view(torch.uint8 if tensor.element_size() == 1 else tensor.dtype)[place] = (
                torch.tensor([value]).to(tensor.dtype).view(torch.uint8)[0] if tensor.element_size() == 1 else value
            )
            stored = float(changed[place].to(torch.float32))
            if stored != value and not (stored != stored and value != value):
                continue  # the dtype does not hold it
            both = {key: held[key] for key in ("w13_bias", "w2_bias")}
            if is_value and value in (0.0, -1.0):
                ExpertWeights.from_engine(**(given | both | {name: changed}))
                continue
            tried += 1
            with pytest.raises(WeightError) as refused:
                ExpertWeights.from_engine(**(given | both | {name: changed}))
            # Trailing axes of size 1 may be missing in what is given.
            where = str(list(place)).removesuffix("]")
            assert f"the first is {name.replace('_zeros', ', biases of groups')}{where}" in str(refused.value)
            assert f"(expert {place[0]}) = {value:g}" in str(refused.value)
    assert tried >= 6


def test_stacks_stored_transposed_are_refused_with_both_names_and_square_ones_named() -> None:
    draw, tried = random.Random(1), 0
    for _ in range(60):
        inner, hidden, halves = draw.choice((8, 16, 24)), draw.choice((8, 16, 24)), draw.choice((1, 2))
        quant = draw.choice(("", "mxfp4"))
        if quant:
            inner, hidden = 32 * inner, 32 * hidden
        shapes = {"w13": [3, halves * inner, hidden], "w2": [3, hidden, inner]}
        swapped = [name for name in shapes if draw.random() < 0.6]
        given = {}
        for name, (experts, rows, columns) in shapes.items():
            held = columns // 2 if quant else columns  # two values along the axis of the inputs share a byte
            axes = (held, rows) if name in swapped else (rows, held)
            given[name] = torch.zeros(experts, *axes, dtype=torch.uint8 if quant else torch.bfloat16)
        shown = [name for name in swapped if shapes[name][1] != shapes[name][2]]
        if not shown or (halves == 1 and len(swapped) == 2):  # the latter are experts of the other sizes
            continue
        tried += 1
        with pytest.raises(ShapeError) as refused:
            ExpertWeights.from_engine(**given, gated=halves == 2, quant=quant)
        text = str(refused.value)
        assert f"w13 {list(given['w13'].shape)} and w2 {list(given['w2'].shape)}: stored transposed" in text
        named = set(text.partition("in, out): ")[2].partition(";")[0].split(" and "))
        # A packed stack can look like one that is stored the other way round, and either stack of ungated experts.
        is_ambiguous = bool(quant) or halves == 1
        assert named == {*shown} or is_ambiguous
        for name in {*shapes} - named:
            assert is_ambiguous or (f"{name} is square" in text) == (shapes[name][1] == shapes[name][2])
    assert tried > 20
