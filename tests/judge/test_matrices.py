"""Matrices decoded in parts are those decoded at once."""

from dataclasses import replace

import pytest
import torch

from moe_mk.lab.judge import matrices
from moe_mk.lab.judge.matrices import Matrix, over_segments, scales_of
from moe_mk.lab.judge.measured import ONE_BLOCK, measure
from moe_mk.lab.verify.dense import decoded
from moe_mk.oracle.expected_error import ONE_TOKEN
from moe_mk.quant.kinds import scheme_of_kind

KINDS = ("bf16", "fp8_block", "fp8_tensor", "fp8_channel", "int4_g32_zp", "int4_g128", "mxfp4", "nvfp4", "q4_k")


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_matrix_are_those_of_the_whole(kind, monkeypatch):
    monkeypatch.setattr(matrices, "AT_ONCE", 1)
    monkeypatch.setattr(matrices, "KEPT", 0)
    draw = torch.Generator().manual_seed(3)
    parts = tuple(scheme_of_kind(kind).quantize(torch.randn((360, 256), generator=draw)) for _ in range(2))
    if kind == "nvfp4":  # gate and up may have one each
        parts = tuple(
            replace(q, global_scale=q.global_scale.reshape(1, 1) * torch.tensor([[1.0], [2.0]])) for q in parts
        )
    whole = torch.cat([decoded(q) for q in parts])
    matrix = Matrix(parts, None)
    rows, found = zip(*matrix.blocks(), strict=True)
    assert len(found) == 6 and [r.start for r in rows] == [0, 128, 256, 360, 488, 616]
    assert torch.equal(torch.cat(found), whole)
    ranges = ((0, 128), (256, 360))
    few = Matrix(parts[:1], torch.arange(360), ranges)
    assert torch.equal(torch.cat([w for _, w in few.blocks()]), torch.cat([whole[a:b] for a, b in ranges]))
    assert few.shape == (232, 256) and few.wanted_bias.tolist() == [*range(128), *range(256, 360)]
    if matrix.has_scales:
        codes = torch.cat([w for _, w in matrix.blocks(unscaled=True)])
        scales = torch.cat([over_segments(scales_of(q), q, 16) for q in parts]).repeat_interleave(16, 1)
        assert torch.allclose(codes * scales, whole, rtol=1e-6)


def test_one_block_beyond_its_limit_makes_its_row_wrong():
    want, got = torch.zeros(2, 3, 1024), torch.zeros(2, 3, 1024)
    got[1, 2, :128] = 1.1 * ONE_BLOCK
    found = measure(got, want, torch.ones_like(want)).check("w2", "w2_out")
    assert found.worst_row < ONE_TOKEN and found.deviations < 1 and not found.passed
    assert (found.wrong_rows, found.rows) == (1, 6) and found.worst_block == pytest.approx(1.1 * ONE_BLOCK)
