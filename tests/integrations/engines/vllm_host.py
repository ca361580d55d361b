"""A tiny random Mixtral by transformers, by vLLM, and by vLLM with this library; started as a program of its own.

python vllm_host.py FOLDER
"""

from __future__ import annotations

import os
import sys
from typing import Any

PROMPT, TOKENS = [5, 3, 8, 1], 8


def write(folder: str) -> list[int]:
    """Save the model; returns what transformers generates. Drawn wide, so that experts decide which token comes."""
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, num_local_experts=6, num_experts_per_tok=2, initializer_range=0.3,
        max_position_embeddings=128, bos_token_id=1, pad_token_id=0, eos_token_id=95,
    )  # fmt: skip
    model = MixtralForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    ids = torch.tensor([PROMPT])
    settings: dict[str, Any] = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    made = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return list(made[0, len(PROMPT) :].tolist())


def generate(folder: str, calls: list[str]) -> list[int]:
    import vllm

    engine = vllm.LLM(
        folder, dtype="float32", max_model_len=64, enforce_eager=True, skip_tokenizer_init=True,
        additional_config={"moe_mk": {"experts": "torch_cpu"}},
    )  # fmt: skip
    sampling = vllm.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    calls.clear()  # of the engine's own trial runs
    (stated,) = engine.generate([{"prompt_token_ids": PROMPT}], sampling)
    return list(stated.outputs[0].token_ids)


def main(folder: str) -> None:
    os.environ.update(
        VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip
    expected = write(folder)
    from moe_mk.integrations import vllm as door
    from moe_mk.integrations.engine_experts import EngineExperts

    calls: list[str] = []
    run = EngineExperts.run
    EngineExperts.run = lambda self, *args: (calls.append(self.name), run(self, *args))[1]  # type: ignore[method-assign]
    print("inert:", not door.register())
    own = generate(folder, calls)
    print("calls before:", len(calls))
    door.enable()
    ours = generate(folder, calls)
    print("calls:", len(calls))
    print("tokens by transformers:", expected)
    print("tokens by vLLM:", own)
    print("tokens by vLLM with moe_mk:", ours)


if __name__ == "__main__":
    main(sys.argv[1])
