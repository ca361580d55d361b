"""One-sided dispatch and combine between GPUs, over peer pointers."""
