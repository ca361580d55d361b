"""Every named fault, injected in a small engine of its own, is found at its stage and by its name."""

import pytest

from moe_mk.lab.judge.verdict import judge
from tests.support.small_engine import Layer

FORMATS = {
    "fp8": {"kind": "fp8_block", "quantised_rows": True, "groups": 4},
    "int4": {"kind": "int4_g32_zp", "scoring": "softmax", "bias": False},
    "mxfp4": {"kind": "mxfp4", "activation": "swiglu_oai", "limit": 2.0, "scoring": "softmax", "bias": False},
}
KINDS = {
    "formats": FORMATS["fp8"],
    "TP": {"kind": "fp8_block", "tp": 4, "shared": True},
    "EP": {"kind": "fp8_block", "ep": 4, "eplb": True, "activation": "swiglu_limit", "limit": 1.0, "tokens": 24},
    "shared": {"kind": "int4_g32_zp", "shared": True, "tp": 2, "ep": 2, "groups": 2},
}
GENERAL = {
    "gate and up swapped": "w13", "interleaved for concatenated": "w13", "scale dropped": "w13", "scale squared": "w13",
    "scale squared, w2": "w2", "scale of another expert": "w13", "bias in the weights": "weights",
    "never renormalised": "weights", "renormalised twice": "weights", "routed scaling missing": "weights",
    "routed scaling twice": "weigh-and-sum", "order of tokens": "weigh-and-sum", "order of tokens, input": "quantise",
    "K block skipped": "w13", "K block skipped, w2": "w2", "padding leaks": "weigh-and-sum",
    "stale row": "weigh-and-sum", "stale weight": "w2", "activation of another family": "activation",
    "tokens beyond a bucket's edge": "weigh-and-sum", "bias not used to choose": "top-k", "experts shifted": "w13",
}  # fmt: skip
"""The stage of each fault that every layer can have."""
SPECIAL = {
    "formats": {"scale transposed": "w13", "group of another size": "w13", "groups ignored": "groups"},
    "TP": {"TP slice doubled": "reduce", "TP slice missing": "reduce", "shared experts twice": "shared",
           "shared experts per rank": "shared", "scale transposed": "w13"},
    "EP": {"physical ids for logical": "w13", "EP rank missing": "reduce", "clamp of the wrong side": "activation",
           "scale transposed": "w13"},
    "shared": {"shared experts missing": "shared", "shared experts per rank": "shared", "TP slice doubled": "reduce",
               "zero point off by one": "w13", "zero point off by one, w2": "w2", "EP rank missing": "reduce",
               "group of another size": "w13", "groups ignored": "groups"},
}  # fmt: skip
OF_FORMATS = {
    "int4": {"zero point off by one": "w13", "scale transposed, w2": "w2"},
    "mxfp4": {"clamp of the wrong side": "activation", "scale dropped": "w13"},
}


def found(layer, fault, stage, **options):
    """(stage is right, name is right, the verdict)."""
    verdict = judge(layer.case(fault, **options).checked())
    return verdict.stage == stage, verdict.fault == fault.split(",")[0], verdict


def planted(seed, *, each_once):
    """(what, layer, fault, its stage) of every kind of layer; each_once: a general fault in one of them, in turn."""
    for number, (kind, settings) in enumerate(KINDS.items()):
        general = list(GENERAL.items())[number :: len(KINDS)] if each_once else GENERAL.items()
        for fault, stage in (*general, *SPECIAL[kind].items()):
            yield f"{kind}, {fault}", Layer(**settings, seed=seed), fault, stage
    for kind, faults in OF_FORMATS.items():
        for fault, stage in faults.items():
            yield f"{kind}, {fault}", Layer(**FORMATS[kind], seed=seed), fault, stage


@pytest.mark.row(175)
@pytest.mark.slow
def test_each_fault_is_found_at_its_stage_and_by_its_name():
    lost = []
    for what, layer, fault, stage in planted(1, each_once=True):
        at, named, verdict = found(layer, fault, stage)
        if not (at and named):
            lost.append(f"{what}: {verdict.right} {verdict.stage} {verdict.fault}")
    assert not lost


@pytest.mark.row(175)
@pytest.mark.stress
@pytest.mark.timeout(600)
def test_planted_faults_of_another_seed_are_found_in_every_kind_of_layer():
    """At least 95 % at the right stage, 90 % by the right name."""
    stages, names, lost = [], [], []
    for what, layer, fault, stage in planted(2, each_once=False):
        at, named, verdict = found(layer, fault, stage)
        stages.append(at)
        names.append(named)
        if not (at and named):
            lost.append(f"{what}: {verdict.right} {verdict.stage} {verdict.fault}")
    assert sum(stages) >= 0.95 * len(stages) and sum(names) >= 0.9 * len(names), lost
