"""Proxy against GPU: the 16 dispatch times that pplx-kernels publishes; the bubble of a pipeline, on its timetable."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_mk.errors import ConfigError
from moe_mk.lab.plan.paths import dispatch_us
from moe_mk.lab.plan.pipeline import bubble

# tokens, ranks, microseconds from the GPU and through the proxy
PUBLISHED = [
    (1, 16, 102.7, 290.5), (1, 32, 115.7, 421.2), (1, 64, 121.0, 525.0), (1, 128, 125.9, 488.4),
    (128, 16, 622.4, 687.1), (128, 32, 427.6, 973.5), (128, 64, 317.4, 1669.3), (128, 128, 307.7, 2038.5),
]  # fmt: skip


def proxy_over_gpu(tokens: int, ranks: int) -> float:
    return dispatch_us("cpu_proxy", tokens, ranks) / dispatch_us("gpu", tokens, ranks)


@pytest.mark.row(62)
@pytest.mark.parametrize("tokens,ranks,gpu,proxy", PUBLISHED)
def test_ratios_of_the_published_times(tokens: int, ranks: int, gpu: float, proxy: float) -> None:
    found = proxy_over_gpu(tokens, ranks)
    assert (found > 1) == (proxy > gpu)
    assert found == pytest.approx(proxy / gpu, rel=0.19)
    assert dispatch_us("gpu", tokens, ranks) == pytest.approx(gpu, rel=0.19)
    assert dispatch_us("cpu_proxy", tokens, ranks) == pytest.approx(proxy, rel=0.19)


def test_one_call_by_hand() -> None:
    # 4 tokens x 8 on two nodes: 16 rows each way; 96 + 7.8 + max(16 x 1.0, 16 x 0.2)
    assert dispatch_us("gpu", 4, 16) == pytest.approx(96 + 7.8 + 16)
    # on five nodes: 6.4 near, 25.6 far x 0.45 x sqrt(4)
    assert dispatch_us("cpu_proxy", 4, 40) == pytest.approx(208 + 85 * 2.321928 + 25.6 * 0.9)


def test_outside_its_range_it_refuses() -> None:
    with pytest.raises(ConfigError, match="two full nodes of 8 or more"):
        dispatch_us("gpu", 1, 8)


@given(stages=st.integers(1, 12), micro_batches=st.integers(1, 40))
def test_it_is_what_the_timetable_shows(stages: int, micro_batches: int) -> None:
    # Stage s works on micro-batch m in step s + m.
    steps = {stage + batch for stage in range(stages) for batch in range(micro_batches)}
    assert bubble(stages, micro_batches) == 1 - Fraction(micro_batches, len(steps))


def test_by_hand() -> None:
    assert bubble(1, 5) == 0 and bubble(2, 1) == Fraction(1, 2) and bubble(3, 4) == Fraction(1, 3)
    with pytest.raises(ConfigError, match="0 stages, 3 micro-batches"):
        bubble(0, 3)
