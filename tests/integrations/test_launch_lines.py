"""Launch lines of public documentation, a line that breaks each rule and one that keeps it, and how lines are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moe_mk.cli import app
from moe_mk.errors import ConfigError
from moe_mk.integrations.launch_lines import ENGINES, read_launches
from moe_mk.integrations.launch_rules import RULES, lint, lint_together

VLLM, SGLANG, TRTLLM = "vllm serve M ", "python -m sglang.launch_server --model-path M ", "trtllm-serve M "
EP = "--enable-expert-parallel --data-parallel-size 8 "
DEEPEP = "--tp-size 8 --moe-a2a-backend deepep "


def found(text: str) -> list[str]:
    launches = read_launches(text)
    return [each.rule for launch in launches for each in lint(launch)] + [each.rule for each in lint_together(launches)]


def yaml(text: str) -> str:
    return f"cat <<EOF > c.yml\n{text}\nEOF\n{TRTLLM}--tp_size 8 --ep_size 8 --config c.yml"


# Where it was published, the line, and what is found. Comments and continuations are as published.
PUBLISHED = [
    (
        "https://github.com/vllm-project/vllm/blob/main/docs/serving/expert_parallel_deployment.md",
        """VLLM_ALL2ALL_BACKEND=pplx VLLM_USE_DEEP_GEMM=1 \\
    vllm serve deepseek-ai/DeepSeek-V3-0324 \\
    --tensor-parallel-size 1 \\      # Tensor parallelism across 1 GPU
    --data-parallel-size 8 \\         # Data parallelism across 8 processes
    --enable-expert-parallel         # Enable expert parallelism""",
        ["removed-backend"],
    ),
    (
        "https://github.com/vllm-project/vllm/blob/main/docs/serving/expert_parallel_deployment.md",
        """vllm serve Qwen/Qwen3-30B-A3B \\
  --enable-eplb \\
  --eplb-config '{"window_size":1000,"step_interval":3000,"num_redundant_experts":2,"log_balancedness":true}'""",
        ["eplb-without-ep", "eplb-on-one-rank"],
    ),
    (
        "https://github.com/vllm-project/vllm/blob/main/docs/serving/expert_parallel_deployment.md",
        """VLLM_ALL2ALL_BACKEND=deepep_low_latency VLLM_USE_DEEP_GEMM=1 \\
    vllm serve deepseek-ai/DeepSeek-V3-0324 --tensor-parallel-size 1 --enable-expert-parallel \\
    --data-parallel-size 16 --data-parallel-size-local 8 --data-parallel-address 192.168.1.100 \\
    --data-parallel-rpc-port 13345 --api-server-count=8
VLLM_ALL2ALL_BACKEND=deepep_low_latency VLLM_USE_DEEP_GEMM=1 \\
    vllm serve deepseek-ai/DeepSeek-V3-0324 --tensor-parallel-size 1 --enable-expert-parallel \\
    --data-parallel-size 16 --data-parallel-size-local 8 --data-parallel-start-rank 8 \\
    --data-parallel-address 192.168.1.100 --data-parallel-rpc-port 13345 --headless""",
        [],
    ),
    (
        "https://docs.sglang.io/advanced_features/expert_parallelism.html",
        "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --moe-a2a-backend deepep "
        "--moe-runner-backend deep_gemm --tp 8 --ep 8",
        [],
    ),
    (
        # The line before a correction of the model card, and the corrected one.
        "https://huggingface.co/deepseek-ai/DeepSeek-V3.2-Exp/commit/fd33dda13987c4ec2bd43d7d4318046a4f220ca9",
        "python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3.2-Exp --tp 8 --dp 8 --page-size 64",
        ["replicas-instead-of-dp-attention"],
    ),
    (
        "https://huggingface.co/deepseek-ai/DeepSeek-V3.2-Exp/commit/fd33dda13987c4ec2bd43d7d4318046a4f220ca9",
        "python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3.2-Exp --tp 8 --dp 8 --enable-dp-attention",
        [],
    ),
    (
        "https://gist.github.com/FirwoodLin",
        'VLLM_USE_DEEP_GEMM=0 GLOO_SOCKET_IFNAME=bond0 vllm serve "/models/Qwen3-235B" -dp 32 '
        "--data-parallel-size-local 8 --data-parallel-backend=ray --max-num-seqs 64 --enable-expert-parallel "
        "--no-enable-prefix-caching --distributed-executor-backend ray --load-format dummy "
        "--all2all-backend deepep_low_latency 2>&1 | tee /docker_mnt/vllm.log",
        [],
    ),
    (
        "https://nvidia.github.io/TensorRT-LLM/deployment-guide/deployment-guide-for-deepseek-r1-on-trtllm.html",
        """EXTRA_LLM_API_FILE=/tmp/config.yml
cat << EOF > ${EXTRA_LLM_API_FILE}
enable_attention_dp: true
moe_config:
  backend: DEEPGEMM
  max_num_tokens: 3200
EOF
trtllm-serve deepseek-ai/DeepSeek-R1-0528 --max_batch_size 1024 --max_num_tokens 3200 --max_seq_len 2048 \\
    --tp_size 8 --ep_size 8 --trust_remote_code --extra_llm_api_options ${EXTRA_LLM_API_FILE}""",
        [],
    ),
]


@pytest.mark.row("N25")
@pytest.mark.parametrize("source, text, rules", PUBLISHED)
def test_published_launch_lines(source: str, text: str, rules: list[str]) -> None:
    assert found(text) == rules, source


# A line that breaks each rule, and the nearest that does not.
RULE_BY_RULE = {
    "eplb-without-ep": (VLLM + "--enable-eplb -dp 8", VLLM + "--enable-eplb -dp 8 --enable-expert-parallel"),
    "eplb-on-one-rank": (VLLM + "--enable-eplb --enable-expert-parallel", VLLM + EP + "--enable-eplb"),
    "redundant-experts-without-eplb": (
        VLLM + EP + "--eplb-config.num_redundant_experts 32",
        VLLM + EP + "--enable-eplb --eplb-config.num_redundant_experts 32",
    ),
    "round-robin-with-eplb": (
        VLLM + EP + "--enable-eplb --all2all-backend deepep_low_latency --expert-placement-strategy round_robin",
        VLLM + EP + "--all2all-backend deepep_low_latency --expert-placement-strategy round_robin",
    ),
    "round-robin-without-routing-tables": (
        VLLM + EP + "--all2all-backend deepep_high_throughput --expert-placement-strategy round_robin",
        VLLM + EP + "--all2all-backend nixl_ep --expert-placement-strategy round_robin",
    ),
    "removed-backend": (VLLM + EP + "--all2all-backend naive", VLLM + EP + "--all2all-backend nixl_ep"),
    "backend-without-ep": (
        VLLM + "-dp 8 --all2all-backend deepep_v2",
        VLLM + EP + "--all2all-backend deepep_v2",
    ),
    "backend-without-data-parallel": (
        VLLM + "-tp 8 --enable-expert-parallel --all2all-backend deepep_low_latency",
        VLLM + EP + "--all2all-backend deepep_low_latency",
    ),
    "more-local-ranks-than-ranks": (
        VLLM + EP + "--data-parallel-size-local 16", VLLM + EP + "--data-parallel-size-local 8"
    ),
    "overlap-without-deepep": (
        VLLM + EP + "--enable-dbo", VLLM + EP + "--enable-dbo --all2all-backend=deepep_low_latency"
    ),
    "low-latency-on-prefill": (
        VLLM + EP + "--all2all-backend deepep_low_latency --kv-transfer-config '{\"kv_role\":\"kv_producer\"}'",
        VLLM + EP + "--all2all-backend deepep_low_latency --kv-transfer-config '{\"kv_role\":\"kv_both\"}'",
    ),
    "high-throughput-on-decode": (
        VLLM + EP + "--all2all-backend deepep_high_throughput --kv-transfer-config '{\"kv_role\":\"kv_consumer\"}'",
        VLLM + EP + "--all2all-backend deepep_low_latency --kv-transfer-config '{\"kv_role\":\"kv_consumer\"}'",
    ),
    "asynchronous-eplb-over-nccl": (
        VLLM + EP + "--enable-eplb --eplb-config '{\"communicator\":\"pynccl\"}'",
        VLLM + EP + "--enable-eplb --eplb-config '{\"communicator\":\"pynccl\",\"use_async\":false}'",
    ),
    "elastic-ep-without-eplb": (VLLM + EP + "--enable-elastic-ep", VLLM + EP + "--enable-elastic-ep --enable-eplb"),
    "ep-size-is-overridden": (SGLANG + DEEPEP + "--ep-size 4", SGLANG + DEEPEP + "--ep-size 8"),
    "normal-mode-without-graphs": (
        SGLANG + DEEPEP + "--deepep-mode normal",
        SGLANG + DEEPEP + "--deepep-mode normal --disaggregation-mode prefill",
    ),
    "low-latency-with-prefill": (
        SGLANG + DEEPEP + "--deepep-mode low_latency --chunked-prefill-size 4096",
        "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=512 NVSHMEM_QP_DEPTH=2048 "
        + SGLANG + DEEPEP + "--deepep-mode low_latency --chunked-prefill-size 4096 --dp-size 8 --enable-dp-attention",
    ),
    "decode-batch-above-the-cap": (
        SGLANG + DEEPEP + "--dp-size 8 --enable-dp-attention --max-running-requests 2048",
        SGLANG + DEEPEP + "--dp-size 8 --enable-dp-attention --max-running-requests 1024",
    ),
    "cap-above-the-protocol": (
        "NVSHMEM_QP_DEPTH=8192 SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=2048 " + SGLANG + DEEPEP,
        "NVSHMEM_QP_DEPTH=8192 SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=1024 " + SGLANG + DEEPEP,
    ),
    "queues-too-short": (
        "export SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=512\n" + SGLANG + DEEPEP,
        "export SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=511\n" + SGLANG + DEEPEP,
    ),
    "deepep-mode-without-deepep": (SGLANG + "--tp-size 8 --deepep-mode auto", SGLANG + DEEPEP + "--deepep-mode auto"),
    "removed-deepep-flag": (SGLANG + "--tp-size 8 --enable-deepep-moe", SGLANG + DEEPEP),
    "dp-head-without-dp-attention": (
        SGLANG + DEEPEP + "--enable-dp-lm-head", SGLANG + DEEPEP + "--enable-dp-lm-head --enable-dp-attention"
    ),
    "replicas-instead-of-dp-attention": (
        SGLANG + DEEPEP + "--dp-size 8", SGLANG + DEEPEP + "--dp-size 8 --enable-dp-attention"
    ),
    "moe-grid-is-not-tp": (TRTLLM + "--tp_size 8 --ep_size 3", TRTLLM + "--tp_size 8 --ep_size 4"),
    "unknown-moe-backend": (yaml("moe_config:\n  backend: WIDEEP"), yaml("moe_config:\n  backend: CUTLASS")),
    "balancer-without-attention-dp": (
        yaml("moe_config:\n  load_balancer: balancer.yaml"),
        yaml("enable_attention_dp: true\nmoe_config:\n  load_balancer: balancer.yaml"),
    ),
    "moe-tp-without-all-to-all": (
        yaml("enable_attention_dp: true").replace("--ep_size 8", "--ep_size 4"), yaml("enable_attention_dp: true")
    ),
}  # fmt: skip


@pytest.mark.row("N25")
def test_every_rule_has_a_line_and_a_source() -> None:
    assert {rule.name for rule in RULES} == set(RULE_BY_RULE)
    assert {rule.engine for rule in RULES} == set(ENGINES)
    assert all(rule.source.startswith("https://") and rule.fix for rule in RULES)


@pytest.mark.parametrize("rule", RULE_BY_RULE)
def test_a_rule_finds_its_pitfall_and_nothing_beside_it(rule: str) -> None:
    broken, kept = RULE_BY_RULE[rule]
    assert rule in found(broken)
    assert rule not in found(kept) and not found(kept), "the nearest line without it has no other pitfall"


def test_launch_lines_of_one_deployment_must_agree() -> None:
    node = VLLM + EP + "--data-parallel-address 10.0.0.1 --all2all-backend "
    assert found(node + "deepep_low_latency\n" + node + "deepep_low_latency --headless") == []
    text = node + "deepep_low_latency\n" + node + "nixl_ep --headless"
    (finding,) = lint_together(read_launches(text))
    assert finding.rule == "ranks-disagree" and "line 1: deepep_low_latency, line 2: nixl_ep" in finding.text
    other = text.replace("10.0.0.1", "10.0.0.2", 1)
    assert lint_together(read_launches(other)) == [], "two deployments may differ"


def test_how_lines_are_read() -> None:
    text = (
        "pip install vllm && cd /x  # vllm serve in a comment --enable-eplb\n"
        "export NVSHMEM_QP_DEPTH=4096 OTHER='a b'\n\n"
        "nohup A=1 vllm serve M -tp 2 \\\n  --no-enable-eplb --data_parallel_size=$DP --max-num-seqs 64 | tee log\n"
    )
    (launch,) = read_launches(text)
    assert launch.engine == "vllm" and launch.line == 4
    assert launch.options["tensor-parallel-size"] == "2" and not launch.has("enable-eplb")
    assert launch.number("data-parallel-size", 7) == 7 and not launch.is_stated("data-parallel-size")
    assert launch.environment["NVSHMEM_QP_DEPTH"] == "4096"
    assert read_launches("echo hello\nls -l") == []
    with pytest.raises(ConfigError, match="line 1: No closing quotation"):
        read_launches("vllm serve 'M")


def test_the_command_ends_with_1_for_errors_only(tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(VLLM + "--enable-eplb -dp 8\n", encoding="utf-8")
    result = CliRunner().invoke(app, ["lint", str(file)])
    assert result.exit_code == 1 and "line 1, eplb-without-ep" in result.stdout and "parallel.py" in result.stdout
    file.write_text(VLLM + EP + "--all2all-backend pplx\n", encoding="utf-8")
    warned = CliRunner().invoke(app, ["lint", str(file), "--json"])
    assert warned.exit_code == 0 and json.loads(warned.stdout)["findings"][0]["rule"] == "removed-backend"
    assert CliRunner().invoke(app, ["lint", "--rules"]).stdout.count("https://") == len(RULES)
    for words, text in ((["lint"], "name a script"), (["lint", str(tmp_path / "no")], "cannot be read")):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2 and text in refused.stderr
    file.write_text("ls\n", encoding="utf-8")
    assert "holds no launch line" in CliRunner().invoke(app, ["lint", str(file)]).stderr
