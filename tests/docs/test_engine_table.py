"""The table for authors of engines: its lines for this library run, in order, and do what their row names."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_mk
from moe_mk.integrations.engine_experts import EngineExperts, EngineWeights
from moe_mk.rebalance import RebalanceManager
from tests.docs.pages import ROOT
from tests.support.layers import HIDDEN, config, layer, tensors

STEPS = (
    "build", "load tensor by tensor", "load split weights", "forward", "routed forward", "compile", "CUDA graph",
    "EP group", "EPLB", "explain",
)  # fmt: skip
PREFIX = "model.layers.3.mlp."


def table() -> dict[str, list[str]]:
    """The lines of code of this library by step, from the last column."""
    page = (ROOT / "docs/embedding.md").read_text(encoding="utf-8")
    rows = re.search(r"^\| step \| vLLM \| SGLang \| transformers \| moe_mk \|\n(.+?)\n\n", page, re.S | re.M)
    assert rows is not None, "the table has other columns"
    cells = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in rows[1].splitlines()[1:]]
    assert all(len(line) == 5 and all(line) for line in cells)
    return {line[0]: re.findall(r"`([^`]+)`", line[-1]) for line in cells}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.slow
def test_every_line_of_the_table_for_engines_runs(process_group: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lines, wanted = table(), layer(4, 2, dtype=torch.float32)
    assert tuple(lines) == STEPS and all(lines.values())
    given = tensors(4)
    x_TH = torch.randn((3, HIDDEN), generator=torch.Generator().manual_seed(0))
    routing = wanted.route(x_TH)
    gate, up, down = (
        torch.stack([given[f"experts.{e}.{name}_proj.weight"] for e in range(4)]) for name in ("gate", "up", "down")
    )
    names: dict[str, Any] = {
        "torch": torch, "moe_mk": moe_mk, "EngineExperts": EngineExperts, "EngineWeights": EngineWeights,
        "RebalanceManager": RebalanceManager, "process_group": process_group, "config": config(4, 2),
        "hidden_states": x_TH, "topk_weights": routing.weights_TK, "topk_ids": routing.ids_TK,
        "w13": torch.cat((gate, up), dim=1), "w2": down,
    }  # fmt: skip

    def run(line: str) -> Any:
        names.pop("y", None)
        exec(line, names)
        return names.get("y")

    torch.set_grad_enabled(False)
    try:
        (build,) = lines["build"]
        run(build.replace("(config)", "(config, dtype=torch.float32)"))
        start, feed, finish = lines["load tensor by tensor"]
        run(start)
        for name, tensor in given.items():
            names |= {"name": PREFIX + name, "tensor": tensor}
            run(feed)
        run(finish)
        run(*lines["load split weights"])
        y_TH = wanted(x_TH)
        assert torch.equal(run(*lines["forward"]), y_TH)
        for line in lines["routed forward"]:
            torch.testing.assert_close(run(line), y_TH)
        run(*lines["compile"])
        for line in lines["CUDA graph"]:
            run(line)
        assert names["captured"].kernel.graphs
        (shard,) = lines["EP group"]
        run(shard.replace("(config,", "(config, dtype=torch.float32,"))
        assert names["shard"].ep.size == 1 and names["shard"].groups.ep is process_group
        for line in lines["EPLB"]:
            run(line)
        assert names["manager"].status().epochs == (0,)
        run(*lines["explain"])
        assert wanted.decision.chosen.experts in capsys.readouterr().out
        torch.compiler.reset()
        compiled = torch.compile(names["layer"], fullgraph=True, backend="eager")
        assert type(names["compiled"]) is type(compiled) and torch.equal(compiled(x_TH), y_TH)
    finally:
        torch.set_grad_enabled(True)
