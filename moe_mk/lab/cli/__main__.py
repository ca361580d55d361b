"""`python -m moe_mk.lab.cli`, for machines where the console script is not on the path."""

from moe_mk.lab.cli.app import main

main()
