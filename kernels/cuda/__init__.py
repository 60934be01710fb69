"""Triton kernels of the `specc::` operators, one file each."""
