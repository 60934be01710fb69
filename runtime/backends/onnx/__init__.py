"""Programs on onnxruntime."""
