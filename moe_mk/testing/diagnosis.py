"""Why a transport's tokens came home wrong: the simplest explanation that fits what arrived."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_mk.testing.laws import LOST, ORDER, WEIGHTING, Law

SAME = 0.02
"""Relative, above what bf16 rounds: mistakes are told apart here, rounding is judged elsewhere."""


def explained(got: list[Tensor], tokens: list[Tensor], weights: list[Tensor]) -> Law | None:
    """The law that explains a wrong journey through identity experts, or None.

    got, tokens: (T, H) of each rank. weights: (T,) of each rank, what each token should be multiplied by.
    """
    rows = torch.cat(got).double()
    sent, scale = torch.cat(tokens).double(), torch.cat(weights).double()
    wanted = sent * scale[:, None]
    if rows.shape != wanted.shape:
        return None
    wrong = (rows - wanted).norm(dim=1) > SAME * wanted.norm(dim=1)
    if bool(wrong.any()) and not bool(rows[wrong].any()):
        return LOST
    elsewhere = torch.cdist(rows[wrong], wanted).min(dim=1).values <= SAME * wanted.norm(dim=1).max()
    if bool(wrong.any()) and bool(elsewhere.all()):
        return ORDER
    cosine = torch.nn.functional.cosine_similarity(rows[wrong], sent[wrong], dim=1)
    return WEIGHTING if bool(wrong.any()) and bool((cosine > 1.0 - SAME).all()) else None
