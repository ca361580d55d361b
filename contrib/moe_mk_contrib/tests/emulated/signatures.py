"""Parameters with their defaults, as the libraries have them."""

import json
from pathlib import Path
from typing import Any

PACKAGE = "moe_mk_contrib.emulated"


def _read(name: str) -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return content


DEEPEP = _read("deepep_signatures.json")
"""deep_ep 2.1.0 (V2), and nixl_ep of July 2026."""
ROW_LIBRARIES = _read("row_library_signatures.json")
"""flashinfer 0.7.2.post1, mori of August 2026, nccl-extensions 0.1.0."""
