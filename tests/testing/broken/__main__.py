"""Certify every broken backend, and print how many are refused: python -m tests.testing.broken [NAME ...]."""

import sys

from tests.testing.broken import experts, transports
from tests.testing.broken.corpus import CORPUS, refused


def main(names: list[str]) -> int:
    """Exit code 1 if a backend is not refused with its law."""
    assert {experts.__name__, transports.__name__} <= sys.modules.keys()
    killed, chosen = 0, names or list(CORPUS)
    for name in chosen:
        try:
            refused(name)
            killed += 1
            print(f"refused  {CORPUS[name].law:<14} {name}", flush=True)
        except AssertionError as problem:
            print(f"SURVIVES {CORPUS[name].law:<14} {name}: {problem}", flush=True)
    print(f"kill rate: {killed} of {len(chosen)} ({100 * killed // len(chosen)} %)")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
