"""Models of the Triton Inference Server: what is written, and their tensors."""
