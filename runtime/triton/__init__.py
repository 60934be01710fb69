"""What the Triton Inference Server calls: one instance of a model."""
