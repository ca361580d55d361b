"""What is refused before any process starts or any weight is read, and what a plan knows."""

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from moe_mk.config.moe import MoEConfig
from moe_mk.lab.cli.inputs import RunSettings
from moe_mk.lab.cli.plan import plan_run
from moe_mk.lab.cli.world import World
from tests.cli.conftest import Invoke


def test_a_checkpoint_that_is_not_there_is_named_with_the_way_to_write_it(invoke: Invoke, tmp_path: Path) -> None:
    for verb in ("run", "bench"):
        refused = invoke(verb, tmp_path / "ds3")
        assert refused.exit_code == 2 and refused.stdout == ""
        assert f"{tmp_path}/ds3 does not exist" in refused.stderr and "moe-mk make-checkpoint" in refused.stderr


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Mock(side_effect=AssertionError("a rank was started"))
    monkeypatch.setattr("moe_mk.lab.cli.bench.run_ranks", started)
    monkeypatch.setattr("moe_mk.lab.cli.processes.run_ranks", started)  # `run` imports it when it is called


USAGE = [
    ("--ranks 2 --tokens 1,2,3", r"lists 3 numbers for 2 batches of tokens"),
    ("--ranks 2 --replicated --tokens 1,2", r"lists 2 numbers for 1 batches of tokens; give one number"),
    ("--layer 3 --layer 3", r"--layer is given 2 times, and run verifies one layer"),
    ("--layer 4", r"has no experts for layer 4; layers with experts: 3"),
    ("--experts-backend torch_cup", r"no experts backend is called 'torch_cup'; did you mean 'torch_cpu'"),
    ("--prepare-finalize all_to_al", r"'all_to_al'; did you mean 'all_to_all'"),
    ("--dtype bf16", r"--dtype 'bf16' is unknown; did you mean 'bfloat16'"), ("--wire fp4", r"kernel.wire"),
    ("--placement diagonal", r"parallel.placement"), ("--router-dtype half", r"router.router_dtype"),
    ("--timeout 0", r"kernel.timeout_s"),
    ("--inject drop-scales", r"no fault is called 'drop-scales'; did you mean 'drop-scale'"),
    ("--device gpu", r"'gpu' is not a device"), ("--ranks 2 --tp 2", r"parallel.tp=2 does not divide"),
    ("--ranks 4 --ranks-per-node 8", r"--ranks-per-node 8 exceeds 4 ranks; use one of 1, 2, 4"),
    ("--ranks 4 --tp 2 --ranks-per-node 3", r"--ranks-per-node 3 splits TP groups of 2; use one of 2, 4"),
    ("--ranks 33", r"parallel.ep=33 exceeds model.num_experts=32"),
    ("--hidden-states absent.npy", r"absent.npy is not a file"),
    ("--plot nowhere/load.png", r"--plot nowhere/load.png is in a folder that does not exist"),
    ("--trace nowhere/x.json", r"--trace nowhere/x.json is in a folder that does not exist"),
    ("--record-trace nowhere/t.safetensors", r"--record-trace nowhere/t.safetensors is in a folder that does not"),
    ("--out .", r"--out . is a folder"),
    ("--out /proc/x.json", r"--out /proc/x.json cannot be written: .*; name a file in a folder of yours"),
]  # fmt: skip


@pytest.mark.parametrize("words,complaint", USAGE, ids=[words for words, _ in USAGE])
def test_a_usage_error_is_reported_once_before_anything_starts(
    invoke: Invoke, tiny: Path, words: str, complaint: str
) -> None:
    result = invoke("run", tiny, *words.split())
    assert result.exit_code == 2, result.output
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(result.stderr)
    assert result.stdout == "" and "Traceback" not in result.stderr


@pytest.mark.parametrize("words,reasons", [
    ("--ranks 2 --prepare-finalize no_ep --experts-backend torch_cpu", ["serves 1 rank, the group has 2"]),
    ("--ranks 2 --prepare-finalize replicated", ["ranks bring their own tokens [parallel.tokens = replicated]"]),
    ("--experts-backend torch_cpu --activations checkpoint", ["multiplies with plain activations only"]),
    ("--device xpu", ["this library runs on cpu and cuda devices"]),
])  # fmt: skip
def test_what_cannot_run_here_is_refused_with_every_reason(
    invoke: Invoke, tiny: Path, words: str, reasons: list[str]
) -> None:
    result = invoke("run", tiny, *words.split())
    assert result.exit_code == 3, result.output
    assert all(reason in result.stderr for reason in reasons) and result.stdout == ""


def test_rows_of_another_width_are_refused(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((2, 255)))
    result = invoke("run", tiny, "--ranks", 2, "--hidden-states", tmp_path / "rows.npy")
    assert result.exit_code == 2 and "H=256" in result.stderr and "255" in result.stderr


def test_a_damaged_checkpoint_is_refused_with_every_problem(invoke: Invoke, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.layers.3.mlp.experts.5.up_proj.weight"]
    index["weight_map"]["model.layers.3.mlp.experts.99.up_proj.weight"] = next(iter(index["weight_map"].values()))
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    result = invoke("run", broken, "--ranks", 2)
    assert result.exit_code == 2 and "layer 3 of" in result.stderr
    assert "experts.5.up_proj.weight" in result.stderr and "experts.99.up_proj.weight" in result.stderr


def test_a_plan_is_made_for_the_tokens_of_the_run(tiny: Path) -> None:
    for tokens, most in (((0, 0, 7, 1), 7), ((64,), 64), ((0,), 1)):
        plan = plan_run(RunSettings(tiny, 3, MoEConfig.from_hf(tiny), tokens), World(4, 1))
        assert plan.counts == (tokens if len(tokens) == 4 else tokens * 4)
        assert plan.decision.problem.num_tokens == plan.settings.config.kernel.max_num_tokens == most
    buffers = [
        plan_run(RunSettings(tiny, 3, MoEConfig.from_hf(tiny), (n,)), World(4, 1)).memory[0].buffers for n in (1, 64)
    ]
    assert buffers[0] < buffers[1]


def test_a_plan_knows_who_owns_what(tiny: Path) -> None:
    linear = plan_run(RunSettings(tiny, 3, MoEConfig.from_hf(tiny)), World(2, 1))
    assert linear.experts == (tuple(range(16)), tuple(range(16, 32)))
    # One expert: 3 matrices of 128 x 256 in one byte, and 2 blocks with an f32 scale each.
    assert [memory.experts for memory in linear.memory] == [16 * 3 * (128 * 256 + 2 * 4)] * 2
    turns = plan_run(RunSettings(tiny, 3, MoEConfig.from_hf(tiny, placement="round_robin")), World(2, 1))
    assert turns.experts == (tuple(range(0, 32, 2)), tuple(range(1, 32, 2)))
    shared = plan_run(RunSettings(tiny, 3, MoEConfig.from_hf(tiny, tokens="replicated"), (5,)), World(2, 1))
    assert shared.counts == (5,) and shared.batch_of(1) == 0
    assert [layer.layer for layer in shared.facts.layers] == [3]
