"""Train two small models on different text and record their routing, for `moe-mk fit` and `docs/residency.md`.

python benchmarks/residency_traces.py build/residency                  # about four minutes of two cores
python benchmarks/residency_traces.py build/residency --steps 20       # seconds; the routers are barely trained

    code   sources of Python's standard library; the bias of the router balances its experts, as in DeepSeek-V3
    prose  licences and documentation of this machine; nothing balances the experts

Each has 64 experts a layer of which 4 are chosen, in three layers. `NAME.safetensors` is the routing of held-out text,
token after token; `NAME-gate.safetensors` is what the gate of each layer chooses from the input of the layer before,
of the first layer what it does choose. No text is written.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from common import parser_of
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM

from moe_mk.lab.trace.routing import RoutingTrace, TracedForward, TraceFacts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
tiny = import_module("07_train_tiny")
tiny.BATCH = 4

EXPERTS, LENGTH, MOST_BYTES = 64, 512, 4_000_000
PLACES = (
    ("/usr/share/common-licenses", "*"),
    ("/usr/share/doc", "**/copyright"),
    (sys.prefix, "lib/**/*.md"),
    (sys.prefix, "lib/**/*.rst"),
    (sys.prefix, "lib/**/LICENSE*"),
    (sys.base_prefix, "lib/**/*.txt"),
)


def prose() -> tuple[Tensor, Tensor]:
    """Bytes of licences and documentation, every twentieth file held out; each text once."""
    texts: dict[bytes, None] = {}
    for folder, pattern in PLACES:
        for file in sorted(Path(folder).glob(pattern)):
            if file.is_file() and 2_000 < file.stat().st_size < 200_000:
                texts.setdefault(file.read_bytes())
    seen = b"".join(text for number, text in enumerate(texts) if number % 20)[:MOST_BYTES]
    held_out = b"".join(text for number, text in enumerate(texts) if number % 20 == 0)
    seen_N, held_out_N = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (seen, held_out))
    return seen_N, held_out_N


def record(model: nn.Module, text_N: Tensor, sequences: int, name: str) -> Iterator[tuple[str, RoutingTrace]]:
    """The routing of some sequences, and the routing that the gates choose one layer early."""
    gates = list(tiny.routers(model))
    found: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(number: int, inputs: tuple[Tensor, ...], routed: tuple[Tensor, ...]) -> None:
        found[number] = inputs[0].detach(), routed[2].detach()

    hooks = [
        gate.register_forward_hook(lambda _, inputs, routed, number=number: keep(number, inputs, routed))
        for number, gate in enumerate(gates)
    ]
    chosen, early = [], []
    tokens = tiny.windows(text_N, sequences * LENGTH // tiny.LENGTH, torch.Generator("cpu").manual_seed(2))
    with torch.no_grad():
        for step, sequence in enumerate(tokens.reshape(sequences, LENGTH)):
            model(input_ids=sequence[None])
            calls = dict(found)
            for number, gate in enumerate(gates):
                ids_TK = calls[number][1].reshape(LENGTH, -1)
                before = gate(calls[number - 1][0])[2].reshape(LENGTH, -1) if number else ids_TK
                chosen.append(TracedForward(step, number + 1, 0, "decode", ids_TK))
                early.append(TracedForward(step, number + 1, 0, "decode", before))
    for hook in hooks:
        hook.remove()
    facts = TraceFacts(num_experts=EXPERTS, top_k=4, model=f"tiny-{name}")
    yield name, RoutingTrace.of(facts, chosen)
    yield f"{name}-gate", RoutingTrace.of(facts, early)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--only", choices=("code", "prose"))
    parser.add_argument("--sequences", type=int, default=8, help=f"of {LENGTH} tokens, recorded of each model")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    balanced = tiny.GAMMA
    for name, (seen, held_out) in {"code": tiny.corpus(), "prose": prose()}.items():
        if asked.only not in (None, name):
            continue
        torch.manual_seed(0)
        tiny.GAMMA = balanced if name == "code" else 0.0
        model = DeepseekV3ForCausalLM._from_config(tiny.config_of(EXPERTS), experts_implementation="eager")
        print(f"{name}: {len(seen):,} bytes to learn from", flush=True)
        tiny.train(model, seen, asked.steps)
        for file, trace in record(model, held_out, asked.sequences, name):
            trace.write(asked.folder / f"{file}.safetensors")
            print(f"wrote {asked.folder / file}.safetensors: {trace.num_rows:,} rows", flush=True)


if __name__ == "__main__":
    main()
