"""`python -m moe_mk` is `moe-mk`."""

from moe_mk.lab.cli.app import main

main()
