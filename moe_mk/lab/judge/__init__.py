"""Judge one call of any engine's MoE layer: case files, replay, and the fault that explains a wrong output.

from moe_mk.lab.judge import Case, read_case, write_case

write_case("case.safetensors", Case(model=model, router=router, x=x, y=y, topk_ids=ids, topk_weights=weights, ...))
"""

from moe_mk.lab.judge.casefile import Case, read_case, write_case
from moe_mk.lab.judge.recorders import (
    joined,
    record,
    record_ggml,
    record_sglang,
    record_transformers,
    record_vllm,
)

__all__ = [
    "Case",
    "joined",
    "read_case",
    "record",
    "record_ggml",
    "record_sglang",
    "record_transformers",
    "record_vllm",
    "write_case",
]
