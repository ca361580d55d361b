"""Bugs of other projects, rebuilt from their public descriptions in the small engine, are found and placed.

What a description leaves open was chosen, and stands in the docstring of its class.
"""

import pytest
import torch

from moe_mk.lab.judge.verdict import dependences, judge
from tests.support.small_engine import E4M3, Layer


class PerSixtyFour(Layer):
    """Hidden rows are quantised in groups of 64 columns, and the second product reads scales of groups of 128."""

    def rounded(self, row):
        if len(row) != self.inner:
            return super().rounded(row)
        groups = row.float().view(-1, 64)
        scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
        read = scale[: len(scale) // 2].repeat_interleave(2, 0)
        return ((groups / scale).to(E4M3).float() * read).flatten()


class StaleBuffer(Layer):
    """Experts are computed before their copy into one of two buffers ends: with what was there, the last but one."""

    def slot(self, e, fault):
        return e - 2 if e >= 2 else e


class SlicedScales(Layer):
    """Right with one rank and wrong with four: every slice of w2 has the scales of the first one."""

    part = 0

    def expert(self, row, e, slice_, *rest):
        self.part = slice_ or 0
        return super().expert(row, e, slice_, *rest)

    def decode(self, stored, e, fault="", which="w13"):
        if which == "w2" and self.part:
            scale = stored["scale"]
            wide = scale.shape[2] // self.tp
            stored = stored | {"scale": scale[:, :, :wide].repeat(1, 1, self.tp)}
        return super().decode(stored, e, fault, which)


class Tiles(Layer):
    """The first product is right, the activation is not in every second tile of 16 columns: it has its neighbour's."""

    def act(self, g, u, fault):
        tiles = super().act(g, u, fault).unflatten(-1, (-1, 2, 16)).clone()
        tiles[..., 1, :] = tiles[..., 0, :]
        return tiles.flatten(-3)


class QuarterLost(Layer):
    """The kernel of the first product for up to 4 tokens divides columns among four parts, of which one is lost."""

    def rounded(self, row):
        row = super().rounded(row)
        if len(row) == self.hidden:
            row[self.hidden // 2 : 3 * self.hidden // 4] = 0.0
        return row


class HalfLost(Layer):
    """The second product is the sum of two halves, of which one is lost for some tokens."""

    token = 0

    def expert(self, row, e, slice_, seen, at, fault):
        self.token = at[0]
        return super().expert(row, e, slice_, seen, at, fault)

    def rounded(self, row):
        row = super().rounded(row).clone()
        if len(row) == self.inner and self.token % 3 == 0:
            row[self.inner // 2 :] = 0.0
        return row


class ByCount(Layer):
    """Batch invariance is promised, and another kernel, which multiplies by weights in f32, is chosen for one token."""

    def route(self, fault):
        x, parts = self.x, []
        for row in x:
            self.x = row[None]
            parts.append(super().route(fault))
        self.x = x
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def weight(self, w, fault):
        return w if self.tokens == 1 else super().weight(w, fault)


class ScaledShared(Layer):
    """Shared experts are divided by the routed scaling factor, which is then not multiplied."""

    def shared_output(self):
        return (super().shared_output().float() / self.factor).to(self.dtype)


class UnweighedBias(Layer):
    """The bias of the second product is added after the multiplication with routing weights."""

    def forward(self, fault=""):
        y, seen = super().forward(fault)
        left = (1.0 - seen["topk_weights"])[..., None] * self.b2[seen["topk_ids"]].float()
        return (y.float() + left.sum(1)).to(self.dtype), seen


def by_count(*counts):
    """Calls with the first tokens of one layer."""
    layers = [ByCount(seed=36, tokens=max(counts)) for _ in counts]
    for layer, count in zip(layers, counts, strict=True):
        layer.tokens, layer.x = count, layer.x[:count]
    return [layer.case() for layer in layers]


OAI = {"activation": "swiglu_oai", "limit": 2.0, "scoring": "softmax", "bias": False, "factor": 1.0}
WIDE = {"hidden": 256, "inner": 384}
BUGS = {
    "deepseek-ai/DeepGEMM#360": (lambda: PerSixtyFour(**WIDE, kind="fp8_block", quantised_rows=True, seed=31).case(),
                                 "w2", {"group of another size"}),
    "kvcache-ai/ktransformers#1816": (lambda: StaleBuffer(kind="int4_g32", seed=32).case(), "w13",
                                      {"stale weight", "experts shifted"}),
    "kvcache-ai/ktransformers#2076": (lambda: SlicedScales(kind="int4_g32", tp=4, seed=33).case(), "w2",
                                      {"scale of another TP slice"}),
    "Dao-AILab/sonic-moe#63": (lambda: Tiles(seed=34).case(record=("w13_out", "act_out")), "activation", set()),
    "ROCm/aiter#3933": (lambda: QuarterLost(**WIDE, kind="mxfp4", tokens=4, seed=35).case(), "w13",
                        {"K block skipped"}),
    "vllm-project/vllm#57016": (lambda: by_count(8, 1), "shared", {"count of tokens"}),
    "NVIDIA/TensorRT-LLM#17105": (lambda: HalfLost(**WIDE, **OAI, kind="mxfp4", seed=37).case(), "w2",
                                  {"K block skipped"}),
    "sgl-project/sglang#28237": (lambda: ScaledShared(kind="fp8_block", shared=True, seed=38).case(), "shared",
                                 {"routed scaling of shared experts"}),
    "sgl-project/sglang#31475": (lambda: Layer(kind="fp8_block", shared=True, ep=4, seed=39).case(
        "shared experts per rank"), "shared", {"shared experts per rank"}),
    "MetaX-MACA/vLLM-metax#270": (lambda: Layer(experts=128, top_k=8, inner=64, hidden=128, tokens=4, factor=1.0,
                                                scoring="softmax", seed=40).case("bias in the weights"), "weights",
                                  {"bias in the weights"}),
    "vllm-project/vllm#29273": (lambda: Layer(**OAI, expert_bias=True, seed=41).case(order="interleaved"), "w13",
                                {"concatenated for interleaved"}),
    "NVIDIA-NeMo/Automodel#2591": (lambda: UnweighedBias(**OAI, expert_bias=True, seed=42).case(), "weigh-and-sum",
                                   {"expert bias not weighed"}),
}  # fmt: skip
"""What makes the case, the stage, and names that fit; of vLLM's, two calls that must be equal."""


def found(bug):
    """(wrong, at the right stage, by a name that fits, the verdict)."""
    make, stage, names = BUGS[bug]
    case, *others = made if isinstance(made := make(), list) else [made]
    if others:
        (depends, *_) = dependences([case, *others])
        stated = [(each.stage, each.law) for each in depends] or [("", "equal")]
        return bool(depends), stated[0][0] == stage, stated[0][1] in names, f"{stated[0][0]}: {stated[0][1]}"
    verdict = judge(case.checked())
    where = verdict.stage or "one of " + ", ".join(verdict.span)
    return not verdict.right, verdict.stage == stage, verdict.fault in names, f"{where}: {verdict.fault}"


UNNAMED = ("Dao-AILab/sonic-moe#63",)
"""Placed by what was recorded of stages, but by no name."""


@pytest.mark.row(175)
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_of_another_project_is_found_and_placed(bug):
    *outcome, stated = found(bug)
    assert outcome == [True, True, bug not in UNNAMED], stated
