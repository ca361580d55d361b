"""The spans of a forward make the tree that docs/story.md draws, on every kind of grid."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.transports import run_together, virtual_groups
from moe_mk.layer import DeepseekV3MoE
from moe_mk.trace.recorder import Recorder, Span

STORY = Path(__file__).resolve().parents[2] / "docs/story.md"


@dataclass
class Node:
    stage: str
    below: list[Node] = field(default_factory=list)

    def lines(self, depth: int = 0) -> list[str]:
        return ["  " * depth + self.stage, *(line for node in self.below for line in node.lines(depth + 1))]


def tree_of(spans: list[Span]) -> list[str]:
    """Spans by containment: a span's parent is the last one opened before it that is still open when it closes."""
    root, path = Node("forward"), list[tuple[Span, Node]]()
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        while path and path[-1][0].end < span.end:
            path.pop()
        node = Node(span.stage)
        (path[-1][1] if path else root).below.append(node)
        path.append((span, node))
    return root.lines()


def documented(name: str) -> list[str]:
    """The tree under a heading line of the story, without what stands behind two spaces."""
    (block,) = re.findall(rf"^```text spans\n# {name}\n(.*?)^```$", STORY.read_text(encoding="utf-8"), re.M | re.S)
    return [re.sub(r"(?<=\w)  +\S.*$", "", line) for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ds3")
    write_checkpoint(path, CheckpointShape(num_experts=16, hidden_size=256, intermediate_size=256))
    return path


def spans_of(folder: Path, ep: int, tp: int, **settings: object) -> list[list[Span]]:
    """What each rank records in one forward; the first, in which ranks compare notes, is left out."""
    layers = [
        DeepseekV3MoE.from_checkpoint(folder, layer=3, groups=groups, experts="torch_cpu", **settings)
        for groups in virtual_groups(ep, tp)
    ]
    draw = torch.Generator().manual_seed(0)
    x_TH = torch.randn((6, 256), generator=draw).bfloat16()
    tokens = [x_TH if settings.get("tokens") == "replicated" else x_TH[: 6 - rank // tp] for rank in range(ep * tp)]
    run_together(layers, tokens)
    for layer in layers:
        layer.spans.recorder = Recorder()
    run_together(layers, tokens)
    return [layer.spans.recorder.spans for layer in layers if layer.spans.recorder is not None]


@pytest.mark.row(91)
@pytest.mark.parametrize(
    ("name", "grid", "settings"),
    [
        ("one rank", (1, 1), {}),
        ("ranks with tokens of their own", (2, 1), {"prepare_finalize": "all_to_all"}),
        ("ranks with the same tokens", (2, 1), {"prepare_finalize": "replicated", "tokens": "replicated"}),
        ("slices of experts", (1, 2), {}),
    ],
)
def test_the_span_tree_of_a_forward_is_the_documented_chain(
    folder: Path, name: str, grid: tuple[int, int], settings: dict[str, object]
) -> None:
    for spans in spans_of(folder, *grid, **settings):
        assert tree_of(spans) == documented(name)
