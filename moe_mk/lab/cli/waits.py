"""`moe-mk waits`: who waited for whom in a trace of all ranks."""

from __future__ import annotations

from pathlib import Path

from moe_mk.lab.cli.exits import OK, print_json
from moe_mk.lab.cli.screen import Screen, table_of
from moe_mk.lab.trace.waits import STAGES, calls_of_trace, waits_of


def show_waits(screen: Screen, file: Path, stage: str | None, *, as_json: bool) -> int:
    """Print the wait matrix of a trace, and the ranks that stand out. Raises ConfigError for a file without spans."""
    stages = STAGES if stage is None else (stage,)
    waits = waits_of(calls_of_trace(file), stages)
    if as_json:
        stated = {
            "waited_us": waits.waited_WW, "rest_us": waits.rest_W, "calls": waits.calls, "late": waits.late,
            "slow_to_receive": waits.slow_to_receive,
        }  # fmt: skip
        return print_json(stated)
    heads = ("waited, us", *(f"for {rank}" for rank in range(len(waits.rest_W))), "rest")
    table = table_of(heads, left=heads[:1], pad_edge=False, padding=(0, 1))
    for rank, row in enumerate(waits.waited_WW):
        table.add_row(f"rank {rank}", *(f"{us:.0f}" for us in row), f"{waits.rest_W[rank]:.0f}")
    screen.console.print(table)
    screen.fact("calls", f"{waits.calls} of {', '.join(stages)}; rest: all ranks had begun")
    for rank in waits.late:
        screen.fact("late", f"rank {rank}: others waited {waits.caused_W[rank]:.0f} us for it")
    for rank in waits.slow_to_receive:
        screen.fact("slow", f"rank {rank}: {waits.rest_W[rank]:.0f} us after all had begun")
    if not waits.late and not waits.slow_to_receive:
        screen.fact("found", "no rank stands out")
    return OK
