"""Writing measured points: `configs/tuned/<device>/<experts>/<case>.json`, and beside each a `.meta.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_mk.config.tuned import TunedPoint


def save_measured(path: Path, points: Sequence[TunedPoint], meta: Mapping[str, Any]) -> None:
    """Write points in order and, beside them, what they were measured with; each file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(points, key=lambda point: point.tokens)
    _replace(path, json.dumps({"points": [asdict(point) for point in ordered]}, indent=2) + "\n")
    _replace(path.with_suffix(".meta.json"), json.dumps(dict(meta), indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
