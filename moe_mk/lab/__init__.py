"""Tools that a person runs: the command, plans, tuning, the conformance kit, checkpoints and their verification.

The library never imports this package; it needs `pip install 'moe-mk[lab]'`.
"""
