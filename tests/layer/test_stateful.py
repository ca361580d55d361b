"""Any layer under any sequence of changes: the numbers of an independent f64 layer, and what must be counted.

Three ways to draw rows of features and programs of verbs: a pairwise cover in which every verb follows every value of
every feature (`slow`), a few rows of it (the quick tests), and hypothesis, whose failures shrink (`stress`, for as
long as `--machine-seconds` states).
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from pydantic import BaseModel

from moe_mk import MoEConfig
from moe_mk.config.moe import ResidencyConfig
from tests.layer.native import NEEDS_COMPILER
from tests.support import machine_verbs
from tests.support.machine import VERBS, World
from tests.support.machine_features import (
    BASES,
    FEATURES,
    LEFT_OUT,
    SET_APART,
    Row,
    around,
    completed,
    fits,
    pairwise,
    row_of,
)

assert machine_verbs.forward is VERBS["forward"].does
VERBS_OF_A_ROW, PARTS = 3, 16
Followed = tuple[str, str, str]
"""A feature, its value, and a verb that was done in a world with it."""
Program = tuple[Row, tuple[str, ...]]


@cache
def programs() -> Sequence[Program]:
    """The rows of the pairwise cover and those around `BASES`, each with verbs that follow most of its values anew.

    Then rows for what is left, so that every verb follows every value that it can follow.
    """
    draw, planned, used = random.Random(1), list[Program](), Counter[str]()
    left = dict.fromkeys(possible())

    def plan(row: Row, names: Sequence[str]) -> None:
        for feature, value in row.items():
            for name in names:
                left.pop((feature, value, name), None)
        used.update(names)
        names = draw.sample(list(names), len(names))
        # Copies cost little where no ranks are built with them.
        planned.append((row, (*names, *["duplicate"] * (row["grid"] == "alone" and "duplicate" not in names))))

    for row in (*pairwise(), *(row for number in range(len(BASES)) for row in around(number))):
        able = [name for name, verb in VERBS.items() if verb.applies(row)]
        gains = {name: sum((*one, name) in left for one in row.items()) for name in able}
        plan(row, sorted(able, key=lambda name: (-gains[name], used[name]))[:VERBS_OF_A_ROW])
    while left:
        feature, value, name = next(iter(left))
        row = row_with(feature, value, name, draw)
        assert row is not None
        plan(row, [name])
    return planned


@cache
def possible() -> Sequence[Followed]:
    """Every value with every verb that can follow it."""
    draw = random.Random(0)
    return [
        (feature, value, name)
        for feature, values in FEATURES.items()
        for value in values
        for name in VERBS
        if row_with(feature, value, name, draw) is not None
    ]


def row_with(feature: str, value: str, name: str, draw: random.Random) -> Row | None:
    """A row with a value in which a verb applies; None where there is none."""
    needs = VERBS[name].needs
    choices = list(product(*(sorted(values) for values in needs.values())))
    draw.shuffle(choices)
    for chosen in choices:
        row = dict(zip(needs, chosen, strict=True))
        same = row.setdefault(feature, value) == value and fits(row)
        if same and (whole := completed(row, draw, {})) is not None:
            return whole
    return None


def run(program: Program, seed: int, folder: Path) -> set[Followed]:
    """What was done, and followed."""
    row, names = program
    world = World(row, seed=seed, folder=folder)
    world.run([(name, 100 * seed + at) for at, name in enumerate(names)])
    return {(*one, name) for one in row.items() for name in world.done}


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_verb_follows_every_feature(part: int, tmp_path: Path) -> None:
    done, planned = set[Followed](), set[Followed]()
    for number, program in list(enumerate(programs()))[part::PARTS]:
        folder = tmp_path / str(number)
        folder.mkdir()
        done |= run(program, number, folder)
        planned |= {(*one, name) for one in program[0].items() for name in program[1]}
    assert done == planned


@NEEDS_COMPILER
@pytest.mark.parametrize("number", range(0, 180, 60))
def test_some_rows_of_the_cover(number: int, tmp_path: Path) -> None:
    row = pairwise()[number]
    names = [name for name, verb in VERBS.items() if verb.applies(row)]
    run((row, random.Random(number).sample(names, 3)), number, tmp_path)


FOUND: dict[str, tuple[Row, list[tuple[str, int]]]] = {
    "shared experts of packed checkpoints have no biases": (
        {"weights": "int4_g32 compressed_tensors", "biases": "experts", "shared": "one"}, [("forward", 1)],
    ),
    "tokens of images have the fused shared experts too": ({"choice": "images", "others": "fused"}, [("forward", 5)]),
    "a loader is fed what other packings name alike": (
        {"weights": "int8_g128 compressed_tensors", "biases": "experts"}, [("reload", 0)],
    ),
    "shared experts read rows of the layer where experts read latent ones of the same width": (
        {"weights": "bf16", "experts": "cpu_native", "dtype": "bf16", "frame": "latent", "shared": "one"},
        [("forward", 1)],
    ),
    "another pair of a latent layer is tried out in the layer's width": ({"frame": "latent_norm"}, [("swap", 3)]),
    "a layer that chooses by token id swaps on tokens with ids": ({"choice": "table"}, [("swap", 3)]),
    "the norm of a layer's input stays where experts move": ({"frame": "input_norm"}, [("move", 0)]),
    "tokens of replicas are counted once": ({"placement": "replicas", "experts": "torch_cpu"}, [("forward", 0)]),
}  # fmt: skip


@NEEDS_COMPILER
@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_stays_right(name: str, tmp_path: Path) -> None:
    row, program = FOUND[name]
    World(row_of(row), seed=3, folder=tmp_path).run(program)


@pytest.mark.slow
def test_the_plan_has_every_pair_of_features_and_every_verb_after_each() -> None:
    pairs = {pair for row, _ in programs() for pair in combinations(sorted(row.items()), 2)}
    singles = sorted((feature, value) for feature, values in FEATURES.items() for value in values)
    left = [pair for pair in combinations(singles, 2) if pair[0][0] != pair[1][0] and pair not in pairs]
    alone = [pair for pair in left if fits(dict(pair)) and completed(dict(pair), random.Random(0), {}) is not None]
    assert alone == []
    followed = {(*one, name) for row, names in programs() for one in row.items() for name in names}
    assert followed >= set(possible())
    assert {name for _, _, name in possible()} == set(VERBS)


def fields_of(model: type[BaseModel], section: str) -> Iterator[str]:
    """Every field of a configuration by section and key; those of a quantisation and of a residency in their own."""
    for name, field in model.model_fields.items():
        inner = {"quant": "quant", "residency": "residency"}.get(name, name)
        kind = ResidencyConfig if name == "residency" else field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if section:
                yield f"{section}.{name}"
            yield from fields_of(kind, inner)
        else:
            yield f"{section}.{name}"


def test_every_field_of_a_configuration_is_drawn_or_left_out_with_a_reason() -> None:
    drawn = {key for values in FEATURES.values() for overlay in values.values() for key in overlay} | SET_APART
    fields = set(fields_of(MoEConfig, ""))
    assert drawn | set(LEFT_OUT) == fields and not drawn & set(LEFT_OUT)
    assert all(LEFT_OUT.values())


class Machine(RuleBasedStateMachine):
    """Rows and verbs as hypothesis draws them; what fails is shrunk to few features and few verbs."""

    folder: Path

    @initialize(values=st.fixed_dictionaries({}, optional={
        feature: st.sampled_from(sorted(of)) for feature, of in FEATURES.items()
    }), seed=st.integers(0, 999))  # fmt: skip
    def begin(self, values: Row, seed: int) -> None:
        row: Row = {}
        for feature, value in values.items():  # those that fit what came before
            if completed(row | {feature: value}, random.Random(0), {}) is not None and fits(row | {feature: value}):
                row[feature] = value
        whole = row_of(row) if fits(row_of(row)) else completed(row, random.Random(seed), {})
        assert whole is not None
        self.folder.mkdir(exist_ok=True)
        self.world = World(whole, seed=seed, folder=self.folder)

    @rule(name=st.sampled_from(sorted(VERBS)), number=st.integers(0, 2**16))
    def act(self, name: str, number: int) -> None:
        if VERBS[name].applies(self.world.row):
            self.world.do(name, number)


@NEEDS_COMPILER
@pytest.mark.stress
def test_whatever_hypothesis_draws(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    seconds = float(pytestconfig.getoption("--machine-seconds"))
    Machine.folder, ends, seed = tmp_path / "stores", time.monotonic() + seconds, 0
    while time.monotonic() < ends:
        torch.manual_seed(seed)
        random.seed(seed)
        chosen = settings(
            max_examples=50, stateful_step_count=12, derandomize=False, deadline=None,
            suppress_health_check=list(HealthCheck), database=None,
        )  # fmt: skip
        run_state_machine_as_test(Machine, settings=chosen)
        seed += 1
