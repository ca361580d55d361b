"""`python -m moe_mk.cli`, for machines where the console script is not on the path."""

from moe_mk.cli.app import main

main()
