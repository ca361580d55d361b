"""Queues of an imitated device: threads are distinguished by the stream they are on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from moe_mk.external.device import Queues


class NamedWorkers(Queues):
    """`run_later` is true as on a GPU; `stream` is the name of this thread's stream, else "caller"."""

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
    def on_stream(self, name: str) -> Iterator[None]:
        if self.broken:
            raise RuntimeError("no more streams")
        self._here.name = name
        try:
            yield
        finally:
            self._here.name = "caller"
