"""Raw tensors in, raw tensors out: one op a file, `reference/` is the specification."""
