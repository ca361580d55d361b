"""A budget of compute units: bytes by hand, the units of each library call, existing threads, and refusals."""

import inspect
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch

from moe_mk import MoELayer, ParallelGroups, Problem, oracle
from moe_mk.comm.threads import ThreadCommunicator, ThreadWorld
from moe_mk.errors import ConfigError, UnsupportedError
from moe_mk.flight import wait
from moe_mk.lab.testing.emulated import deep_ep, uccl
from moe_mk.lab.testing.emulated.deep_ep.base import V1Buffer
from moe_mk.placement.expert_map import ExpertMap
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.base import Budget
from moe_mk.prepare_finalize.deepep.high_throughput import DeepEPHighThroughput
from moe_mk.prepare_finalize.one_sided.network import NetworkBufferSlot, OneSidedNetwork
from moe_mk.quant.plain import BF16
from tests.prepare_finalize.one_sided.test_network import context, drawn, there_and_back
from tests.support import problems
from tests.support.deepep_ranks import XB, Ranks, asked, ranks_of
from tests.support.layers import HIDDEN, layer
from tests.support.library_ranks import reported

pytestmark = pytest.mark.row(50)
HIGH_THROUGHPUT = ("deepep_ht", "uccl_ep_ht")
COUNTED = {"one_sided_network": "threads", **dict.fromkeys(HIGH_THROUGHPUT, "SMs")}


def listened(kind: type, monkeypatch: pytest.MonkeyPatch, argument: str) -> list[tuple[str, Any]]:
    """What each dispatch and combine of a library's buffers is reported from here on."""
    heard: list[tuple[str, Any]] = []
    for name in ("dispatch", "combine"):
        call = getattr(kind, name)

        def heeded(self: object, *args: Any, call: Any = call, name: str = name, **more: Any) -> Any:
            heard.append((name, more.get(argument)))
            return call(self, *args, **more)

        heeded.__signature__ = inspect.signature(call)  # type: ignore[attr-defined]
        monkeypatch.setattr(kind, name, heeded)
    return heard


def there_and_back_again(ranks: Ranks) -> list[list[list[float]]]:
    tokens = ranks.dispatched(XB)
    return [y_TH.tolist() for y_TH in ranks.combined([t.x_RH.values for t in tokens], tokens)]


def test_queues_follow_the_budget_and_tokens_still_do_not_matter() -> None:
    # EP8, 12 SMs: 6 channels x 8 peers x 256 tokens of 14336 + 8 + 1024 + 512 + 512 bytes, and 20 bytes of counters.
    near = 6 * 8 * (256 * 16392 + 20)
    assert DeepEPHighThroughput.buffer_bytes(asked(comm_units=12)) == -(-near // 128) * 128
    assert DeepEPHighThroughput.buffer_bytes(asked(comm_units=20)) == DeepEPHighThroughput.buffer_bytes(asked())
    # EP32, 24 SMs: 12 channels; queues of 288 tokens near, of 128 far, to and from each of four nodes.
    near, far = 12 * 8 * (288 * 16392 + 44), 2 * 12 * 4 * (128 * 16408 + 72)
    planned = sum(-(-part // 128) * 128 for part in (near, far))
    assert PREPARE_FINALIZE["uccl_ep_ht"].buffer_bytes(asked(ep=32, comm_units=24)) == planned


@pytest.mark.parametrize("name,kind", [("deepep_ht", deep_ep.Buffer), ("uccl_ep_ht", uccl.Buffer)])
def test_high_throughput_calls_carry_their_number_and_the_process_keeps_its_own(
    name: str, kind: type[V1Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = listened(kind, monkeypatch, "config")
    combined = there_and_back_again(ranks_of(name))
    assert heard and all(config is None for _, config in heard), "as the library does by itself"
    heard.clear()
    assert there_and_back_again(ranks_of(name, comm_units=28)) == combined
    assert [(call, config.num_sms) for call, config in heard] == [("dispatch", 28)] * 2 + [("combine", 28)] * 2
    # Two ranks: chunks of dispatch are 24 tokens long, those of combine 10.
    assert [config.num_max_nvl_chunked_send_tokens for _, config in heard] == [24, 24, 10, 10]
    assert kind.num_sms == 20 and "num_sms" not in vars(kind), "the number of the whole process is untouched"


def test_a_buffer_is_as_large_as_the_largest_budget_of_its_layers_wants() -> None:
    ranks = ranks_of("deepep_ht", comm_units=28)
    (near, far, _) = ranks.transports[0]._session.pool.size
    # 14 channels x 2 peers x 256 tokens of 512 + 2056 bytes (rows are padded), 20 bytes of counters each.
    assert (near, far) == (-(-14 * 2 * (256 * 2568 + 20) // 128) * 128, 0)
    context_of = [t.context for t in ranks.transports]
    less = ranks.each(lambda c: DeepEPHighThroughput(replace(c, comm_units=8)), context_of)
    assert less[0]._session.buffer is ranks.transports[0]._session.buffer, "there is room in what is open"


def test_between_nodes_every_multiprocessor_has_a_queue_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], V1Buffer._open
    monkeypatch.setattr(V1Buffer, "_open", lambda self, *args: (opened.append(args[4]), real(self, *args))[1])
    for units, pairs in ((None, 24), (12, 24), (28, 28)):
        opened.clear()
        Ranks("deepep_ht", place=ExpertMap.linear(16, 16), wire=BF16, dtype=BF16, comm_units=units)
        assert opened == [pairs] * 16


def test_odd_numbers_are_refused_by_name_before_anything_is_made() -> None:
    for name in HIGH_THROUGHPUT:
        stated = "takes an even number of SMs, a pair for each channel, not 21 [kernel.comm_units = 22]"
        assert reported(name, asked(comm_units=21)) == {"comm_units": stated}
        assert reported(name, asked(comm_units=22)) == {}
        with pytest.raises(UnsupportedError, match=r"cannot be held to a budget\n.*even number of SMs.*not 21"):
            ranks_of(name, comm_units=21)
    with pytest.raises(UnsupportedError, match="deepep_ht.*even number of SMs, a pair for each channel, not 5"):
        oracle.select(asked(comm_units=5, prepare_finalize="deepep_ht"))
    with pytest.raises(ConfigError, match="comm_units"):
        asked(comm_units=0)


def test_whoever_has_no_budget_states_so_where_one_is_set() -> None:
    own = [name for name in PREPARE_FINALIZE if not PREPARE_FINALIZE.is_foreign(name)]
    expect_units(own, COUNTED)


def expect_units(names: list[str], counted: Mapping[str, str], units: Mapping[str, int] = MappingProxyType({})) -> None:
    """Of the named transports, exactly the counted ones reserve compute units; the others refuse the setting."""
    units_of = {name: PREPARE_FINALIZE[name].traits.comm_unit for name in names}
    assert {name: unit for name, unit in units_of.items() if unit} == counted
    for name in names:
        few = units.get(name, 4)
        stated = f"does not support kernel.comm_units (= {few}) [kernel.comm_units = null]"
        found = reported(name, asked(comm_units=few)).get("comm_units")
        assert found == (None if name in counted else stated), name
        assert "comm_units" not in reported(name, asked()), name
        assert "comm_units" not in reported(name, asked(ep=1, comm_units=4)), "a single rank sends nothing"


def test_a_decision_reports_what_is_kept_and_by_whose_word() -> None:
    def decided(name: str, **more: Any) -> oracle.Decision:
        return oracle.select(asked(prepare_finalize=name, experts="reference", **more))

    by_default = decided("deepep_ht")
    assert by_default.as_dict()["budget"] == {"unit": "SMs", "count": 20, "source": "the library's default"}
    held = decided("deepep_ht", comm_units=12)
    assert held.budget == Budget("SMs", 12, "kernel.comm_units")
    assert "deepep_ht reserves 12 SMs: kernel.comm_units" in str(held)
    assert held.buffer_bytes < by_default.buffer_bytes
    assert held.notes() != by_default.notes(), "ranks that disagree would wait for each other"
    assert decided("all_to_all").as_dict()["budget"] is None


def network_ranks(ranks: int, units: int | None) -> tuple[ThreadWorld, list[OneSidedNetwork]]:
    world = ThreadWorld(ranks, timeout_s=20.0)
    made = [context(comm) for comm in world.communicators()]
    return world, [OneSidedNetwork(replace(c, comm_units=units)) for c in made]


@pytest.mark.parametrize("units", [None, 1, 3])
def test_a_proxy_has_as_many_threads_as_its_budget(units: int | None) -> None:
    before = set(threading.enumerate())
    world, made = network_ranks(4, units)
    batches = [drawn(rank, 5, torch.float32) for rank in range(4)]
    jobs = [lambda t=t, b=b: wait(there_and_back(t, *b)) for t, b in zip(made, batches, strict=True)]  # type: ignore[misc]
    combined = world.together(jobs)
    for transport in made:
        (buffer,) = transport._pool.slots
        assert isinstance(buffer, NetworkBufferSlot)
        proxy = buffer.heap.proxy
        assert len(proxy._workers) == (units or 1) and all(worker.is_alive for worker in proxy._workers)
        assert len(proxy.channels) == max(units or 1, 2), "a ring for each thread"
    assert len(set(threading.enumerate()) - before) >= 4 * (units or 1)
    # Experts scale by the sum of a rank's weights, so that the sums are x times all weights of a token.
    for (x_TH, routing), y_TH in zip(batches, combined, strict=True):
        torch.testing.assert_close(y_TH, x_TH * routing.weights_TK.sum(dim=1, keepdim=True))


def test_a_layer_explains_the_threads_that_it_has() -> None:
    world = ThreadWorld(3, timeout_s=20.0)

    def served(comm: ThreadCommunicator) -> tuple[MoELayer, torch.Tensor]:
        settings = {"prepare_finalize": "one_sided_network", "comm_units": 2, "max_num_tokens": 8}
        made = layer(9, 2, ParallelGroups(ep=comm), **settings)
        return made, made(torch.ones((3, HIDDEN)))

    three = world.together([partial(served, comm) for comm in world.communicators()])
    torch.testing.assert_close(three[0][1], layer(9, 2)(torch.ones((3, HIDDEN))))
    for made, _ in three:
        assert made.explain().budget == Budget("threads", 2, "kernel.comm_units")
        (buffer,) = made.kernel.prepare_finalize._pool.slots  # type: ignore[union-attr]
        assert len(buffer.heap.proxy._workers) == 2


def test_layers_with_another_budget_have_proxies_of_their_own() -> None:
    comm = ThreadWorld(4).communicators()[0]
    one, same, other = (OneSidedNetwork(replace(context(comm), comm_units=units)) for units in (2, 2, 3))
    assert one._pool is same._pool and one._pool is not other._pool


def test_more_threads_than_peers_are_refused() -> None:
    def problem(units: int) -> Problem:
        return problems.problem("tiny", max_num_tokens=64, ep=4, comm_units=units)

    assert OneSidedNetwork.reasons_against(problem(3)) == []
    assert [str(reason) for reason in OneSidedNetwork.reasons_against(problem(4))] == [
        "has 3 peers, each served by one thread: 4 threads are too many [kernel.comm_units = 3]"
    ]
    assert OneSidedNetwork.budget(problem(3)) == Budget("threads", 3, "kernel.comm_units")
    with pytest.raises(UnsupportedError, match="has 3 peers, each served by one thread: 4 threads"):
        network_ranks(4, 4)
