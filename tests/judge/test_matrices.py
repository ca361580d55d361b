"""Matrices decoded in parts are those decoded at once."""

import pytest
import torch

from moe_mk.lab.judge import matrices
from moe_mk.lab.judge.matrices import Matrix, over_segments, scales_of
from moe_mk.lab.verify.dense import decoded
from moe_mk.quant.kinds import scheme_of_kind

KINDS = ("bf16", "fp8_block", "fp8_tensor", "fp8_channel", "int4_g32_zp", "int4_g128", "mxfp4", "nvfp4", "q4_k")


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_matrix_are_those_of_the_whole(kind, monkeypatch):
    monkeypatch.setattr(matrices, "AT_ONCE", 1)
    monkeypatch.setattr(matrices, "KEPT", 0)
    draw = torch.Generator().manual_seed(3)
    parts = tuple(scheme_of_kind(kind).quantize(torch.randn((384, 256), generator=draw)) for _ in range(2))
    whole = torch.cat([decoded(q) for q in parts])
    matrix = Matrix(parts, None)
    rows, found = zip(*matrix.blocks(), strict=True)
    assert len(found) == 6 and [r.start for r in rows] == list(range(0, 768, 128))
    assert torch.equal(torch.cat(found), whole)
    ranges = ((0, 128), (256, 384))
    few = Matrix(parts[:1], torch.arange(384), ranges)
    assert torch.equal(torch.cat([w for _, w in few.blocks()]), torch.cat([whole[a:b] for a, b in ranges]))
    assert few.shape == (256, 256) and few.wanted_bias.tolist() == [*range(128), *range(256, 384)]
    if matrix.has_scales:
        codes = torch.cat([w for _, w in matrix.blocks(unscaled=True)])
        scales = torch.cat([over_segments(scales_of(q), q, 16) for q in parts]).repeat_interleave(16, 1)
        assert torch.allclose(codes * scales, whole, rtol=1e-6)
