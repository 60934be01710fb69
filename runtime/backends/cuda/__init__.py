"""Programs on a GPU: Triton's kernels, CUDA graphs, products by measurement."""
