"""Transports that each answer a failure of a peer in one wrong way; registered when this module is imported."""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_mk.errors import CommError
from moe_mk.flight import Flight
from moe_mk.prepare_finalize import PREPARE_FINALIZE
from moe_mk.prepare_finalize.all_to_all import AllToAll
from moe_mk.tokens import ExpertOutput, Routing, Tokens


class AnswersFailures(AllToAll):
    """all_to_all, but what it does when a peer fails during dispatch or combine is `answer`."""

    answer: Callable[[CommError], None]
    _x_TH: Tensor

    def prepare(self, x_TH: Tensor, routing: Routing) -> Flight[Tokens]:
        self._x_TH = x_TH
        try:
            return (yield from super().prepare(x_TH, routing))
        except CommError as error:
            type(self).answer(error)
            raise

    def finalize(self, output: ExpertOutput, tokens: Tokens) -> Flight[Tensor]:
        try:
            return (yield from super().finalize(output, tokens))
        except CommError as error:
            type(self).answer(error)
            return torch.zeros_like(self._x_TH)


def hang(error: CommError) -> None:
    time.sleep(3600)


def change_type(error: CommError) -> None:
    raise RuntimeError("a peer failed") from error


def abort(error: CommError) -> None:
    os.abort()


def swallow(error: CommError) -> None:
    """finalize then returns rows that are wrong."""


for _name, _answer in (("hangs", hang), ("changes_type", change_type), ("aborts", abort), ("swallows", swallow)):
    PREPARE_FINALIZE.register(f"broken_{_name}")(
        type(f"Broken_{_name}", (AnswersFailures,), {
            "answer": staticmethod(_answer), "traits": replace(AllToAll.traits, summary=f"{_name} after a failure"),
        })
    )  # fmt: skip


@PREPARE_FINALIZE.register("right_after_all")
class Right(AllToAll):
    """all_to_all under another name."""

    traits = replace(AllToAll.traits, summary="nothing is wrong with it")
