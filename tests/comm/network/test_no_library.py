"""Between hosts with nothing installed: what the proxies import, and that they work with no device and no library."""

import sys

import pytest

from tests.architecture.checks import ROOT, Source
from tests.support.network_ends import store
from tests.support.network_proxies import flag_of, proxies, wait_for

NEEDED = {"torch", "numpy", "moe_mk"}


@pytest.mark.row(159)
def test_proxies_need_python_torch_and_numpy_and_no_compiler() -> None:
    paths = list((ROOT / "moe_mk" / "comm" / "network").glob("*.py"))
    files = [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]
    assert len(files) > 10
    imported = {name.split(".")[0] for source in files for _, name in source.imports()}
    assert imported - sys.stdlib_module_names <= NEEDED
    assert "ctypes" not in imported


@pytest.mark.row(159)
def test_ranks_come_and_go() -> None:
    """Elastic: a group of another size is opened beside one that is at work, and closed again."""
    with proxies(2) as (zero, one):
        for ranks in (3, 4):
            with proxies(ranks) as larger:
                assert larger[0].commit(0, store(ranks - 1, 0, ranks))
                wait_for(lambda larger=larger: flag_of(larger[-1], 0) == len(larger))
            assert zero.commit(0, store(1, 0, ranks))
            wait_for(lambda ranks=ranks: flag_of(one, 0) == ranks)
