"""`moe-mk trace check`: by the gates of a checkpoint, by another record, by statistics, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_mk import MoELayer
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.checkpoints.like import write_like
from moe_mk.lab.trace.record_compare import SAMPLE
from moe_mk.weights import SafetensorsSource
from tests.cli.conftest import Invoke

HIDDEN, LAYERS, TOKENS = 128, (1, 2, 3), 60
SHAPE = CheckpointShape(8, HIDDEN, 128, 0, LAYERS, top_k=2, num_groups=2, top_k_groups=1, quant="bf16")
PUBLISHED = json.loads((Path(__file__).parents[1] / "config/published.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three layers with experts, hidden states before their gates, and a record of what they choose."""
    made, draw = tmp_path_factory.mktemp("records") / "made", torch.Generator().manual_seed(0)
    write_checkpoint(made, SHAPE, threads=1)
    hidden: dict[str, torch.Tensor] = {}
    ids: list[torch.Tensor] = []
    for layer in LAYERS:
        x_RH = hidden[f"model.layers.{layer}.hidden_states"] = torch.randn(TOKENS, HIDDEN, generator=draw)
        ids.append(MoELayer.from_checkpoint(made, layer, dtype=torch.float32).route(x_RH).ids_TK)
    save_file(hidden, made / "hidden.safetensors")
    record = torch.stack(ids, 1)[:-1].numpy()
    np.save(made / "right.npy", record)
    np.save(made / "late.npy", np.roll(record, 3, 0))
    np.save(made / "swapped.npy", record[:, [1, 0, 2]])
    np.save(made / "narrow.npy", record[..., :1])
    return made


def checked(invoke: Invoke, code: int, *words: str | Path) -> dict[str, Any]:
    result = invoke("trace", "check", *map(str, words), "--json")
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.row("177")
def test_a_record_is_checked_by_the_gates_of_its_checkpoint(folder: Path, invoke: Invoke) -> None:
    against = ("--checkpoint", folder, "--inputs", folder / "hidden.safetensors")
    found = checked(invoke, 0, folder / "right.npy", *against)
    assert found["agreement_X"] == {"1": 1.0, "2": 1.0, "3": 1.0} and found["findings"] == []
    assert found["basis"] == "the gates of the checkpoint, 1 sequences" and found["num_rows"] == TOKENS - 1
    for name, fault in (("late", "rows shifted"), ("swapped", "layer order"), ("narrow", "top-k")):
        found = checked(invoke, 1, folder / f"{name}.npy", *against)
        assert [each["fault"] for each in found["findings"]] == [fault]


@pytest.mark.row("177")
def test_some_layers_suffice_and_logits_as_well(folder: Path, invoke: Invoke, tmp_path: Path) -> None:
    x_RH = load_file(folder / "hidden.safetensors")["model.layers.2.hidden_states"]
    gate_EH = SafetensorsSource(folder).read("model.layers.2.mlp.gate.weight")
    save_file({"layers.2.router_logits": x_RH @ gate_EH.float().T}, tmp_path / "logits.safetensors")
    against = ("--checkpoint", folder, "--inputs", tmp_path / "logits.safetensors")
    assert checked(invoke, 0, folder / "right.npy", *against)["agreement_X"] == {"2": 1.0}
    assert checked(invoke, 1, folder / "swapped.npy", *against)["findings"][0]["fault"] == "unexplained"


@pytest.mark.parametrize("name", ["openai--gpt-oss-20b", "google--gemma-4-26B-A4B"])
def test_gates_choose_from_hidden_states_what_layers_choose(name: str, invoke: Invoke, tmp_path: Path) -> None:
    """Of a gate with a bias, and of one that scales a normalised input."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]["config"]))
    number = write_like(tmp_path / "small", tmp_path / "config.json")
    layer = MoELayer.from_checkpoint(tmp_path / "small", number, dtype=torch.float32)
    x_RH = torch.randn(TOKENS, layer.config.model.hidden_size, generator=torch.Generator().manual_seed(0))
    save_file({f"layers.{number}.hidden_states": x_RH}, tmp_path / "hidden.safetensors")
    np.save(tmp_path / "record.npy", layer.route(x_RH).ids_TK[:-1, None].numpy())
    against = ("--checkpoint", tmp_path / "small", "--inputs", tmp_path / "hidden.safetensors")
    assert checked(invoke, 0, tmp_path / "record.npy", *against)["agreement_X"] == {str(number): 1.0}


@pytest.mark.row("177")
def test_a_record_is_checked_by_another_and_by_itself(folder: Path, invoke: Invoke) -> None:
    other = ("--record", folder / "right.npy")
    assert checked(invoke, 1, folder / "late.npy", *other)["findings"][0]["fault"] == "rows shifted"
    assert checked(invoke, 0, folder / "right.npy", *other)["kind"] == "arrays"
    found = checked(invoke, 0, folder / "right.npy", "--checkpoint", folder)
    assert found["basis"] == "statistics of the record" and not found["agreement_X"]
    shown = invoke("trace", "check", str(folder / "swapped.npy"), *map(str, other))
    assert shown.exit_code == 1 and "layer order: 2 of 3 layers: 0 holds 1, 1 holds 0" in shown.stdout
    shown = invoke("trace", "check", str(folder / "right.npy"), "--checkpoint", str(folder))
    assert "no fault shows in the record alone" in shown.stdout


@pytest.mark.row("177")
def test_orders_that_cannot_be_met_end_with_2(folder: Path, invoke: Invoke, tmp_path: Path) -> None:
    right, hidden = str(folder / "right.npy"), str(folder / "hidden.safetensors")
    save_file({"layers.2.hidden_states": torch.zeros(3, 4, dtype=torch.int64)}, tmp_path / "ids.safetensors")
    save_file(
        {"layers.2.hidden_states": torch.zeros(3, HIDDEN), "lengths": torch.tensor([1])}, tmp_path / "few.safetensors"
    )
    for words, message in (
        ((right,), "a record alone cannot be checked"),
        ((right, "--inputs", hidden), "--inputs needs --checkpoint"),
        ((right, "--checkpoint", str(folder), "--inputs", str(tmp_path / "ids.safetensors")), "must hold layers.N"),
        (
            (right, "--checkpoint", str(folder), "--inputs", str(tmp_path / "few.safetensors")),
            "store the tokens of each",
        ),
        ((right, "--checkpoint", str(folder), "--inputs", right), "cannot be read as safetensors"),
        ((str(tmp_path / "none.npy"), "--checkpoint", str(folder)), "cannot be read"),
    ):
        result = invoke("trace", "check", *words)
        assert result.exit_code == 2 and message in result.stderr, result.output
    assert SAMPLE > TOKENS, "every row of these records is compared"
