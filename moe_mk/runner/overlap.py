"""The ways to spend a flight's waiting time. This package alone decides; nothing below knows of overlap.

`prepare_async` and `finalize_async` as engines know them: thin views of the same flight.

Posting happens at the call. The hook waits for the data and may be called by anybody, once or more; the receiver
returns the result, calling the hook first if nobody has, and once only.

Autograd's switches belong to a thread: a job finds them as they are in the thread that asks for it.

Micro-batches one behind the other, in the six steps of a low-latency decode: one computes while the next arrives.

With two micro-batches 0 and 1, dispatch D, experts M and combine C, each journey issued (i) and received (r) apart:

    1  D0i          4  C0i D1r
    2  D0r D1i      5  M1
    3  M0           6  C1i C0r, and C1r at the very end: the next layer's attention of batch 0 may come before it

A third batch is issued when the first is home: D1r C0r D2i M1 C1i. At most two journeys are under way at once, which is
what two alternating buffers allow. Source of the order: DeepEP's low-latency kernels with receive hooks
(github.com/deepseek-ai/DeepEP), for which waiting occupies no compute unit.

Two streams: one carries, the other multiplies, each fed by a thread of its own. On the CPU the threads are all.

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
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from moe_mk.errors import MoEMKError
from moe_mk.external.device import Queues
from moe_mk.flight import Flight, InFlight, cancel, interleave, wait
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.tokens import ExpertOutput, Routing, Tokens

X = TypeVar("X")
Y = TypeVar("Y")


def run_alone(flight: Flight[X]) -> X:
    """Wait, doing nothing meanwhile."""
    return wait(flight)


def run_dual(flights: Sequence[Flight[X]]) -> list[X]:
    """Dual-batch overlap, for any number of micro-batches: while one is in flight, the next computes.

    All ranks must bring the same number of flights; one without tokens still makes every hop.
    """
    return interleave(flights)


def run_with(flight: Flight[X], meanwhile: Callable[[], Y], during: str = "dispatch") -> tuple[X, Y]:
    """Do `meanwhile` once while the flight is at `during`; return both results."""
    return wait(alongside(flight, meanwhile, during))


def alongside(flight: Flight[X], meanwhile: Callable[[], Y], during: str = "dispatch") -> Flight[tuple[X, Y]]:
    """A flight whose first hop called `during` is spent on `meanwhile`; without such a hop it is done at the end."""
    extra: list[Y] = []
    while True:
        try:
            hop: InFlight = next(flight)
        except StopIteration as landed:
            return cast(X, landed.value), extra[0] if extra else meanwhile()
        if not extra and hop.what == during:
            extra.append(meanwhile())
        yield hop


class ReceivedTwice(MoEMKError, RuntimeError):
    """A receiver was called a second time; its tensors may already be in other hands."""


class Half(Generic[X]):
    """One half of a forward, under way: `hook()` then `receive()`."""

    def __init__(self, flight: Flight[X]) -> None:
        self._flight = flight
        self._result: list[X] = []
        self._landed = self._received = False
        self._advance()  # post now: up to the first hop

    def hook(self) -> None:
        """Wait until the data is here; harmless when called again."""
        while not self._landed:
            self._advance()

    def receive(self) -> X:
        """The result. Raises ReceivedTwice on a second call."""
        if self._received:
            raise ReceivedTwice("this half was already received; keep the result of the first call")
        self.hook()
        self._received = True
        return self._result.pop()

    def _advance(self) -> None:
        try:
            next(self._flight)
        except StopIteration as landed:
            self._result.append(cast(X, landed.value))
            self._landed = True


def prepare_async(transport: PrepareFinalize, x_TH: Tensor, routing: Routing) -> Half[Tokens]:
    """Start a dispatch."""
    return Half(transport.prepare(x_TH, routing))


def finalize_async(transport: PrepareFinalize, output: ExpertOutput, tokens: Tokens) -> Half[Tensor]:
    """Start a combine."""
    return Half(transport.finalize(output, tokens))


P = ParamSpec("P")


def with_modes_of_here(job: Callable[P, X]) -> Callable[P, X]:
    """The same job, for another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def as_here(*args: P.args, **kwargs: P.kwargs) -> X:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return job(*args, **kwargs)

    return as_here


Note = Callable[[str], None]


@dataclass(frozen=True)
class MicroBatch:
    """A part of a rank's tokens, routed to physical experts."""

    x_TH: Tensor
    routing: Routing


class Issued(Generic[X]):
    """A flight up to its first hop: what it sends is on its way."""

    def __init__(self, name: str, flight: Flight[X], note: Note) -> None:
        self._name, self._flight, self._note = name, flight, note
        self._hop: InFlight | None = None
        self._result: list[X] = []
        note(f"{name}i")
        try:
            self._hop = next(flight)
        except StopIteration as landed:
            self._result.append(cast(X, landed.value))

    @property
    def flight(self) -> Flight[X]:
        """The flight itself, for whoever gives it up."""
        return self._flight

    def receive(self) -> Flight[X]:
        """The rest of the flight."""
        self._note(f"{self._name}r")
        if self._hop is None:
            return self._result.pop()
        yield self._hop
        return (yield from self._flight)


def staggered(
    transport: PrepareFinalize,
    multiply: Callable[[Tokens], ExpertOutput],
    batches: Sequence[MicroBatch],
    note: Note = lambda event: None,
) -> Flight[list[Tensor]]:
    """Run micro-batches in the order above, any number of them; (T, H) of each, bit for bit as one after the other.

    multiply: what a kernel does between the journeys. All ranks must bring the same number of batches; one without
    tokens still makes every hop. note: told of each event by its name above as it begins.
    """
    last = len(batches) - 1
    home: list[Tensor] = []
    coming: list[Issued[Tokens]] = []
    going: list[Issued[Tensor]] = []

    def dispatch(number: int) -> Issued[Tokens]:
        batch = batches[number]
        return Issued(f"D{number}", transport.prepare(batch.x_TH, batch.routing), note)

    try:
        if batches:
            coming.append(dispatch(0))
        for number in range(len(batches)):
            tokens = yield from coming.pop().receive()
            if number < last:
                if going:  # a third journey would need a third buffer
                    home.append((yield from going.pop().receive()))
                coming.append(dispatch(number + 1))
            note(f"M{number}")
            combine = Issued(f"C{number}", transport.finalize(multiply(tokens), tokens), note)
            if going:
                home.append((yield from going.pop().receive()))
            going.append(combine)
        if going:
            home.append((yield from going.pop().receive()))
        return home
    finally:
        cancel(issued.flight for issued in coming)
        cancel(issued.flight for issued in going)


def finishes_async(*, asked_async: bool, overlaps_batches: bool) -> bool:
    """Whether a library's call should return before its communication has ended: only where nothing else overlaps.

    With several micro-batches in turn, the turn itself is the overlap, and a call that returns early would let both
    compute at once. Source of the rule: vLLM, `async_finish = async_prepare and not dbo_enabled()`.
    """
    return asked_async and not overlaps_batches


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
                result = wait(flight)
            finally:
                self._last = self._queues.mark()
            return result, self._last
