"""`moe-mk run --trace`: one time axis for the ranks of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moe_mk.trace.recorder import STAGES

BIN = Path(sys.executable).parent


@pytest.mark.row(93)
@pytest.mark.slow
def test_a_run_of_two_processes_shows_shared_experts_while_rows_travel(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["run", tiny, "--ranks", 2, "--tokens", 40, "--repeats", 1, "--no-verify", "--trace", out]
    done = subprocess.run(
        [str(word) for word in (BIN / "moe-mk", *words)], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"{out}, " in done.stdout
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1} and {event["name"] for event in events} <= set(STAGES)
    span = {(e["pid"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events}
    for rank in (0, 1):
        whole, dispatch, shared = (span[rank, name] for name in ("other", "dispatch", "shared"))
        assert all(whole[0] <= start <= end <= whole[1] for (r, _), (start, end) in span.items() if r == rank)
        assert dispatch[0] < shared[0] < shared[1] < dispatch[1]
        assert span[rank, "experts"][0] >= dispatch[1] and span[rank, "combine"][0] >= span[rank, "experts"][1]
    (first, last), (begin, end) = span[0, "other"], span[1, "other"]
    assert max(first, begin) < min(last, end), "both ranks ran at once, on one axis"
