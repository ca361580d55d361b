"""A routing trace on disk: nothing is lost, little is written, and what is damaged or foreign is reported."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_mk.lab.trace.routing import RoutingTrace, TracedForward, TraceError, TraceFacts, TraceFolder
from tests.support.routing_cases import by_hand, drawn, equal
from tests.support.trees import Runs


def test_a_file_gives_back_every_bit(tmp_path: Path) -> None:
    far = [replace(by_hand(), step_X=by_hand().step_X + at) for at in (2**31 - 2, 2**31, -(2**31), -(2**40))]
    traces = (by_hand(), drawn(256, 8), drawn(40_000, 2, layers=1), by_hand().filter(steps=[9]), *far)
    for number, trace in enumerate(traces):
        trace.write(tmp_path / f"{number}.safetensors")
        assert equal(RoutingTrace.read(tmp_path / f"{number}.safetensors"), trace)
    assert {file.name for file in tmp_path.iterdir()} == {f"{n}.safetensors" for n in range(8)}, "nothing half-written"


@given(experts=st.sampled_from([1, 2, 254, 255, 256, 257, 32_768, 32_769]), holes=st.booleans(), seed=st.integers(0, 9))
def test_ids_survive_at_every_width(
    tmp_path_factory: pytest.TempPathFactory, experts: int, holes: bool, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1 if holes else 0, experts, (50, 1), generator=draw)
    ids[0] = experts - 1
    ids[1] = -1 if holes else 0
    trace = RoutingTrace.of(TraceFacts(experts, 1), [TracedForward(0, 0, 0, "prefill", ids)])
    file = tmp_path_factory.mktemp("t") / "a.safetensors"
    trace.write(file)
    assert RoutingTrace.read(file).ids_RK.tolist() == ids.tolist()
    with safe_open(str(file), "pt") as opened:
        assert (opened.get_tensor("ids_RK").dtype == torch.uint8) == (experts + holes <= 256)


def test_only_what_is_needed_is_written(tmp_path: Path) -> None:
    # 256 experts, 8 a token, no -1: a byte each. Weights of 1/8 are exact in bf16: two bytes each.
    ids = torch.arange(256).view(32, 8)
    tokens = torch.arange(32)
    forwards = [TracedForward(0, x, 0, "prefill", ids, torch.full((32, 8), 0.125), tokens) for x in range(10)]
    RoutingTrace.of(TraceFacts(256, 8), forwards).write(tmp_path / "a.safetensors")
    stored = load_file(tmp_path / "a.safetensors")
    assert stored["ids_RK"].dtype == torch.uint8 and stored["weights_RK"].dtype == torch.bfloat16
    assert len(stored["token_ids"]) == 32  # ten layers saw the same tokens, which are named once
    assert (tmp_path / "a.safetensors").stat().st_size < 10 * 32 * 8 * 3 + 2500
    # A third is exact in no narrow dtype.
    for value, dtype in ((1 + 2**-10, torch.float16), (1 / 3, torch.float32)):
        rough = replace(RoutingTrace.read(tmp_path / "a.safetensors"), weights_RK=torch.full((320, 8), value))
        rough.write(tmp_path / "b.safetensors")
        assert equal(RoutingTrace.read(tmp_path / "b.safetensors"), rough)
        assert load_file(tmp_path / "b.safetensors")["weights_RK"].dtype == dtype


def test_the_header_is_json_that_anyone_can_read(tmp_path: Path) -> None:
    by_hand().write(tmp_path / "a.safetensors")
    with safe_open(str(tmp_path / "a.safetensors"), "pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "moe_mk routing trace" and metadata["version"] == "1"
    assert json.loads(metadata["header"]) == {
        "num_experts": 4, "top_k": 2, "num_groups": 2, "num_ranks": 2, "model": "toy",
    }  # fmt: skip


def test_chunks_of_a_folder_are_one_trace(tmp_path: Path) -> None:
    trace, folder = by_hand(), TraceFolder(tmp_path / "run")
    for step in (0, 9, 1):  # step 9 has no forwards and leaves no chunk
        folder.append(trace.filter(steps=[step]))
    assert folder.num_chunks == 2 and equal(RoutingTrace.read(tmp_path / "run"), trace)
    with pytest.raises(TraceError, match="holds 2 chunks already; take another folder"):
        TraceFolder(tmp_path / "run")
    (tmp_path / "run" / "chunk-000000.safetensors").unlink()
    with pytest.raises(TraceError, match=r"chunk-000000.safetensors is missing, chunk-000001.safetensors is there"):
        RoutingTrace.read(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match=r"is a folder without chunk-000000.safetensors"):
        RoutingTrace.read(tmp_path / "empty")


def test_every_kind_of_damage_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    by_hand().write(file)
    whole = file.read_bytes()
    for cut in (0, 4, 100, len(whole) - 1):
        file.write_bytes(whole[:cut])
        with pytest.raises(TraceError, match="is damaged, or no safetensors file"):
            RoutingTrace.read(file)
    flipped = bytearray(whole)
    flipped[-20] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(TraceError, match="does not have the digest it was written with"):
        RoutingTrace.read(file)


def test_what_is_no_trace_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere.safetensors is not there"):
        RoutingTrace.read(tmp_path / "nowhere.safetensors")
    save_file({"load": torch.ones(2, 4)}, tmp_path / "weights.safetensors")
    with pytest.raises(TraceError, match=r"of another kind \(no format\), not a routing trace"):
        RoutingTrace.read(tmp_path / "weights.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "hf.safetensors", {"format": "pt"})
    with pytest.raises(TraceError, match=r"another kind \(format 'pt'\)"):
        RoutingTrace.read(tmp_path / "hf.safetensors")
    save_file({"x": torch.ones(2)}, tmp_path / "new.safetensors", {"format": "moe_mk routing trace", "version": "2"})
    with pytest.raises(TraceError, match=r"has version '2', this library reads up to 1; update it"):
        RoutingTrace.read(tmp_path / "new.safetensors")
    with pytest.raises(TraceError, match="cannot be written"):
        by_hand().write(tmp_path / "no folder" / "a.safetensors")


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    torch.save({"ids": Runs()}, tmp_path / "a.safetensors")
    with pytest.raises(TraceError, match="no safetensors file"):
        RoutingTrace.read(tmp_path / "a.safetensors")


def test_a_file_that_was_made_to_deceive_is_refused(tmp_path: Path) -> None:
    """A right digest over a content that contradicts itself."""
    from moe_mk.lab.trace.routing_file import save

    by_hand().write(tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    header = {"num_experts": 4, "top_k": 2, "num_groups": 2, "num_ranks": 2, "model": "toy"}
    for changed, states in (
        ({"tokens_X": tensors["tokens_X"] + 1}, "token ids end at|the forwards need"),
        ({"ids_RK": tensors["ids_RK"].float()}, "ids are torch.float32"),
        ({"rank_X": tensors["rank_X"] + 5}, r"rank_X holds 5 to 6, outside \[0, 2\)"),
        ({"token_start_X": tensors["token_start_X"] - 9}, "token ids end at"),
        *(
            ({"token_start_X": tensors["token_start_X"].index_fill(0, torch.tensor(at), 9)}, "token ids end at 1")
            for at in range(5)
        ),
        ({"phase_X": tensors["phase_X"] + 2}, r"phase_X holds 2 to 3, outside \[0, 2\)"),
    ):
        save(tmp_path / "b.safetensors", header, {**tensors, **changed})
        with pytest.raises(TraceError, match=states):
            RoutingTrace.read(tmp_path / "b.safetensors")
    without = {name: tensor for name, tensor in tensors.items() if name != "ids_RK"}
    save(tmp_path / "b.safetensors", header, without)
    with pytest.raises(TraceError, match=r"lacks \['ids_RK'\]"):
        RoutingTrace.read(tmp_path / "b.safetensors")
    save(tmp_path / "b.safetensors", {"num_experts": 4}, tensors)
    with pytest.raises(TraceError, match=r"its header differs in \['model', 'num_groups', 'num_ranks', 'top_k'\]"):
        RoutingTrace.read(tmp_path / "b.safetensors")


def test_a_numpy_reader_sees_the_same_loads(tmp_path: Path) -> None:
    """The format needs no library of ours: ids and columns are plain tensors."""
    trace = drawn(64, 4, holes=False)
    trace.write(tmp_path / "a.safetensors")
    stored = load_file(tmp_path / "a.safetensors")
    layer_R = np.repeat(stored["layer_X"].numpy(), stored["tokens_X"].numpy())
    for x, load_E in enumerate(trace.loads()):
        assert (np.bincount(stored["ids_RK"].numpy()[layer_R == x].ravel(), minlength=64) == load_E).all()
