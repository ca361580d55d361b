"""A quantised tensor is indexed, moved and counted as one thing."""

import copy
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from moe_mk.quant import BF16, FP32, SCHEMES, FP8_128x128, FP8_128x128_UE8M0
from moe_mk.quant.gguf import GGUF
from moe_mk.quant.grouped import GROUPED
from moe_mk.quant.tensor import QuantScheme
from moe_mk.quant.wire import as_bytes, encode_rows
from tests.support.draws import normal
from tests.support.strides import restrided

ALL = [*SCHEMES.values(), *GROUPED.values(), *GGUF.values()]
PARTS = ("values", "scales", "global_scale", "zeros")


def test_a_row_of_a_block_cannot_be_picked() -> None:
    # Row 1 has its scale in block row 0: picking scales[1] would take that of rows 128 to 255.
    with pytest.raises(AssertionError, match="cut into blocks"):
        FP8_128x128.quantize(normal(256, 128))[1]


def test_it_is_a_value() -> None:
    q = BF16.quantize(normal(1, 1))
    with pytest.raises(FrozenInstanceError):
        q.scales = None  # type: ignore[misc]


@pytest.mark.parametrize("scheme", [BF16, FP32, FP8_128x128, FP8_128x128_UE8M0], ids=lambda scheme: scheme.name)
def test_a_copy_of_a_view_and_its_pickle_hold_its_elements_and_nothing_else(scheme: QuantScheme) -> None:
    whole = scheme.quantize(normal(4, 256, 256))
    view = whole[1]
    assert copy.deepcopy(view).values.untyped_storage().nbytes() == view.values.nbytes
    text = pickle.dumps(view)
    again = pickle.loads(text)
    assert len(text) < 1.2 * view.num_bytes + 4096  # a fourth of the storage behind it
    assert again.scheme == view.scheme
    assert torch.equal(as_bytes(again.values), as_bytes(view.values))
    assert (again.scales is None) == (view.scales is None)
    assert again.scales is None or torch.equal(as_bytes(again.scales), as_bytes(view.scales))


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
def test_strides_of_numbers_and_of_every_part_change_nothing(scheme: QuantScheme) -> None:
    x = normal(4, 512) * torch.arange(1, 5)[:, None]
    q = scheme.quantize(x)
    wanted = q.dequantize(torch.float32)
    sends = q.global_scale is None and q.zeros is None and (q.scales is None or len(q.scales) == 4)
    for other in restrided(x):
        assert torch.equal(scheme.quantize(other).dequantize(torch.float32), wanted)
    for name in PARTS:
        for part in () if getattr(q, name) is None else restrided(getattr(q, name)):
            other = replace(q, **{name: part})
            for same in (other, copy.deepcopy(other), pickle.loads(pickle.dumps(other)), other.to(part.device)):
                assert torch.equal(same.dequantize(torch.float32), wanted), (name, part.stride())
            assert not sends or torch.equal(encode_rows(other), encode_rows(q)), (name, part.stride())
    if (scheme.block or (1,))[0] == 1 and q.global_scale is None:
        assert torch.equal(q[torch.tensor([2, 0])].dequantize(torch.float32), wanted[[2, 0]])


@pytest.mark.parametrize("scheme", ALL, ids=lambda scheme: scheme.name)
def test_no_rows_have_a_shape_and_no_bytes(scheme: QuantScheme) -> None:
    by_row = scheme.block is None or scheme.block[0] == 1
    for shape in [(0, 512), *([(2, 0, 512), (0, 4, 512)] if by_row else [])]:
        q = scheme.quantize(torch.empty(shape, dtype=torch.float32))
        assert q.shape == shape and q.dequantize(torch.bfloat16).shape == shape
        assert q.num_bytes == shape[0] * scheme.num_bytes(0, 512) == 0
        assert {part.device.type for part in q.to(torch.device("meta")).tensors} == {"meta"}
        assert copy.deepcopy(q).to(torch.device("meta")).shape == pickle.loads(pickle.dumps(q)).shape == shape
