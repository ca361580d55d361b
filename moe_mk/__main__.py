"""The `moe-mk` command, also as `python -m moe_mk`."""

import os
import signal
import sys


def main() -> None:
    """Run the command; without the packages that it needs, print one line and exit with code 3."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # an exception that ends an import is printed with a traceback, or lost
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    try:
        from moe_mk.lab.cli.app import main as run
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] not in ("click", "rich", "typer"):
            raise
        sys.stderr.write(f"moe-mk: the command needs {missing.name}: pip install 'moe-mk[lab]'\n")
        raise SystemExit(3) from None
    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
