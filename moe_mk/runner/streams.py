"""Two streams: one carries, the other multiplies, each fed by a thread of its own. On the CPU the threads are all.

    carries      | D0 | D1 | D2 | C0 | C1 | C2 |
    multiplies        | E0 | E1 | E2 |

The older way of overlap, in which nobody needs to know where a flight can be left alone: whole journeys are jobs of the
carrying thread, in an order that is the same on all ranks. It takes a thread, and room for the tokens of every batch.

On a device E0 waits for the end of D0 and C0 for the end of E0, on the device alone. Memory that a stream has made is
free for what that stream does next. So tokens live until the carrying stream has been told to wait for the experts that
read them, and outputs of experts until the other one has been told to wait for their journeys home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from moe_mk.external.device import Queues
from moe_mk.flight import Flight, land
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.runner.thread_modes import with_modes_of_here
from moe_mk.tokens import ExpertOutput, Routing, Tokens

X = TypeVar("X")


def run_on_two_streams(
    transport: PrepareFinalize,
    multiply: Callable[[Tokens], ExpertOutput],
    batches: Sequence[tuple[Tensor, Routing]],
    queues: Queues | None = None,
) -> list[Tensor]:
    """Run several batches, the experts of one while others travel; the outputs are those of one after the other.

    multiply: what experts make of tokens that have arrived, such as `FusedMoEKernel.multiply` with its weights. All
    ranks must bring as many batches. This thread multiplies, on its current stream; a thread that lives as long as the
    call carries, on a stream of its own. queues: has that stream, best the same one for every call; None makes it.
    Raises what either of them raises, once the carrying one has ended.
    """
    if not batches:
        return []
    queues = queues or Queues(batches[0][0].device)
    carrier, read = Carrier(queues), list[ExpertOutput]()
    try:
        arriving = [carrier.take(transport.prepare(x_TH, routing)) for x_TH, routing in batches]
        leaving = []
        for arrival in arriving:
            tokens = carrier.deliver(arrival)
            output = multiply(tokens)
            if queues.run_later:
                read.append(output)  # by the carrying stream: this one may not write over it before they meet
            leaving.append(carrier.take(transport.finalize(output, tokens)))
        return [queues.read_here(carrier.deliver(departure)) for departure in leaving]
    finally:
        carrier.end()


class Carrier:
    """The thread that carries, and its stream."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="carrier")
        self._last: Any = None
        """The end of all that was carried, on the device."""

    def take(self, flight: Flight[X]) -> Future[tuple[X, Any]]:
        """Carry a flight when those before have landed; it reads what this thread has made so far."""
        carry: Callable[[Flight[X], Any], tuple[X, Any]] = with_modes_of_here(self._carry)
        return self._thread.submit(carry, flight, self._queues.mark())

    def deliver(self, job: Future[tuple[X, Any]]) -> X:
        """What a flight brought, for what this thread calls next. Raises what the flight raised."""
        result, mark = job.result()
        self._queues.after(mark)
        return result

    def end(self) -> None:
        """Let nothing more begin, and let what this thread calls next come after all that was carried."""
        self._thread.shutdown(cancel_futures=True)
        self._queues.after(self._last)

    def _carry(self, flight: Flight[X], ready: Any) -> tuple[X, Any]:
        with self._queues.lane("carry"):
            self._queues.after(ready)
            try:
                result = land(flight)
            finally:
                self._last = self._queues.mark()
            return result, self._last
