"""Select backends for machines that are not available: a Problem is plain data, so a laptop can plan a cluster.

python examples/03_explain_hypothetical.py
"""

from __future__ import annotations

from moe_mk import MoEConfig, Problem, UnsupportedError
from moe_mk.config import device_profile, load_config
from moe_mk.oracle import Decision, libraries_of, select
from moe_mk.quant.plain import BF16
from moe_mk.text import amount


def ask(config: MoEConfig, device: str, ranks: int, tokens: int, **settings: object) -> Decision:
    """Decide for `ranks` ranks of a shipped device with all libraries that it supports, each with `tokens` a call."""
    configured, profile = config.with_(ep=ranks, max_num_tokens=tokens, **settings), device_profile(device)
    return select(Problem(configured, profile, BF16, num_tokens=tokens, installed=libraries_of(profile)))


def main() -> None:
    """Print a table over devices and ranks, one complete decision, and a request that no pair supports."""
    config = load_config("deepseek_v3")
    print("DeepSeek-V3, 128 tokens per rank (from the cost model, not measured)\n")
    heads = f"{'dispatch':>10}{'combine':>10}{'experts':>10}"
    print(f"{'device':<8}{'ranks':>6}{'nodes':>6}  {'selected':<24}{'wire':<11}{heads}")
    for device, ranks in (("cpu", 2), ("h100", 8), ("h200", 8), ("h200", 32), ("h200", 144), ("b200", 32)):
        d = ask(config, device, ranks, tokens=128)
        sizes = "".join(f"{amount(size):>10}" for size in (d.dispatch_bytes, d.combine_bytes, d.weights_bytes))
        print(f"{device:<8}{ranks:>6}{d.problem.nodes:>6}  {d.chosen.name:<24}{d.wire.name:<11}{sizes}")

    print("\nOne complete decision:\n")
    print(ask(config, "h200", 32, tokens=128))

    print("\nAn unsupported request is rejected with every reason:\n")
    try:
        ask(config, "h200", 32, tokens=128, prepare_finalize="no_ep", graphs=True)
    except UnsupportedError as refusal:
        print(refusal)


if __name__ == "__main__":
    main()
