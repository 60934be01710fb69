"""Programs on TensorRT."""
