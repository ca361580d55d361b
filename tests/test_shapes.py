"""The check at the doors."""

import re

import pytest
import torch

from moe_mk.errors import ShapeError
from moe_mk.shapes import LEGEND, expect, same_device


def test_a_tensor_as_announced_passes() -> None:
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    expect("x", x, "T H", torch.bfloat16, torch.device("cpu"), T=3, H=8)
    expect("x", x, "T H", (torch.float32, torch.bfloat16))
    expect("x", x, "T H")
    expect("y", torch.zeros(()), "")
    expect("x", torch.zeros(0, 8), "T H", T=0)


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(ShapeError) as caught:
        expect("hidden_states", torch.zeros(3, 9), "T H", torch.bfloat16, torch.device("meta"), T=4, H=8)
    assert str(caught.value) == (
        "hidden_states has T=3 (axis 0), expected T=4; has H=9 (axis 1), expected H=8; "
        "has dtype torch.float32, expected torch.bfloat16; is on cpu, expected meta; move it with .to('meta')"
    )


def test_a_wrong_number_of_dimensions_names_those_expected() -> None:
    with pytest.raises(ShapeError, match=re.escape("x has 3 dimensions (1, 2, 3), expected 2 [T, H]")):
        expect("x", torch.zeros(1, 2, 3), "T H", T=1)


def test_several_dtypes_are_all_named() -> None:
    with pytest.raises(ShapeError, match="has dtype torch.float64, expected torch.float32 or torch.bfloat16"):
        expect("x", torch.zeros(1, dtype=torch.float64), "T", (torch.float32, torch.bfloat16))


def test_a_device_without_an_index_matches_every_index() -> None:
    cuda, zero, one, cpu = (torch.device(name) for name in ("cuda", "cuda:0", "cuda:1", "cpu"))
    assert same_device(cuda, zero) and same_device(one, cuda) and same_device(cpu, cpu) and same_device(zero, zero)
    assert not any(same_device(*pair) for pair in [(zero, one), (cpu, cuda), (zero, cpu)])


def test_letters_are_single_and_upper_case() -> None:
    assert all(len(letter) == 1 and letter.isupper() for letter in LEGEND) and set("TKHIEPLRNSGW") <= LEGEND
