"""Specialisation of the experts of the tiny DeepSeek-V3: the kinds of bytes routed to each, and a routing trace.

python examples/07_train_tiny.py build/tiny-ds3                                  # makes the model, once
python examples/07_load_map.py build/tiny-ds3                                    # prints the map
python examples/07_load_map.py build/tiny-ds3 --trace trace.safetensors          # for moe-mk place --trace
python examples/07_load_map.py build/tiny-ds3 --docs docs --trace examples/data/tiny_routing.safetensors

Held-out text goes through the FP8 checkpoint. The kind of a byte is that of Python's tokenizer. If experts
were independent of kinds, the share of the kinds' entropy that experts explain would be 0, as it nearly is after
shuffling the kinds.
"""

from __future__ import annotations

import argparse
import io
import json
import keyword
import sysconfig
import tokenize
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moe_mk.lab.plan.affinity import nodes_per_token, place_by_affinity
from moe_mk.lab.trace.routing import RoutingRecorder, RoutingTrace, TraceFacts

KINDS = ("indent", "space", "keyword", "name", "number", "operator", "string", "comment")
WINDOWS, LENGTH, RANKS = 64, 128, 4
Counts = NDArray[np.int64]
CPU = torch.device("cpu")


def held_out() -> tuple[bytes, Counts]:
    """Every twentieth file of the standard library, as in training, and the kind of each byte."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_bytes() for number, file in enumerate(files) if number % 20 == 0]
    return b"".join(texts), np.concatenate([kinds_of(text) for text in texts])


def kinds_of(text: bytes) -> Counts:
    """The place in KINDS of every byte of a file."""
    letters = text.decode("latin-1")  # a character a byte
    lines = letters.splitlines(keepends=True)
    starts = np.cumsum([0, *map(len, lines)])
    kinds = np.full(len(text), KINDS.index("space"), np.int64)
    for line, start in zip(lines, starts, strict=False):
        kinds[start : start + len(line) - len(line.lstrip(" \t"))] = KINDS.index("indent")
    for token in tokens_of(letters):
        kind = kind_of(token)
        if kind is not None:
            (row, column), (last_row, last_column) = token.start, token.end
            kinds[starts[row - 1] + column : starts[last_row - 1] + last_column] = KINDS.index(kind)
    return kinds


def tokens_of(letters: str) -> Iterator[tokenize.TokenInfo]:
    """Tokens up to the first one that the tokenizer cannot read."""
    try:
        yield from tokenize.generate_tokens(io.StringIO(letters, newline="").readline)
    except (tokenize.TokenError, SyntaxError):
        return


def kind_of(token: tokenize.TokenInfo) -> str | None:
    """The kind of a token; None for whitespace and layout."""
    name = tokenize.tok_name[token.type]
    if name == "NAME":
        return "keyword" if keyword.iskeyword(token.string) else "name"
    if name.startswith(("STRING", "FSTRING")):
        return "string"
    return {"NUMBER": "number", "OP": "operator", "COMMENT": "comment"}.get(name)


def record(folder: Path) -> tuple[RoutingTrace, Counts]:
    """Route windows of held-out text, distributed over four ranks: the trace, and the kinds of its tokens in order."""
    text, kinds = held_out()
    draw = torch.Generator(CPU).manual_seed(2)
    starts = torch.randint(len(text) - LENGTH, (WINDOWS,), generator=draw, device=CPU).tolist()
    model = import_module("05_nano_engine").NanoModel.load(folder)  # in this folder
    config = json.loads((folder / "config.json").read_text())
    facts = TraceFacts(
        config["n_routed_experts"], config["num_experts_per_tok"], config["n_group"], RANKS, "tiny-deepseek-v3"
    )
    recorders = [RoutingRecorder(facts, rank=rank, weights=False) for rank in range(RANKS)]
    traces = []
    with torch.no_grad():
        for number, start in enumerate(starts):
            recorder, window = recorders[number % RANKS], list(text[start : start + LENGTH])
            with recorder.listening(model.moe):
                recorder.next_step("prefill", torch.tensor(window, dtype=torch.int64, device=CPU))
                model.forward([(model.new_cache(), window)])
            traces.append(recorder.take())
    return RoutingTrace.concat(traces), np.concatenate([kinds[start : start + LENGTH] for start in starts])


def load_map(trace: RoutingTrace, kinds: Counts) -> Counts:
    """Assignments by layer, kind and expert."""
    counts = np.zeros((len(trace.layers), len(KINDS), trace.facts.num_experts), np.int64)
    for number, layer in enumerate(trace.layers):
        ids = trace.filter(layers=[layer]).ids_RK.numpy().astype(np.int64)
        np.add.at(counts[number], (np.repeat(kinds, ids.shape[1]), ids.ravel()), 1)
    return counts


def explained(counts: Counts) -> float:
    """Mutual information of kind and expert over the entropy of kinds: 0 if independent, 1 if experts determine it."""
    joint = counts / counts.sum()
    kind, expert = joint.sum(1, keepdims=True), joint.sum(0, keepdims=True)
    seen = joint > 0
    information = (joint[seen] * np.log(joint[seen] / (kind * expert)[seen])).sum()
    entropy = -(kind[kind > 0] * np.log(kind[kind > 0])).sum()
    return float(information / entropy)


def described(counts: Counts, shuffled: Counts, layers: list[int]) -> Iterator[str]:
    """A table: information of experts about kinds, and the most specialised expert of each layer."""
    yield "| Layer | kinds explained by experts | with kinds shuffled | busiest expert | most specialised expert |"
    yield "|---:|---:|---:|---:|---|"
    for layer, mine, chance in zip(layers, counts, shuffled, strict=True):
        load = mine.sum(0)
        lift = (mine / load.clip(1)) / (mine.sum(1, keepdims=True) / mine.sum()).clip(1e-9)
        lift[:, load < load.mean() / 4] = 0  # too few to judge
        kind, expert = np.unravel_index(int(lift.argmax()), lift.shape)
        best = f"{expert}: {KINDS[kind]}, {lift[kind, expert]:.1f} x as often as on average"
        yield (
            f"| {layer} | {100 * explained(mine):.1f} % | {100 * explained(chance):.1f} % "
            f"| {load.max() / load.mean():.2f} x mean | {best} |"
        )


def visited(trace: RoutingTrace) -> tuple[float, float]:
    """Nodes of two that a token is sent to, averaged over layers: experts in their order, and by affinity.

    The first half of the tokens makes the placement of each layer, the second half judges both.
    """
    experts, both = trace.facts.num_experts, []
    for layer in trace.layers:
        ids = trace.filter(layers=[layer]).ids_RK.numpy().astype(np.int64)
        made_from, judged_by = np.array_split(ids, 2)
        placed = place_by_affinity(made_from, experts, ranks=RANKS, nodes=2).expert_map
        node_E = np.empty(experts, np.int64)
        for rank, held in enumerate(placed.experts_of_rank):
            node_E[list(held)] = rank // (RANKS // 2)
        linear_E = np.arange(experts) // (experts // 2)
        both.append([nodes_per_token(judged_by, each) for each in (linear_E, node_E)])
    linear, affinity = np.mean(both, axis=0)
    return float(linear), float(affinity)


def picture(counts: Counts, layers: list[int], file: Path) -> None:
    """Kinds by experts, experts sorted by their favourite; the colour shows how much more often than on average."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(layers), figsize=(9, 2.1 * len(layers)), layout="constrained", squeeze=False)
    for layer, mine, axis in zip(layers, counts, axes[:, 0], strict=True):
        lift = (mine / mine.sum(0).clip(1)) / (mine.sum(1, keepdims=True) / mine.sum()).clip(1e-9)
        shown = np.log2(lift.clip(1 / 8, 8))[:, np.argsort(lift.argmax(0), kind="stable")]
        drawn = axis.imshow(shown, aspect="auto", cmap="RdBu_r", vmin=-3, vmax=3)
        axis.set_yticks(range(len(KINDS)), KINDS, fontsize="x-small")
        axis.set_xticks([])
        axis.set_ylabel(f"layer {layer}")
    axes[-1, 0].set_xlabel("experts, by their most frequent kind of byte")
    figure.colorbar(drawn, ax=axes, label="assignments, log2 of times the average", shrink=0.8)
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def page(folder: Path, table: list[str], tokens: int, nodes: tuple[float, float]) -> str:
    """The results as docs/training.md."""
    measured = json.loads((folder / "training.json").read_text())
    steps = {int(step): bits for step, bits in measured["bits_by_step"].items()}
    shown = [step for step in sorted(steps) if step % 100 == 0 or step == max(steps)]
    curve = ["| " + " | ".join(["Step", *map(str, shown)]) + " |", "|---" * (len(shown) + 1) + "|"]
    curve.append("| " + " | ".join(["bits a byte", *(f"{steps[step]:.2f}" for step in shown)]) + " |")
    layers = ", ".join(f"{uneven:.2f}" for uneven in measured["busiest_of_layers"])
    text = (Path(__file__).parent / "data" / "training_page.md").read_text()
    return text.format(
        **{key: measured[key] for key in ("command", "device", "torch", "experts")},
        parameters=f"{measured['parameters']:,}", learned=f"{measured['bytes_learned']:,}",
        stored=f"{measured['bytes_stored']:,}", minutes=f"{measured['seconds'] / 60:.0f}",
        bf16=f"{measured['held_out_bits_bf16']:.4f}",
        fp8=f"{measured['held_out_bits_fp8']:.4f}", ratio=f"{measured['perplexity_ratio']:.4f}", busiest=layers,
        curve="\n".join(curve), table="\n".join(table), tokens=f"{tokens:,}",
        linear=f"{nodes[0]:.3f}", affinity=f"{nodes[1]:.3f}",
    )  # fmt: skip


def main() -> None:
    """Record, print, and write the requested files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the output folder of 07_train_tiny.py")
    parser.add_argument("--trace", type=Path, help="write the routing trace to this file")
    parser.add_argument("--docs", type=Path, help="write training.md and training.png into this folder")
    asked = parser.parse_args()
    trace, kinds = record(asked.folder)
    counts = load_map(trace, kinds)
    shuffled = load_map(trace, np.random.default_rng(0).permutation(kinds))
    table = list(described(counts, shuffled, trace.layers))
    print("\n".join(table))
    nodes = visited(trace)
    print(f"nodes per token, of 2: {nodes[0]:.3f} with experts in their order, {nodes[1]:.3f} by affinity")
    if asked.trace is not None:
        asked.trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write(asked.trace)
        print(f"wrote {trace.num_rows:,} rows, {asked.trace.stat().st_size:,} B to {asked.trace}")
    if asked.docs is not None:
        picture(counts, trace.layers, asked.docs / "training.png")
        (asked.docs / "training.md").write_text(page(asked.folder, table, len(kinds), nodes))
        print(f"wrote {asked.docs / 'training.md'} and training.png")


if __name__ == "__main__":
    main()
