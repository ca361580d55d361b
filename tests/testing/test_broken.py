"""A corpus of broken backends: each is refused with the law that it violates, and the correct ones are certified."""

from collections.abc import Iterator

import pytest

from moe_mk.lab.testing.certify import certify
from tests.support.tiers import quick_where
from tests.testing.broken import experts, transports
from tests.testing.broken.corpus import CORPUS, refused, registered

SMALL = [name for name, broken in CORPUS.items() if not broken.larger]


@pytest.mark.parametrize("name", quick_where(lambda name: name.startswith("experts."), SMALL))
def test_a_broken_backend_is_refused_with_the_law_that_it_violates(name: str) -> None:
    assert refused(name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name, broken in CORPUS.items() if broken.larger])
def test_one_that_is_wrong_at_larger_sizes_only_is_refused_without_quick_only(name: str) -> None:
    assert refused(name)


@pytest.fixture(params=[*experts.RIGHT, *transports.RIGHT], ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def correct(request: pytest.FixtureRequest) -> Iterator[str]:
    with registered(request.param) as name:
        yield name


@pytest.mark.thorough
def test_the_backends_that_they_are_made_of_are_correct(correct: str) -> None:
    certificate = certify(correct, processes=False, quick=True)
    assert certificate.passed, certificate.failures


def test_the_corpus_covers_every_law_of_a_single_process() -> None:
    assert len(CORPUS) >= 40
    laws = {broken.law for broken in CORPUS.values()}
    assert laws >= {
        "inputs", "shape", "stage", "weighting", "order", "lost", "nowhere", "padding", "deterministic", "invariant",
        "slots", "calls", "kept", "nothing left", "yield points", "graphs", "values", "runs",
    }  # fmt: skip
