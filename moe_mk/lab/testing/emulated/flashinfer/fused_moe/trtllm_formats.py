"""Arguments of the TRT-LLM kernels for each type of weights, checked as strictly as their launcher checks it.

Every order of rows and columns is undone here by its own rule, so that weights in another order give other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_mk.kernels.reference.quantize import spread
from moe_mk.lab.testing.emulated.flashinfer.fused_moe.formats import (
    E4M3,
    E8M0,
    four_bits,
    in_fp8,
    in_mxfp8,
    in_nvfp4,
    over,
    untiled,
)

BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
PANEL, TILE = 128, 128
Matrix = Callable[[int], Tensor]
Given = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """Everything in f32: rows as they are multiplied, both weights by expert, hidden rows as they are rounded."""

    x: Tensor
    first: Matrix
    """(2I, H): up rows, then gate rows."""
    second: Matrix
    between: Callable[[Tensor], Tensor]
    behind: tuple[Tensor, Tensor] | None = None
    """(L, 2, 1), what up and gate are multiplied with; (L,), what outputs are."""
    biases: tuple[Tensor | None, Tensor | None] = (None, None)

    def wide(self, token_X: Tensor, expert: int) -> Tensor:
        """Return the first product with its bias: up, then gate."""
        made = self.x[token_X] @ self.first(expert).T
        if self.behind is not None:
            made = (made.reshape(len(made), 2, -1) * self.behind[0][expert]).flatten(1)
        bias = self.biases[0]
        return made if bias is None else made + _sorted(bias[expert, :, None], 32, alternate=True)[:, 0]

    def out(self, made: Tensor, expert: int) -> Tensor:
        """Rows of the output, not weighed yet."""
        y = made @ self.second(expert).T
        y = y if self.behind is None else y * self.behind[1][expert]
        bias = self.biases[1]
        return y if bias is None else y + _sorted(bias[expert, :, None], 32, alternate=False)[:, 0]


def bf16(x: Tensor, w13: Tensor, w2: Tensor, inner: int) -> Rows:
    """(L, H / 64, 2I, 64) and (L, I / 64, H, 64), shuffled by 32."""
    assert x.dtype is w13.dtype is w2.dtype is BF16 and x.is_contiguous(), "BF16 MoE"
    assert inner % 128 == 0, "intermediate_size must be a multiple of 128"
    _expect(w13, BF16, (w13.shape[0], x.shape[1] // 64, 2 * inner, 64), "gemm1_weights")
    _expect(w2, BF16, (w13.shape[0], inner // 64, x.shape[1], 64), "gemm2_weights")

    def matrix(w: Tensor, *, alternate: bool) -> Matrix:
        return lambda e: _sorted(_whole(w[e]).float(), 32, alternate=alternate)

    first, second = matrix(w13, alternate=True), matrix(w2, alternate=False)
    return Rows(x.float(), first, second, lambda h: h.to(BF16).float())


def fp8_block(x: Tensor, scales: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, inner: int) -> Rows:
    """Rows of scales (H / 128, T); weights in panels, shuffled by 16, up rows before gate rows; f32 block scales."""
    (tokens, hidden), local = x.shape, w13.shape[0]
    assert inner % 128 == 0 == hidden % 128, "sizes must be multiples of 128"
    _expect(x, E4M3, (tokens, hidden), "hidden_states")
    _expect(scales, F32, (hidden // 128, tokens), "hidden_states_scale")
    _expect(w13, E4M3, (local, hidden // PANEL, 2 * inner, PANEL), "gemm1_weights")
    _expect(w2, E4M3, (local, inner // PANEL, hidden, PANEL), "gemm2_weights")
    _expect(s13, F32, (local, 2 * inner // 128, hidden // 128), "gemm1_weights_scale")
    _expect(s2, F32, (local, hidden // 128, inner // 128), "gemm2_weights_scale")

    def matrix(w: Tensor, own: Tensor) -> Matrix:
        def made(e: int) -> Tensor:
            values = _sorted(_whole(w[e].view(U8)), 16, alternate=False).contiguous().view(E4M3).float()
            return values * spread(own[e], values.shape[0], values.shape[1], (128, 128))

        return made

    return Rows(x.float() * over(scales.T, x, 128), matrix(w13, s13), matrix(w2, s2), in_fp8)


def mxfp8(x: Tensor, scales: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, inner: int) -> Rows:
    """Scales of rows (T, H / 32) as bytes; weights shuffled by 32 with their scales, which are stored in tiles."""
    (tokens, hidden), local = x.shape, w13.shape[0]
    assert inner % 128 == 0 == hidden % 128, "sizes must be multiples of 128"
    _expect(x, E4M3, (tokens, hidden), "hidden_states")
    _expect(scales, U8, (tokens, hidden // 32), "hidden_states_scale")
    _expect(w13, E4M3, (local, 2 * inner, hidden), "gemm1_weights")
    _expect(w2, E4M3, (local, hidden, inner), "gemm2_weights")
    _expect(s13, U8, (local, 2 * inner, hidden // 32), "gemm1_weights_scale")
    _expect(s2, U8, (local, hidden, inner // 32), "gemm2_weights_scale")

    def matrix(w: Tensor, own: Tensor, *, alternate: bool) -> Matrix:
        def made(e: int) -> Tensor:
            values = _sorted(w[e].view(U8), 32, alternate=alternate).contiguous().view(E4M3).float()
            return values * over(_scales(own[e], E8M0, alternate=alternate), values, 32)

        return made

    first, second = matrix(w13, s13, alternate=True), matrix(w2, s2, alternate=False)
    return Rows(x.float() * over(scales.view(E8M0), x, 32), first, second, in_mxfp8)


def nvfp4(given: Given, wholes: tuple[Tensor | None, Tensor | None, Tensor | None], inner: int) -> Rows:
    """Rows alike, under one scale for all that the three factors of an expert hold: of up, of gate, of the output."""
    x, scales, w13, s13, w2, s2 = given
    (tokens, packed), local = x.shape, w13.shape[0]
    assert scales is not None, "hidden_states_scale is required for E2m1 activation"
    _expect(x, U8, (tokens, packed), "hidden_states")
    _expect(scales, E4M3, (tokens, packed // 8), "hidden_states_scale")
    _expect_four_bits(given, inner, 16)
    up, gate, out = wholes
    assert up is not None and gate is not None and out is not None, "output scales are required for E2m1 activation"
    for each in (up, gate, out):
        _expect(each, F32, (local,), "output scales")
    behind = (torch.stack([up, gate], dim=1)[:, :, None], out)
    one = torch.ones((), dtype=F32, device=x.device)
    first, second = _four_bit_matrix(w13, s13, 16, alternate=True), _four_bit_matrix(w2, s2, 16, alternate=False)
    return Rows(four_bits(x, scales, 16), first, second, lambda h: in_nvfp4(h, one), behind)


def mxfp4(given: Given, biases: tuple[Tensor | None, Tensor | None], inner: int) -> Rows:
    """MXFP8 rows with scales that are called e4m3 whatever they are, or bf16 rows without."""
    x, scales, w13, s13, w2, s2 = given
    hidden, local = x.shape[1], w13.shape[0]
    _expect_four_bits(given, inner, 32)
    for bias, width in zip(biases, (2 * inner, hidden), strict=True):
        assert bias is None or (bias.dtype is F32 and bias.shape == (local, width) and bias.is_contiguous()), "bias"
    first, second = _four_bit_matrix(w13, s13, 32, alternate=True), _four_bit_matrix(w2, s2, 32, alternate=False)
    if x.dtype is BF16:
        assert scales is None and x.is_contiguous(), "bf16 rows have no scales"
        return Rows(x.float(), first, second, lambda h: h.to(BF16).float(), None, biases)
    assert scales is not None, "MXFP8 rows bring their scales"
    _expect(x, E4M3, (x.shape[0], hidden), "hidden_states")
    _expect(scales, E4M3, (x.shape[0], hidden // 32), "hidden_states_scale")
    rows = x.float() * over(scales.view(U8).view(E8M0), x, 32)
    return Rows(rows, first, second, in_mxfp8, None, biases)


def _four_bit_matrix(w: Tensor, own: Tensor, group: int, *, alternate: bool) -> Matrix:
    dtype = E4M3 if group == 16 else E8M0

    def made(e: int) -> Tensor:
        values = _sorted(w[e], 32, alternate=alternate)
        return four_bits(values, _scales(own[e].view(U8), dtype, alternate=alternate), group)

    return made


def _scales(own: Tensor, dtype: torch.dtype, *, alternate: bool) -> Tensor:
    """Out of tiles, then out of the order of rows."""
    flat = untiled(own, own.shape[0], own.shape[1], U8)
    return _sorted(flat, 32, alternate=alternate).contiguous().view(dtype)


def _sorted(x: Tensor, stripe: int, *, alternate: bool) -> Tensor:
    """Rows as they were: row r of a stripe stands at 8 (r mod s/8) + r div (s/8); up's at even, gate's at odd ones."""
    row = torch.arange(x.shape[0], dtype=torch.int64, device=x.device)
    ways, inside = stripe // 8, row % stripe
    x = x[row - inside + 8 * (inside % ways) + inside // ways]
    return torch.cat([x[0::2], x[1::2]]) if alternate else x


def _whole(panels: Tensor) -> Tensor:
    """(panels, M, width) to (M, columns)."""
    return panels.transpose(0, 1).flatten(1)


def _expect_four_bits(given: Given, inner: int, group: int) -> None:
    x, _, w13, s13, w2, s2 = given
    local, hidden = w13.shape[0], x.shape[1] * (2 if x.dtype is U8 else 1)
    assert 2 * inner % TILE == 0 == hidden % TILE, "rows of weights come in whole tiles"
    _expect(w13, U8, (local, 2 * inner, hidden // 2), "gemm1_weights")
    _expect(w2, U8, (local, hidden, inner // 2), "gemm2_weights")
    _expect(s13, E4M3, (local, 2 * inner, hidden // group), "gemm1_weights_scale")
    _expect(s2, E4M3, (local, hidden, inner // group), "gemm2_weights_scale")


def _expect(t: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> None:
    assert t.dtype is dtype and tuple(t.shape) == shape, (
        f"{name} must be {dtype} {shape}, got {t.dtype} {tuple(t.shape)}"
    )
    assert t.is_contiguous(), f"{name} must be contiguous"
