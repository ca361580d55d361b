"""How accurate each type of experts is: one layer, every backend, against the same layer in f32 before quantising.

The table of docs/quantisation.md; see pages.py.
"""

import math
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_mk.config import device_profile, load_config
from moe_mk.config.problem import Problem
from moe_mk.config.quant import QuantConfig
from moe_mk.experts import EXPERTS
from moe_mk.experts.base import ExpertsContext
from moe_mk.external.library import COMPILER
from moe_mk.permute import permute, weight_and_reduce
from moe_mk.quant import BF16, FP32, QuantScheme
from moe_mk.tokens import OutputStage, RowTokens
from moe_mk.weights.expert_weights import ExpertWeights
from tools.pages import filled, markdown

ROOT, PAGE = Path(__file__).resolve().parent.parent, "docs/quantisation.md"
EXPERTS_IN_LAYER, HIDDEN, INNER, TOKENS, TOP_K = 4, 1024, 512, 64, 2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One way to store the experts, and what activations are rounded to."""

    title: str
    quant: dict[str, object]
    rounds: bool

    @property
    def settings(self) -> QuantConfig:
        return QuantConfig.parse(self.quant, self.title)


CASES = [
    Case("bf16", {"weights": "bf16"}, False),
    Case("fp8 128x128, W8A16", {"weights": "fp8_block"}, False),
    Case("fp8 128x128, W8A8 1x128", {"weights": "fp8_block"}, True),
    Case("fp8 128x128 UE8M0, W8A8 1x128", {"weights": "fp8_block", "scale": "ue8m0"}, True),
    Case("fp8 channel, W8A8 token", {"weights": "fp8_channel"}, True),
    Case("fp8 tensor, W8A8 token", {"weights": "fp8_tensor"}, True),
    Case("int8 channel, W8A16", {"weights": "int8"}, False),
    Case("int8 channel, W8A8 token", {"weights": "int8"}, True),
    Case("int8 128x128, W8A8 token", {"weights": "int8_block"}, True),
    Case("mxfp8, W8A16", {"weights": "mxfp8"}, False),
    Case("mxfp8, W8A8", {"weights": "mxfp8"}, True),
    Case("mxfp4, W4A16", {"weights": "mxfp4"}, False),
    Case("mxfp4, W4A8 mxfp8", {"weights": "mxfp4", "activations": "mxfp8"}, True),
    Case("mxfp4, W4A8 1x128", {"weights": "mxfp4", "activations": "fp8"}, True),
    Case("nvfp4, W4A16", {"weights": "nvfp4"}, False),
    Case("nvfp4, W4A4", {"weights": "nvfp4"}, True),
]
BACKENDS = ("reference", "torch_cpu", "cpu_native")


def layer_weights(scheme: QuantScheme) -> ExpertWeights:
    """The same normals in every scheme."""
    draw = torch.Generator("cpu").manual_seed(11)

    def normal(rows: int, columns: int, gain: float) -> Tensor:
        shape = (EXPERTS_IN_LAYER, rows, columns)
        drawn: Tensor = torch.randn(shape, generator=draw, dtype=torch.float32, device=CPU)
        return drawn * (gain / math.sqrt(columns))

    w13, w2 = normal(2 * INNER, HIDDEN, 1.7), normal(HIDDEN, INNER, 0.9)
    return ExpertWeights(scheme.quantize(w13), scheme.quantize(w2))


def rows() -> RowTokens:
    """Normal tokens, each at two experts."""
    draw = torch.Generator("cpu").manual_seed(3)
    x_RH = torch.randn((TOKENS, HIDDEN), generator=draw, dtype=torch.float32, device=CPU).to(torch.bfloat16)
    ids_RK = torch.stack([torch.randperm(EXPERTS_IN_LAYER, generator=draw, device=CPU)[:TOP_K] for _ in range(TOKENS)])
    weights_RK = torch.rand((TOKENS, TOP_K), generator=draw, dtype=torch.float32, device=CPU) + 0.1
    return RowTokens(BF16.quantize(x_RH), ids_RK.to(torch.int32), weights_RK, EXPERTS_IN_LAYER)


def output(backend: str, weights: ExpertWeights, compute: QuantScheme, *, exact: bool = False) -> Tensor:
    """What a backend makes of the tokens; exact: in f32 throughout."""
    dtype = FP32 if exact else BF16
    context = ExpertsContext(dtype, compute, "silu", EXPERTS_IN_LAYER, HIDDEN, INNER, CPU)
    experts = EXPERTS[backend](context)
    tokens = permute(rows(), experts.traits.consumes)
    made = experts.run(tokens, experts.relayout(weights))
    return weight_and_reduce(made, tokens, OutputStage.REDUCED).y.double()


def table() -> str:
    """The table as markdown: relative L2 distance of the output from the f32 layer before quantising."""
    truth = output("reference", layer_weights(FP32), FP32, exact=True)
    rows = [["Scheme", "bytes a weight", *BACKENDS]]
    for case in CASES:
        settings = case.settings
        weights = layer_weights(settings.weight_scheme)
        size = weights.num_bytes / (EXPERTS_IN_LAYER * 3 * HIDDEN * INNER)
        compute = (settings.activation_scheme if case.rounds else None) or BF16
        cells = [_cell(case, backend, weights, compute, truth) for backend in BACKENDS]
        rows.append([case.title, f"{size:.4f}", *cells])
    return markdown(rows)


def _cell(case: Case, backend: str, weights: ExpertWeights, compute: QuantScheme, truth: Tensor) -> str:
    config = load_config("deepseek_v3").with_(
        quant=case.settings.model_dump(), activations="checkpoint" if case.rounds else "plain"
    )
    asked = Problem(config, device_profile("cpu"), BF16, TOKENS, frozenset({COMPILER}))
    if any(reason.code == "activations" for reason in EXPERTS[backend].reasons_against(asked)):
        return "no such activations"
    if compute.family not in EXPERTS[backend].traits.computes:
        return "no such activations"
    y = output(backend, weights, compute)
    return f"{float((y - truth).norm() / truth.norm()):.2%}"


def text() -> str:
    made = (
        f"{EXPERTS_IN_LAYER} experts of {HIDDEN} x {INNER}, {TOKENS} bf16 tokens, top-{TOP_K}, seeded normals; "
        f"torch {torch.__version__} on a {platform.machine()} CPU; `python tools/pages.py accuracy`."
    )
    return f"\n{table()}\n\n{made}\n"


def pages(root: Path) -> dict[str, str]:
    """The page with the table as it is computed now."""
    torch.set_num_threads(1)
    return filled(root, PAGE, "accuracy", text())
