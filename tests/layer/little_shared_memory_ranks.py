"""What each of two ranks does while /dev/shm has room for a few pages alone."""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from moe_mk import MoELayer
from moe_mk.layer import swap_backends
from tests.layer.failing_ranks import TIMEOUT_S, built, outcome, references, tokens

FOLDER = Path("/dev/shm")
MANY = 64
TYPED = ("right", "CommError", "ConfigError", "UnsupportedError")


def serve(rank: int, transport: str, rounds: int) -> list[str]:
    """What each round came to on this rank; "bad" where it was neither right nor a typed error that came at once."""
    draw, expected, found = random.Random(0), references(rank, 2, MANY), list[str]()
    made = [built(transport), built("all_gather")]
    few, others = expected[0][:1], ("all_gather", transport)

    def check(layer: MoELayer) -> dict[str, Any]:
        return outcome(lambda: layer(tokens(rank, MANY, 1)), expected[1])

    for _ in range(rounds):
        pages, verb = draw.choice((0, 0, 1, 2, 3, 5, 8)), draw.choice(("build", "few", "many", "swap"))
        if rank == 0:
            fill(pages)
        if draw.random() < 0.7:  # windows are opened by the first call
            made = [built(transport), built("all_gather")]
        dist.barrier()
        verbs: dict[str, Callable[[], Any]] = {
            "build": lambda: built(transport)(tokens(rank, MANY)),
            "few": partial(made[0], tokens(rank, MANY)[:1]),
            "many": partial(made[0], tokens(rank, MANY)),
            "swap": partial(swapped, made[1], rank, others),
        }
        result = outcome(verbs[verb], {"few": few, "swap": None}.get(verb, expected[0]))
        dist.barrier()
        if rank == 0:
            (FOLDER / "filler").unlink()
        dist.barrier()
        of_rounds = [result]
        for layer in made:
            if result["is"] != "right":
                layer.recover()
            of_rounds.append(check(layer))
        at_once = all(each["seconds"] < TIMEOUT_S / 2 for each in of_rounds)
        fine = result["is"] in TYPED and all(each["is"] == "right" for each in of_rounds[1:]) and at_once
        text = "" if fine else f"bad {of_rounds}"
        found.append(f"{verb} {pages} {result['is']} {text}")
        dist.barrier()
    return found


def swapped(layer: MoELayer, rank: int, others: tuple[str, str]) -> Any:
    now = layer.decision.chosen.prepare_finalize
    swap_backends(layer, tokens(rank, 3), prepare_finalize=others[int(now == others[0])])
    return layer(tokens(rank, MANY))


def fill(pages: int) -> None:
    """Take all of the folder but some pages."""
    there = os.statvfs(FOLDER)
    size = max(there.f_bavail * there.f_frsize - pages * os.sysconf("SC_PAGE_SIZE"), 0)
    with open(FOLDER / "filler", "wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
