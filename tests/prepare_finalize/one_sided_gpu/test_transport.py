"""What the oracle hears of the one-sided transport of GPUs; its calls are tested with the Triton kernels."""

from dataclasses import replace

import pytest

from moe_mk.comm import LockstepWorld
from moe_mk.config.problem import Problem
from moe_mk.errors import UnsupportedError
from moe_mk.prepare_finalize.one_sided_gpu.transport import NAME, OneSidedGpu
from tests.support import problems
from tests.support.one_sided_ranks import context


def problem(device: str, **settings: object) -> Problem:
    return problems.problem("tiny", device, installed=["triton"], **{"max_num_tokens": 64, **settings})


def test_it_is_taken_by_name_alone_until_it_has_been_measured() -> None:
    pinned = problem("h200", ep=4, prepare_finalize=NAME)
    assert not OneSidedGpu.reasons_against(pinned)
    assert not OneSidedGpu.reasons_against(problem("h200", ep=4, prepare_finalize=NAME, graphs=True))
    (reason,) = OneSidedGpu.reasons_against(problem("h200", ep=4))
    assert reason.code == "unmeasured" and "not yet measured" in reason.text


def test_every_limit_is_reported() -> None:
    far = problem("h200", ep=4, prepare_finalize=NAME)
    far = replace(far, device=far.device.model_copy(update={"ranks_per_node": 2}), installed=frozenset())
    assert {r.code for r in OneSidedGpu.reasons_against(far)} == {"fabric", "library"}
    assert {r.code for r in OneSidedGpu.reasons_against(problem("cpu", prepare_finalize=NAME))} == {"device", "ranks"}
    odd = problem("h200", ep=4, prepare_finalize=NAME, hidden_size=36)
    assert "a sum of 72 bytes does not divide into 16" in {r.text for r in OneSidedGpu.reasons_against(odd)}


def test_memory_and_rows_are_those_of_a_full_window() -> None:
    few, many = (problem("h200", ep=4, prepare_finalize=NAME, max_num_tokens=limit) for limit in (64, 128))
    assert OneSidedGpu.max_rows(few) == 4 * 64
    hidden = few.config.model.hidden_size
    assert OneSidedGpu.buffer_bytes(many) - OneSidedGpu.buffer_bytes(few) >= 4 * 64 * 2 * 2 * hidden


def test_a_cpu_is_refused_outside_of_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(UnsupportedError, match="runs on cuda, this device is cpu"):
        OneSidedGpu(context(LockstepWorld(2).communicators()[0]))
