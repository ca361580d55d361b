"""Queues of a device that is not here: threads are told apart by the lane they are in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_mk.external.device import Queues


class NamedLanes(Queues):
    """What a queue would do later is told by `run_later`; `stream` is the lane of this thread, else "caller"."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.broken, self._here = broken, threading.local()

    @property
    def run_later(self) -> bool:
        return True

    @property
    def stream(self) -> str:
        return getattr(self._here, "name", "caller")

    @contextmanager
    def lane(self, name: str) -> Iterator[None]:
        if self.broken:
            raise RuntimeError("no more streams")
        self._here.name = name
        try:
            yield
        finally:
            self._here.name = "caller"
