"""GPU kernels in Triton, one op a file, named as in `kernels/reference` where that has the op.

Importing this package imports nothing optional; importing one of its files needs triton. Set TRITON_INTERPRET=1 before
that to run the kernels on CPU tensors, one program after the other: for tests.
"""
