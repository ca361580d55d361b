"""What capturing the routing of a layer costs a decode step on a CPU: steps with and without it in turn.

    python benchmarks/routing_capture.py                             # a layer of Qwen3-30B-A3B's sizes, FP8
    python benchmarks/routing_capture.py --hidden 7168 --inter 2048  # of DeepSeek-V3's

A step is one layer's forward with --tokens tokens. Steps without capture and with it alternate, each first in turn, so
that both meet the same load of the machine. The cost is the median of the differences of neighbours.
"""

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import torch
from common import about, parser_of, with_output, write

from moe_mk import DeepseekV3MoE
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.router.replay import RoutingCapture


def main() -> None:
    """Measure and print."""
    options = with_output(
        parser_of(__doc__, hidden=2048, inter=768, experts=32, top_k=8, rounds=600, tokens=1)
    ).parse_args()
    shape = CheckpointShape(
        num_experts=options.experts, top_k=options.top_k, num_groups=1, top_k_groups=1, hidden_size=options.hidden,
        intermediate_size=options.inter, quant="fp8",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), shape)
        layer = DeepseekV3MoE.from_checkpoint(folder, 3, activations="plain", max_num_tokens=max(options.tokens, 64))
        x_TH = torch.randn(options.tokens, options.hidden, dtype=torch.bfloat16)
        sizes = {"layers": 1, "num_experts": options.experts, "top_k": options.top_k}
        capture, without, captured = RoutingCapture(max_num_tokens=options.tokens, **sizes), [], []
        for number in range(options.rounds + 4):
            took = {}
            for on in (False, True) if number % 2 else (True, False):
                with capture.listening({0: layer} if on else {}):
                    began = perf_counter_ns()
                    layer(x_TH)
                    took[on] = (perf_counter_ns() - began) / 1e3
                if on:
                    assert len(capture.take()) == options.tokens
            if number >= 4:
                without.append(took[False])
                captured.append(took[True])
    costs = [one - other for one, other in zip(captured, without, strict=True)]
    facts = {
        **about(options), "backends": layer.decision.chosen.name, "dtype": str(capture.dtype),
        "step_us": median(without), "step_with_capture_us": median(captured), "cost_us": median(costs),
        "share": median(costs) / median(without),
    }  # fmt: skip
    steps = f"step {median(without):.1f} us, with capture {median(captured):.1f} us"
    print(f"{facts['backends']}, ids in {capture.dtype}: {steps}")
    print(f"capture costs {median(costs):.2f} us a step of one layer, {100 * median(costs) / median(without):.2f} %")
    write(options.output, facts)


if __name__ == "__main__":
    main()
