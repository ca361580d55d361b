"""Tuned kernel parameters: candidates, measurement within a budget, and files of results."""

from moe_mk.config.tuned import Candidate, TunedPoint, load_measured, tuned_path
from moe_mk.lab.tuning.session import Space, TuneCase, TuneResult, save_measured, space_of, tune
from moe_mk.lab.tuning.vllm import VllmTuned, read_vllm

__all__ = [
    "Candidate", "Space", "TuneCase", "TuneResult", "TunedPoint", "VllmTuned", "load_measured", "read_vllm",
    "save_measured", "space_of", "tune", "tuned_path",
]  # fmt: skip
