"""`nccl.ep.interop`: the library for users of PyTorch."""
