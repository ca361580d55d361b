"""Write measured points: `configs/tuned/<device>/<experts>/<case>.json`, each with a `.meta.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_mk.config.tuned import TunedPoint
from moe_mk.files import write_text


def save_measured(path: Path, points: Sequence[TunedPoint], meta: Mapping[str, Any]) -> None:
    """Write points in order, and the conditions of measurement to `.meta.json`; both are replaced atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(points, key=lambda point: point.tokens)
    write_text(path, json.dumps({"points": [asdict(point) for point in ordered]}, indent=2) + "\n")
    write_text(path.with_suffix(".meta.json"), json.dumps(dict(meta), indent=2) + "\n")
