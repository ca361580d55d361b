"""`python -m moe_mk` is `moe-mk`."""

from moe_mk.cli.app import main

main()
