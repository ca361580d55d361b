"""Figures of `moe-mk judge`, for docs/judge.md.

python -m benchmarks.judge planted    faults planted in a small engine (tests/support): stages and names found
python -m benchmarks.judge clean      clean cases of that engine in all formats: false alarms
python -m benchmarks.judge transformers    calls of all experts classes of transformers: false alarms, mistakes found
python -m benchmarks.judge public     bugs of other projects, rebuilt from their descriptions: found, placed, named
python -m benchmarks.judge peers --vllm vllm --ggml ggml --kt kt    calls of their operators: the same
python -m benchmarks.judge wide       a case of DeepSeek-V3's width (7168 x 2048, FP8, top 8), right and wrong: seconds
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from moe_mk.lab.judge import read_case, record, record_ggml, record_transformers
from moe_mk.lab.judge.verdict import judge
from moe_mk.lab.testing.cases import draw_experts
from moe_mk.quant.fp8 import FP8_128x128

MISTAKES = ("order of tokens", "routing weights missing", "experts shifted")
"""Made by the caller of an experts class of transformers, by the name of the fault."""


def planted(options: argparse.Namespace) -> None:
    """Print the share of planted faults that are found."""
    from tests.judge.test_faults import found
    from tests.judge.test_faults import planted as faults

    stages, names, lost, start = 0, 0, [], time.perf_counter()
    every = [each for seed in options.numbers or [1] for each in faults(seed, each_once=False)]
    for what, layer, fault, stage in every:
        at, named, verdict = found(layer, fault, stage)
        stages, names = stages + at, names + named
        if not (at and named):
            lost.append(f"{what}: stage {verdict.stage or '?'}, {'right' if verdict.right else verdict.fault}")
    took = time.perf_counter() - start
    print(
        f"{len(every)} planted, {stages} at the right stage, {names} by the right name, {took:.0f} s", *lost, sep="\n  "
    )


def clean(options: argparse.Namespace) -> None:
    """Print false alarms."""
    from tests.judge.test_verdict import INTERMEDIATE, layer_of

    alarms, start, (count,) = list[int](), time.perf_counter(), options.numbers or [200]
    for seed in range(count):
        case = layer_of(seed).case(record=INTERMEDIATE if seed % 4 == 1 else ())
        if not judge(case).right:
            alarms.append(seed)
    print(f"{count} clean cases, {len(alarms)} false alarms {alarms}, {time.perf_counter() - start:.0f} s")


def of_transformers(options: argparse.Namespace) -> None:
    """Print false alarms for calls of every experts class of transformers, and how many of three mistakes are found.

    The mistakes are made in the caller of the class: rows in another order, no routing weights, experts shifted by one.
    """
    from tests.integrations.hf.cases import experts_classes, tiny_call, tiny_experts
    from tests.judge.test_recorders import Model

    judged, alarms, wrong, found = 0, list[str](), dict.fromkeys(MISTAKES, 0), dict.fromkeys(MISTAKES, 0)
    for cls, dtype, how in product(
        experts_classes(), (torch.float32, torch.bfloat16), ("eager", "grouped_mm", "batched_mm")
    ):
        model = Model(tiny_experts(cls)).to(dtype)
        model.layers[0].config._experts_implementation = how
        if getattr(model.layers[0], "has_post_expert_norm", False):
            continue
        for seed in (1, 2):
            x, ids, weights = tiny_call(9, seed)
            x, weights = x.to(dtype), weights.to(dtype)
            with TemporaryDirectory() as folder, torch.no_grad():
                record_transformers(model, Path(folder), norm=0.0)
                model(x, ids, weights)
                case = read_case(Path(folder) / "layers.0.safetensors")
                shifted = (ids + 1) % case.model.num_experts
                outputs = model(x, ids, weights).roll(1, 0), model(x, ids, torch.ones_like(weights))
                outputs += (model(x, shifted, weights),)
            judged += 1
            if not judge(case).right:
                alarms.append(f"{cls.__name__} {how} {dtype}")
            if how != "eager" or seed != 1:
                continue
            for name, y in zip(MISTAKES, outputs, strict=True):
                verdict = judge(replace(case, y=y))
                wrong[name] += not verdict.right
                found[name] += verdict.fault == name
    made = judged // 6
    print(f"{judged} calls of transformers, {len(alarms)} false alarms {alarms}")
    for name in MISTAKES:
        print(f"{name}: {wrong[name]} of {made} wrong, {found[name]} by name")


def of_peers(options: argparse.Namespace) -> None:
    """Print false alarms for calls of other projects' CPU operators, recorded by `record`, and the mistakes found.

    benchmarks/peers/README.md states how to get the projects. Calls have 1, 2, 7 and 33 tokens, of three seeds each.
    """
    import laws

    total, false = 0, 0
    for name, made in laws.peers(options).items():
        if not name.startswith(tuple(options.only)):
            continue
        if (peer := made(options)) is None:
            print(f"{name}: not on this processor", flush=True)
            continue
        judged, alarms, found = 0, list[str](), dict.fromkeys(MISTAKES, 0)
        for tokens, seed in product((1, 2, 7, 33), range(3)):
            x, ids, weights = drawn_call(peer.experts.w2.shape[0], peer.experts.w2.shape[1], tokens, seed)
            with TemporaryDirectory() as folder:
                file = Path(folder) / "case.safetensors"
                # No kernel has groups that are wider than its rows.
                rounded = {} if peer.compute is None else {"activation_group": min(1 << 20, peer.compute.block[1])}
                fn = (record_ggml(peer.fn, file, peer.experts, norm=0.0) if name.startswith("ggml")
                      else record(peer.fn, file, peer.experts, norm=0.0, **rounded))  # fmt: skip
                fn(x.clone(), ids, weights)
                case = read_case(file)
            judged += 1
            if not (verdict := judge(case)).right:
                alarms.append(f"{tokens} tokens, seed {seed}: {verdict.checks[-1].deviations:.2f} {verdict.fault}")
            if tokens != 7:
                continue
            shifted = (ids + 1) % peer.experts.w2.shape[0]
            outputs = (peer.fn(x, ids, weights).roll(1, 0), peer.fn(x, ids, torch.ones_like(weights)),
                       peer.fn(x, shifted.int(), weights))  # fmt: skip
            for mistake, y in zip(MISTAKES, outputs, strict=True):
                found[mistake] += judge(replace(case, y=y.clone())).fault == mistake
        total, false = total + judged, false + len(alarms)
        named = ", ".join(f"{mistake} {count} of 3" for mistake, count in found.items())
        print(f"{name}: {judged} calls, {len(alarms)} false alarms; {named}", *alarms, sep="\n  ", flush=True)
    print(f"{total} calls, {false} false alarms", flush=True)


def drawn_call(experts: int, hidden: int, tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens in bf16, two experts for each, and their weights."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.rand((tokens, experts), generator=draw).argsort(dim=1)[:, :2].int()
    x = torch.randn((tokens, hidden), generator=draw).to(torch.bfloat16)
    return x, ids, torch.rand((tokens, 2), generator=draw) + 0.1


def public(options: argparse.Namespace) -> None:
    """Print what is found of bugs of other projects."""
    from tests.judge.test_public_bugs import BUGS
    from tests.judge.test_public_bugs import found as found_of

    outcomes = []
    for bug in BUGS:
        *outcome, said = found_of(bug)
        outcomes.append(outcome)
        words = [word for word, is_so in zip(("wrong", "placed", "named"), outcome, strict=True) if is_so]
        print(f"{bug}: {' '.join(words)}; {said}", flush=True)
    wrong, placed, named = (sum(each) for each in zip(*outcomes, strict=True))
    print(f"{len(BUGS)} bugs: {wrong} found wrong, {placed} placed, {named} named")


def wide(options: argparse.Namespace) -> None:
    """Print the seconds of one token of DeepSeek-V3's width."""
    top_k, experts = 8, draw_experts(FP8_128x128, 8, 7168, 2048)
    x, ids = torch.randn((1, 7168)).to(torch.bfloat16), torch.arange(top_k, dtype=torch.int32)[None]
    right, swapped = torch.zeros(7168), torch.zeros(7168)
    for slot in map(experts.slot, range(top_k)):
        gate, up, down = (part.dequantize(torch.float32) for part in (slot.gate_IH, slot.up_IH, slot.down_HI) if part)
        g, u = gate @ x[0].float(), up @ x[0].float()
        right += 2.5 / top_k * (down @ (torch.nn.functional.silu(g) * u))
        swapped += 2.5 / top_k * (down @ (torch.nn.functional.silu(u) * g))
    with TemporaryDirectory() as folder:
        file, y = Path(folder) / "case.safetensors", right[None].to(torch.bfloat16)
        record(lambda x, ids, weights: y, file, experts, norm=0.0)(x, ids, torch.full((1, top_k), 2.5 / top_k))
        case = read_case(file)
    for what, output in (("right", right), ("gate and up swapped", swapped)):
        start, busy = time.perf_counter(), time.process_time()
        verdict = judge(replace(case, y=output[None].to(torch.bfloat16)))
        took = f"{time.perf_counter() - start:.1f} s, {time.process_time() - busy:.1f} s of processors"
        print(f"{what}: {took}, {'right' if verdict.right else verdict.fault}", flush=True)


COMMANDS = {
    "planted": planted, "clean": clean, "transformers": of_transformers, "public": public, "peers": of_peers,
    "wide": wide,
}  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from common import parser_of, with_peers

    parser = with_peers(parser_of(__doc__))
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("numbers", type=int, nargs="*", help="seeds of planted; how many cases are clean")
    parser.add_argument("--only", nargs="+", default=["vllm", "ggml", "kt"], help="of peers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    COMMANDS[options.what](options)


if __name__ == "__main__":
    main()
