"""Write docs/transports.md: every built-in transport with what it does, what it takes and what it refuses.

Everything on the page comes from the registry: traits, `plan` and the reasons against problems that go beyond a limit.
`--check` writes nothing and fails where the file is stale.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from moe_mk.comm.traffic import Nodes
from moe_mk.config.moe import MoEConfig
from moe_mk.config.problem import Problem, Reason
from moe_mk.config.shipped import device_profile
from moe_mk.external.library import EMULATED, LIBRARIES
from moe_mk.prepare_finalize import PREPARE_FINALIZE, PrepareFinalize
from moe_mk.quant.plain import BF16, FP16, FP32
from moe_mk.tokens import LAYOUT_NAMES
from tools.movers import page_of_movers

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/transports.md"
TOKENS = 128
DEVICES = {"cuda": "h200", "rocm": "mi300x", "cpu": "cpu"}
"""The profile that stands for each kind of device, the fastest kind that a transport runs on first."""

INTRODUCTION = """\
# Transports

Written by `make features` from the registry (`tools/transports.py`); do not edit.

A transport carries tokens to the ranks of their experts and the output home. The oracle chooses one for each range of
tokens; `moe-mk explain` tells why not the others. Those with a library run on an emulation of it where
`kernel.allow_emulated` says so: slow, on the CPU, for tests.

What a call that fails on one rank does on the others, by transport: [Reliability](reliability.md#by-transport).
"""

MEANING = """\
**Layout**: what arrives. *rows*: one row a received token; *grouped*: one an assignment, sorted by expert; *batched*: a
padded block for each expert. **Takes**: how far experts bring the output: *reduced* is summed over a rank's experts,
*raw* is as the last GEMM left it, and the transport weighs and sums. **Wire**: number formats that rows can travel in.
**Graph**: a call can be captured in a CUDA graph. **Equal bits**: equal inputs give equal bits; libraries whose rows
arrive in any order do not promise it. **Masks ranks**: `leave_out` lets calls go on in the same group without ranks
that are dead, where the installed build offers it. **Budget**: what `kernel.comm_units` counts, the compute
units that a transport keeps for itself; one that has none refuses the setting.
"""

PLAN = """\
## Planned bytes

What a transport or its library keeps on one rank between calls, for DeepSeek-V3 (7168 values, 256 experts, top-8, bf16)
and at most {tokens} tokens a rank and call: `plan(problem).buffer_bytes`, known before anything is allocated.
A dash: it cannot serve that.
"""

LIMITS = """\
## Limits

Each line is what the oracle says of a layer of 7168 values, 256 experts and top-8 in bf16 on 8 ranks of one node (two
nodes of 4 for `hierarchical`) with 128 tokens, after one thing is changed; of several changes that break a limit, the
least. Tried are 2 to 256 ranks, 252 experts, top-9 to top-64, rows of 2880 to 16384 values, up to 4096 tokens, fp16 and
fp32.
"""

TOPOLOGY = """\
## Nodes

Neighbouring ranks share a node. How many is `ranks_per_node` of the device profile, or `parallel.ranks_per_node` where
it is set; with tensor parallelism, neighbours of one slice count together. A node is where ranks reach each other over
the fast links: a rack of 72 GPUs in one NVLink domain is one node of 72. `Nodes` says of every rank where it lies and
who relays for it: what a rank sends to another node goes to the rank of equal place there.
"""


def render() -> str:
    """The whole page."""
    kinds = built_in()
    parts = [INTRODUCTION, *table_of(kinds), "", MEANING, PLAN.format(tokens=TOKENS), *plan_of(kinds), ""]
    parts += [LIMITS, *(line for name, kind in kinds for line in limits_of(name, kind)), TOPOLOGY, *topology_of(8, 4)]
    parts += ["", *page_of_movers()]
    return "\n".join(parts) + "\n"


def built_in() -> list[tuple[str, type[PrepareFinalize]]]:
    """Transports of this package, plugins of others left out."""
    return [(name, kind) for name, kind in PREPARE_FINALIZE.items() if kind.__module__.startswith("moe_mk.")]


def table_of(kinds: Sequence[tuple[str, type[PrepareFinalize]]]) -> Iterator[str]:
    """One line a transport."""
    heads = ("Transport", "What it is", "Layout", "Takes", "Wire", "Runs on", "Library", "Graph", "Equal bits")
    yield _row(*heads, "Masks ranks", "Budget")
    yield "|" + "---|" * (len(heads) + 2)
    for name, kind in kinds:
        traits = kind.traits
        devices = ", ".join(sorted(traits.kinds)) + (
            f" from sm_{''.join(map(str, traits.min_arch))}" if any(traits.min_arch) else ""
        )
        emulated = ", emulated" if traits.library in EMULATED else ""
        yield _row(
            f"`{name}`", traits.summary, LAYOUT_NAMES[traits.produces], traits.wants.name.lower(),
            ", ".join(sorted(traits.wire)), devices, f"{traits.library}{emulated}" if traits.library else "none",
            "yes" if traits.graph_safe else "no", "yes" if traits.deterministic else "no",
            "yes" if traits.masks_ranks else "no", traits.comm_unit or "-",
        )  # fmt: skip


def plan_of(kinds: Sequence[tuple[str, type[PrepareFinalize]]]) -> Iterator[str]:
    """Bytes of one node and of four."""
    yield f"| Transport | Device | 8 ranks, one node | 32 ranks, four nodes | 8 ranks, {8 * TOKENS} tokens |"
    yield "|---|---|---|---|---|"
    for name, kind in kinds:
        asked = [_problem(kind, ranks=8), _problem(kind, ranks=32), _problem(kind, ranks=8, num_tokens=8 * TOKENS)]
        plans = [kind.plan(problem) for problem in asked]
        cells = ["-" if plan.reasons else f"{plan.buffer_bytes:,}" for plan in plans]
        yield _row(f"`{name}`", asked[0].device.name, *cells)


def limits_of(name: str, kind: type[PrepareFinalize]) -> Iterator[str]:
    """What one transport says to a problem that differs in one thing."""
    base = _problem(kind, ranks=1 if kind.traits.max_ranks == 1 else 8, ranks_per_node=4 if "hier" in name else None)
    always = {reason.code for reason in kind.reasons_against(base)}
    told: set[tuple[str, str]] = set()
    yield f"**`{name}`**"
    yield ""
    lines = []
    for change, problem in _changes(kind, base):
        # Of several changes that break one limit, the first, which is the least, is enough.
        reasons = [reason for reason in kind.reasons_against(problem) if reason.code not in always]
        new = [reason for reason in reasons if (reason.code, _opening(reason)) not in told]
        told |= {(reason.code, _opening(reason)) for reason in new}
        if new:
            lines.append(f"- {change}: {'; '.join(map(str, new))}")
    yield from lines or ["None of these changes anything."]
    yield ""


def topology_of(ranks: int, ranks_per_node: int) -> Iterator[str]:
    """The table of ranks of a small cluster."""
    nodes = Nodes.of(ranks, ranks_per_node)
    yield f"`Nodes.of({ranks}, ranks_per_node={ranks_per_node})`:"
    yield ""
    heads = " | ".join(f"relay in node {node}" for node in range(nodes.num_nodes))
    yield f"| Rank | Node | Place | {heads} | Links to ranks 0 to {ranks - 1} |"
    yield "|---" * (4 + nodes.num_nodes) + "|"
    for rank in range(ranks):
        place = nodes.local_index(rank)
        relays = [str(nodes.members(node)[place]) for node in range(nodes.num_nodes)]
        links = " ".join(nodes.link(rank, peer).removesuffix("_node") for peer in range(ranks))
        yield _row(str(rank), str(nodes.node_of_W[rank]), str(place), *relays, links)


def _changes(kind: type[PrepareFinalize], base: Problem) -> Iterator[tuple[str, Problem]]:
    per_node = base.config.parallel.ranks_per_node
    yield "2 ranks", _problem(kind, ranks=2, ranks_per_node=per_node)
    for ranks in (6, 32, 96, 256):
        yield f"{ranks} ranks", _problem(kind, ranks=ranks, ranks_per_node=per_node)
    yield "256 ranks in one node", _problem(kind, ranks=256, ranks_per_node=256)
    yield "8 ranks, 252 experts", _problem(kind, ranks=base.ranks, ranks_per_node=per_node, num_experts=252)
    for top_k in (9, 12, 24, 64):
        yield f"top-{top_k}", _problem(kind, ranks=base.ranks, ranks_per_node=per_node, top_k=top_k)
    for hidden in (2880, 7424, 16384):
        yield f"rows of {hidden}", _problem(kind, ranks=base.ranks, ranks_per_node=per_node, hidden=hidden)
    for tokens in (512, 4096):
        yield f"{tokens} tokens", _problem(kind, ranks=base.ranks, ranks_per_node=per_node, num_tokens=tokens)
    for dtype in (FP16, FP32):
        yield f"a layer in {dtype.name}", replace(base, dtype=dtype)


def _problem(
    kind: type[PrepareFinalize],
    *,
    ranks: int,
    ranks_per_node: int | None = None,
    num_tokens: int = TOKENS,
    hidden: int = 7168,
    num_experts: int = 256,
    top_k: int = 8,
) -> Problem:
    """A layer like DeepSeek-V3's on the device that a transport is for, with every library there."""
    quant = {"weights": "fp8_block", "scale": "float32"}
    model = {"hidden_size": hidden, "moe_intermediate_size": 2048, "num_experts": num_experts, "quant": quant}
    content = {"model": model, "router": {"top_k": top_k}}
    settings = {"ep": ranks, "max_num_tokens": num_tokens, "tokens": sorted(kind.traits.tokens)[-1]}
    if ranks_per_node is not None:
        settings["ranks_per_node"] = ranks_per_node
    config = MoEConfig.parse(content, "the table of transports").with_(**settings)
    device = next(DEVICES[name] for name in DEVICES if name in kind.traits.kinds)
    return Problem(config, device_profile(device), BF16, num_tokens, frozenset(LIBRARIES))


def _opening(reason: Reason) -> str:
    """How a reason begins, up to its first number: what it is about."""
    return re.split(r"\d", reason.text, maxsplit=1)[0]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help=f"exit 1 if {PAGE} is stale")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args(arguments)
    page, new = options.root / PAGE, render()
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    if new == old:
        print(f"{PAGE} is up to date: {len(built_in())} transports")
    elif options.check:
        changes = difflib.unified_diff(
            old.splitlines(), new.splitlines(), "as it stands", "as it should be", "", "", 0, ""
        )
        print("\n".join(list(changes)[:40]), file=sys.stderr)
        print(f"{PAGE} is stale; run `make features` and commit it", file=sys.stderr)
        return 1
    else:
        page.parent.mkdir(exist_ok=True)
        page.write_text(new, encoding="utf-8")
        print(f"{PAGE} written: {len(built_in())} transports")
    return 0


if __name__ == "__main__":
    sys.exit(main())
