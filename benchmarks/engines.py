"""Tokens per second of whole engines, with and without moe_mk, on a random model of real width.

    python benchmarks/engines.py qwen3-30b-a3b --layers 8 --vllm PYTHON --zentorch PYTHON --json out.json
    python benchmarks/engines.py qwen3-30b-a3b --layers 8 --only vllm vllm+moe_mk --rounds 3

The model is written once under --models, in the official layout: the first --layers layers, with a vocabulary shortened
in the same proportion, so that lm_head keeps its share of a token. engines_models.py writes it. Every contestant runs in
a process of its own, in turn, --rounds times: A B C A B C. Figures are medians over all runs of a case. A contestant
whose interpreter (--vllm, --zentorch, --llama) is not given is left out; a failure is recorded, and ends nothing.

Decode: --new tokens after a prompt of 16 for 1, 4 and 16 sequences at once, the prompt's time included; prefill: one
token after a prompt of 512. vLLM runs compiled, in its default mode, in one process, bound to all processors.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

CASES = {"batch 1": (1, 16, 32), "batch 4": (4, 16, 32), "batch 16": (16, 16, 16), "prefill 512": (1, 512, 1)}
"""Sequences, tokens of each prompt, new tokens of each."""
CONTESTANTS = (
    "vllm", "vllm+moe_mk", "vllm+zentorch", "vllm+zentorch+moe_mk", "transformers", "transformers+moe_mk",
    "transformers+moe_mk blocks", "llama.cpp", "gguf+moe_mk",
)  # fmt: skip
Generate = Callable[[Sequence[Sequence[int]], int], object]
"""Called with prompts and the number of new tokens."""


def vllm_engine(name: str, folder: Path) -> tuple[Generate, str]:
    """vLLM, with the plugin if it is named; zentorch is chosen by its interpreter."""
    ours = "moe_mk" in name
    os.environ |= {
        "VLLM_PLUGINS": "moe_mk" if ours else "",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm

    settings = {"moe_mk": {"experts": "cpu_native", "release_weights": True}} if ours else {}
    llm = vllm.LLM(
        str(folder), max_model_len=1200, max_num_batched_tokens=2048, skip_tokenizer_init=True, seed=0,
        enable_prefix_caching=False, additional_config=settings,
    )  # fmt: skip

    def generate(prompts: Sequence[Sequence[int]], new: int) -> object:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": list(one)} for one in prompts], sampling, use_tqdm=False)

    return generate, f"vllm {vllm.__version__}"


def transformers_engine(name: str, folder: Path) -> tuple[Generate, str]:
    """transformers with grouped_mm, with experts by moe_mk, or with whole blocks by moe_mk."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    ours, blocks = "moe_mk" in name, name.endswith("blocks")
    if ours:
        from moe_mk.integrations.transformers import patch_blocks, prepare, register

        register(experts="cpu_native")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", experts_implementation="moe_mk" if ours else "grouped_mm"
    ).eval()
    if blocks:
        patch_blocks(model, experts="cpu_native")
    elif ours:
        prepare(model, in_place=True)

    def generate(prompts: Sequence[Sequence[int]], new: int) -> object:
        ids = torch.tensor(prompts, dtype=torch.int64, device="cpu")
        with torch.inference_mode():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

    return generate, f"transformers {transformers.__version__}"


ENGINES = {"vllm": vllm_engine, "transformers": transformers_engine}


def run_one(name: str, folder: Path, repeats: int, out: Path) -> None:
    """One contestant in this process: seconds of every repeat of every case, written to `out`."""
    import resource

    begin = time.perf_counter()
    generate, version = ENGINES[name.partition("+")[0]](name, folder)
    loaded = time.perf_counter() - begin
    draw = random.Random(0)

    def seconds(sequences: int, prompt: int, new: int) -> float:
        prompts = [[draw.randrange(10, 1000) for _ in range(prompt)] for _ in range(sequences)]
        begin = time.perf_counter()
        generate(prompts, new)
        return time.perf_counter() - begin

    seconds(1, 8, 4)
    found = {case: [seconds(*CASES[case]) for _ in range(repeats + 1)][1:] for case in CASES}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    import torch

    threads = str(torch.get_num_threads())
    if "moe_mk" in name:
        from moe_mk.kernels.native.threads import described

        threads += f"; moe_mk: {described()}"
    facts = {"version": version, "torch": torch.__version__, "threads": threads}
    out.write_text(json.dumps({"seconds": found, "peak_bytes": peak, "load_s": loaded} | facts), encoding="utf-8")


def rate(case: str, seconds: float) -> float:
    """Tokens per second: new ones, or those of the prompt where there is one new token."""
    sequences, prompt, new = CASES[case]
    return sequences * (new if new > 1 else prompt) / seconds


def run_in_turn(options: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    """All contestants, in alternating processes; adds their figures to `found`, and saves them after every process."""
    for turn in range(options.rounds):
        for name in options.only:
            python = interpreter(name, options)
            if python is None or "failed" in found.get(name, {}):
                continue
            file = Path(options.models) / "one.json"
            file.unlink(missing_ok=True)
            command = [python, str(Path(__file__).resolve()), options.model, "--one", name, "--folder", str(folder)]
            command += ["--repeats", str(options.repeats), "--json", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if not file.exists():
                found[name] = {"failed": (done.stderr or done.stdout).strip().splitlines()[-1:]}
                sys.stderr.write(f"{name}: {(done.stderr or done.stdout)[-4000:]}\n")
                continue
            facts = json.loads(file.read_text(encoding="utf-8"))
            held = found.setdefault(name, facts | {"seconds": {case: [] for case in CASES}})
            held["peak_bytes"] = max(held["peak_bytes"], facts["peak_bytes"])
            for case, seconds in facts["seconds"].items():
                held["seconds"][case] += seconds
            shown = " ".join(f"{rate(case, median(each)):.1f}" for case, each in facts["seconds"].items())
            print(f"round {turn + 1}  {name:28} {shown}", flush=True)
            held["tokens_per_second"] = {c: round(rate(c, median(each)), 1) for c, each in held["seconds"].items()}
            save(options, found)


def save(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write the result file, if one was asked for."""
    if options.json is None:
        return
    facts = {
        "what": "engines", "model": options.model, "layers": options.layers, "format": options.format,
        "cases": CASES, "rounds": options.rounds, "processor": processor(), "date": time.strftime("%Y-%m-%d"),
        "contestants": found,
    }  # fmt: skip
    options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def interpreter(name: str, options: argparse.Namespace) -> str | None:
    """The interpreter of a contestant; None if it was not given."""
    if "zentorch" in name:
        return str(options.zentorch) if options.zentorch else None
    if name.startswith("vllm"):
        return str(options.vllm) if options.vllm else None
    return (str(options.llama) if options.llama else None) if name == "llama.cpp" else sys.executable


def table(found: Mapping[str, Any]) -> str:
    """Tokens per second and peak memory of every contestant."""
    lines = ["| contestant | " + " | ".join(CASES) + " | peak memory |", "|---" * (len(CASES) + 2) + "|"]
    for name, facts in found.items():
        if "failed" in facts:
            lines.append(f"| {name} | failed: {' '.join(facts['failed'])} |" + " |" * len(CASES))
            continue
        speeds = " | ".join(str(facts["tokens_per_second"][case]) for case in CASES)
        lines.append(f"| {name} | {speeds} | {facts['peak_bytes'] / 1e9:.1f} GB |")
    return "\n".join(lines)


def processor() -> str:
    """Its name in /proc/cpuinfo, and the number of processors."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return f"{name}, {os.cpu_count()} processors"


def main() -> None:
    """Write the model, run the contestants, print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="qwen3-30b-a3b, deepseek-v2-lite or gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--format", default="bf16", choices=("bf16", "fp8", "int4"))
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS[:6]))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache" / "moe-mk-engines")
    parser.add_argument("--vllm", type=Path, help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--zentorch", type=Path, help="of one with vllm-cpu and zentorch")
    parser.add_argument("--llama", type=Path, help="of one with llama-cpp-python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one, options.folder, options.repeats, options.json)
        return
    from engines_models import write_model

    folder = write_model(options.model, options.layers, options.format, options.models)
    found: dict[str, Any] = {}
    run_in_turn(options, folder, found)
    print(table(found))
    save(options, found)


if __name__ == "__main__":
    main()
