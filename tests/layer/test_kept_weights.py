"""The stored weights of a layer survive whatever a backend does with them: later layouts are made from the same bytes.
Matrices here are larger than a page, so that pages which are given back to the system by mistake read as zeros."""

import copy
import ctypes
import mmap
import os
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moe_mk import DeepseekV3MoE, ExpertMap, MoELayer, ParallelGroups, WeightError
from moe_mk.comm import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.lab.checkpoints import CheckpointShape, official_state_dict, write_checkpoint
from moe_mk.lab.checkpoints.checkpoint_shape import FORMATS, GGUF_FILES
from moe_mk.layer.hot_swap import swap_backends
from moe_mk.weights import load_layer
from moe_mk.weights.expert_weights import MappedExpertWeights, digest
from moe_mk.weights.gguf_source import open_source
from moe_mk.weights.safetensors_header import FileState, TensorEntry
from moe_mk.weights.source import MappedFile, in_memory, is_mapped
from tests.layer.native import NEEDS_COMPILER
from tests.support.tiers import quick_where
from tests.support.unreadable_mappings import unreadable_mappings

EXPERTS, SIDE, LAYER = 4, 256, 3
SHAPE = {"num_experts": EXPERTS, "hidden_size": SIDE, "intermediate_size": SIDE, "layers": (LAYER,), "top_k": 2}
MOVED = ExpertMap(((3, 1, 0, 2),), num_experts=EXPERTS)
X_TH = torch.randn((12, SIDE), generator=torch.Generator().manual_seed(1)).bfloat16()
COPIED = ("awq", "gptq", "mxfp4_gguf")
"""Formats that are unpacked into memory of the process when they are read."""
QUICK = (*COPIED, "fp8", "bf16", "nvfp4", "int4_g32", "q4_k_m")

Change = Callable[[MoELayer, Path], MoELayer]


def placed(layer: MoELayer, path: Path) -> MoELayer:
    layer.live.set_placement(MOVED)
    return layer


def swapped(layer: MoELayer, path: Path) -> MoELayer:
    for experts in ("reference", layer.decision.chosen.experts):
        assert swap_backends(layer, X_TH, limit=1.0, experts=experts).swapped
    return layer


def reloaded(layer: MoELayer, path: Path) -> MoELayer:
    return layer.load_from_safetensors(path, LAYER)


def named(layer: MoELayer, path: Path) -> MoELayer:
    """Loaded from the tensors of the layer where these have official names."""
    if layer.config.model.quant.weights not in ("fp8_block", "bf16"):
        return copy.deepcopy(layer)
    twin = type(layer)(layer.config, device="cpu", name="twin")
    return twin.load_weights(official_state_dict(layer.weights))


def built(layer: MoELayer, path: Path, **where: Any) -> MoELayer:
    """A new layer with the placement of another one from the start."""
    twin = type(layer)(layer.config, device="cpu", **where)
    twin.live.set_placement(layer.expert_map)
    return twin.load_from_safetensors(path, LAYER)


CHANGES: tuple[Change, ...] = (
    lambda layer, path: copy.deepcopy(layer),
    placed,
    lambda layer, path: pickle.loads(pickle.dumps(layer)),
    swapped,
    reloaded,
    named,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("kept")

    def of(quant: str) -> Path:
        folder = root / quant
        if not folder.exists():
            if quant in GGUF_FILES:
                pytest.importorskip("gguf", reason="the gguf package writes the files: pip install 'moe-mk[gguf]'")
            write_checkpoint(folder, CheckpointShape(num_groups=1, top_k_groups=1, quant=quant, **SHAPE), threads=1)
        return folder

    return of


def digests(layer: MoELayer) -> list[str]:
    weights = layer.weights
    assert weights.shared is not None
    order = [weights.facts.owned.index(expert) for expert in range(EXPERTS)]
    experts = MappedExpertWeights(tuple(weights.experts.slot(slot) for slot in order), weights.experts.scheme)
    shared = MappedExpertWeights((weights.shared,), weights.shared.up_IH.scheme)
    return [digest(experts), digest(shared)]


@pytest.mark.parametrize("experts", [pytest.param("cpu_native", marks=NEEDS_COMPILER), "torch_cpu"])
@pytest.mark.parametrize("quant", quick_where(lambda quant: quant in QUICK, FORMATS))
@torch.no_grad()
@unreadable_mappings()
def test_every_later_layout_is_made_from_the_stored_weights(
    quant: str, experts: str, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint(quant)
    layer: MoELayer = DeepseekV3MoE.from_checkpoint(path, LAYER, experts=experts, device="cpu")
    y_TH, stored = layer(X_TH), digests(layer)
    assert stored[0] == digest(load_layer(open_source(path), LAYER, layer.spec, owned=range(EXPERTS)).experts)
    # Each format and backend begins elsewhere, so that every change comes first and last in some of them.
    first = FORMATS.index(quant) + 3 * (experts == "torch_cpu")
    for index in range(3 if experts == "cpu_native" else 2):
        layer = CHANGES[(first + index) % len(CHANGES)](layer, path)
        assert digests(layer) == stored
        wanted_TH = built(layer, path)(X_TH) if layer.expert_map == MOVED else y_TH
        assert torch.equal(layer(X_TH), wanted_TH)


@NEEDS_COMPILER
@pytest.mark.parametrize("quant", quick_where(lambda quant: quant == "awq", COPIED))
@torch.no_grad()
def test_experts_that_move_between_ranks_are_the_stored_ones(quant: str, checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint(quant)
    groups = [ParallelGroups(ep=comm) for comm in LockstepWorld(2).communicators()]
    ranks = [
        DeepseekV3MoE.from_checkpoint(path, LAYER, experts="cpu_native", device="cpu", groups=each) for each in groups
    ]

    def outputs(ranks: list[MoELayer]) -> list[Tensor]:
        return interleave([rank.steps(x_TH) for rank, x_TH in zip(ranks, X_TH.chunk(2), strict=True)])

    outputs(ranks)
    of_0, of_3 = ranks[0].live.export_slot(0), ranks[1].live.export_slot(1)
    moved = ExpertMap(((3, 1), (2, 0)), num_experts=EXPERTS)
    ranks[0].live.set_placement(moved, {0: of_3})
    ranks[1].live.set_placement(moved, {1: of_0})
    fresh = [ParallelGroups(ep=comm) for comm in LockstepWorld(2).communicators()]
    wanted = outputs([built(rank, path, groups=each) for rank, each in zip(ranks, fresh, strict=True)])
    assert all(torch.equal(now, then) for now, then in zip(outputs(ranks), wanted, strict=True))


def cut(file: Path, other: Path) -> None:
    os.truncate(file, 20_000)


def cut_to_nothing(file: Path, other: Path) -> None:
    os.truncate(file, 0)


def written_over(file: Path, other: Path) -> None:
    """As by cp: the same inode and the same size."""
    file.write_bytes(other.read_bytes())


def appended_to(file: Path, other: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"more")


def replaced(file: Path, other: Path) -> None:
    """As by a download that renames its file when it is complete."""
    shutil.copy(other, file.with_suffix(".new"))
    file.with_suffix(".new").replace(file)


def deleted(file: Path, other: Path) -> None:
    file.unlink()


IN_PLACE = (cut, cut_to_nothing, written_over, appended_to)
WRITES = (*IN_PLACE, replaced, deleted)


@pytest.fixture
def two_checkpoints(checkpoint: Callable[[str], Path], tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A file of a checkpoint that may be written to, and one of other weights and the same size."""

    def of(quant: str) -> tuple[Path, Path]:
        folder = shutil.copytree(checkpoint(quant), tmp_path / quant)
        file = next(each for each in folder.iterdir() if each.suffix in (".safetensors", ".gguf"))
        other = tmp_path / f"other.{quant}"
        octets = bytearray(file.read_bytes())
        octets[-40_000:] = octets[-80_000:-40_000]
        other.write_bytes(octets)
        return file, other

    return of


def refusal(call: Callable[[], object]) -> str:
    """The text of the WeightError of a call; "" without one."""
    try:
        call()
    except WeightError as refused:
        return str(refused)
    except AssertionError as kept:  # `swapped` asserts that the swap was made
        return f"kept: {kept}"
    return ""


@pytest.mark.parametrize("quant", quick_where(lambda quant: quant == "fp8", ["fp8", "awq", "q4_k_m"]))
@pytest.mark.parametrize("experts", [pytest.param("cpu_native", marks=NEEDS_COMPILER), "torch_cpu"])
@torch.no_grad()
@unreadable_mappings()
def test_a_file_that_changes_at_any_read_of_a_load_is_named_or_was_read_before(
    quant: str, experts: str, two_checkpoints: Callable[[str], tuple[Path, Path]]
) -> None:
    """Every write, at reads all over the load. What is loaded in the end is right, or nothing is."""
    file, other = two_checkpoints(quant)
    before, draw = file.read_bytes(), random.Random(quant)
    layer = DeepseekV3MoE.from_checkpoint(file.parent, LAYER, experts=experts, device="cpu")
    wanted_TH, read, count = layer(X_TH), MappedFile.read, 0

    def counted(self: MappedFile, *given: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == at:
            write(file, other)
        return read(self, *given)

    with mock.patch.object(MappedFile, "read", counted):
        at = 0
        layer.load(file.parent, LAYER)
        reads = count
        for write in WRITES:
            for at in {1, *draw.sample(range(2, reads), 3), reads, reads + 1}:
                MappedFile._open.clear()
                file.unlink(missing_ok=True)
                file.write_bytes(before)
                count = 0
                refused = refusal(lambda: layer.load(file.parent, LAYER))
                assert bool(refused) is (write in IN_PLACE and at <= reads)
                assert not refused or f"{file} was changed after its header was read: it had" in refused
                assert torch.equal(layer(X_TH), wanted_TH), (write.__name__, at, reads)


@pytest.mark.parametrize("write", quick_where(lambda write: write in (cut, replaced), WRITES))
@pytest.mark.parametrize("experts", [pytest.param("cpu_native", marks=NEEDS_COMPILER), "torch_cpu", "reference"])
@torch.no_grad()
@unreadable_mappings()
def test_a_file_that_changes_under_a_layer_is_named_when_it_is_read_again(
    experts: str, write: Callable[[Path, Path], None], two_checkpoints: Callable[[str], tuple[Path, Path]]
) -> None:
    file, other = two_checkpoints("fp8")
    layer: MoELayer = DeepseekV3MoE.from_checkpoint(file.parent, LAYER, experts=experts, device="cpu")
    wanted_TH = layer(X_TH)
    write(file, other)
    if experts == "reference" and write in IN_PLACE:  # it reads the file in every call
        with pytest.raises(WeightError, match=f"{file} was changed after its header was read: it had"):
            layer(X_TH)
        return
    made = [layer]
    for change in (CHANGES[0], CHANGES[2], CHANGES[3], CHANGES[1]):
        refused = refusal(lambda change=change: made.append(change(layer, file.parent)))
        assert bool(refused) is (write in IN_PLACE)
        assert not refused or change is swapped or f"{file} was changed" in refused
        if layer.expert_map != MOVED:
            assert torch.equal(made[-1](X_TH), wanted_TH)


def test_only_unchanged_views_of_a_file_are_read_from_it(checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint("bf16")
    source, file = open_source(folder), next(folder.glob("*.safetensors"))
    names = [name for name in source.names() if "experts.0." in name]
    mapped, written = source.open(names[0]), source.open(names[1])
    written.view(torch.uint8).fill_(7)
    cases = {
        "a slice": (mapped[3:200, 5:], True),
        "other bits": (mapped.view(torch.int16), True),
        "a private copy": (mapped.clone(), False),
        "a pickled copy": (pickle.loads(pickle.dumps(mapped)), False),
        "written to": (written[1:], False),
        "mapped by someone else": (load_file(file)[names[0]], False),
        "fresh": (torch.ones(64, 256), False),
        "empty": (mapped[:0], True),
    }
    for case, (tensor, is_view) in cases.items():
        read = in_memory(tensor)
        assert is_mapped(tensor) is is_view and (read is tensor) is not is_view, case
        assert torch.equal(read, tensor) and read.dtype is tensor.dtype and not is_mapped(read), case


def memory_at(address: int, size: int) -> Tensor | None:
    """Anonymous memory mapped at an address, for the life of the process; None if something else is there."""
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
    fixed_noreplace, access = 0x100000, mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    if library.mmap(address, size, access, flags, -1, 0) != address:
        return None
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a mapping at a given address, as Linux makes it")
def test_memory_at_the_address_of_a_mapping_that_is_gone_is_not_of_the_file(checkpoint: Callable[[str], Path]) -> None:
    file, size = next(checkpoint("bf16").glob("*.safetensors")), 1 << 20
    for _ in range(20):  # another thread may have taken the address in between
        view = MappedFile(file, FileState.of(file)).view(TensorEntry("all", torch.uint8, "U8", (size,), size))
        assert is_mapped(view)
        address = view.data_ptr()
        del view
        if (anonymous := memory_at(address, size)) is not None:
            break
    assert anonymous is not None and anonymous.data_ptr() == address
    anonymous.fill_(7)
    assert in_memory(anonymous) is anonymous


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_that_arrive_from_elsewhere_are_checked_like_a_checkpoint(
    value: float, checkpoint: Callable[[str], Path]
) -> None:
    path = checkpoint("fp8")
    layer = DeepseekV3MoE.from_checkpoint(path, LAYER, experts="torch_cpu", device="cpu")
    slot = layer.live.export_slot(3)
    assert slot.down_HI.scales is not None
    scales = slot.down_HI.scales.clone()
    scales[1, 0] = value
    broken = replace(slot, down_HI=replace(slot.down_HI, scales=scales))
    y_TH = layer(X_TH)
    with pytest.raises(WeightError, match=rf"scales of down of expert 3\[1, 0\] = {value:g}"):
        layer.live.set_placement(MOVED, {0: broken})
    state = {name: tensor.clone() for name, tensor in official_state_dict(layer.weights).items()}
    state["experts.2.up_proj.weight_scale_inv"][0, 1] = value
    reported = rf"experts\.2\.up_proj\.weight_scale_inv\[0, 1\] = {value:g}"
    with pytest.raises(WeightError, match=reported):
        layer.load_weights(state)
    loader = layer.loader()
    for name, tensor in state.items():
        loader.feed(name, tensor)
    with pytest.raises(WeightError, match=reported):
        loader.finish()
    assert torch.equal(layer(X_TH), y_TH), "the layer is as it was"
