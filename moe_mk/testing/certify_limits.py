"""What a backend says beforehand that it cannot serve, so that certification asks for nothing it has refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from moe_mk.config.device import DeviceProfile
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.quant import QuantConfig
from moe_mk.config.shipped import device_profile
from moe_mk.experts.base import EXPERTS
from moe_mk.external.library import emulated, installed
from moe_mk.kernels.reference.activation import CLAMPED
from moe_mk.prepare_finalize.base import PREPARE_FINALIZE
from moe_mk.quant.plain import BF16, Plain
from moe_mk.quant.tensor import QuantScheme
from moe_mk.testing.experts import CLAMPED_AT
from moe_mk.testing.on_ranks import HIDDEN, INNER, TOP_K

PASSED_OVER = frozenset({"device", "library"})
"""Codes of reasons: certification runs on a CPU, and on an emulation where the library is not installed."""
SIZES = ((HIDDEN, INNER), (256, 256))
"""Hidden and intermediate size; the first that a backend serves is tried. 192 is no multiple of 128."""
MOST_TOKENS = 64


@dataclass(frozen=True)
class Format:
    """What experts are tried with: how weights are stored, the layer's dtype, and what activations are rounded to."""

    quant: Mapping[str, Any]
    """As in a configuration file."""
    dtype: Plain
    compute: QuantScheme
    activation: str = "silu"

    @property
    def weights(self) -> QuantScheme:
        """The scheme of the stored weights."""
        return QuantConfig.parse(self.quant, "certify").weight_scheme


def dtype_of(wire: QuantScheme) -> Plain:
    """The layer's dtype beside a wire format."""
    return wire if isinstance(wire, Plain) else BF16


def refusal_of_transport(name: str, ranks: int, wire: QuantScheme, ranks_per_node: int | None = None) -> str:
    """Why a transport cannot serve a format on some ranks; empty if it can. ranks_per_node: None is all on one host."""
    cls, dtype = PREPARE_FINALIZE[name], dtype_of(wire)
    model = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": 8, "quant": {"weights": dtype.name}}
    tokens = next(iter(cls.traits.tokens))
    return _told(cls.reasons_against(_problem(model, dtype, ep=ranks, tokens=tokens, ranks_per_node=ranks_per_node)))


def refusal_of_experts(name: str, given: Format, sizes: tuple[int, int], *, batch_invariant: bool = False) -> str:
    """Why experts cannot serve a format at a hidden and an intermediate size; empty if they can."""
    hidden, inner = sizes
    model = {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": 8, "quant": dict(given.quant)}
    model |= {"activation": given.activation, "swiglu_limit": CLAMPED_AT if given.activation in CLAMPED else None}
    activations = "plain" if isinstance(given.compute, Plain) else "checkpoint"
    return _told(
        EXPERTS[name].reasons_against(
            _problem(model, given.dtype, activations=activations, batch_invariant=batch_invariant)
        )
    )


def _problem(model: Mapping[str, Any], dtype: Plain, **settings: Any) -> Problem:
    config = MoEConfig.parse({"model": model, "router": {"top_k": TOP_K}}, "certify")
    config = config.with_(allow_emulated=True, max_num_tokens=MOST_TOKENS, **settings)
    profile, libraries = _machine()
    return Problem(config, profile, dtype, MOST_TOKENS, libraries, emulated())


@cache
def _machine() -> tuple[DeviceProfile, frozenset[str]]:
    """Once a process: looking for a compiler starts one."""
    return device_profile("cpu"), installed()


def _told(reasons: Iterable[Reason]) -> str:
    return "; ".join(reason.text for reason in reasons if reason.code not in PASSED_OVER)
