"""An inference engine in one file: a DeepSeek-V3 end to end over two ranks, text in, text out.

python examples/07_train_tiny.py build/tiny-ds3                                       # creates the model, once
python examples/05_nano_engine.py build/tiny-ds3 --prompt "def main(" --prompt "class "
torchrun --standalone --nproc-per-node 2 examples/05_nano_engine.py build/tiny-ds3 --prompt "import "
python examples/05_nano_engine.py build/tiny-ds3 --experts-memory 3.2e6    # a third; others are read

Around the layer it implements multi-head latent attention with its cache (in the absorbed form, so that the
cache holds one latent vector and one rotary key per token), continuous batching of prompts and single tokens in one
forward, greedy and sampled decoding. Attention is data parallel: each rank has its own requests. `NanoModel.load` also
takes a tensor-parallel group, whose ranks have the same requests and a part of the heads each. Experts are spread over
the ranks: every rank calls every layer in every step, with zero tokens too, until the last request of the last
rank is done. The experts stay FP8; bytes are the tokens.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

import moe_mk
from moe_mk.flight import wait
from moe_mk.quant.fp8 import FP8_128x128
from moe_mk.quant.tensor import QuantTensor
from moe_mk.trace.recorder import Spans

MOST_TOKENS, MOST_RUNNING = 1024, 16
"""Tokens and requests of one rank in one step: what the batch is filled up to."""
CPU = torch.device("cpu")


@dataclass
class Cache:
    """What attention remembers of one sequence: a latent vector and a rotary key a token and layer."""

    latent_SL: list[Tensor]
    rotary_SR: list[Tensor]

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self.latent_SL[0])


class NanoModel:
    """Weights, and one forward over packed tokens of many sequences. T: tokens, S: those of one sequence, A: heads."""

    def __init__(self, facts: dict[str, Any], tensors: dict[str, Tensor], moe: dict[int, moe_mk.DeepseekV3MoE]) -> None:
        self.facts, self.tensors, self.moe, self.spans = facts, tensors, moe, Spans()
        self.tp = next(iter(moe.values())).tp
        self.heads = facts["num_attention_heads"] // self.tp.size
        """Of this rank."""
        self.nope, self.rope = facts["qk_nope_head_dim"], facts["qk_rope_head_dim"]
        theta = facts.get("rope_theta") or facts["rope_parameters"]["rope_theta"]
        self.frequencies_R = theta ** -(torch.arange(0, self.rope, 2, dtype=torch.float64, device=CPU) / self.rope)

    @classmethod
    def load(
        cls,
        folder: Path,
        group: dist.ProcessGroup | None = None,
        tp: dist.ProcessGroup | None = None,
        experts_bytes: int | None = None,
    ) -> NanoModel:
        """Read everything but the experts as bf16, and give each layer of experts to the library.

        group: ranks with other requests and other experts. tp: ranks with the same requests, which share heads and
        slice experts. experts_bytes: memory for the experts of all layers and of all ranks of `group`; those that do
        not fit are read from `experts.store` in the folder, which is written at the first load.
        """
        facts = json.loads((folder / "config.json").read_text())
        config = moe_mk.MoEConfig.from_hf(folder).with_(max_num_tokens=MOST_TOKENS)
        pool = None
        if experts_bytes is not None:
            pool = moe_mk.ResidencyPool(experts_bytes // (1 if group is None else dist.get_world_size(group)))
            store = (folder / "experts.store").resolve()
            config = config.with_(experts="cpu_native", residency={"store": store})
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as shard:
                stored = set(shard.keys())
                for name in stored:
                    if "experts" in name or name.endswith("_scale_inv"):
                        continue
                    value, scales = shard.get_tensor(name), f"{name}_scale_inv"
                    if scales in stored:
                        value = QuantTensor(value, shard.get_tensor(scales), FP8_128x128).dequantize(torch.bfloat16)
                    tensors[name] = value
        moe = {}
        given = {"ep": group, "tp": tp}
        groups = moe_mk.ParallelGroups(**{name: each for name, each in given.items() if each is not None})
        for number in range(facts["first_k_dense_replace"], facts["num_hidden_layers"]):
            layer = moe_mk.DeepseekV3MoE(config, groups=groups, name=f"layer {number}", pool=pool)
            moe[number] = layer.load_from_safetensors(folder, layer=number)
        return cls(facts, tensors, moe)

    def new_cache(self) -> Cache:
        """The cache of a sequence that has not begun."""
        layers, rank = self.facts["num_hidden_layers"], self.facts["kv_lora_rank"]
        latent = [torch.empty((0, rank), dtype=torch.bfloat16, device=CPU) for _ in range(layers)]
        return Cache(latent, [torch.empty((0, self.rope), dtype=torch.bfloat16, device=CPU) for _ in range(layers)])

    def forward(self, parts: list[tuple[Cache, list[int]]]) -> Tensor:
        """Logits (T, V) of the new tokens of every sequence, one after the other; the caches take them in."""
        tokens_T = torch.tensor([token for _, new in parts for token in new], dtype=torch.int64, device=CPU)
        at = [torch.arange(cache.length, cache.length + len(new), device=CPU) for cache, new in parts]
        positions_T = torch.cat([torch.empty(0, dtype=torch.int64, device=CPU), *at])
        turns_TR = torch.polar(torch.ones((), dtype=torch.float64), positions_T[:, None] * self.frequencies_R)
        x_TH = self.tensors["model.embed_tokens.weight"][tokens_T]
        for number in range(self.facts["num_hidden_layers"]):
            prefix = f"model.layers.{number}"
            normed_TH = self._norm(x_TH, f"{prefix}.input_layernorm")
            with self.spans.span("attention"):
                part_TH = self._attend(normed_TH, number, parts, turns_TR)
            with self.spans.span("attention all-reduce"):
                x_TH = x_TH + wait(self.tp.all_reduce(part_TH, "attention"))
            normed_TH = self._norm(x_TH, f"{prefix}.post_attention_layernorm")
            x_TH = x_TH + (self.moe[number](normed_TH) if number in self.moe else self._mlp(normed_TH, prefix))
        return linear(self._norm(x_TH, "model.norm"), self.tensors["lm_head.weight"]).float()

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of whole sequences."""
        return torch.stack([self.forward([(self.new_cache(), row)]) for row in tokens_BT.tolist()])

    def _attend(self, x_TH: Tensor, number: int, parts: list[tuple[Cache, list[int]]], turns_TR: Tensor) -> Tensor:
        """Multi-head latent attention over the heads of this rank, a part of the sum of all TP ranks.

        Source: DeepSeek-V2 technical report, section 2.1 and appendix C.
        """
        prefix, heads, w = f"model.layers.{number}.self_attn", self.heads, self.tensors
        q_b_XQ, kv_b_XL, o_HX = (w[f"{prefix}.{name}_proj.weight"] for name in ("q_b", "kv_b", "o"))
        q_b_XQ, kv_b_XL = (each.chunk(self.tp.size)[self.tp.rank] for each in (q_b_XQ, kv_b_XL))
        o_HX = o_HX.chunk(self.tp.size, dim=1)[self.tp.rank]
        low_TQ = self._norm(linear(x_TH, w[f"{prefix}.q_a_proj.weight"]), f"{prefix}.q_a_layernorm")
        query_TAX = linear(low_TQ, q_b_XQ).view(len(x_TH), heads, -1).float()
        both_TX = linear(x_TH, w[f"{prefix}.kv_a_proj_with_mqa.weight"])
        latent_TL = self._norm(both_TX[:, : -self.rope], f"{prefix}.kv_a_layernorm")
        rotary_TR = turned(both_TX[:, -self.rope :].float(), turns_TR).to(torch.bfloat16)
        # What turns a latent into keys and values is applied to queries and sums instead: nothing is unpacked.
        up_AXL = kv_b_XL.view(heads, -1, latent_TL.shape[1]).float()
        key_ANL, value_AVL = up_AXL[:, : self.nope], up_AXL[:, self.nope :]
        query_TAL = torch.einsum("tan,anl->tal", query_TAX[..., : self.nope], key_ANL)
        query_TAR = turned(query_TAX[..., self.nope :], turns_TR[:, None])
        sums, start = [torch.empty((0, heads, latent_TL.shape[1]), dtype=torch.float32, device=CPU)], 0
        for cache, new in parts:
            mine = slice(start, start := start + len(new))
            cache.latent_SL[number] = torch.cat((cache.latent_SL[number], latent_TL[mine]))
            cache.rotary_SR[number] = torch.cat((cache.rotary_SR[number], rotary_TR[mine]))
            latent_SL, rotary_SR = cache.latent_SL[number].float(), cache.rotary_SR[number].float()
            scores_ATS = torch.einsum("tal,sl->ats", query_TAL[mine], latent_SL)
            scores_ATS += torch.einsum("tar,sr->ats", query_TAR[mine], rotary_SR)
            every_TS = torch.ones(scores_ATS.shape[1:], dtype=torch.bool, device=CPU)
            later_TS = every_TS.triu(len(latent_SL) - len(new) + 1)
            scores_ATS = (scores_ATS * (self.nope + self.rope) ** -0.5).masked_fill(later_TS, -torch.inf)
            sums.append(torch.einsum("ats,sl->tal", scores_ATS.softmax(-1), latent_SL))
        values_TAV = torch.einsum("tal,avl->tav", torch.cat(sums), value_AVL)
        return linear(values_TAV.flatten(1).to(torch.bfloat16), o_HX)

    def _mlp(self, x_TH: Tensor, prefix: str) -> Tensor:
        gate, up, down = (self.tensors[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return linear(silu(linear(x_TH, gate)) * linear(x_TH, up), down)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], self.facts["rms_norm_eps"])


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: neighbours are the two sides of a complex number, as DeepSeek stores them."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2).float()


@dataclass
class Request:
    """One text to go on with."""

    prompt: bytes
    most_new: int
    temperature: float = 0.0
    seed: int = 0
    written: list[int] = field(default_factory=list)
    cache: Cache | None = None

    def check(self) -> None:
        """Raise ValueError for what could never run."""
        if not 0 < len(self.prompt) <= MOST_TOKENS - MOST_RUNNING:
            raise ValueError(f"a prompt has 1 to {MOST_TOKENS - MOST_RUNNING} bytes, not {len(self.prompt)}")
        if self.most_new < 1 or not 0 <= self.temperature < float("inf"):
            raise ValueError(f"{self.most_new} new bytes at temperature {self.temperature}: at least 1, at least 0")

    def choose(self, logits_V: Tensor) -> None:
        """Take the likeliest byte, or draw one; draws depend on the seed and the place alone, not on batch-mates."""
        if self.temperature == 0:
            self.written.append(int(logits_V.argmax()))
            return
        draw = torch.Generator(CPU).manual_seed(self.seed * 1_000_003 + len(self.written))
        self.written.append(int(torch.multinomial((logits_V / self.temperature).softmax(-1), 1, generator=draw)))


class Engine:
    """Continuous batching: what runs brings one token, what waits brings its prompt when there is room."""

    def __init__(self, model: NanoModel) -> None:
        self.model = model
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps = self.tokens = 0

    def submit(self, request: Request) -> None:
        """Queue a request; refuses what could never run."""
        request.check()
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.waiting or self.running)

    def step(self) -> None:
        """One forward for everybody that runs, and for those that still fit; one new byte for each."""
        room = MOST_TOKENS - len(self.running)
        while self.waiting and len(self.running) < MOST_RUNNING and len(self.waiting[0].prompt) <= room:
            room -= len(self.waiting[0].prompt)
            self.running.append(self.waiting.pop(0))
        parts = []
        for request in self.running:
            if request.cache is None:
                request.cache = self.model.new_cache()
                parts.append((request.cache, list(request.prompt)))
            else:
                parts.append((request.cache, request.written[-1:]))
        logits_TV, last = self.model.forward(parts), -1
        for request, (_, new) in zip(self.running, parts, strict=True):
            last += len(new)
            request.choose(logits_TV[last])
        self.steps, self.tokens = self.steps + 1, self.tokens + len(logits_TV)
        self.running = [request for request in self.running if len(request.written) < request.most_new]


def serve(
    folder: Path, requests: list[Request], group: dist.ProcessGroup | None, experts_bytes: int | None = None
) -> tuple[dict[int, str], Engine]:
    """This rank's share of the requests, by number; ends when all ranks are done."""
    rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    for request in requests:  # of other ranks too: who refuses alone leaves the others waiting
        request.check()
    engine = Engine(NanoModel.load(folder, group, experts_bytes=experts_bytes))
    mine = {number: request for number, request in enumerate(requests) if number % ranks == rank}
    for request in mine.values():
        engine.submit(request)
    with torch.no_grad():
        while True:
            left = torch.tensor([int(engine.busy)], dtype=torch.int64, device=CPU)
            if group is not None:
                dist.all_reduce(left, group=group)
            if not int(left):
                break
            engine.step()
    return {number: bytes(request.written).decode(errors="replace") for number, request in mine.items()}, engine


def requests_of(asked: argparse.Namespace) -> list[Request]:
    """A request for each prompt."""
    return [Request(prompt.encode(), asked.new, asked.temperature, at) for at, prompt in enumerate(asked.prompt)]


def run_rank(asked: argparse.Namespace) -> None:
    """One rank, in a default group if there is one; the first prints what all have written."""
    group = dist.group.WORLD if dist.is_initialized() else None
    start = time.perf_counter()
    texts, engine = serve(asked.folder, requests_of(asked), group, asked.experts_memory)
    seconds = time.perf_counter() - start
    everything: list[Any] = [texts]
    if group is not None:
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, texts)
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    written = {number: text for part in everything for number, text in part.items()}
    for number, prompt in enumerate(asked.prompt):
        print(f"--- {number}\n{prompt}{written[number]}")
    layer = next(iter(engine.model.moe.values()))
    how = f"{engine.steps} steps, {engine.tokens} tokens on rank 0; experts by {layer.decision.chosen.name}"
    print(f"--- {len(asked.prompt)} requests on {len(everything)} ranks, {seconds:.1f} s\n{how}")
    found = [each.report().residency for each in engine.model.moe.values()]
    if counts := [each for each in found if each is not None]:
        uses, hits, read = (sum(getattr(each, name) for each in counts) for name in ("uses", "hits", "read_bytes"))
        slots, experts = (sum(getattr(each, name) for each in counts) for name in ("slots", "experts"))
        print(
            f"memory for {slots} of the {experts} experts of rank 0, {[each.slots for each in counts]} a layer: "
            f"{hits} of {uses} were there when it needed them, {read / 1e6:.1f} MB read"
        )


def spawned(rank: int, asked: argparse.Namespace, meeting: str) -> None:
    """One rank that this script started itself."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // asked.ranks))
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=asked.ranks, timeout=timedelta(seconds=60)
    )
    try:
        run_rank(asked)
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Be one rank under torchrun, else start all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", action="append", default=[], help="again for more")
    parser.add_argument("--new", type=int, default=64, help="bytes to write for each prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--experts-memory", type=lambda text: int(float(text)), metavar="BYTES", help="for experts of all layers, ranks"
    )
    asked = parser.parse_args()
    asked.prompt = asked.prompt or ["def ", "class ", "import ", "    return "]
    if not (asked.folder / "config.json").is_file():
        parser.error(f"{asked.folder} holds no model; make one: python examples/07_train_tiny.py {asked.folder}")
    experts = json.loads((asked.folder / "config.json").read_text())["n_routed_experts"]
    if asked.ranks < 1 or experts % asked.ranks:
        parser.error(f"--ranks {asked.ranks} does not divide {experts} experts")
    try:
        for request in requests_of(asked):
            request.check()
    except ValueError as problem:
        parser.error(str(problem))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        run_rank(asked)
        dist.destroy_process_group()
        return
    if asked.ranks == 1:
        run_rank(asked)
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        ranks = [spawn.Process(target=spawned, args=(rank, asked, meeting)) for rank in range(asked.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"ranks ended with {[process.exitcode for process in ranks]}")


if __name__ == "__main__":
    main()
