"""`nccl`, as far as its expert-parallel extension goes: the Python of nccl-extensions 0.1.0 over nccl4py."""
