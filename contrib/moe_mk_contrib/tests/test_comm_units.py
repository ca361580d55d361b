"""A budget of compute units, of the transports of this distribution."""

import inspect

import pytest
from moe_mk_contrib.deepep_v2 import DeepEPElastic
from moe_mk_contrib.emulated import deep_ep
from moe_mk_contrib.emulated.mori import ops as mori_ops
from moe_mk_contrib.mori import Mori

from moe_mk import oracle
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.base import Budget
from tests.prepare_finalize.test_comm_units import expect_units, listened, there_and_back_again
from tests.support import library_ranks
from tests.support.deepep_ranks import XB, asked, ranks_of
from tests.support.library_ranks import reported

pytestmark = pytest.mark.row(50)
COUNTED = {"mori": "CUs", **dict.fromkeys(("deepep_v2", "deepep_v2_grouped", "nccl_ep", "nccl_ep_ht"), "SMs")}


def test_elastic_calls_carry_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = listened(deep_ep.ElasticBuffer, monkeypatch, "num_sms")
    combined = there_and_back_again(ranks_of("deepep_v2"))
    assert heard and all(number is None for _, number in heard), "the library counts by itself"
    heard.clear()
    ranks = ranks_of("deepep_v2", comm_units=7)
    assert there_and_back_again(ranks) == combined
    assert heard == [("dispatch", 7)] * 2 + [("combine", 7)] * 2
    assert all(tokens.handle[1].num_sms == 7 for tokens in ranks.dispatched(XB))


def test_mori_launches_as_many_blocks_in_every_call_and_its_own_number_by_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = listened(mori_ops.EpDispatchCombineOp, monkeypatch, "block_num")

    def combined(units: int | None) -> list[list[list[float]]]:
        ranks = library_ranks.Ranks("mori", comm_units=units)
        tokens = ranks.dispatched()
        return [y_TH.tolist() for y_TH in ranks.combined([t.x_RH.values for t in tokens], tokens)]

    by_itself = combined(None)
    assert heard == [("dispatch", None)] * 2 + [("combine", None)] * 2, "the library counts by itself"
    heard.clear()
    assert combined(12) == by_itself
    assert heard == [("dispatch", 12)] * 2 + [("combine", 12)] * 2
    default = inspect.signature(mori_ops.EpDispatchCombineConfig).parameters["block_num"].default
    amd = library_ranks.problem("mi300x")
    assert Mori.budget(amd) == Budget("CUs", default, "the library's default")
    held = library_ranks.problem("mi300x", comm_units=12)
    assert Mori.budget(held) == Budget("CUs", 12, "kernel.comm_units") and not Mori.reasons_against(held)


def test_whoever_has_no_budget_states_so_where_one_is_set() -> None:
    names = [name for name in PREPARE_FINALIZE if PREPARE_FINALIZE.origin(name).startswith("moe-mk-contrib ")]
    expect_units(names, COUNTED, {"nccl_ep": 20})  # 256 experts need 19 SMs there


def test_a_window_of_rows_is_as_large_whoever_moves_them_and_any_number_is_taken() -> None:
    assert DeepEPElastic.buffer_bytes(asked(comm_units=12)) == DeepEPElastic.buffer_bytes(asked())
    assert reported("deepep_v2", asked(comm_units=21)) == {}


def test_a_decision_reports_the_formula_of_the_library() -> None:
    def budget(**more: int) -> Budget | None:
        return oracle.select(asked(prepare_finalize="deepep_v2", experts="reference", **more)).budget

    # NVLink of 160 GB/s: 7/8 of the rows cross it, each is written once: 3.66 SMs and a quarter more, made even.
    assert budget() == Budget("SMs", 6, "the library's formula for links of 160 GB/s")
    between = budget(ep=32)
    assert between is not None and between.source.endswith("links of 160 and 46 GB/s")
