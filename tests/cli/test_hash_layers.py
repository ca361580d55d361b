"""Layers that choose experts by token id, from the command line: written, inspected, run on two ranks, measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_mk.lab.trace.routing import RoutingTrace
from tests.cli.conftest import Invoke, printed

VOCABULARY, EXPERTS, TOP_K, HIDDEN = 40, 12, 6, 128


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 experts of 128 x 128 behind a table of 40 tokens. Never write into it."""

    folder = tmp_path_factory.mktemp("hashed") / "v4"
    sizes = ("--experts", EXPERTS, "--hidden", HIDDEN, "--intermediate", 128, "--hash-vocabulary", VOCABULARY)
    assert "12 experts, routed by a table of 40 token ids, top-6" in printed("make-checkpoint", folder, *sizes)
    return folder


def table_of(checkpoint: Path) -> torch.Tensor:
    return load_file(next(checkpoint.glob("*.safetensors")))["model.layers.3.mlp.gate.tid2eid"]


def files(folder: Path, rows: int, ids: object) -> tuple[object, ...]:
    np.save(folder / "rows.npy", np.random.default_rng(0).standard_normal((rows, HIDDEN)))
    np.save(folder / "ids.npy", np.asarray(ids))
    return ("--hidden-states", folder / "rows.npy", "--token-ids", folder / "ids.npy")


@pytest.mark.slow
def test_two_ranks_route_the_ids_of_a_file_as_the_table_states(invoke: Invoke, hashed: Path, tmp_path: Path) -> None:
    ids = [3, 39, 0, 3, 17, 8, 8]  # shared out 4 + 3
    report, traced = tmp_path / "run.json", tmp_path / "trace.safetensors"
    done = invoke(
        "run", hashed, "--ranks", 2, *files(tmp_path, 7, ids), "--repeats", 1, "--out", report,
        "--record-trace", traced, "--trace", tmp_path / "spans.json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found, table_XK = json.loads(report.read_text()), table_of(hashed)
    assert found["verification"]["passed"] and found["verification"]["routing_equal"] == 7 + 2
    assert found["expert_load"] == torch.bincount(table_XK[ids].flatten(), minlength=EXPERTS).tolist()
    trace = RoutingTrace.read(traced)
    reported = [each for each in trace.forwards() if each.phase == "prefill"]
    known = [each.token_ids_T.tolist() for each in reported if each.token_ids_T is not None]
    assert known == [ids[:4], ids[4:]]
    for each in reported:
        assert torch.equal(each.ids_TK.long(), table_XK[each.token_ids_T])


def test_rows_without_ids_are_refused_by_name(invoke: Invoke, hashed: Path, tmp_path: Path) -> None:
    done = invoke("run", hashed, *files(tmp_path, 3, [0])[:2])
    assert done.exit_code == 2 and done.stdout == ""
    assert "need --token-ids FILE: an integer of [0, 40) for each of the 3 rows" in done.stderr


@pytest.mark.parametrize("ids,complaint", [
    ([0, 1], "holds 2 ids for 3 tokens; give one id a token"),
    ([0, 40, 1], "holds ids from 0 to 40; they must be in [0, 40), the range of the table of layer 3"),
    ([0, -1, 1], "holds ids from -1 to 1"), ([0.0, 1.0, 2.0], "--token-ids"), ([[0], [1], [2]], "--token-ids"),
])  # fmt: skip
def test_ids_that_do_not_fit_are_refused(
    ids: object, complaint: str, invoke: Invoke, hashed: Path, tmp_path: Path
) -> None:
    done = invoke("run", hashed, *files(tmp_path, 3, ids))
    assert done.exit_code == 2 and done.stdout == ""
    assert complaint in done.stderr


def test_layers_that_choose_by_scores_record_ids_and_take_no_other_notice(tiny: Path, tmp_path: Path) -> None:
    save_file({"token_ids": torch.tensor([70000, 5]), "other": torch.zeros(1)}, tmp_path / "ids.safetensors")
    traced = tmp_path / "trace.safetensors"
    words = ("--token-ids", tmp_path / "ids.safetensors", "--tokens", 2, "--repeats", 1, "--record-trace", traced)
    printed("run", tiny, *words)
    held = RoutingTrace.read(traced).token_ids_R
    assert held is not None and held.tolist() == [70000, 5, 70000]
