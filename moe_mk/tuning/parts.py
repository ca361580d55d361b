"""What a session has measured so far: `<case>.part.jsonl`, a line a trial, written before the next one starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_mk.config.tuned import Candidate
from moe_mk.files import parse_json, read_lines
from moe_mk.tuning.judge import Rounds, Trial


class Parts:
    """Trials by tokens and parameters, of this session and of those before it. Raises nothing for lines cut off."""

    def __init__(self, file: Path, case: str) -> None:
        self.file, self.case = file, case
        self._trials: dict[str, Trial] = {}
        for line in read_lines(file) if file.is_file() else []:
            self._take(line)

    def __len__(self) -> int:
        return len(self._trials)

    def get(self, tokens: int, candidate: Candidate) -> Trial | None:
        """What is known of a candidate."""
        return self._trials.get(_key(tokens, candidate))

    def add(self, tokens: int, candidate: Candidate, rounds: Rounds, *, confirms: bool = False) -> None:
        """Write what was measured. confirms: rounds of its own, of a candidate that is known."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        held = {"case": self.case, "tokens": tokens, "parameters": dict(candidate), "rounds": rounds}
        with self.file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(held | {"confirms": confirms}) + "\n")
        self._enter(tokens, candidate, rounds, confirms=confirms)

    def done(self) -> None:
        """Forget the file: all of it stands in the tuned one."""
        self.file.unlink(missing_ok=True)

    def _take(self, line: bytes) -> None:
        """A line that was cut off, or written by another method, is left out."""
        try:
            held: Mapping[str, Any] = parse_json(line)
            if held["case"] != self.case:
                return
            rounds = tuple((float(before), float(its)) for before, its in held["rounds"])
            self._enter(int(held["tokens"]), held["parameters"], rounds, confirms=bool(held["confirms"]))
        except (ValueError, KeyError, TypeError):
            return

    def _enter(self, tokens: int, candidate: Candidate, rounds: Rounds, *, confirms: bool) -> None:
        key = _key(tokens, candidate)
        if confirms and key in self._trials:
            self._trials[key] = replace(self._trials[key], confirmed=rounds)
        elif not confirms:
            self._trials[key] = Trial(dict(candidate), rounds)


def _key(tokens: int, candidate: Candidate) -> str:
    return json.dumps([tokens, dict(candidate)], sort_keys=True)
