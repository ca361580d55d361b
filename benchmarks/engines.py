"""Tokens per second of whole engines, with and without moe_mk, on a random model of real width.

    python benchmarks/engines.py qwen3-30b-a3b --layers 4 --vllm PYTHON --only vllm vllm+moe_mk --json out.json
    python benchmarks/engines.py qwen3-30b-a3b --layers 4 --vllm PYTHON --only vllm vllm+moe_mk:fp8 vllm+moe_mk:int4
    python benchmarks/engines.py qwen3-30b-a3b --layers 4 --llama PYTHON --only llama.cpp:q4_k transformers+moe_mk:q4_k

A contestant is an engine (vllm, transformers, llama.cpp), what it runs with (zentorch, moe_mk; blocks: whole blocks by
moe_mk; linears: linear layers too; int8: tokens are rounded to INT8), and the format of the weights if that is not
bf16. Each has a process, which loads its model and runs every case once. Then they take turns, A B C A B C for each
case, --rounds times, one at work and the others idle, so that load from other programs affects all of them alike. All
must fit in memory; --only selects fewer. Figures are medians over all runs of a case. A contestant is skipped if its
interpreter (--vllm, --zentorch, --llama) is not given; one that fails is recorded as failed, and the others continue.

engines_models.py writes the model once under --models, in the official layout: the first --layers layers, with a
vocabulary shortened in the same proportion, so that lm_head keeps its share of a token.

Decode: new tokens after a prompt of 16, for 1, 4 and 16 sequences at once, the prompt's time included; prefill: one
token after a prompt of 512. vLLM runs compiled, its default, in one process.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from typing import Any

CASES = {"batch 1": (1, 16, 32), "batch 4": (4, 16, 32), "batch 16": (16, 16, 16), "prefill 512": (1, 512, 1)}
"""Sequences, tokens of each prompt, new tokens of each."""
LONGEST, MOST = 1024, 16
"""Tokens of a sequence, and sequences, that an engine has room for."""
USUAL = (
    "vllm", "vllm+moe_mk", "vllm+zentorch", "vllm+zentorch+moe_mk",
    "transformers", "transformers+moe_mk", "transformers+moe_mk+blocks",
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

    settings = {"moe_mk": {"experts": "cpu_native", "release_weights": True} | tokens(name)} if ours else {}
    llm = vllm.LLM(
        str(folder), max_model_len=LONGEST, max_num_batched_tokens=2048, skip_tokenizer_init=True, seed=0,
        enable_prefix_caching=False, additional_config=settings,
    )  # fmt: skip

    def generate(prompts: Sequence[Sequence[int]], new: int) -> object:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": list(one)} for one in prompts], sampling, use_tqdm=False)

    return generate, f"vllm {vllm.__version__}"


def transformers_engine(name: str, folder: Path) -> tuple[Generate, str]:
    """transformers with grouped_mm, with experts by moe_mk, or with whole blocks by moe_mk, in any format."""
    import torch
    import transformers

    torch.set_num_threads(os.cpu_count() or 1)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    if "moe_mk" not in name:
        model = load(folder, dtype="auto", experts_implementation="grouped_mm")
    else:
        from moe_mk.integrations import transformers as ours

        ours.register(experts="cpu_native")
        if name.endswith((":q4_k", ":int4")):
            model = ours.model_without_experts(folder)
            ours.replace_experts(model, folder, experts="cpu_native", **tokens(name))
            if "blocks" in name:
                ours.patch_blocks(model)
        else:
            with ours.cpu_fp8():
                model = load(folder, dtype="auto", experts_implementation="moe_mk")
            ours.patch_blocks(model, experts="cpu_native") if "blocks" in name else ours.prepare(model, in_place=True)
        if "linears" in name:
            ours.pack_linears(model, folder, **tokens(name))
    model.train(False)

    def generate(prompts: Sequence[Sequence[int]], new: int) -> object:
        ids = torch.tensor(prompts, dtype=torch.int64, device="cpu")
        with torch.inference_mode():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

    return generate, f"transformers {transformers.__version__}"


def llama_engine(name: str, file: Path) -> tuple[Generate, str]:
    """llama.cpp, all sequences in one batch, the likeliest token each."""
    import ctypes

    import llama_cpp as ll
    import numpy as np

    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(str(file).encode(), ll.llama_model_default_params())
    settings = ll.llama_context_default_params()
    settings.n_ctx, settings.n_seq_max, settings.kv_unified = MOST * 64 + LONGEST, MOST, True
    settings.n_batch = settings.n_ubatch = 512
    settings.n_threads = settings.n_threads_batch = os.cpu_count() or 1
    context = ll.llama_init_from_model(model, settings)
    batch = ll.llama_batch_init(MOST * LONGEST, 0, 1)
    words = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))

    def step(tokens: Sequence[Sequence[int]], begin: int) -> list[int]:
        last, at = [], 0
        for sequence, each in enumerate(tokens):
            for place, token in enumerate(each):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, begin + place, 1
                batch.seq_id[at][0], batch.logits[at] = sequence, place == len(each) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        if ll.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = [ctypes.cast(ll.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float)) for i in last]
        return [int(np.ctypeslib.as_array(row, (words,)).argmax()) for row in rows]

    def generate(prompts: Sequence[Sequence[int]], new: int) -> object:
        ll.llama_memory_clear(ll.llama_get_memory(context), True)
        chosen = step(prompts, 0)
        for place in range(new - 1):
            chosen = step([[token] for token in chosen], len(prompts[0]) + place)
        return chosen

    return generate, f"llama-cpp-python {ll.__version__}"


ENGINES = {"vllm": vllm_engine, "transformers": transformers_engine, "llama.cpp": llama_engine}


def run_one(name: str, folder: Path) -> None:
    """One contestant in this process: answers each case on standard input with its seconds, in a line of JSON."""
    import resource

    replies = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # what an engine prints is not an answer
    # As vLLM's server does for its workers. Unbound, both threads of a small machine may share a processor for a while.
    os.environ["GOMP_CPU_AFFINITY"] = f"0-{(os.cpu_count() or 1) - 1}"
    begin = time.perf_counter()
    generate, version = ENGINES[engine_of(name)](name, folder)
    facts: dict[str, Any] = {"version": version, "load_s": round(time.perf_counter() - begin, 1)}
    if engine_of(name) != "llama.cpp":
        import torch

        facts |= {"torch": torch.__version__, "threads": str(torch.get_num_threads())}
    draw = random.Random(0)

    def seconds(sequences: int, prompt: int, new: int) -> float:
        prompts = [[draw.randrange(10, 1000) for _ in range(prompt)] for _ in range(sequences)]
        begin = time.perf_counter()
        generate(prompts, new)
        return round(time.perf_counter() - begin, 4)

    for sizes in CASES.values():
        seconds(*sizes)
    if "moe_mk" in name:
        from moe_mk.kernels.native.threads import described

        facts["kernel_threads"] = described()
    rollup = dict(line.split()[:2] for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    facts["large_page_bytes"] = int(rollup["AnonHugePages:"]) * 1024
    facts["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts["seconds"] = {case: [] for case in CASES}
    replies.write(json.dumps(facts) + "\n")
    for case in sys.stdin:
        replies.write(json.dumps(seconds(*CASES[case.strip()])) + "\n")
    os._exit(0)  # vLLM takes many seconds to end


def tokens(name: str) -> dict[str, Any]:
    """The setting of contestants that round tokens to INT8."""
    return {"activations": "int8"} if "int8" in name.partition(":")[0].split("+") else {}


def engine_of(name: str) -> str:
    return name.partition(":")[0].partition("+")[0]


def rate(case: str, seconds: float) -> float:
    """Tokens per second: new ones, or those of the prompt where there is one new token."""
    sequences, prompt, new = CASES[case]
    return sequences * (new if new > 1 else prompt) / seconds


def start(name: str, options: argparse.Namespace) -> tuple[Popen[str], dict[str, Any]] | None:
    """The process of a contestant, loaded and warm, and its facts; None if its interpreter was not given."""
    from engines_models import write_model

    python, kind = interpreter(name, options), name.partition(":")[2] or "bf16"
    if python is None:
        return None
    folder = write_model(options.model, options.layers, kind, options.models, options.llama)
    command = [python, str(Path(__file__).resolve()), options.model, "--one", name, "--folder", str(folder)]
    log = options.models / f"{name}.log"
    with log.open("w", encoding="utf-8") as errors:
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=errors, text=True, bufsize=1)
    line = str(process.stdout.readline()) if process.stdout else ""
    if line:
        return process, json.loads(line)
    process.wait()
    return process, {"failed": log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]}


def run_in_turn(options: argparse.Namespace) -> None:
    """All contestants, taking turns at each case; saves their figures after every round, and prints them at the end."""
    from common import command, processor, write

    about = {
        "what": "engines", "model": options.model, "layers": options.layers, "cases": CASES, "command": command(),
        "processor": f"{processor()}, {os.cpu_count()} processors", "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    running = {name: started for name in options.only if (started := start(name, options))}
    found = {name: facts for name, (_, facts) in running.items()}
    for _ in range(options.rounds):
        for case in CASES:
            for name, (process, _) in running.items():
                if process.poll() is None and process.stdin and process.stdout:
                    process.stdin.write(case + "\n")
                    if line := process.stdout.readline():
                        found[name]["seconds"][case].append(json.loads(line))
                    else:
                        found[name] = {"failed": f"{case}: process ended with status {process.wait()}"}
        for facts in found.values():
            if "seconds" in facts:
                held = facts["seconds"].items()
                facts["tokens_per_second"] = {case: round(rate(case, median(times)), 1) for case, times in held}
        write(options.json, about | {"contestants": found})
    for process, _ in running.values():
        process.communicate()
    for name, facts in found.items():
        print(name, facts.get("tokens_per_second") or f"failed: {facts.get('failed')}")


def interpreter(name: str, options: argparse.Namespace) -> str | None:
    """The interpreter of a contestant; None if it was not given."""
    given = {"vllm": options.vllm, "llama.cpp": options.llama}
    needed = options.zentorch if "zentorch" in name else given.get(engine_of(name), sys.executable)
    return None if needed is None else str(needed)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="qwen3-30b-a3b, deepseek-v2-lite or gpt-oss-20b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=USUAL, metavar="CONTESTANT", help=" ".join(USUAL))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", type=Path, default=Path.home() / ".cache" / "moe-mk-engines")
    parser.add_argument("--vllm", type=Path, help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--zentorch", type=Path, help="of one with vllm-cpu and zentorch")
    parser.add_argument("--llama", type=Path, help="of one with llama-cpp-python")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one, options.folder)
    run_in_turn(options)


if __name__ == "__main__":
    main()
