"""Kernels that no backend uses: attention as a plugin of full TensorRT, which no GPU has run."""
