"""What each process does in the tests of failed calls: serve, fail at one place, catch it, and make the next call."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_mk import CommError, MoELayer, ParallelGroups
from moe_mk.comm import DistributedCommunicator
from moe_mk.errors import MoEMKError
from moe_mk.flight import wait
from moe_mk.rebalance import RebalanceManager, RebalanceSettings
from moe_mk.runner import run_dual
from tests.support.layers import layer

EXPERTS, TOP_K, HIDDEN = 8, 2, 16
TIMEOUT_S = 20.0
"""Long, so that what is reported at once cannot be taken for a timeout."""


def built(transport: str, groups: ParallelGroups | None = None, **settings: Any) -> MoELayer:
    groups = groups or ParallelGroups(ep=dist.new_group())  # of its own: a failure stays with it
    if transport == "hierarchical":
        settings = {"ranks_per_node": 1, **settings}
    if transport == "one_sided_network":
        settings = {"network": "127.0.0.0/8", **settings}
    settings = {"timeout_s": TIMEOUT_S, "max_num_tokens": 64, **settings}
    return layer(EXPERTS, TOP_K, groups, prepare_finalize=transport, **settings)


def tokens(rank: int, count: int, seed: int = 0) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(100 * seed + rank))


def fail_once_in_experts(made: MoELayer, error: BaseException) -> None:
    """Let the next call of the experts raise, as an allocation that fails does."""
    experts: Any = made.kernel.experts
    run: Callable[..., Any] = experts.run

    def failing(*args: Any) -> Any:
        experts.run = run
        raise error

    experts.run = failing


def outcome(call: Callable[[], Tensor], expected: Tensor | None = None) -> dict[str, Any]:
    """What a call came to: "right", "WRONG", or the error."""
    began = time.monotonic()
    try:
        y_TH = call()
    except MoEMKError as error:
        peer = error.peer if isinstance(error, CommError) else None
        text = f"{error} {' '.join(getattr(error, '__notes__', []))}"
        return {"is": type(error).__name__, "peer": peer, "text": text, "seconds": time.monotonic() - began}
    except BaseException as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return {"is": type(error).__name__, "peer": None, "text": notes, "seconds": time.monotonic() - began}
    right = expected is None or torch.allclose(y_TH, expected, rtol=0.0, atol=1e-4)  # sums meet in another order
    return {"is": "right" if right else "WRONG", "peer": None, "text": "", "seconds": time.monotonic() - began}


def references(rank: int, seeds: int, count: int) -> list[Tensor]:
    alone = layer(EXPERTS, TOP_K, max_num_tokens=64)
    return [alone(tokens(rank, count, seed)) for seed in range(seeds)]


ERRORS: dict[str, Callable[[], BaseException]] = {
    "MemoryError": MemoryError,
    "ValueError": lambda: ValueError("bad expert"),
    "KeyboardInterrupt": KeyboardInterrupt,
}


def caught(rank: int, transport: str, error: str) -> list[dict[str, Any]]:
    """Rank 0, without tokens, fails in its experts; its engine catches that and goes on. Then all recover."""
    made = built(transport)
    count = 0 if rank == 0 else 12
    expected = references(rank, 4, count)
    found = [outcome(lambda: made(tokens(rank, count)), expected[0])]
    if rank == 0:
        fail_once_in_experts(made, ERRORS[error]())
    found += [outcome(lambda s=s: made(tokens(rank, count, s)), expected[s]) for s in (1, 2)]  # type: ignore[misc]
    made.recover()
    for _ in range(30):
        made(tokens(rank, count))
    return [*found, *(outcome(lambda s=s: made(tokens(rank, count, s)), expected[s]) for s in (0, 1, 2, 3))]  # type: ignore[misc]


def one_more_micro_batch(rank: int, transport: str) -> list[dict[str, Any]]:
    """Rank 0 brings three micro-batches, the others two; one-sided, it waits for windows that they never open."""
    made = built(transport, timeout_s=2.0 if transport.startswith("one_sided") else TIMEOUT_S)
    made(tokens(rank, 6))
    dist.barrier()  # else a failure may reach the first call of a rank that has not read all sums yet
    parts = [tokens(rank, 6, seed) for seed in range(3 if rank == 0 else 2)]
    return [outcome(lambda: torch.cat(run_dual([made.steps(x_TH) for x_TH in parts])))]


def another_layer(rank: int, transport: str) -> list[dict[str, Any]]:
    """Two layers over one group; rank 0 calls the second where the others call the first."""
    groups = ParallelGroups(ep=dist.new_group())
    layers = [built(transport, groups), built(transport, groups)]
    for each in layers:
        each(tokens(rank, 6))
    dist.barrier()  # else a failure may reach the first call of a rank that has not read all sums yet
    return [outcome(lambda: layers[int(rank == 0)](tokens(rank, 6)))]


def two_threads(rank: int, transport: str) -> list[dict[str, Any]]:
    """Two threads call two layers over one group, in an order of their own on every rank."""
    groups = ParallelGroups(ep=dist.new_group())
    layers = [built(transport, groups), built(transport, groups)]
    expected = references(rank, 2, 9)
    for each in layers:
        each(tokens(rank, 9))
    dist.barrier()  # else a failure of the threads on one rank reaches a first call that another has not finished
    found: list[dict[str, Any]] = []
    start = threading.Barrier(2, timeout=30.0)

    def serve(number: int) -> None:
        refused = 0
        start.wait()  # else one thread may end before the other begins, and no two calls overlap
        for _ in range(400):
            found.append(outcome(lambda: layers[number](tokens(rank, 9, number)), expected[number]))
            refused += found[-1]["is"] != "right"
            if refused == 5:
                return

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def abandoned(rank: int, transport: str) -> list[dict[str, Any]]:
    """Rank 1 leaves a call in the air and drops it."""
    made = built(transport)
    made(tokens(rank, 5))
    dist.barrier()  # else the report may reach the first call of a rank that has not read the sums of rank 1 yet
    if rank == 1:
        flight = made.steps(tokens(rank, 5))
        next(flight)
        flight.close()
        return [outcome(lambda: made(tokens(rank, 5)))]
    return [outcome(lambda: made(tokens(rank, 5)))]


def fails_on_a_grid(rank: int) -> list[dict[str, Any]]:
    """Two by two ranks: EP runs down, TP to the right. Rank 2, of EP rank 1 and TP rank 0, fails in its experts."""
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    tp = [dist.new_group(members) for members in rows][rank // 2]
    ep = [dist.new_group(members) for members in columns][rank % 2]
    made = built("all_to_all", ParallelGroups(ep=ep, tp=tp))
    made(tokens(rank // 2, 5))
    dist.barrier()  # else a failure may reach the first call of a rank that has not read all sums yet
    if rank == 2:
        fail_once_in_experts(made, MemoryError())
    return [outcome(lambda: made(tokens(rank // 2, 5)))]


def shared_expert_fails(rank: int) -> list[dict[str, Any]]:
    """The shared expert of rank 1 fails while tokens are in flight."""
    made = built("all_to_all", num_shared_experts=1)
    made(tokens(rank, 5))
    dist.barrier()  # else a failure may reach the first call of a rank that has not read all sums yet
    if rank == 1:
        shared: Any = made.state.backends.shared
        shared.experts.run = lambda *args: (_ for _ in ()).throw(MemoryError())
    return [outcome(lambda: made(tokens(rank, 5)))]


def hostile_counts(rank: int, transport: str, count: int) -> list[dict[str, Any]]:
    """Rank 1 announces rows that no window and no memory could hold."""
    made = built(transport)
    made(tokens(rank, 5))
    dist.barrier()  # else a failure may reach the first call of a rank that has not read all sums yet
    if rank == 1:
        messages: Any = made.kernel.prepare_finalize.context.comm._messages  # type: ignore[union-attr]
        exchange, eager = messages.exchange, messages.exchange_eager

        def lying(caller: Any, phase: str, counts: Any, outgoing: Any, incoming: Any) -> Any:
            if phase == "dispatch counts":
                counts = dict.fromkeys(counts, count)
                outgoing = {peer: torch.full_like(rows, count) for peer, rows in outgoing.items()}
            return exchange(caller, phase, counts, outgoing, incoming)

        def lying_eagerly(caller: Any, phase: str, outgoing: Any, awaited: Any, *long: Any) -> Any:
            if phase == "dispatch counts":
                outgoing = {peer: rows._replace(num_rows=count) for peer, rows in outgoing.items()}
            return eager(caller, phase, outgoing, awaited, *long)

        messages.exchange, messages.exchange_eager = lying, lying_eagerly
    return [outcome(lambda: made(tokens(rank, 5)))]


def hostile_ids(rank: int, transport: str, number: int, per_node: int) -> list[dict[str, Any]]:
    """Rank 1 sends rows whose first assignment is none that exists."""
    made = built(transport, **({"ranks_per_node": per_node} if transport == "hierarchical" else {}))
    made(tokens(rank, 12))
    dist.barrier()  # else a failure may reach the first call of a rank that has not read all sums yet
    if rank == 1:
        messages: Any = made.kernel.prepare_finalize.context.comm._messages  # type: ignore[union-attr]
        exchange, eager, ids_at = messages.exchange, messages.exchange_eager, -TOP_K * (4 + 4)

        def lying(caller: Any, phase: str, counts: Any, outgoing: Any, incoming: Any) -> Any:
            if phase == "dispatch":
                for rows_XB in outgoing.values():
                    rows_XB[:, ids_at : ids_at + 4] = torch.tensor([number], dtype=torch.int32).view(torch.uint8)
            return exchange(caller, phase, counts, outgoing, incoming)

        def lying_eagerly(caller: Any, phase: str, outgoing: Any, awaited: Any, *long: Any) -> Any:
            for envelope in outgoing.values() if phase == "dispatch counts" and not long else ():
                tails_XB = envelope.rows.view(-1)[-envelope.num_rows * TOP_K * (4 + 4) :].view(envelope.num_rows, -1)
                tails_XB[:, :4] = torch.tensor([number], dtype=torch.int32).view(torch.uint8)
            return eager(caller, phase, outgoing, awaited, *long)

        messages.exchange, messages.exchange_eager = lying, lying_eagerly
    return [outcome(lambda: made(tokens(rank, 12)))]


def go_on(rank: int, transport: str, late: int | None = None, size: int = 3) -> list[dict[str, Any]]:
    """Of `size` ranks rank 1 ends or is killed between two calls; the others go on over the same process group, with
    every expert. late: a rank that makes the second call only when the wait of another one for it has lasted 2 s; -1:
    there is no call before the death, so that no rank has received anything of another one. A sum of loads is in
    flight."""
    warnings.simplefilter("ignore")
    made = built(transport)
    manager = RebalanceManager([made], RebalanceSettings(sync_every=1))
    expected = references(rank, 3, 7)
    found: list[dict[str, Any]] = [{"is": "right"}]
    if late != -1:
        found = [outcome(lambda: made(tokens(rank, 7)), expected[0])]
        manager.step()
    else:
        dist.barrier()
    if rank == 1:
        if late is None:
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == late:
        time.sleep(2.0)
    found.append(outcome(lambda: made(tokens(rank, 7, 1))))
    lost = found[-1]["peer"]
    left: Any = wait(made.ep.without([lost]))
    if size == 2:
        wait(made.ep.recover())  # alone
    old = outcome(lambda: wait(made.ep.all_gather(torch.zeros(1), [1] * size, "late")))
    manager.rank_lost(lost, left)
    found += [outcome(lambda s=s: made(tokens(rank, 7, s)), expected[s]) for s in (1, 2)]  # type: ignore[misc]
    return [*found, old, {"is": f"rank {left.rank} of {left.size}, {made.decision.chosen.prepare_finalize}"}]


def lose_twice_and_disagree(rank: int) -> list[dict[str, Any]]:
    """Ranks 1 and 2 leave one after the other, and over another group ranks disagree on who has left."""
    left, comm = (DistributedCommunicator(dist.new_group(), timeout_s=5.0) for _ in range(2))
    wait(comm.gather_count(1, "counts"))
    for _ in range((2, 0, 1, 2)[rank]):
        left = wait(left.without([1]))  # type: ignore[assignment]
    assert left.timeout_s == 5.0
    ends: list[dict[str, Any]] = [{"is": str(wait(left.gather_count(rank, "counts")))}] if rank in (0, 3) else []
    if rank < 3:
        ends.append(outcome(lambda: wait(comm.without([3] if rank else [2]))))  # type: ignore[arg-type,return-value]
    return ends
