"""TensorRT engines, from ONNX files."""
