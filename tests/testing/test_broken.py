"""A corpus of broken backends: each is refused with the law that it violates, and the correct ones are certified."""

import re
from collections.abc import Iterator

import pytest

from moe_mk.lab.testing.certify import certify
from moe_mk.lab.testing.laws import LAWS
from tests.support.tiers import quick_where
from tests.testing.broken import experts, transports
from tests.testing.broken.corpus import CORPUS, refused, registered

STATED = {
    "experts.ClaimsToWeigh": "output is WEIGHTED, the traits declare RAW",
    "experts.FailsWithoutRows": "RuntimeError: ",
    "experts.FirstWeightsForever": "the second of two weights in turn: tokens",
    "experts.LastBitByCall": "two calls give different bits",
    "experts.NowhereIsTheLastExpert": "all to one expert",
    "experts.OneActivation": "even, grouped: tokens",
    "experts.OrderOfSumsByBatch": "row 0 has other bits in a batch of its own",
    "experts.OutputInF64": "output is torch.float64",
    "experts.OutputInPlaceOfRows": "grouped: the tokens were changed",
    "experts.PaddedOutput": "output has shape",
    "experts.ReusedOutput": "an output changed in a later call",
    "experts.SumsPadding": "batched: the output is not finite",
    "experts.SwappedHalves": "canonical.*away",
    "experts.TenthOfAPercentTooLarge": "away",
    "experts.WeightsInPlace": "canonical weights were changed",
    "experts.WrongFromRow32": "65 tokens, grouped: tokens",
    "experts.WrongFromRow128": "257 tokens, grouped: tokens",
    "transports.AddsToItsInput": "an input changed",
    "transports.ClampsIds": "all to one expert: an input changed",
    "transports.EqualWeights": r"token 0 of rank 0 was combined to \[.*expected \[",
    "transports.FailsWithoutTokens": "ValueError: nothing to send",
    "transports.KeepsEveryInput": "on the wire: 6 calls leak 12 tensors",
    "transports.LastBitByCall": "other work in between changes bits",
    "transports.LosesTheLast": r"was combined to \[0.0",
    "transports.LosesTokensFrom64": "65 tokens: token 64 of rank 0 was combined to",
    "transports.NeighbouringSlot": "even, each expert with its own factor: token 0 of rank 0 was combined to",
    "transports.OtherDevice": "the output of rank 0 is on device meta",
    "transports.ReversesTokens": "was combined to",
    "transports.RoundsToBf16": "2 ranks, fp32, even: token 0 of rank 0 was combined to",
    "transports.SizedByItsFirstCall": "after a smaller call: token 1 of rank 0 was combined to",
    "transports.SlotsFrom32": "40 experts per rank, each expert with its own factor: token",
    "transports.YieldsOnceMoreWithTokens": "yield points depend on the number of tokens",
}
"""What a message of the certificate states, in addition to the law."""
SLOW = ("transports.KeepsEveryInput", *(name for name, broken in CORPUS.items() if broken.larger))


@pytest.mark.row("N5")
@pytest.mark.parametrize(
    "name",
    quick_where(lambda name: name not in SLOW and (name in STATED or name.startswith("experts.")), list(CORPUS)),
)
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


@pytest.mark.thorough
def test_the_backends_that_they_are_made_of_are_correct(correct: str) -> None:
    certificate = certify(correct, processes=False, quick=True)
    assert certificate.passed, certificate.failures


def test_every_law_is_shown_to_be_broken_by_something() -> None:
    # Plugins that do not load in test_certify.py, faults in test_faults.py; two processes differ where ranks do.
    elsewhere = {"loads", "signature", "processes", "faults"}
    assert {law.name for law in LAWS} == {broken.law for broken in CORPUS.values()} | elsewhere and len(CORPUS) >= 40
