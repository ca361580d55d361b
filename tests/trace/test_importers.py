"""Recordings of other programs, written here in their layouts, read as traces."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_mk.lab.trace.importers import from_arrays, from_router_tensors, import_trace
from moe_mk.lab.trace.routing import TraceError
from tests.support.routing_cases import by_hand, equal
from tests.support.trees import Runs

# Three layers, the first without experts; 4 logical experts in 6 slots, other slots in each layer.
PHYSICAL = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]])


def record(step: int, rank: int, mode: int, rows: list[list[int]]) -> dict[str, object]:
    """One forward as SGLang keeps it: a buffer of 8 columns, -1 where nothing was chosen."""
    ids = torch.full((3, len(rows), 8), -1, dtype=torch.int32)
    for token, row in enumerate(rows):
        ids[1:, token, : len(row)] = torch.tensor(row, dtype=torch.int32)
    return {
        "forward_pass_id": step, "rank": rank, "gatherer_key": "primary", "forward_mode": mode,
        "input_ids": list(range(10 * rank, 10 * rank + len(rows))), "positions": list(range(len(rows))),
        "extend_seq_lens": [len(rows)], "topk_ids_of_layer": ids, "misc_objects": [],
    }  # fmt: skip


def sglang(folder: Path) -> list[Path]:
    folder.mkdir()
    for rank, rows in ((0, [[0, 5], [4, 2]]), (1, [[3, 1]])):
        records = [record(7, rank, 1, rows), record(8, rank, 2, rows[:1])]
        content = {"records": records, "last_physical_to_logical_map": PHYSICAL}
        torch.save(content, folder / f"expert_distribution_recorder_1700000000.{rank}_{rank}.pt")
    return sorted(folder.iterdir())


@pytest.mark.row("N10")
def test_a_recording_of_sglang_becomes_a_trace_of_logical_experts(tmp_path: Path) -> None:
    files = sglang(tmp_path / "run")
    trace = import_trace(tmp_path / "run", num_groups=2)
    facts = trace.facts
    assert (facts.num_experts, facts.top_k, facts.num_groups, facts.num_ranks) == (4, 2, 2, 2)
    assert trace.layers == [1, 2] and trace.steps == [7, 8] and trace.num_rows == 2 * (3 + 2)
    first, second = (next(trace.filter(layers=[layer], ranks=[0], steps=[7]).forwards()) for layer in (1, 2))
    # Slots 0 5, 4 2 hold experts 0 1, 0 2 in layer 1 and 3 2, 3 1 in layer 2.
    assert first.ids_TK.tolist() == [[0, 1], [0, 2]] and second.ids_TK.tolist() == [[3, 2], [3, 1]]
    assert first.phase == "prefill" and trace.filter(phase="decode").steps == [8]
    assert first.token_ids_T.tolist() == [0, 1] and trace.weights_RK is None
    for mode, phase in enumerate(("prefill", "decode", "prefill", "decode", "decode", "prefill"), 1):  # `ForwardMode`
        content = {"records": [record(7, 0, mode, [[0, 5]])], "last_physical_to_logical_map": PHYSICAL}
        torch.save(content, tmp_path / "one.pt")
        assert {forward.phase for forward in import_trace(tmp_path / "one.pt").forwards()} == {phase}
    alone = import_trace(files[1])
    assert alone.facts.num_ranks == 1 and alone.filter(layers=[1], steps=[7]).ids_RK.tolist() == [[3, 1]]
    trace.write(tmp_path / "ours.safetensors")
    assert equal(import_trace(tmp_path / "ours.safetensors"), trace)


def test_what_is_no_recording_per_token_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    whole = {"records": [record(0, 0, 1, [[0, 1]])], "last_physical_to_logical_map": PHYSICAL}
    bare = {name: value for name, value in record(0, 0, 1, [[0]]).items() if name != "topk_ids_of_layer"}
    wrong = record(0, 0, 1, [[0, 6]])
    for content, states in (
        ({"logical_count": torch.ones(2, 3, 4)}, "holds loads without tokens.*record in mode per_token"),
        ({"records": []}, "no recording of SGLang"),
        ({**whole, "records": [bare]}, r"record 0 lacks \['topk_ids_of_layer'\]; record in mode per_token"),
        ({**whole, "records": [wrong]}, r"ids of shape \(3, 1, 8\) up to 6, the map of \[layers, slots\] is \(3, 6\)"),
        ({**whole, "records": [{**record(0, 0, 1, [[0]]), "input_ids": [1, 2]}]}, "names 2 tokens for 1 rows"),
        ({**whole, "records": [record(0, 0, 1, [])]}, "hold no token that met an expert"),
        (["text"], "holds a list, expected tensors by name"),
    ):
        torch.save(content, file)
        with pytest.raises(TraceError, match=states):
            import_trace(file)


def test_files_that_would_run_code_are_refused(tmp_path: Path) -> None:
    torch.save({"records": Runs()}, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([Runs()], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "a.npz", topk_ids=np.array([{"a": 1}], dtype=object))
    (tmp_path / "b.npz").write_bytes(b"PK\3\4 cut")
    for name in ("a.pt", "a.npy", "a.npz", "b.npz"):
        with pytest.raises(TraceError, match="cannot be read as"):
            import_trace(tmp_path / name)


def test_routing_maps_of_a_router_by_hand(tmp_path: Path) -> None:
    chosen = torch.tensor([[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    probs = chosen * torch.tensor([0.1, 0.2, 0.3, 0.4])
    name = "decoder.layers.{}.mlp.router.{}".format
    torch.save(
        {name(11, "routing_map"): chosen, name(11, "probs"): probs, name(2, "routing_map"): chosen.flip(1),
         name(2, "probs"): probs.flip(1), name(2, "expert_bias"): torch.ones(4)},
        tmp_path / "dump.pt",
    )  # fmt: skip
    trace = import_trace(tmp_path / "dump.pt")
    assert trace.layers == [2, 11] and trace.facts.num_experts == 4 and trace.facts.top_k == 2
    last = next(trace.filter(layers=[11]).forwards())
    assert last.ids_TK.tolist() == [[1, 3], [0, -1], [-1, -1]]
    assert torch.equal(last.weights_TK, torch.tensor([[0.2, 0.4], [0.1, 0.0], [0.0, 0.0]]))
    # Every assignment of the map is in the loads, and nothing else.
    assert trace.loads().tolist() == [chosen.flip(1).sum(0).tolist(), chosen.sum(0).tolist()]


def test_indices_of_a_router_need_the_number_of_experts(tmp_path: Path) -> None:
    ids, weights = np.array([[3, 1], [0, 2]]), np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)
    np.savez(tmp_path / "dump.npz", layer_5_topk_indices=ids, layer_5_topk_weights=weights, rng_state=ids)
    with pytest.raises(TraceError, match="does not say how many experts there are; pass num_experts, 4 or more"):
        import_trace(tmp_path / "dump.npz")
    trace = import_trace(tmp_path / "dump.npz", num_experts=8)
    assert (
        trace.layers == [5] and trace.ids_RK.tolist() == ids.tolist() and trace.weights_RK.tolist() == weights.tolist()
    )
    narrow = {"layers.6.indices": torch.tensor([[2], [1]]), "layers.6.scores": torch.ones(2, 1)}
    wide = {"layers.5.indices": torch.from_numpy(ids), "layers.5.scores": torch.from_numpy(weights)}
    both = from_router_tensors(narrow | wide, num_experts=8).filter(layers=[6])
    assert (both.ids_RK.tolist(), both.weights_RK.tolist()) == ([[2, -1], [1, -1]], [[1.0, 0.0], [1.0, 0.0]])
    with pytest.raises(TraceError, match=r"none of \['rng_state', 'x'\] names a layer and one of routing_map"):
        from_router_tensors({"rng_state": torch.ones(2), "x": torch.ones(2)})
    with pytest.raises(TraceError, match=r"layer 1: indices are torch.int64 \(2, 2\), weights \(3, 2\)"):
        from_router_tensors(
            {"layers.1.indices": torch.ones(2, 2).long(), "layers.1.scores": torch.ones(3, 2)}, num_experts=4
        )
    with pytest.raises(TraceError, match=r"routing_map has shape \(2, 4\), probs \(2, 5\)"):
        from_router_tensors({"layers.1.routing_map": torch.ones(2, 4), "layers.1.probs": torch.ones(2, 5)})


def line(step: int, layer: int, rank: int, rows: list[list[int]], **more: object) -> str:
    facts = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
    return json.dumps({**facts, "num_tokens": len(rows), "topk": 2, "top_indices": rows, **more})


@pytest.mark.row("N10")
def test_json_lines_of_megatron(tmp_path: Path) -> None:
    first = [line(0, 3, 4, [[0, 7], [2, 1]]), line(0, 5, 4, [[1, 6], [1, 0]]), line(1, 3, 4, [])]
    first += [line(0, 3, 4, [[5, 5]], block="mtp", mtp_idx=0)]
    (tmp_path / "router_trace_rank4.jsonl").write_text("\n".join(first) + "\n")
    (tmp_path / "router_trace_rank6.jsonl").write_text(line(0, 3, 6, [[3, 4]]))
    trace = import_trace(tmp_path, num_experts=8)
    assert [(f.step, f.layer, f.rank, f.ids_TK.tolist()) for f in trace.forwards()] == [
        (0, 3, 0, [[0, 7], [2, 1]]), (0, 5, 0, [[1, 6], [1, 0]]), (1, 3, 0, []), (0, 3, 1, [[3, 4]]),
    ]  # fmt: skip
    assert trace.facts.num_ranks == 2 and trace.facts.top_k == 2
    with pytest.raises(TraceError, match="pass num_experts, 5 or more"):
        import_trace(tmp_path / "router_trace_rank6.jsonl")


@pytest.mark.parametrize(("text", "states"), [
    ("{", "line 1 is no record of a routing trace"),
    (line(0, 3, 0, []) + "\n[1]", "line 2 is no record of a routing trace"),
    ('{"step": 0, "layer": "3", "rank": 0, "topk": 2}', "line 1 lacks layer, top_indices, or has them in another"),
    (line(0, 3, 0, [[1, 2, 3]]), "line 1 is no record of a routing trace"),
    (line(0, 3, 0, [[1, 2]], block="mtp"), "1 files hold no line of a decoder layer"),
    (line(0, 3, 0, [[1, 9]]), r"ids_RK holds 1 to 9, outside \[-1, 8\)"),
])  # fmt: skip
def test_lines_that_are_no_trace_are_reported_by_number(tmp_path: Path, text: str, states: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(TraceError, match=states):
        import_trace(tmp_path / "a.jsonl", num_experts=8)


def test_arrays_with_a_layer_axis(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 8, (3, 2, 5, 2))
    np.save(tmp_path / "four.npy", ids)
    trace = import_trace(tmp_path / "four.npy", num_experts=8)
    assert trace.steps == [0, 1, 2] and trace.layers == [0, 1]
    assert trace.filter(steps=[2], layers=[1]).ids_RK.tolist() == ids[2, 1].tolist()
    assert trace.loads().tolist() == [np.bincount(ids[:, x].ravel(), minlength=8).tolist() for x in range(2)]
    np.savez(tmp_path / "named.npz", topk_ids=ids[0], topk_weights=ids[0] / 8)
    named = import_trace(tmp_path / "named.npz", num_experts=8)
    assert named.layers == [0, 1] and named.weights_RK.tolist() == (ids[0] / 8).reshape(10, 2).tolist()
    with pytest.raises(TraceError, match=r"ids are torch.float64 of shape \(2,\), expected integers of"):
        from_arrays(torch.ones(2, dtype=torch.float64), num_experts=3)
    with pytest.raises(TraceError, match=r"weights have shape \(1,\), ids have \(2, 2\)"):
        from_arrays(torch.ones(2, 2).long(), torch.ones(1), num_experts=3)
    with pytest.raises(TraceError, match=r"ids_RK holds 1 to 5, outside \[-1, 4\)"):
        from_arrays(torch.tensor([[1, 5]]), num_experts=4)


def test_our_own_files_and_unknown_ones(tmp_path: Path) -> None:
    by_hand().write(tmp_path / "a.safetensors")
    assert equal(import_trace(tmp_path / "a.safetensors"), by_hand())
    (tmp_path / "a.csv").write_text("1")
    with pytest.raises(
        TraceError, match=r"ends in '.csv', known are .safetensors, .pt, .jsonl, .npy, .npz and folders"
    ):
        import_trace(tmp_path / "a.csv")
    with pytest.raises(TraceError, match="is not there"):
        import_trace(tmp_path / "nowhere.pt")
