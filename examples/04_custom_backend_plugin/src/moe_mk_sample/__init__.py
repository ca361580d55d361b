"""Sample backends for moe-mk: `one_by_one` carries tokens, `matmul_loop` multiplies."""
