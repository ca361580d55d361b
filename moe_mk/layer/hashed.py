"""Layers that choose experts by token id: what a checkpoint says of them, and the router of one batch."""

from __future__ import annotations

from os import PathLike

import torch
from torch import Tensor

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ShapeError
from moe_mk.router.hashed import INTEGERS, HashedTokens, HashRouter
from moe_mk.router.router import Router
from moe_mk.shapes import expect
from moe_mk.weights.checkpoint import find_prefix
from moe_mk.weights.names import CONVENTIONS
from moe_mk.weights.source import SafetensorsSource


def hashed(config: MoEConfig, path: str | PathLike[str], layer: int) -> MoEConfig:
    """The config with the vocabulary of one layer's table, where the checkpoint has one; such a layer has no bias.

    Looked for where a family has such layers, known by their scores (sqrtsoftplus). Raises WeightError for a layer that
    is not there.
    """
    if config.router.scoring_func != "sqrtsoftplus" or config.router.hash_vocabulary is not None:
        return config
    source = SafetensorsSource(path)
    prefix, names = find_prefix(source, layer), source.names()
    tables = {prefix + convention.table for convention in CONVENTIONS.values()}
    shapes = [source.entry(name).shape for name in sorted(tables) if name in names]
    if not shapes or len(shapes[0]) != 2:
        return config
    return config.with_(hash_vocabulary=shapes[0][0], has_correction_bias=False)


def hash_router_of(config: MoEConfig, table_XK: Tensor | None, device: torch.device) -> HashRouter | None:
    """The router over a layer's table, on its device; None for a layer that chooses by scores."""
    if table_XK is None:
        return None
    router = config.router
    return HashRouter(table_XK.to(device), router.scoring_func, router.renormalize, router.routed_scaling_factor)


def router_of_batch(
    router: Router, by_id: HashRouter | None, token_ids_T: Tensor | None, x_TH: Tensor, name: str
) -> Router | HashedTokens:
    """The router of these tokens. Layers that choose by scores take no notice of token ids.

    Raises ShapeError where ids are needed and missing, or do not fit the tokens.
    """
    if by_id is None:
        return router
    if token_ids_T is None:
        raise ShapeError(f"layer {name!r} chooses experts by token id; call it with token_ids_T, one id of each token")
    expect("token_ids_T", token_ids_T, "T", INTEGERS, x_TH.device, T=x_TH.shape[0])
    return by_id.of(token_ids_T)
