"""`one_sided_network` over NIXL: the conformance kit, faults, and how the link is chosen and explained."""

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from moe_mk.comm.network import LINKS
from moe_mk.comm.network.nixl import NixlLinks
from moe_mk.comm.threads import ThreadWorld
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem
from moe_mk.errors import ConfigError, LibraryMissing, UnsupportedError
from moe_mk.external.library import RDMA, installed
from moe_mk.flight import wait
from moe_mk.lab.testing.certify import certify
from moe_mk.lab.testing.conformance import check_transport
from moe_mk.lab.testing.faults import Campaign, run_worlds
from moe_mk.oracle import select
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.base import LinkChoice
from moe_mk.prepare_finalize.one_sided.network import NetworkBufferSlot, OneSidedNetwork, link_choice
from moe_mk.quant import BF16
from moe_mk.quant.fp8 import FP8_1x128
from moe_mk.quant.tensor import QuantScheme
from tests.support import problems
from tests.support.network_ends import NEEDS_NIXL
from tests.support.one_sided_ranks import context, drawn, there_and_back

KIT = "tests.support.nixl_transport"
BOTH = frozenset({"nixl", RDMA})


@pytest.fixture
def kit() -> Iterator[str]:
    """The transport of `nixl_transport`, registered for one test."""
    before = dict(PREPARE_FINALIZE._entries)
    module = importlib.import_module(KIT)
    PREPARE_FINALIZE._entries[module.NAME] = module.OneSidedNetworkOverNixl
    yield module.NAME
    PREPARE_FINALIZE._entries.clear()
    PREPARE_FINALIZE._entries.update(before)


@NEEDS_NIXL
@pytest.mark.row(158, 188)
@pytest.mark.parametrize("wire", [BF16, FP8_1x128], ids=["bf16", "fp8"])
def test_tokens_return_times_the_sum_of_their_weights_over_nixl(kit: str, wire: QuantScheme) -> None:
    assert check_transport(kit, num_ranks=2, wire=wire, dtype=BF16) >= 12


@NEEDS_NIXL
@pytest.mark.stress
@pytest.mark.timeout(900)
def test_the_whole_conformance_kit_passes_over_nixl_with_the_bits_of_tcp(kit: str) -> None:
    certificate = certify(kit, processes=False, quick=True, modules=(KIT,))
    assert certificate.passed, certificate.failures
    assert certificate.digest == certify("one_sided_network", processes=False, quick=True).digest


@NEEDS_NIXL
@pytest.mark.row(148, 188, "N9")
@pytest.mark.timeout(300)  # the harness compiles the kernels if no other test has
def test_faults_end_in_typed_errors_in_time_over_nixl() -> None:
    """A kill, a stop, a cut connection and a proxy that ends among them; every output is right or its call raises."""
    model = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 8}
    given = {"model": model, "router": {"top_k": 2}, "kernel": {"network_link": "nixl", "experts": "torch_cpu"}}
    kinds = {"none": 1, "kill": 3, "stop": 1, "cut": 2, "proxy": 2, "raise": 1}
    campaign = Campaign(("one_sided_network",), config=MoEConfig.parse(given, "a test"), kinds=kinds)
    report = run_worlds(campaign, range(10))
    assert {world.plan.kind for world in report.worlds} == set(kinds)
    assert all(world.plan.config["kernel"]["network_link"] == "nixl" for world in report.worlds)
    assert report.passed, [(world.plan.describe(), world.bad) for world in report.worlds if world.bad]
    assert sum(world.fired for world in report.worlds) >= 8


@NEEDS_NIXL
def test_a_transport_opens_the_link_that_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ThreadWorld(2, timeout_s=20.0)
    made = [OneSidedNetwork(replace(context(comm), network_link="nixl")) for comm in world.communicators()]
    jobs = [lambda t=t, r=r: wait(there_and_back(t, *drawn(r, 5, torch.float32))) for r, t in enumerate(made)]  # type: ignore[misc]
    world.together(jobs)
    for transport in made:
        (buffer,) = transport._pool.slots
        assert isinstance(buffer, NetworkBufferSlot) and isinstance(buffer.heap.proxy.links, NixlLinks)


def test_auto_needs_the_library_and_an_rdma_device() -> None:
    assert link_choice("auto", BOTH).name == "nixl"
    neither, library = link_choice("auto", frozenset()), link_choice("auto", frozenset({"nixl"}))
    assert neither.name == library.name == link_choice("auto", frozenset({RDMA})).name == "tcp"
    assert "not nixl: nixl is not installed [pip install 'moe-mk[nixl]']; no RDMA device was found" in neither.because
    assert "not nixl: no RDMA device was found" in library.because and "not installed" not in library.because
    assert link_choice("nixl", frozenset()) == LinkChoice("nixl", f"{LINKS['nixl'].summary} [kernel.network_link]")
    with pytest.raises(ConfigError, match=r"no network link is called 'ucx' \(known: nixl, tcp\)"):
        link_choice("ucx", BOTH)


def problem(libraries: frozenset[str], ranks: int = 4, **settings: object) -> Problem:
    return problems.problem("tiny", installed=libraries, prepare_finalize="one_sided_network", ep=ranks, **settings)


def test_the_decision_states_the_link_and_ranks_compare_it() -> None:
    decisions = [select(problem(libraries)) for libraries in (frozenset(), BOTH)]
    assert [decision.link.name for decision in decisions if decision.link] == ["tcp", "nixl"]
    assert [decision.notes()["network_link"] for decision in decisions] == ["tcp", "nixl"]
    assert "one_sided_network sends rows over tcp: headers and payload" in decisions[0].text(None)
    assert "one_sided_network sends rows over nixl: headers over TCP" in decisions[1].text(None)
    assert decisions[1].as_dict()["link"]["name"] == "nixl"
    other = select(problems.problem("tiny", prepare_finalize="all_to_all", ep=4))
    assert other.link is None and other.as_dict()["link"] is None and other.notes()["network_link"] == ""


def test_a_pinned_link_without_its_library_and_an_unknown_one_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"nixl is not installed, which network link 'nixl' needs \[pip install"):
        select(problem(frozenset(), network_link="nixl"))
    with pytest.raises(UnsupportedError, match=r"kernel.network_link='ucx' is none of auto, tcp, nixl"):
        select(problem(BOTH, network_link="ucx"))
    comm = ThreadWorld(2).communicators()[0]
    with pytest.raises(ConfigError, match="no network link is called 'ucx'"):
        OneSidedNetwork(replace(context(comm), network_link="ucx"))
    if "nixl" not in installed():
        with pytest.raises(LibraryMissing, match=r"pip install 'moe-mk\[nixl\]'"):
            OneSidedNetwork(replace(context(comm), network_link="nixl"))
