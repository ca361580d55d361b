"""A doorbell and its record: how a sleeping consumer learns of work, and learns of it although the bell was not heard.

The record is a count that lies in memory: how much work was ever queued, the head of a ring. The doorbell only wakes.
A consumer that wakes for any reason works up to the record, so a lost doorbell costs time and nothing else.
"""

from __future__ import annotations

import os

from moe_mk.comm.fork import in_child


class Doorbell:
    """Wakes a thread that waits for a file descriptor."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        in_child(self, Doorbell.close)
        self.is_awaited = False
        """Set by the consumer before its last look at the record; nobody rings for one that is awake."""

    def fileno(self) -> int:
        """What to wait for."""
        return self._event

    def ring(self) -> None:
        """Wake the consumer, from any thread."""
        os.eventfd_write(self._event, 1)

    def ring_if_awaited(self) -> None:
        """Wake the consumer if it sleeps, or is about to."""
        if self.is_awaited:
            self.ring()

    def hear(self) -> None:
        """Be ready for the next ring."""
        try:
            os.eventfd_read(self._event)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Give the descriptor back; it can be rung no more."""
        event, self._event = self._event, -1
        if event >= 0:
            os.close(event)

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            self.close()
