"""Traces for other programs and from them: Chrome traces, waits read from one, recorded routings, own and imported.

from moe_mk.lab.trace.chrome import write_chrome_trace
from moe_mk.lab.trace.sparsity import count_near_zero
from moe_mk.lab.trace.waits import waits_of
"""
