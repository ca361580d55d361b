"""A linter for launch lines of other engines: pitfalls of expert parallelism that they meet late, or never report.

    findings = [finding for launch in launches for finding in lint(launch)] + lint_together(launches)

Each rule is a function of one launch and names its source. A rule states nothing where the option that it needs is not
in the line: defaults change between versions, and only defaults that a source states are used. Engines are read, never
imported. Options are those of the versions that the sources name; a rule that an engine has dropped costs a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_mk.integrations.launch_lines import Launch

VLLM_PARALLEL = "https://github.com/vllm-project/vllm/blob/main/vllm/config/parallel.py"
VLLM_CONFIG = "https://github.com/vllm-project/vllm/blob/main/vllm/config/vllm.py"
VLLM_EXPERTS = "https://github.com/vllm-project/vllm/blob/main/vllm/model_executor/layers/fused_moe/layer.py"
VLLM_DOCS = "https://docs.vllm.ai/en/latest/serving/expert_parallel_deployment/"
SGLANG_DOCS = "https://docs.sglang.io/advanced_features/expert_parallelism.html"
SGLANG_ARGS = "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/server_args.py"
SGLANG_DEEPEP = (
    "https://github.com/sgl-project/sglang/blob/main/python/sglang/srt/layers/moe/token_dispatcher/deepep.py"
)
DEEPEP_QUEUES = "https://github.com/deepseek-ai/DeepEP/issues/430"
DEEPEP_LIMIT = "https://github.com/deepseek-ai/DeepEP/issues/165"
TRTLLM_MAPPING = "https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/mapping.py"
TRTLLM_MOE = "https://nvidia.github.io/TensorRT-LLM/llm-api/reference/MoeConfig.html"
TRTLLM_COMM = (
    "https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/_torch/modules/fused_moe/communication/"
    "communication_factory.py"
)


@dataclass(frozen=True)
class Finding:
    """One pitfall."""

    rule: str
    severity: str
    """error: the engine refuses to start, or fails later. warning: it starts, and does something else than asked."""
    text: str
    fix: str
    source: str
    line: int


Check = Callable[[Launch], str | None]


@dataclass(frozen=True)
class Rule:
    """One pitfall of one engine."""

    name: str
    engine: str
    severity: str
    fix: str
    source: str
    check: Check
    """What is wrong, or None."""


RULES: list[Rule] = []


def _rule(engine: str, severity: str, fix: str, source: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(check.__name__.removeprefix("_").replace("_", "-"), engine, severity, fix, source, check))
        return check

    return register


def lint(launch: Launch) -> list[Finding]:
    """What the rules of its engine find in one launch line."""
    return [
        Finding(rule.name, rule.severity, text, rule.fix, rule.source, launch.line)
        for rule in RULES
        if rule.engine == launch.engine and (text := rule.check(launch)) is not None
    ]


TOGETHER = {
    "vllm": ("data-parallel-address", ("all2all-backend", "tensor-parallel-size", "data-parallel-size", "enable-eplb",
             "enable-expert-parallel", "enable-dbo", "expert-placement-strategy", "max-num-batched-tokens")),
    "sglang": ("dist-init-addr", ("moe-a2a-backend", "deepep-mode", "tp-size", "dp-size", "ep-size", "enable-eplb",
               "enable-dp-attention", "moe-runner-backend", "ep-num-redundant-experts", "chunked-prefill-size")),
}  # fmt: skip
"""By engine: the option that names a deployment, and those that all its launch lines must agree on."""


def lint_together(launches: Sequence[Launch]) -> list[Finding]:
    """Options that differ between the launch lines of one deployment, whose ranks then make different collectives."""
    found = []
    for engine, (meeting, names) in TOGETHER.items():
        deployments: dict[str, list[Launch]] = {}
        for launch in launches:
            if launch.engine == engine and launch.options.get(meeting):
                deployments.setdefault(launch.options[meeting], []).append(launch)
        for where, each in deployments.items():
            for name in (*names, *_shared_environment(each)):
                values = [launch.options.get(name, launch.environment.get(name)) for launch in each]
                if len(set(values)) > 1:
                    shown = ", ".join(
                        f"line {launch.line}: {'not set' if value is None else value or 'set'}"
                        for launch, value in zip(each, values, strict=True)
                    )
                    found.append(
                        Finding(
                            "ranks-disagree", "error", f"{name} differs between the launch lines of {where} ({shown})",
                            "give all nodes of a deployment the same value",
                            VLLM_PARALLEL if engine == "vllm" else "https://github.com/deepseek-ai/DeepEP/issues/208",
                            each[-1].line,
                        )
                    )  # fmt: skip
    return found


def _shared_environment(launches: Sequence[Launch]) -> list[str]:
    wanted = ("VLLM_ALL2ALL_BACKEND", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "NVSHMEM_QP_DEPTH")
    return [name for name in wanted if any(name in launch.environment for launch in launches)]


def _all2all(launch: Launch) -> str:
    """The backend that a vLLM line names, by option or by the variable of older versions."""
    return launch.options.get("all2all-backend") or launch.environment.get("VLLM_ALL2ALL_BACKEND", "")


def _vllm_ranks(launch: Launch) -> int:
    return launch.number("tensor-parallel-size", 1) * launch.number("data-parallel-size", 1)


def _redundant(launch: Launch) -> int:
    stated = launch.config.get("num_redundant_experts", launch.options.get("num-redundant-experts", 0))
    return int(stated) if str(stated).isdigit() else 0


@_rule("vllm", "error", "add --enable-expert-parallel", VLLM_PARALLEL)
def _eplb_without_ep(launch: Launch) -> str | None:
    if launch.has("enable-eplb") and not launch.has("enable-expert-parallel"):
        return "--enable-eplb without --enable-expert-parallel is refused at start"
    return None


@_rule("vllm", "error", "raise --data-parallel-size or --tensor-parallel-size", VLLM_PARALLEL)
def _eplb_on_one_rank(launch: Launch) -> str | None:
    if launch.has("enable-eplb") and _vllm_ranks(launch) <= 1:
        return "--enable-eplb with one rank of experts is refused at start"
    return None


@_rule("vllm", "error", "add --enable-eplb, or drop num_redundant_experts", VLLM_PARALLEL)
def _redundant_experts_without_eplb(launch: Launch) -> str | None:
    if _redundant(launch) and not launch.has("enable-eplb"):
        return f"num_redundant_experts = {_redundant(launch)} without --enable-eplb is refused at start"
    return None


@_rule("vllm", "warning", "drop one of them", VLLM_EXPERTS)
def _round_robin_with_eplb(launch: Launch) -> str | None:
    asked = launch.options.get("expert-placement-strategy") == "round_robin"
    if asked and (launch.has("enable-eplb") or _redundant(launch)):
        return "round_robin placement falls back to linear where EPLB is on or experts are redundant"
    return None


@_rule("vllm", "warning", "use --all2all-backend deepep_low_latency or nixl_ep, or linear placement", VLLM_EXPERTS)
def _round_robin_without_routing_tables(launch: Launch) -> str | None:
    asked = launch.options.get("expert-placement-strategy") == "round_robin"
    known = _all2all(launch) not in ("deepep_low_latency", "nixl_ep")
    if asked and known and launch.number("data-parallel-size", 1) > 1:
        used = _all2all(launch) or "allgather_reducescatter"
        return f"round_robin placement falls back to linear with the all2all backend {used}"
    return None


@_rule("vllm", "warning", "choose a backend of this version: allgather_reducescatter is what runs", VLLM_PARALLEL)
def _removed_backend(launch: Launch) -> str | None:
    if _all2all(launch) in ("pplx", "naive"):
        return f"the all2all backend {_all2all(launch)} has been removed; allgather_reducescatter runs instead"
    return None


@_rule("vllm", "warning", "add --enable-expert-parallel", VLLM_PARALLEL)
def _backend_without_ep(launch: Launch) -> str | None:
    if _all2all(launch).startswith(("deepep", "nixl", "mori", "flashinfer")) and not launch.has(
        "enable-expert-parallel"
    ):
        return f"the all2all backend {_all2all(launch)} is not used without --enable-expert-parallel"
    return None


@_rule("vllm", "warning", "raise --data-parallel-size; tensor parallelism alone needs no all-to-all", VLLM_PARALLEL)
def _backend_without_data_parallel(launch: Launch) -> str | None:
    stated = launch.is_stated("data-parallel-size") or "data-parallel-size" not in launch.options
    kernels = _all2all(launch).startswith(("deepep", "nixl", "mori", "flashinfer"))
    if kernels and launch.has("enable-expert-parallel") and stated and launch.number("data-parallel-size", 1) <= 1:
        return f"the all2all backend {_all2all(launch)} is not used with data-parallel-size 1"
    return None


@_rule("vllm", "error", "lower --data-parallel-size-local", VLLM_PARALLEL)
def _more_local_ranks_than_ranks(launch: Launch) -> str | None:
    local, ranks = launch.number("data-parallel-size-local", 0), launch.number("data-parallel-size", 0)
    if ranks and local > ranks:
        return f"data-parallel-size-local {local} exceeds data-parallel-size {ranks}"
    return None


@_rule("vllm", "error", "use --all2all-backend deepep_low_latency, deepep_high_throughput or nixl_ep", VLLM_CONFIG)
def _overlap_without_deepep(launch: Launch) -> str | None:
    if launch.has("enable-dbo") and _all2all(launch) not in ("deepep_low_latency", "deepep_high_throughput", "nixl_ep"):
        return f"--enable-dbo is refused with the all2all backend {_all2all(launch) or 'allgather_reducescatter'}"
    return None


@_rule("vllm", "warning", "use deepep_high_throughput on a prefill instance", VLLM_DOCS)
def _low_latency_on_prefill(launch: Launch) -> str | None:
    if _all2all(launch) == "deepep_low_latency" and launch.config.get("kv_role") == "kv_producer":
        return "deepep_low_latency on a prefill instance (kv_producer): its masked buffers are for decode"
    return None


@_rule("vllm", "warning", "use deepep_low_latency on a decode instance", VLLM_DOCS)
def _high_throughput_on_decode(launch: Launch) -> str | None:
    if _all2all(launch) == "deepep_high_throughput" and launch.config.get("kv_role") == "kv_consumer":
        return "deepep_high_throughput on a decode instance (kv_consumer) cannot be captured in CUDA graphs"
    return None


@_rule("vllm", "error", "use torch_gloo or nixl, or use_async = false", VLLM_PARALLEL)
def _asynchronous_eplb_over_nccl(launch: Launch) -> str | None:
    communicator = launch.config.get("communicator")
    if communicator in ("torch_nccl", "pynccl") and str(launch.config.get("use_async", True)).lower() == "true":
        return f"EPLB moves weights asynchronously by default, which is refused with communicator {communicator}"
    return None


@_rule("vllm", "error", "add --enable-eplb, and no pipeline parallelism", VLLM_PARALLEL)
def _elastic_ep_without_eplb(launch: Launch) -> str | None:
    if launch.has("enable-elastic-ep") and (
        not launch.has("enable-eplb") or launch.number("pipeline-parallel-size", 1) > 1
    ):
        return "--enable-elastic-ep needs --enable-eplb and pipeline-parallel-size 1"
    return None


A2A_OF_EQUAL_SIZE = ("deepep", "mooncake", "flashinfer", "ascend_fuseep")


def _a2a(launch: Launch) -> str:
    if launch.has("enable-deepep-moe"):
        return "deepep"
    return launch.options.get("moe-a2a-backend", "none")


def _cap(launch: Launch) -> int:
    """Tokens that a rank may dispatch in low-latency mode; 128 where it is not set."""
    text = launch.environment.get("SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK", "128")
    return int(text) if text.isdigit() else 128


@_rule("sglang", "warning", "give --ep-size the value of --tp-size, or --moe-a2a-backend none", SGLANG_DOCS)
def _ep_size_is_overridden(launch: Launch) -> str | None:
    both = launch.is_stated("ep-size") and launch.is_stated("tp-size")
    ep, tp = launch.number("ep-size", 1), launch.number("tp-size", 1)
    if _a2a(launch) in A2A_OF_EQUAL_SIZE and both and ep != tp:
        return f"ep-size {ep} becomes {tp}, the tp-size: {_a2a(launch)} supports no other"
    return None


@_rule("sglang", "warning", "use --deepep-mode auto", SGLANG_ARGS)
def _normal_mode_without_graphs(launch: Launch) -> str | None:
    is_prefill = launch.options.get("disaggregation-mode") == "prefill" or launch.has("disable-cuda-graph")
    if _a2a(launch) == "deepep" and launch.options.get("deepep-mode") == "normal" and not is_prefill:
        return "deepep-mode normal turns CUDA graphs off, for decode too"
    return None


@_rule("sglang", "error", "use --deepep-mode auto, or normal on a prefill instance", DEEPEP_LIMIT)
def _low_latency_with_prefill(launch: Launch) -> str | None:
    if _a2a(launch) != "deepep" or launch.options.get("deepep-mode") != "low_latency":
        return None
    if launch.options.get("disaggregation-mode") == "prefill":
        return "deepep-mode low_latency on a prefill instance: prompts exceed what a rank may dispatch"
    chunk, ranks = launch.number("chunked-prefill-size", 0), launch.number("dp-size", 1)
    per_rank = chunk // ranks if launch.has("enable-dp-attention") else chunk
    if launch.options.get("disaggregation-mode") != "decode" and per_rank > _cap(launch):
        return (
            f"prefill chunks of {per_rank} tokens per rank exceed the {_cap(launch)} that a rank may dispatch "
            "[SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK]"
        )
    return None


@_rule("sglang", "error", "raise SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK, or lower --max-running-requests",
       DEEPEP_LIMIT)  # fmt: skip
def _decode_batch_above_the_cap(launch: Launch) -> str | None:
    if _a2a(launch) != "deepep" or launch.options.get("deepep-mode", "auto") == "normal":
        return None
    ranks = launch.number("dp-size", 1) if launch.has("enable-dp-attention") else 1
    drafts = launch.number("speculative-num-draft-tokens", 1)
    tokens = -(-launch.number("max-running-requests", 0) // ranks) * drafts
    if launch.options.get("disaggregation-mode") != "prefill" and tokens > _cap(launch):
        return (
            f"up to {tokens} tokens per rank in decode (max-running-requests over dp-size, times draft tokens) exceed "
            f"the {_cap(launch)} that a rank may dispatch [SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK]"
        )
    return None


@_rule("sglang", "error", "set it to at most 1024", SGLANG_DEEPEP)
def _cap_above_the_protocol(launch: Launch) -> str | None:
    if _a2a(launch) == "deepep" and _cap(launch) > 1024 and launch.options.get("deepep-mode") != "normal":
        return f"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK = {_cap(launch)} exceeds the 1024 of the protocol"
    return None


@_rule("sglang", "error", "set NVSHMEM_QP_DEPTH to at least twice the cap plus 2", DEEPEP_QUEUES)
def _queues_too_short(launch: Launch) -> str | None:
    depth = launch.environment.get("NVSHMEM_QP_DEPTH", "1024")
    need = 2 * (_cap(launch) + 1)
    if (
        _a2a(launch) == "deepep"
        and depth.isdigit()
        and need > int(depth)
        and launch.options.get("deepep-mode") != "normal"
    ):
        return f"{_cap(launch)} tokens per rank need queues of {need} entries; NVSHMEM_QP_DEPTH is {depth}"
    return None


@_rule("sglang", "warning", "add --moe-a2a-backend deepep", SGLANG_DOCS)
def _deepep_mode_without_deepep(launch: Launch) -> str | None:
    if "deepep-mode" in launch.options and _a2a(launch) == "none":
        return "--deepep-mode has no effect: --moe-a2a-backend is none"
    return None


@_rule("sglang", "error", "write --moe-a2a-backend deepep", SGLANG_DOCS)
def _removed_deepep_flag(launch: Launch) -> str | None:
    return "--enable-deepep-moe is not an option of current versions" if launch.has("enable-deepep-moe") else None


@_rule("sglang", "error", "add --enable-dp-attention", SGLANG_ARGS)
def _dp_head_without_dp_attention(launch: Launch) -> str | None:
    if launch.has("enable-dp-lm-head") and not launch.has("enable-dp-attention"):
        return "--enable-dp-lm-head without --enable-dp-attention is refused at start"
    return None


@_rule("sglang", "warning", "add --enable-dp-attention", SGLANG_ARGS)
def _replicas_instead_of_dp_attention(launch: Launch) -> str | None:
    replicas, tp = launch.number("dp-size", 1), launch.number("tp-size", 1)
    if replicas > 1 and not launch.has("enable-dp-attention"):
        return f"dp-size {replicas} without --enable-dp-attention starts {replicas} replicas of {tp} ranks each"
    return None


def _section(launch: Launch, name: str) -> dict[str, Any]:
    found = launch.config.get(name)
    return found if isinstance(found, dict) else {}


@_rule("trtllm", "error", "let moe_tp_size x ep_size be tp_size", TRTLLM_MAPPING)
def _moe_grid_is_not_tp(launch: Launch) -> str | None:
    if not (launch.is_stated("tp-size") and launch.is_stated("ep-size")):
        return None
    tp, ep = launch.number("tp-size", 1), launch.number("ep-size", 1)
    inside = launch.number("moe-tp-size", 0) or max(tp // max(ep, 1), 1)
    cluster = launch.number("moe-cluster-size", 1)
    if inside * ep * cluster != tp:
        return f"moe_tp_size {inside} x ep_size {ep} x cluster {cluster} = {inside * ep * cluster}, not tp_size {tp}"
    return None


MOE_BACKENDS = ("AUTO", "CUTLASS", "CUTEDSL", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "VANILLA", "TRITON", "MARLIN",
                "MEGAMOE_DEEPGEMM", "MEGAMOE_CUTEDSL")  # fmt: skip


@_rule(
    "trtllm", "error", "use one of the backends that MoeConfig lists; wide EP is not one of them any more", TRTLLM_MOE
)
def _unknown_moe_backend(launch: Launch) -> str | None:
    backend = _section(launch, "moe_config").get("backend")
    return f"moe_config.backend = {backend} is unknown" if backend and str(backend) not in MOE_BACKENDS else None


@_rule("trtllm", "warning", "set enable_attention_dp: true", TRTLLM_COMM)
def _balancer_without_attention_dp(launch: Launch) -> str | None:
    if _section(launch, "moe_config").get("load_balancer") and not launch.config.get("enable_attention_dp"):
        return "moe_config.load_balancer without enable_attention_dp: no all-to-all is used, all ranks have all tokens"
    return None


@_rule("trtllm", "warning", "let ep_size be tp_size", TRTLLM_COMM)
def _moe_tp_without_all_to_all(launch: Launch) -> str | None:
    tp, ep = launch.number("tp-size", 1), launch.number("ep-size", 1)
    if launch.config.get("enable_attention_dp") and launch.is_stated("ep-size") and 1 < ep < tp:
        return (
            f"ep_size {ep} below tp_size {tp} slices experts: all-gather and reduce-scatter run instead of all-to-all"
        )
    return None
