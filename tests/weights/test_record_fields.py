"""Every field of every record of weights survives what is done to records, and is read from its own tensor.

Records are filled by the types of their fields, so that a new field is tried without a word here.
"""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor

from moe_mk.config.equation import FUSED_SHARED_BIAS
from moe_mk.layer.settings import config_of, layer_spec_of, stated
from moe_mk.quant import BF16, QuantTensor
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.tensor import QuantScheme
from moe_mk.weights import ExpertWeights, LayerWeights, MappedExpertWeights, MappingSource, SlotWeights, load_layer
from moe_mk.weights.expert_weights import SlotBiases, on_device
from moe_mk.weights.layer_spec import Features, LayerSpec
from moe_mk.weights.names import CONVENTIONS, Part, Role
from moe_mk.weights.slices import narrow_columns, narrow_rows, stacked_rows
from tests.layer.any_tensors import tensors_of
from tests.weights.foreign import Draw, write

CPU, INT4 = torch.device("cpu"), GROUPED["int4_g32_zp"]
RECORDS: Sequence[type] = (QuantTensor, SlotBiases, SlotWeights, ExpertWeights, MappedExpertWeights, LayerWeights)
COUNT = itertools.count(1)


def filled(kind: Any) -> Any:
    """A value of a type, whose tensors no other value has."""
    if get_origin(kind) in (Union, type(int | None)):
        kind = next(each for each in get_args(kind) if each is not type(None))
    if kind is Tensor:
        return torch.arange(16, dtype=torch.uint8).view(4, 4) + 7 * next(COUNT)
    if get_origin(kind) in (tuple, Sequence):
        return tuple(filled(get_args(kind)[0]) for _ in range(2))
    if kind is QuantScheme:
        return INT4
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{each.name: filled(hints[each.name]) for each in fields(kind)})  # type: ignore[operator]
    return {str: "marker", int: 3, bool: True}[kind]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a record by its path."""
    if is_dataclass(value) and not isinstance(value, QuantScheme):
        for each in fields(value):
            yield from leaves(getattr(value, each.name), f"{path}.{each.name}")
    elif isinstance(value, tuple | list):
        for at, each in enumerate(value):
            yield from leaves(each, f"{path}[{at}]")
    else:
        yield path.removeprefix("."), value


def differing(one: Any, other: Any) -> list[str]:
    """The paths at which two records differ."""
    first, second = dict(leaves(one)), dict(leaves(other))
    assert first.keys() == second.keys()

    def same(a: Any, b: Any) -> bool:
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return bool(a == b)
        octets = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype is b.dtype and a.shape == b.shape and torch.equal(*octets)

    return [path for path, value in first.items() if not same(value, second[path])]


MOVES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy, "pickle": lambda record: pickle.loads(pickle.dumps(record)), "replace": replace,
    "clone": lambda record: record.changed(Tensor.clone), "to": lambda record: record.to(CPU),
    "on_device": lambda record: on_device(record, CPU),
}  # fmt: skip
HAVE: dict[str, Sequence[type]] = {
    "clone": (QuantTensor, SlotBiases, SlotWeights, MappedExpertWeights), "to": (QuantTensor,),
    "on_device": (ExpertWeights, MappedExpertWeights),
}  # fmt: skip


@pytest.mark.parametrize("move,record", [(m, r) for m in MOVES for r in HAVE.get(m, RECORDS)])
def test_no_field_is_lost_or_taken_from_another(move: str, record: type) -> None:
    whole = filled(record)
    assert not [path for path, value in leaves(whole) if value is None], "a field was not filled"
    assert record is SlotBiases or whole.num_bytes == sum(t.nbytes for _, t in leaves(whole) if isinstance(t, Tensor))
    assert differing(whole, MOVES[move](whole)) == []


def matrix(rows: int, columns: int, seed: int) -> QuantTensor:
    return INT4.quantize(torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)))


def test_parts_of_a_matrix_have_their_parts_of_every_field() -> None:
    """Rows and columns are cut and joined again, and rows are picked."""
    whole = replace(matrix(8, 128, 1), global_scale=torch.tensor([[2.0]]))
    cut = [narrow_rows(whole, start, 4) for start in (0, 4)]
    assert all(part.global_scale is not None for part in cut)
    alone = [replace(part, global_scale=None) for part in cut]
    assert differing(stacked_rows(alone), replace(whole, global_scale=None)) == []
    columns = [narrow_columns(whole, start, 64) for start in (0, 64)]
    for path, value in leaves(whole):
        if isinstance(value, Tensor) and path != "global_scale":
            assert torch.equal(torch.cat([getattr(part, path) for part in columns], 1), value), path
    order, picked = torch.tensor([5, 0, 3]), replace(whole, global_scale=None)
    assert differing(picked[order], picked.changed(lambda part: part[order])) == []
    with pytest.raises(AssertionError, match="the first dimension is cut into blocks"):
        _ = whole[order]


FEATURES = {each.name for each in fields(Features)}
FIELDS: dict[str, tuple[Part, dict[str, Any]]] = {
    "gate_EH": (Part(Role.ROUTER), {}), "bias_E": (Part(Role.BIAS), {"has_gate_bias": True}),
    "logit_bias_E": (Part(Role.LOGIT_BIAS), {"has_logit_bias": True}),
    "shared_gate_H": (Part(Role.SHARED_GATE), {"has_shared_gate": True}),
    "expert_scale_E": (Part(Role.EXPERT_SCALE), {"has_expert_scale": True}),
    "image_bias_E": (Part(Role.IMAGE_BIAS), {"has_image_bias": True}),
    "table_XK": (Part(Role.TABLE), {"table": (17, 2)}),
    "latent[0]": (Part(Role.LATENT, "down"), {"latent_size": 64, "has_latent_norm": True}),
    "latent[1]": (Part(Role.LATENT, "up"), {"latent_size": 64, "has_latent_norm": True}),
    "latent[2]": (Part(Role.LATENT, "norm"), {"latent_size": 64, "has_latent_norm": True}),
    "input_norm[0]": (Part(Role.INPUT_NORM, "experts"), {"has_input_norm": True}),
    "input_norm[1]": (Part(Role.INPUT_NORM, "router"), {"has_input_norm": True}),
}  # fmt: skip


OWNED = {2: 0, 0: 1}
"""The slot of each expert of the rank."""


def expected_path(part: Part, tp_rank: int) -> str:
    """Where a tensor of an expert is in the record of the layer; "" if it is not."""
    if part.expert == 1 or (part.extra and part.projection == "down" and tp_rank):  # one rank adds down's biases
        return ""
    of = "shared" if part.role is Role.SHARED else f"experts.slots[{OWNED[part.expert or 0]}]"
    if part.extra:
        return f"{of}.biases.{part.projection}_{'H' if part.projection == 'down' else 'I'}"
    return f"{of}.{part.projection}_{'HI' if part.projection == 'down' else 'IH'}.values"


@pytest.mark.parametrize("tp", [(0, 1), (1, 2)])
@pytest.mark.parametrize("without", ["table_XK", "bias_E"])
def test_each_tensor_of_a_layer_is_read_into_its_field_and_no_other(without: str, tp: tuple[int, int]) -> None:
    """One number of one tensor is changed at a time, of a layer with every feature but one: a table replaces a bias."""
    features = {key: value for field, (_, on) in FIELDS.items() if field != without for key, value in on.items()}
    spec = LayerSpec(3, 128, 64, BF16, 1, 32, has_expert_bias=True, **features)
    tensors, seen = tensors_of(spec, 3), set[str]()

    def read(changed: dict[str, Tensor]) -> LayerWeights:
        return load_layer(MappingSource(changed), 0, spec, owned=[*OWNED], tp_rank=tp[0], tp_size=tp[1], prefix="")

    whole = read(tensors)
    for name, tensor in tensors.items():
        part, other = CONVENTIONS["scaled"].parse(name), tensor.clone()
        assert part is not None
        other.view(-1)[-1] += 1 if part.role is not Role.TABLE else -int(other.view(-1)[-1])
        other.view(-1)[-1] += part.role is Role.TABLE and torch.equal(other, tensor)
        if part.role in (Role.EXPERT, Role.SHARED):
            path = expected_path(part, tp[0])
        else:
            path = next(field for field, (each, _) in FIELDS.items() if each == part)
            path = "" if path == without else path
        seen.add(path)
        assert differing(whole, read(tensors | {name: other})) == [path] * bool(path), name
    assert FIELDS.keys() - {without} <= seen
    text_bias = CONVENTIONS["scaled"].spell(Part(Role.BIAS))
    assert without != "bias_E" or differing(whole, read(tensors | {text_bias: torch.ones(3)})) == [], "a table wins"
    spec = replace(spec, num_fused_shared_experts=1)
    fused = read(tensors)
    for bias_E, other_E in ((fused.bias_E, whole.bias_E), (fused.image_bias_E, whole.image_bias_E)):
        if other_E is not None:  # every token has the last one
            assert bias_E is not None and torch.equal(bias_E, torch.tensor([*other_E[:2], FUSED_SHARED_BIAS]))


KINDS = {
    "values": ("weight", "qweight", "weight_packed"), "scales": ("weight_scale", "weight_scale_inv", "scales"),
    "global_scale": ("weight_scale_2", "weight_global_scale"), "zeros": ("qzeros", "weight_zero_point"),
    "": ("g_idx", "weight_shape", "input_scale", "input_global_scale"),
}  # fmt: skip


@pytest.mark.parametrize(
    "form", ["bf16", "fp8_block", "fp8_channel", "int8", "gptq4", "gptq8", "awq", "ct4", "mxfp4", "nvfp4", "nvfp4_ct"]
)
def test_each_tensor_of_a_matrix_is_read_into_its_field_and_no_other(form: str, tmp_path: Any) -> None:
    form_of_zeros = {"checkpoint_format": "gptq_v2"} if form.startswith("gptq") else {}  # any code is a zero point
    written = write(Draw(form, experts=2, symmetric=False, options=form_of_zeros), tmp_path)
    spec = layer_spec_of(stated(config_of(tmp_path, 0), tmp_path, 0))

    def read(tensors: dict[str, Tensor]) -> LayerWeights:
        return load_layer(MappingSource(tensors), 0, spec, owned=[1], prefix="")

    whole = read(written.tensors)
    for name, tensor in written.tensors.items():
        if name == "gate.weight":
            continue
        _, expert, projection, end = name.split(".")
        kind = next(kind for kind, ends in KINDS.items() if end in ends)
        if not kind:
            continue
        octets = tensor.clone().reshape(-1).view(torch.uint8)
        octets[tensor.element_size() - 1 if tensor.is_floating_point() else 0] ^= 1  # a reciprocal may lose a last bit
        other = octets.view(tensor.dtype).reshape(tensor.shape)
        found = differing(whole, read(written.tensors | {name: other}))
        letters = {"gate_proj": "gate_IH", "up_proj": "up_IH", "down_proj": "down_HI"}[projection]
        assert found == ([f"experts.slots[0].{letters}.{kind}"] if expert == "1" else []), name
