"""The `moe-mk` command, also as `python -m moe_mk`."""

import sys


def main() -> None:
    """Run the command; without the packages that it needs, print one line and exit with code 3."""
    try:
        from moe_mk.lab.cli.app import main as run
    except ModuleNotFoundError as missing:
        if str(missing.name).partition(".")[0] not in ("click", "rich", "typer"):
            raise
        sys.stderr.write(f"moe-mk: the command needs {missing.name}: pip install 'moe-mk[lab]'\n")
        raise SystemExit(3) from None
    run()


if __name__ == "__main__":
    main()
