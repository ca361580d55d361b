"""Events of libraries in DeepEP's manner: results may be read once the current stream has waited for them."""

from __future__ import annotations

from collections.abc import Callable

import torch


class EventHandle:
    """A point on a stream. Emulated work arrives when somebody waits for it; `waits` counts how often that was."""

    def __init__(self, arrive: Callable[[], None] | None = None) -> None:
        self.waits = 0
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        """Everything before the point has happened."""
        self.waits += 1
        if self._arrive is not None:
            self._arrive()


class EventOverlap:
    """An event as it is handed to users; without one there is nothing to wait for."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[torch.Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], None] | None = None

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Wait, then run what was registered."""
        assert self.event is not None
        self.event.current_stream_wait()
        if self.hook_after_wait is not None:
            self.hook_after_wait()
            self.hook_after_wait = None
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Have something done on the stream that waited."""
        assert self.hook_after_wait is None, "A hook is already registered"
        self.hook_after_wait = hook_after_wait

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(self, *problem: object) -> None:
        if self.event is not None:
            self.current_stream_wait()


class Arrival:
    """Work that was issued and has not arrived: what it will do to its results, once."""

    def __init__(self) -> None:
        self._deliveries: list[Callable[[], object]] = []

    def then(self, delivery: Callable[[], object]) -> None:
        """Have something done on arrival."""
        self._deliveries.append(delivery)

    def __call__(self) -> None:
        """Arrive; a second time does nothing."""
        deliveries, self._deliveries = self._deliveries, []
        for delivery in deliveries:
            delivery()


def host_assert(holds: bool, text: str) -> None:
    """Raise as a failed check in a library's C++ does."""
    if not holds:
        raise RuntimeError(f"Failed: Assertion error '{text}'")
