"""A corpus of broken backends: each is refused with the law that it violates, and the correct ones are certified."""

import ast
import re
from collections.abc import Hashable, Iterator
from pathlib import Path

import pytest

from moe_mk.lab.testing.certify import certify
from moe_mk.lab.testing.laws import LAWS
from tests.support.tiers import quick_where
from tests.testing.broken import experts, transports
from tests.testing.broken.corpus import CORPUS, refused, registered

STATED = {
    "experts.AllRowsAHairTooLarge": "all tokens together are .* away, limit",
    "experts.ClaimsToWeigh": "output is WEIGHTED, the traits declare RAW",
    "experts.DrawsRandomNumbers": "random numbers of torch of the process were changed",
    "experts.WrongTheSecondTime": ", called again: tokens", "experts.FailsWithoutRows": "RuntimeError: ",
    "experts.FirstWeightsForever": "the second of two weights in turn: tokens",
    "experts.LastBitByCall": "two calls give different bits",
    "experts.NaNOfAll": "with a token of NaN: the output is not finite",
    "experts.NewestWeights": "the first of two weights in turn: tokens",
    "experts.NowhereIsTheLastExpert": "all to one expert", "experts.OneActivation": "even, grouped: tokens",
    "experts.OrderOfSumsByBatch": "row 0 has other bits in a batch of its own",
    "experts.OrderOfSumsByBatchOfRows": "rows: row 0 has other bits in a batch of its own",
    "experts.OutputElsewhere": "output is on device meta", "experts.OutputInF64": "output is torch.float64",
    "experts.OutputInPlaceOfRows": "grouped: the tokens were changed", "experts.PaddedOutput": "output has shape",
    "experts.ReadsNoWeights": "reads neither canonical nor mapped weights",
    "experts.ReusedOutput": "an output changed in a later call",
    "experts.SumsPadding": "batched: the output is not finite", "experts.SwappedHalves": "canonical.*away",
    "experts.TenthOfAPercentTooLarge": "tokens .* are up to .* away, the limit is",
    "experts.WeightsInPlace": "canonical weights were changed by relayout",
    "experts.WeightsInPlaceOfACall": "canonical weights were changed$",
    "experts.WrongFromRow32": "65 tokens, grouped: tokens", "experts.WrongFromRow128": "257 tokens, grouped: tokens",
    "transports.AddsToItsInput": "an input changed", "transports.ClampsIds": "all to one expert: an input changed",
    "transports.EqualWeights": r"token 0 of rank 0 was combined to \[.*expected \[",
    "transports.FailsWithoutTokens": "ValueError: nothing to send",
    "transports.KeepsEveryInput": r"on the wire: 6 calls leak \d+ tensors",
    "transports.LastBitByCall": "other work in between changes bits",
    "transports.LastBitOfTheSecondOpenCall": "two micro-batches change bits",
    "transports.LosesTheLast": r"was combined to \[0.0",
    "transports.LosesTokensFrom64": "65 tokens: token 64 of rank 0 was combined to",
    "transports.NaNOfAll": "with a token of NaN: other tokens of rank 0 differ",
    "transports.NeighbouringSlot": "even, each expert with its own factor: token 0 of rank 0 was combined to",
    "transports.OtherDevice": "the output of rank 0 is on device meta", "transports.PaddedOutput": "rank . got",
    "transports.ReusedOutput": "an output changed in a later call", "transports.ReversesTokens": "was combined to",
    "transports.RoundsToBf16": "2 ranks, fp32, even: token 0 of rank 0 was combined to",
    "transports.SizedByItsFirstCall": "after a smaller call: token 1 of rank 0 was combined to",
    "transports.SlotsFrom32": "40 experts per rank, each expert with its own factor: token",
    "transports.StatesFewerChoices": "dispatched tokens have rows with . choices, most_K is 1",
    "transports.SumsPadding": "the output of rank 0 is not finite",
    "transports.YieldsOnceMoreOnTheFirstRank": "ranks have different yield points",
    "transports.YieldsOnceMoreWithTokens": "yield points depend on the number of tokens",
}  # fmt: skip
"""What a message of the certificate states, in addition to the law."""
ROOT = Path(__file__).parents[2]
KIT = ROOT / "moe_mk/lab/testing"
SLOW = ("transports.KeepsEveryInput", *(name for name, broken in CORPUS.items() if broken.larger))


def is_quick(name: str) -> bool:
    return name not in SLOW and (name in STATED or name.startswith("experts."))


def axes(name: str) -> tuple[Hashable, ...]:
    return name.partition(".")[0], CORPUS[name].law, CORPUS[name].larger


@pytest.mark.row("N5")
@pytest.mark.parametrize("name", quick_where(is_quick, CORPUS, axes))
def test_a_broken_backend_is_refused_with_the_law_that_it_violates(name: str) -> None:
    failures = refused(name).failures
    assert all(failure.text for failure in failures)
    assert any(re.search(STATED.get(name, ""), failure.message) for failure in failures)
    if CORPUS[name].larger:
        assert all(failure.check.endswith("larger sizes") for failure in failures)


@pytest.fixture(params=[*experts.RIGHT, *transports.RIGHT], ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def correct(request: pytest.FixtureRequest) -> Iterator[str]:
    with registered(request.param) as name:
        yield name


@pytest.mark.slow
def test_the_backends_that_they_are_made_of_are_correct(correct: str) -> None:
    certificate = certify(correct, processes=False, quick=True)
    assert certificate.passed, certificate.failures


ELSEWHERE = {
    "loads": "tests/testing/test_certify.py::test_a_plugin_that_cannot_be_loaded_gets_a_certificate_that_states_so",
    "signature": "tests/testing/test_certify.py::test_a_plugin_that_cannot_be_loaded_gets_a_certificate_that_states_so",
    "processes": "tests/testing/test_certify.py::test_processes_give_the_bits_of_virtual_ranks",
    "faults": "tests/testing/test_faults.py",
}
"""Laws that no call of a backend in one process can violate."""
OF_TRANSPORTS, OF_EXPERTS = ("lost", "order", "slots", "weighting", "yield points"), ("invariant", "stage")
"""Laws that only one of the two kinds can violate."""


def test_every_law_is_violated_alone_by_a_broken_backend_of_each_kind() -> None:
    violated = {kind: {one.law for name, one in CORPUS.items() if name.startswith(kind)} for kind in ("exp", "trans")}
    every = {law.name for law in LAWS} - ELSEWHERE.keys()
    violated = {kind: laws - ELSEWHERE.keys() for kind, laws in violated.items()}
    assert violated == {"exp": every - {*OF_TRANSPORTS}, "trans": every - {*OF_EXPERTS}} and len(CORPUS) >= 95
    assert all((ROOT / place.split("::")[0]).is_file() for place in ELSEWHERE.values())


GUARD = "a guard behind another check"
SITES = {
    "calls.py: an output changed in a later call": "experts.ReusedOutput",
    "calls.py: calls leak * tensors": "transports.KeepsEveryInput",
    "calls.py: row * has other bits in a batch of its own": "experts.OrderOfSumsByBatchOfRows",
    "calls.py: the * of two weights in turn": "experts.FirstWeightsForever",
    "calls.py: with a token of NaN": "experts.NaNOfAll",
    "certify_checks.py: outcomes after faults are wrong": ELSEWHERE["faults"],
    "certify_checks.py: processes give other bits than ranks of one process": ELSEWHERE["processes"],
    "experts.py: called again": "experts.WrongTheSecondTime",
    "experts.py: output has shape * not": "experts.PaddedOutput",
    "experts.py: output is": "experts.OutputInF64",
    "experts.py: output is * the traits declare": "experts.ClaimsToWeigh",
    "experts.py: output is on device": "experts.OutputElsewhere",
    "experts.py: reads neither * nor mapped weights": "experts.ReadsNoWeights",
    "experts.py: the tokens were changed": "experts.OutputInPlaceOfRows",
    "experts.py: two calls give different bits": "experts.LastBitByCall",
    "experts.py: weights were changed": "experts.WeightsInPlaceOfACall",
    "experts.py: weights were changed by relayout": "experts.WeightsInPlace",
    "limits.py: all tokens together are * away, limit": "experts.AllRowsAHairTooLarge",
    "limits.py: of the process were changed": "experts.DrawsRandomNumbers",
    "limits.py: shape * not": GUARD,
    "limits.py: the output is not finite": "experts.SumsPadding",
    "limits.py: tokens * are up to * away, the limit is": "experts.TenthOfAPercentTooLarge",
    "transports.py: an input changed": "transports.AddsToItsInput",
    "transports.py: an output changed in a later call": "transports.ReusedOutput",
    "transports.py: an output shares memory with an input, on ranks": GUARD,
    "transports.py: dispatched tokens have": "transports.StatesFewerChoices",
    "transports.py: rank * got * not": "transports.PaddedOutput",
    "transports.py: ranks have different yield points": "transports.YieldsOnceMoreOnTheFirstRank",
    "transports.py: the output of rank * is not finite": "transports.SumsPadding",
    "transports.py: the output of rank * is on device": "transports.OtherDevice",
    "transports.py: two micro-batches change bits": "transports.LastBitOfTheSecondOpenCall",
    "transports.py: with a token of NaN: other tokens of rank * differ": "transports.NaNOfAll",
    "transports.py: yield points depend on the number of tokens": "transports.YieldsOnceMoreWithTokens",
}
"""The broken backend that each check of the kit refuses, by its file and its words."""


def test_every_law_is_shown_to_be_broken_by_something() -> None:
    # Plugins that do not load in test_certify.py, faults in test_faults.py; two processes differ where ranks do.
    elsewhere = {"loads", "signature", "processes", "faults"}
    assert {law.name for law in LAWS} == {broken.law for broken in CORPUS.values()} | elsewhere


def sites() -> Iterator[tuple[str, str]]:
    """Every place where the kit refuses something with words of its own: its file, and the words."""
    for file in ("calls.py", "certify_checks.py", "experts.py", "limits.py", "transports.py"):
        for node in ast.walk(ast.parse((KIT / file).read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("require", "require_close")):
                continue
            message = node.args[-1]
            parts = message.values if isinstance(message, ast.JoinedStr) else [message]
            words = [each.value.strip(" :,;(") for each in parts if isinstance(each, ast.Constant)]
            if sum(map(len, words)) >= 8:
                yield file, " * ".join(filter(None, words))


def test_every_check_of_the_kit_refuses_a_broken_backend() -> None:
    assert {f"{file}: {words}" for file, words in sites()} == SITES.keys()
    for site, name in SITES.items():
        if name in CORPUS:
            longest = max(site.partition(": ")[2].split(" * "), key=len)
            assert longest in STATED[name], f"STATED[{name!r}] does not show that {site!r} refuses it"
        else:
            assert name in ELSEWHERE.values() or name == GUARD, name
