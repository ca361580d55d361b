"""The same layer on four real processes over gloo: equal to transformers, equal to lockstep, and never hanging."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_mk.comm.lockstep import LockstepWorld
from moe_mk.flight import interleave
from moe_mk.kernels.native.toolchain import find_compiler
from moe_mk.lab.checkpoints import CheckpointShape, write_checkpoint
from moe_mk.lab.testing.cases import hostile_routings
from moe_mk.lab.testing.on_ranks import RankWorld
from moe_mk.layer import DeepseekV3MoE
from tests.layer import gloo_ranks
from tests.layer.conftest import Twin
from tests.support.formats import EXPERTS, TOP_K
from tests.support.tiers import slow
from tests.support.worlds import world_of

LIMIT = 1e-6
COUNTS = (0, 0, 7, 1)
SEVEN = ["attention", "attention all-reduce", "route", "dispatch", "experts", "combine", "late_reduce"]
DISPATCH = ["dispatch counts", "dispatch"]


world = world_of(4)


def tokens_of(twin: Twin, counts: tuple[int, ...] = COUNTS) -> list[Tensor]:
    return [part.clone() for part in twin.x_TH[: sum(counts)].split(list(counts))]


def forward(world: RankWorld, twin: Twin, inputs: list[Tensor], grid: str = "ep4", **settings: Any) -> list[Any]:
    settings = {"router_dtype": "float32", **settings}
    return world.call(gloo_ranks.layer_forward, str(twin.path), inputs, grid, 0, torch.float32, settings)


@pytest.mark.parametrize(
    "transport,weights,activations",
    [
        ("all_to_all", "fp32", "plain"),
        *slow(("all_to_all", "fp8_block", "checkpoint"), ("all_gather", "fp32", "plain")),
        *slow(("replicated", "fp8_block", "checkpoint")),
    ],
)
def test_processes_give_the_bits_that_lockstep_gives(
    world: RankWorld, transport: str, weights: str, activations: str
) -> None:
    ranks = world.call(gloo_ranks.hostile_cases, transport, weights, activations)
    form = gloo_ranks.form_of(weights, activations)
    for number, case in enumerate(hostile_routings(4, num_experts=EXPERTS, top_k=TOP_K)):
        comms = LockstepWorld(4).communicators()
        flights = [gloo_ranks.case_flight(r, comms[r], number, transport, form)[0] for r in range(4)]
        for rank, y_TH in enumerate(interleave(flights)):
            assert torch.equal(ranks[rank][case.name]["y"], y_TH), f"{case.name}, rank {rank}"
        hops = [tuple(ranks[rank][case.name]["hops"]) for rank in range(4)]
        assert len(set(hops)) == 1, f"{case.name}: {hops}"


@pytest.mark.row(24, 25, 26, 65, 78)
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_idle_ranks_make_the_same_hops_and_all_equal_transformers(world: RankWorld, twin: Twin, transport: str) -> None:
    tokens = tokens_of(twin)
    ranks = forward(world, twin, tokens, prepare_finalize=transport)
    for answer, x_TH in zip(ranks, tokens, strict=True):
        torch.testing.assert_close(answer["y"], twin.run(x_TH), atol=LIMIT, rtol=0)
        assert torch.equal(answer["again"], answer["y"])
        assert answer["hops"] == [*DISPATCH, "combine"] and answer["slots"] == 4
        assert set(answer["stages"]) >= {"route", "quantise", "dispatch", "shared", "experts", "combine"}
        assert answer["own"] == pytest.approx(answer["open"]), "the spans add up to the forward"


def test_two_layers_over_different_groups_and_backends_live_in_one_process(world: RankWorld, twin: Twin) -> None:
    tokens = tokens_of(twin, (2, 5, 0, 3))
    for rank, (wide, square, again) in enumerate(world.call(gloo_ranks.two_layers, str(twin.path), tokens, 0)):
        torch.testing.assert_close(wide, twin.run(tokens[rank]), atol=LIMIT, rtol=0)
        torch.testing.assert_close(square, twin.run(tokens[rank // 2]), atol=LIMIT, rtol=0)
        assert torch.equal(again, wide)


@pytest.mark.row(34)
def test_a_block_takes_seven_steps_on_two_by_two_ranks(world: RankWorld, tmp_path: Path) -> None:
    # Ranks 0 and 1 hold tokens 1 and 2, ranks 2 and 3 hold 3 and 4; 1 and 3 want expert 1, 2 and 4 expert 2.
    write_one_block_model(tmp_path)
    alone = gloo_ranks.walk(0, str(tmp_path), None)["found"]
    pairs = [found["pair"] for found in alone]
    for rank, answer in enumerate(world.call(gloo_ranks.walk, str(tmp_path), pairs)):
        expected = alone[rank // 2]
        assert [step for step in answer["steps"] if step in SEVEN] == SEVEN
        assert answer["ids"].tolist() == [[0], [1]] and answer["heads"] == 2
        # The sum of two slices is rounded to bf16 once more than that of one process.
        torch.testing.assert_close(answer["a"], expected["a"], atol=2**-5, rtol=2**-6)
        torch.testing.assert_close(answer["logits"], expected["logits"], atol=2**-3, rtol=2**-5)


def write_one_block_model(path: Path) -> None:
    """A DeepSeek-V3 of one block: latent attention of four heads, two FP8 experts of which a token takes one."""
    hidden, low, latent, nope, rope, heads = 256, 64, 32, 16, 8, 4
    shape = CheckpointShape(
        num_experts=2, hidden_size=hidden, intermediate_size=256, top_k=1, num_groups=1, top_k_groups=1,
        num_shared_experts=0, layers=(0,),
    )  # fmt: skip
    write_checkpoint(path, shape)
    facts = json.loads((path / "config.json").read_text()) | {
        "first_k_dense_replace": 0, "num_hidden_layers": 1, "num_attention_heads": heads, "kv_lora_rank": latent,
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(facts))
    prefix, vocabulary = "model.layers.0", gloo_ranks.VOCABULARY
    attention = {
        "q_a_proj": (low, hidden), "q_b_proj": (heads * (nope + rope), low),
        "kv_a_proj_with_mqa": (latent + rope, hidden), "kv_b_proj": (heads * 2 * nope, latent),
        "o_proj": (hidden, heads * nope),
    }  # fmt: skip
    matrices = {f"{prefix}.self_attn.{name}.weight": size for name, size in attention.items()}
    matrices |= {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    norms = {"self_attn.q_a_layernorm": low, "self_attn.kv_a_layernorm": latent, "input_layernorm": hidden}
    norms |= {"post_attention_layernorm": hidden}
    tensors = {name: torch.randn(size) / size[1] ** 0.5 for name, size in matrices.items()}
    tensors |= {f"{prefix}.{name}.weight": torch.ones(size) for name, size in norms.items()}
    tensors["model.norm.weight"] = torch.ones(hidden)
    save_file({name: value.to(torch.bfloat16) for name, value in tensors.items()}, path / "attention.safetensors")


@pytest.mark.row(28)
def test_pipeline_stages_of_expert_parallel_ranks_equal_one_process(world: RankWorld, twin: Twin) -> None:
    # Two micro-batches for each of two data-parallel ranks; one has no token in the second. Rank 2 d + s is stage s.
    batches = [list(twin.x_TH[:9].split([4, 5])), list(twin.x_TH[9:12].split([3, 0]))]
    ranks = world.call(gloo_ranks.pipeline, str(twin.path), batches)
    for place, mine in enumerate(batches):
        for number, x_TH in enumerate(mine):
            first_TH = x_TH + twin.run(x_TH)
            torch.testing.assert_close(ranks[2 * place][number], first_TH, atol=LIMIT, rtol=0)
            both_TH = first_TH + 2 * twin.run(first_TH)
            torch.testing.assert_close(ranks[2 * place + 1][number], both_TH, atol=10 * LIMIT, rtol=0)


@pytest.fixture(scope="module", params=[False, True], ids=["f32 scales", "UE8M0 scales"])
def wide_checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """Rows of DeepSeek-V3's 7168, experts of one block."""
    path = tmp_path_factory.mktemp("wide")
    shape = CheckpointShape(
        num_experts=8, hidden_size=7168, intermediate_size=128, top_k=2, num_groups=4, top_k_groups=2,
        num_shared_experts=0, power_of_two_scales=request.param,
    )  # fmt: skip
    write_checkpoint(path, shape)
    return path, request.param


@pytest.mark.row(51, 99)
@pytest.mark.parametrize("transport", ["all_to_all", *slow("all_gather")])
def test_fp8_rows_take_the_bytes_they_should(
    world: RankWorld, wide_checkpoint: tuple[Path, bool], transport: str
) -> None:
    # A row of 7168 bf16 values is 14336 B; in FP8 it is 7168 B and 56 scales: 7392 B with f32 ones, 7224 B with UE8M0.
    path, ue8m0 = wide_checkpoint
    tokens = [torch.randn(count, 7168).to(torch.bfloat16) for count in (0, 3, 5, 4)]
    fp8_row, bf16_row, ids_and_weights = 7224 if ue8m0 else 7392, 14336, 8 * 2
    assert {7392: 0.5156, 7224: 0.5039}[fp8_row] == round(fp8_row / bf16_row, 4)
    for wire, row in (("auto", fp8_row), ("fp8", fp8_row), ("plain", bf16_row)):
        settings = {"experts": "reference", "prepare_finalize": transport, "wire": wire, "activations": "checkpoint"}
        answers = world.call(gloo_ranks.layer_forward, str(path), tokens, "ep4", 3, torch.bfloat16, settings)
        for rank, answer in enumerate(answers):
            sent = rows_sent(rank, transport, answers, tokens)
            assert answer["ep_bytes"]["dispatch"] == 2 * sent * (row + ids_and_weights), "two forwards were counted"
            assert answer["ep_bytes"]["combine"] == 2 * rows_received(rank, transport, answers, tokens) * bf16_row


def rows_sent(rank: int, transport: str, answers: list[Any], tokens: list[Tensor]) -> int:
    """Each token once to every other rank that holds one of its experts; by all-gather to every other rank."""
    if transport == "all_gather":
        return 3 * len(tokens[rank])
    return sum(len({e // 2 for e in ids} - {rank}) for ids in answers[rank]["ids"].tolist())


def rows_received(rank: int, transport: str, answers: list[Any], tokens: list[Tensor]) -> int:
    """Rows whose sums return from here: those that came from others, or every token of every other rank."""
    others = [r for r in range(4) if r != rank]
    if transport == "all_gather":
        return sum(len(tokens[r]) for r in others)
    return sum(rank in {e // 2 for e in ids} for r in others for ids in answers[r]["ids"].tolist())


@pytest.mark.row(71, 72)
@pytest.mark.skipif(not find_compiler(shutil.which), reason="batch-invariant experts on a CPU need a C++ compiler")
def test_chunks_of_tensor_parallel_pairs_give_the_bits_of_whole_batches(world: RankWorld, tmp_path: Path) -> None:
    shape = CheckpointShape(
        num_experts=8, hidden_size=256, intermediate_size=128, top_k=2, num_groups=1, top_k_groups=1
    )  # fmt: skip
    write_checkpoint(tmp_path, shape)
    batches = [torch.randn(count, 256, generator=torch.Generator().manual_seed(count)).bfloat16() for count in (7, 1)]
    settings = {"prepare_finalize": "all_to_all", "activations": "plain"}
    alone = DeepseekV3MoE.from_checkpoint(
        tmp_path, layer=3, dtype=torch.float32, experts="reference", activations="plain"
    )
    ranks = world.call(gloo_ranks.with_and_without_chunks, str(tmp_path), batches, {**settings, "invariant": True})
    for rank, answer in enumerate(ranks):
        assert torch.equal(answer["chunked"], answer["whole"]), f"rank {rank}"
        exact_TH = alone(batches[rank // 2].float())
        assert float((answer["whole"].float() - exact_TH).norm() / exact_TH.norm()) < 2e-2, "rows of bf16"
    whole, both = sum(answer["computed"] for answer in ranks).tolist()
    assert (whole, both - whole) == (2 * 8 * 2, 8 * 2), "whole, a token is computed twice; in chunks, once"


@pytest.mark.row("N3")
def test_ranks_that_decided_differently_say_so_on_every_rank(world: RankWorld, twin: Twin) -> None:
    for rank, text in enumerate(world.call(gloo_ranks.disagree, str(twin.path), 0)):
        assert text.startswith(f"rank {rank}, phase 'agreement', layer 'layer 0'")
        assert "ranks decided differently" in text and "router:" in text
        assert text.count('"top_k": 4') == 3 and text.count('"top_k": 3') == 1
        assert '"top_k": 3' in text.splitlines()[3], "after the title, the name and rank 0"
