"""Tiny random models by vLLM with this library, compared with transformers; started as a program of its own.

python vllm_host.py FOLDER [--eager] [--alone] [--record] [--int8] [--checkpoint] [--tp] [--ep] [--dp] NAME...

Names are those of `vllm_models.write`. Prints one JSON line for each model. --alone: by vLLM without this library.
--record: with case files of the first call of each layer, compared with the experts of transformers.
--int8: with tokens rounded to INT8; --checkpoint: where the checkpoint states it.
--tp, --ep: on two ranks, each with a part of every expert, or with half of the experts. --dp: on two engines, each with
half of the experts and prompts of its own; --second: the other of the two, with one prompt, which ends early.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

PROMPTS, TOKENS = [[5, 3, 8, 1], [7, 9, 11, 2, 40], [100, 3, 50]], 12
ROUNDINGS = 8


Made = list[tuple[list[int], list[float]]]
"""Tokens and their log probabilities for each prompt."""


def experts_of(model: Any) -> list[tuple[str, int, int, bool]]:
    """In each rank of vLLM: the backend of each layer, its experts, their width, and whether vLLM's are freed."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    found = [method.experts_here for method in methods if hasattr(method, "experts_here")]
    return [
        (
            e.backend,
            rank.num_experts // rank.grid.ep.size,
            rank.decision.problem.config.model.moe_intermediate_size,
            e.is_released,
        )
        for e in found
        for rank in (e.of_rank,)
    ]


def generate(folder: Path, *, eager: bool, wish: str = "auto", recorded: bool = False, **more: Any) -> tuple[Made, Any]:
    """What it generates, and the experts of each rank."""
    import vllm

    from moe_mk.lab.judge import record_vllm
    from tests.integrations.engines import vllm_host  # by a name that processes of vLLM can import

    engine = vllm.LLM(
        str(folder), dtype="bfloat16", max_model_len=128, enforce_eager=eager, skip_tokenizer_init=True,
        max_num_batched_tokens=512, **more,
        additional_config={"moe_mk": {"experts": "cpu_native", "activations": wish}},
    )  # fmt: skip
    if recorded:
        (folder / "cases").mkdir()
        engine.apply_model(partial(record_vllm, folder=str(folder / "cases"), checkpoint=folder.name, norm=0.0))
    sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
    made = []
    for stated in engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False):
        (found,) = stated.outputs
        tokens = list(found.token_ids)
        made.append((tokens, [found.logprobs[at][token].logprob for at, token in enumerate(tokens)]))
    return made, engine.apply_model(vllm_host.experts_of)


def compared(model: Any, made: Made) -> dict[str, float]:
    """How far transformers agrees, given the same tokens. behind: how much the chosen tokens are below the best at
    most, in log probability. off: how much their log probabilities differ. noise: how much those of the same model
    differ when all modules round to bf16, root mean square of all tokens at the worst position of ROUNDINGS trials.
    equal: how many of the tokens are the best."""
    import copy

    import torch

    rough, behind, off, noise, equal = copy.deepcopy(model), 0.0, 0.0, 0.0, 0
    draw = torch.Generator().manual_seed(0)

    def rounded(module: Any, given: Any, out: Any) -> Any:
        """By chance up or down: a router or an attention that is close to a tie is decided by the last bit."""
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            drawn = (torch.rand(out.shape, generator=draw) - 0.5) * 2**-8
            return (out * (1.0 + drawn)).to(torch.bfloat16).to(out.dtype)
        return out

    for each in rough.modules():
        each.register_forward_hook(rounded)
    for prompt, (tokens, stated) in zip(PROMPTS, made, strict=True):
        ids, at = torch.tensor([prompt + tokens[:-1]]), slice(len(prompt) - 1, None)
        exact = model(ids).logits[0, at].log_softmax(-1)
        chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        behind = max(behind, float((exact.amax(-1) - chosen).max()))
        off = max(off, float((chosen - torch.tensor(stated)).abs().max()))
        for _ in range(ROUNDINGS):
            near = rough(ids).logits[0, at].log_softmax(-1)
            noise = max(noise, float((near - exact).square().mean(-1).sqrt().max()))
        equal += int((exact.argmax(-1) == torch.tensor(tokens)).sum())
    return {"behind": behind, "off": off, "noise": noise, "equal": equal}


def of_record(model: Any, folder: Path, options: set[str]) -> dict[str, Any]:
    """The case files of all layers: how far their outputs are from the experts of transformers, and their tokens."""
    from moe_mk.lab.judge import joined, read_case

    found: dict[str, Any] = {"layers": [], "tokens": [], "errors": []}
    for first in sorted(folder.glob("*.rank0.safetensors")):
        files = sorted(folder.glob(first.name.replace("rank0", "rank*")))
        sizes = {"ep" if "--ep" in options else "tp": len(files)}
        case = joined([read_case(file) for file in files], **sizes).checked()
        experts = model.model.layers[case.layer].mlp.experts
        wanted = experts(case.x.float(), case.topk_ids, case.topk_weights.float())
        found["layers"].append(case.layer)
        found["tokens"].append(case.num_tokens)
        found["errors"].append(float((case.y.float() - wanted).norm() / wanted.norm()))
    return found


def main(folder: Path, names: list[str], options: set[str]) -> None:
    os.environ.update(
        VLLM_PLUGINS="" if "--alone" in options else "moe_mk",
        VLLM_ENABLE_V1_MULTIPROCESSING=str(int("--dp" in options)),
        VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1",
        VLLM_ALLOW_INSECURE_SERIALIZATION="1",
    )  # fmt: skip
    import torch

    from moe_mk.integrations.engine_experts import EngineExperts
    from moe_mk.integrations.packed_linear import PackedLinear
    from moe_mk.layer.experts_of_rank import ExpertsOfRank
    from tests.integrations.engines import vllm_models

    if "--second" in options:
        del PROMPTS[1:]
        generate(folder / names[0], eager="--eager" in options, enable_expert_parallel=True)
        return
    second = [sys.executable, "-m", "tests.integrations.engines.vllm_host", str(folder), "--second", *options, *names]
    if "--dp" in options:
        from vllm.utils.network_utils import get_open_port

        place = {"SIZE": "2", "RANK": "0", "RANK_LOCAL": "0", "MASTER_IP": "127.0.0.1", "MASTER_PORT": get_open_port()}
        os.environ.update({f"VLLM_DP_{key}": str(value) for key, value in place.items()})
    run, matrices, calls = ExpertsOfRank.run, PackedLinear.__init__, dict[str, int]()
    build, engine_of = EngineExperts.__init__, dict[int, EngineExperts]()

    def built(self: EngineExperts, *args: Any, **settings: Any) -> None:
        build(self, *args, **settings)
        engine_of[id(self.of_rank)] = self

    def counted(self: ExpertsOfRank, *args: torch.Tensor) -> torch.Tensor:
        engine = engine_of[id(self)]
        calls["experts"] += 1
        calls["experts int8"] += self.decision.compute.name.startswith("int8")
        calls[engine.backend] = engine.is_released
        return run(self, *args)

    def made(self: PackedLinear, *args: Any, int8: bool = False) -> None:
        calls["linear"] += 1
        calls["linear int8"] += int8
        matrices(self, *args, int8=int8)

    EngineExperts.__init__, ExpertsOfRank.run = built, counted  # type: ignore[method-assign, assignment]
    PackedLinear.__init__ = made  # type: ignore[method-assign, assignment]
    with torch.inference_mode():
        for name in names:
            model = vllm_models.write(name, folder / name)
            calls.clear()
            calls.update(dict.fromkeys(("experts", "experts int8", "linear", "linear int8"), 0))
            parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": "--ep" in options}
            more: dict[str, Any] = parallel if {"--tp", "--ep"} & options else {}
            if "--dp" in options:
                more = {"enable_expert_parallel": True}
                subprocess.Popen(second, env=os.environ | {"VLLM_DP_RANK": "1", "VLLM_DP_RANK_LOCAL": "1"})
            (more["wish"],) = [each[2:] for each in ("--int8", "--checkpoint") if each in options] or ["auto"]
            more["recorded"] = "--record" in options
            found, ranks = generate(folder / name, eager="--eager" in options, **more)
            facts = {"name": name, "tokens": [tokens for tokens, _ in found], "calls": dict(calls), "ranks": ranks}
            facts |= {"record": of_record(model, folder / name / "cases", options)} if "--record" in options else {}
            print(json.dumps(facts | compared(model, found)), flush=True)


if __name__ == "__main__":
    given = sys.argv[2:]
    main(Path(sys.argv[1]), [a for a in given if a[0] != "-"], {a for a in given if a[0] == "-"})
