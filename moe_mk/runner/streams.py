"""Two streams: one carries, the other multiplies. On the CPU each is a thread.

    carries      | D0 | D1 | D2 | C0 | C1 | C2 |
    multiplies        | E0 | E1 | E2 |

The older way of overlap, in which nobody needs to know where a flight can be left alone: whole journeys are jobs of the
carrying thread, in an order that is the same on all ranks. It takes a thread, and room for the tokens of every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from moe_mk.flight import Flight, land
from moe_mk.prepare_finalize.base import PrepareFinalize
from moe_mk.runner.thread_modes import with_modes_of_here
from moe_mk.tokens import ExpertOutput, Routing, Tokens


def run_on_two_streams(
    transport: PrepareFinalize, multiply: Callable[[Tokens], ExpertOutput], batches: Sequence[tuple[Tensor, Routing]]
) -> list[Tensor]:
    """Run several batches, the experts of one while others travel; the outputs are those of one after the other.

    multiply: what experts make of tokens that have arrived, such as `FusedMoEKernel.multiply` with its weights. All
    ranks must bring as many batches. This thread multiplies; a thread that lives as long as the call carries.
    Raises what either of them raises, once the carrying one has ended.
    """
    carrier = ThreadPoolExecutor(1, thread_name_prefix="carrier")
    prepared: Callable[[Flight[Tokens]], Tokens] = with_modes_of_here(land)
    finalized: Callable[[Flight[Tensor]], Tensor] = with_modes_of_here(land)
    try:
        arriving = [carrier.submit(prepared, transport.prepare(x_TH, routing)) for x_TH, routing in batches]
        leaving = []
        for arrival in arriving:
            tokens = arrival.result()
            leaving.append(carrier.submit(finalized, transport.finalize(multiply(tokens), tokens)))
        return [departure.result() for departure in leaving]
    finally:
        carrier.shutdown(cancel_futures=True)
