"""The first stage of a layer's forward: tokens to experts, which are counted, and experts to their replicas."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from moe_mk.config.moe import MoEConfig
from moe_mk.errors import ConfigError, ShapeError, UnsupportedError
from moe_mk.flight import wait
from moe_mk.layer.custom_op import REPLAYED, is_untraced
from moe_mk.layer.gate import AnyRouter, Gate
from moe_mk.layer.module_habits import Part
from moe_mk.layer.serving_state import ServingState
from moe_mk.layer.settings import router_of
from moe_mk.router.hashed import HashedTokens, HashRouter, ImageRouter
from moe_mk.router.replay import ReplayedTokens
from moe_mk.router.router import OwnRouter, Router
from moe_mk.router.topk import IDS
from moe_mk.shapes import expect
from moe_mk.tokens import Routing

if TYPE_CHECKING:
    from moe_mk.layer.moe_layer import MoELayer


class RouterPart(Part[Any]):
    """The router of a layer, as it was set."""

    def __get__(self, owner: object | None, kind: type) -> Any:
        found = super().__get__(owner, kind)
        return found.choose if isinstance(found, OwnRouter) else found

    def __set__(self, owner: Any, value: Any) -> None:
        owner.routing.use(value)


class LayerRouting:
    """The routers of one layer, and what is counted of their choices."""

    hash_router: HashRouter | ImageRouter | None = None
    listener: Callable[[Routing], None] | None = None
    """Called with the logical routing of every forward."""
    tokens: int = 0
    """How many tokens were counted, in calls of `top_k` choices each."""
    dropped: Tensor | None = None
    """int64 scalar on the device: assignments to lost experts that were left out."""
    zero: Tensor | None = None
    """int64 scalar on the device: assignments to experts without weights; None in a layer without such experts."""
    _returned: tuple[weakref.ref[Tensor], int, int] | None = None
    """The ids that `choose` returned last, their version and address."""

    def __init__(self, config: MoEConfig, name: str) -> None:
        self.router, self._top_k, self._name = router_of(config), config.router.top_k, name
        self._own, self._num_experts = self.router, config.model.scored_experts

    def use(self, router: Router | HashedTokens | OwnRouter | Callable[[Tensor, Tensor | None], Routing]) -> None:
        """Choose experts by another router. Raises ConfigError for one that does not choose top_k experts."""
        if not callable(router):
            raise ConfigError(f"router is {router!r} ({type(router).__name__}), not a function of logits and bias")
        if type(router) is Router and router.top_k != self._top_k:
            raise ConfigError(f"the router chooses {router.top_k} experts a token, router.top_k is {self._top_k}")
        plain = type(router) is Router or isinstance(router, HashedTokens | OwnRouter)
        self.router = router if plain else OwnRouter(router, self._top_k, self._num_experts)  # type: ignore[assignment]

    @property
    def replaced(self) -> str:
        """The router that is used instead of that of the settings; empty: none."""
        if self.router == self._own:
            return ""
        return self.router.name if isinstance(self.router, OwnRouter) else repr(self.router)

    def notes(self) -> dict[str, str]:
        """Return the settings of the router that ranks compare."""
        return {"router in use": self.replaced} if self.replaced else {}

    def router_of(self, x_TH: Tensor, token_ids_T: Tensor | ReplayedTokens | None) -> AnyRouter:
        """The router of these tokens. Layers that choose by scores ignore token ids.

        Raises ShapeError where ids are needed and missing, or do not fit the tokens.
        """
        if isinstance(token_ids_T, ReplayedTokens):
            return token_ids_T
        if self.hash_router is None:
            return self.router
        if token_ids_T is None:
            raise ShapeError(
                f"layer {self._name!r} chooses experts by token id; call it with token_ids_T, one id of each token"
            )
        expect("token_ids_T", token_ids_T, "T", IDS, x_TH.device, T=x_TH.shape[0])
        return self.hash_router.of(token_ids_T)

    def check_token_ids(self, x_TH: Tensor, token_ids_T: Tensor | None) -> None:
        """Raise ShapeError or ConfigError unless these ids can route these tokens; reads them on the host.

        For callers that split a batch over ranks: all of them must refuse a bad batch, not only the rank with the bad
        part.
        """
        if isinstance(router := self.router_of(x_TH, token_ids_T), HashedTokens):
            router.router.check(router.token_ids_T)

    def choose(self, gate: Gate, x_TH: Tensor, token_ids_T: Tensor | None) -> Routing:
        """Logical experts, weights and router logits of each token; nothing is counted. x_TH: the router's input."""
        routing, logits_TE = gate.route(x_TH, self.router_of(x_TH, token_ids_T))
        ids_TK = routing.ids_TK
        if not ids_TK.is_inference():  # those have no version
            self._returned = weakref.ref(ids_TK), ids_TK._version, ids_TK.data_ptr()
        return routing if routing.logits_TE is not None else replace(routing, logits_TE=logits_TE)

    def has_chosen(self, ids_TK: Tensor) -> bool:
        """Whether these are the ids that `choose` returned last, not written to since."""
        if self._returned is None:
            return False
        ids, version, address = self._returned
        same = ids_TK is not None and ids() is ids_TK
        return same and ids_TK._version == version and ids_TK.data_ptr() == address

    def physical(self, x_TH: Tensor, router: AnyRouter, load_E: Tensor, state: ServingState) -> Routing:
        """The physical routing; on a GPU one launch after the gate where the router has a kernel for both.

        It has logits and bias if the kernel of the state routes inside.
        """
        gate = state.backends.gate
        if state.experts.kernel.routes_inside and self.replaced:
            chosen = state.experts.decision.chosen.experts
            way = "pin kernel.experts to another backend, or leave the router of the settings"
            raise UnsupportedError(f"{chosen} routes inside, which leaves out router {self.replaced}", [way])
        if x_TH.device.type != "cuda":
            routing, logits_TE = gate.route(x_TH, router)
        else:
            logits_TE, tables = gate(x_TH), state.tables
            if (
                isinstance(router, Router)
                and state.lost is None
                and gate.expert_scale_E is None
                and self.zero is None
                and tables.one_to_one
                and not state.experts.kernel.routes_inside
            ):
                both = router.placed(logits_TE, gate.bias_E, load_E, tables.choice_X)
                if both is not None:
                    self._note(both[0])
                    return both[1]
            routing = gate.scaled(router(logits_TE, gate.bias_E), router)
        placed = self.place(routing, load_E, state)
        return (
            replace(placed, logits_TE=logits_TE, bias_E=gate.bias_E) if state.experts.kernel.routes_inside else placed
        )

    def place(self, routing: Routing, load_E: Tensor, state: ServingState) -> Routing:
        """Count each chosen expert, except ids of -1, and choose its replica: see `PlacementTables.to_physical`.

        Ranks with the same tokens choose the same replicas; else they are spread over the ranks.
        """
        routing = self.dispatched(routing, state)
        self._note(routing)
        ids = routing.ids_TK.flatten().long()
        load_E.index_add_(0, ids.clamp_min(0), (ids >= 0).to(torch.int64))
        if state.lost is not None:
            assert self.dropped is not None
            routing = state.lost.leave_out(routing, self.dropped)
        ids_TK = routing.ids_TK.to(torch.int32)  # routers may choose in int64
        if not state.tables.is_identity:
            ids_TK = state.tables.to_physical(ids_TK, 0 if state.experts.is_partial else state.experts.grid.ep.rank)
        return replace(routing, ids_TK=ids_TK)

    def dispatched(self, routing: Routing, state: ServingState) -> Routing:
        """The routing with ids of -1 in place of experts without weights, which are counted and not dispatched."""
        model = state.backends.config.model
        if self.zero is None:
            return routing
        zero_TK = routing.ids_TK >= model.num_experts
        self.zero += zero_TK.sum()
        weights_TK, weights_T1 = routing.weights_TK.masked_fill(zero_TK, 0.0), None
        if model.zero_expert_type == "identity":
            weights_T1 = routing.weights_TK.masked_fill(~zero_TK, 0.0).sum(1, keepdim=True)
        ids_TK = routing.ids_TK.masked_fill(zero_TK, -1)
        return replace(routing, ids_TK=ids_TK, weights_TK=weights_TK, input_weights_T1=weights_T1)

    def _note(self, routing: Routing) -> None:
        self.tokens += routing.num_tokens
        if self.listener is not None:
            self.listener(routing)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Run forwards that are not counted as tokens, and not passed to the listener."""
        listener, self.listener, counted = self.listener, None, self.counted
        try:
            yield
        finally:
            self.listener = listener
            self.count_from(*counted)

    @property
    def counted(self) -> tuple[int, Tensor | None, Tensor | None]:
        """A copy of what is counted: tokens, and assignments to experts without weights and to lost experts."""
        zero, dropped = (None if each is None else each.clone() for each in (self.zero, self.dropped))
        return self.tokens, zero, dropped

    def count_from(self, tokens: int, zero: Tensor | None, dropped: Tensor | None = None) -> None:
        """Go on from what was `counted`."""
        self.tokens = tokens
        for counter, count in ((self.zero, zero), (self.dropped, dropped)):
            if counter is not None and count is not None:
                counter.copy_(count)

    def unrouted(self, load_E: Tensor) -> int:
        """Assignments of all tokens that chose no expert; waits for the device."""
        asked = self.tokens * self._top_k - (0 if self.zero is None else int(self.zero))
        return max(asked - int(load_E.sum()), 0) if asked else 0


def forward_replayed(layer: MoELayer, hidden_states: Tensor, recorded: Tensor | Routing) -> Tensor:
    """Run the whole layer with recorded experts, as for rollout routing replay: (T, H) to (T, H).

    recorded: ids (T, K) of logical experts, which the live gate weighs, or a `Routing` of which the weights are used as
    well. Ids may be those of a `router.replay.RoutingCapture`; they are read on the host. Every rank passes the record
    of its own tokens. Raises ShapeError for a record of other tokens or experts, UnsupportedError under torch.func and
    for backends that route inside.
    """
    load_E: Any = layer._buffers["expert_load"]
    ids_TK, weights_TK = (recorded.ids_TK, recorded.weights_TK) if isinstance(recorded, Routing) else (recorded, None)
    if is_compiling():
        return REPLAYED.traced(hidden_states, ids_TK, load_E, layer._entry, weights_TK)
    if not is_untraced(hidden_states):
        way = "call forward_replayed outside of torch.func, with a plain tensor"
        raise UnsupportedError("replay under torch.func or with a subclass of Tensor", [way])
    return run_replayed(layer, hidden_states, ids_TK, weights_TK, load_E)


def run_replayed(
    layer: MoELayer, hidden_states: Tensor, ids_TK: Tensor, weights_TK: Tensor | None, load_E: Tensor
) -> Tensor:
    """`forward_replayed` without torch's operator. load_E: the expert load to add to."""
    _ = layer.weights  # raises WeightError before loading
    if layer.kernel.routes_inside:
        chosen = layer.decision.chosen.experts
        raise UnsupportedError(f"{chosen} routes inside", ["pin kernel.experts to another backend"])
    x_TH, config = layer.checked(hidden_states), layer.config
    with torch.no_grad():
        recorded = ids_TK if weights_TK is None else Routing(ids_TK, weights_TK)
        router = ReplayedTokens.of(layer.router, recorded, config.model.scored_experts)
        expect("recorded ids", router.ids_TK, "T K", None, layer.device, T=x_TH.shape[0], K=config.router.top_k)
        return wait(layer.steps(x_TH, load_E, router))
