"""NaN codes and broken scales are found and counted, wherever they hide."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.weights.scan import CACHE_BYTES, JOB_BYTES, count_bad, count_non_finite, is_no_other_scale, is_scale


def test_of_the_256_codes_of_fp8_two_are_nan() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn)
    assert count_non_finite([("all", codes)], threads=1) == {"all": 2}  # 0x7f and 0xff
    assert count_non_finite([("finite", codes[:127]), ("negative", codes[128:255])], threads=1) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nan_and_both_infinities_are_counted_in_plain_weights(dtype: torch.dtype) -> None:
    inf, nan, biggest = float("inf"), float("nan"), torch.finfo(dtype).max
    x = torch.tensor([[1.0, -0.0, biggest, -biggest], [inf, -inf, nan, 0.0]], dtype=dtype, device="cpu")
    assert count_non_finite([("x", x), ("fine", x[:1])], threads=2) == {"x": 3}
    assert count_non_finite([("last", x[1, 3:])], threads=1) == {}


def test_one_nan_at_each_end_of_a_tensor_larger_than_a_job() -> None:
    x = torch.zeros(JOB_BYTES + CACHE_BYTES + 3, dtype=torch.uint8, device="cpu")
    x[0], x[-1], x[CACHE_BYTES] = 0x7F, 0xFF, 0x7F
    assert count_non_finite([("x", x.view(torch.float8_e4m3fn))], threads=2) == {"x": 3}


def test_an_error_in_the_progress_callback_reaches_the_caller() -> None:
    x = torch.zeros(16, dtype=torch.float32, device="cpu")
    with pytest.raises(KeyboardInterrupt):
        count_non_finite([("x", x)], threads=1, on_progress=Mock(side_effect=KeyboardInterrupt))


@given(
    data=st.binary(min_size=4, max_size=512),
    dtype=st.sampled_from([torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32]),
    columns=st.integers(1, 9),
)
def test_any_bytes_are_counted_as_torch_counts_them(data: bytes, dtype: torch.dtype, columns: int) -> None:
    whole = data[: len(data) // 4 * 4]
    x = torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(dtype)
    matrix = x[: x.numel() // columns * columns].reshape(-1, columns)
    for tensor in (x, matrix, matrix[:, : max(1, columns // 2)]):
        wide = tensor.to(torch.float32)
        expected = int((~torch.isfinite(wide)).sum())
        assert count_non_finite([("x", tensor)], threads=1).get("x", 0) == expected


@pytest.mark.row(97)
def test_scales_must_be_finite_and_positive_and_powers_of_two_where_asked() -> None:
    scales = torch.tensor(
        [0.5, 2.0**-127, 0.75, 0.0, -1.0, float("nan"), float("inf")], dtype=torch.float32, device="cpu"
    )
    assert count_bad([("s", scales)], is_scale) == {"s": 4}
    assert count_bad([("s", scales)], is_no_other_scale) == {"s": 1}  # 0.75
    assert count_bad([("s", scales[:2])], is_scale) == count_bad([("s", scales[:2])], is_no_other_scale) == {}


@pytest.mark.row(97)
def test_the_nan_code_of_ue8m0_is_a_broken_scale() -> None:
    codes = torch.tensor([0, 127, 254, 255], dtype=torch.uint8, device="cpu").view(torch.float8_e8m0fnu)
    assert count_bad([("s", codes)], is_scale) == {"s": 1} and count_bad([("s", codes)], is_no_other_scale) == {}
