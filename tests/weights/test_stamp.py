"""A stamp holds for the tensors that it was made of, and for nothing that took their place."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_mk.weights.stamp import Stamp
from tests.support.replaced import CHANGES


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        owner = SimpleNamespace(a=torch.randn(4, 6), b=torch.randn(3))
    stamps: list[Stamp] = []

    def stamp() -> None:
        stamps.append(Stamp([owner.a, owner.b]))

    stamp()
    if inference and change not in ("object", "strided_object", "object_at_the_address"):
        pytest.skip("torch counts no version of inference tensors and replaces no data of them")
    CHANGES[change](owner, "a", torch.randn(4, 6), stamp)
    assert not any(each.is_of([owner.a, owner.b]) for each in stamps)
    stamp()
    assert stamps[-1].is_of([owner.a, owner.b]) and stamps[-1].is_of([owner.a.detach(), owner.b])


def test_a_stamp_keeps_no_memory_and_a_copy_of_it_is_of_nothing() -> None:
    tensor = torch.randn(5)
    stamp, storage = Stamp([tensor]), StorageWeakRef(tensor.untyped_storage())
    for other in (copy.deepcopy(stamp), copy.copy(stamp), pickle.loads(pickle.dumps(stamp))):
        assert not other.is_of([tensor]) and stamp.is_of([tensor])
    assert not stamp.is_of([]) and not stamp.is_of([tensor, tensor])
    both = Stamp([tensor, other := torch.randn(2)])
    del tensor
    assert storage.expired() and stamp.is_gone and both.is_gone and not Stamp([other]).is_gone
