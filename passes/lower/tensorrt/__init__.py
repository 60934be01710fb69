"""TensorRT engines, from ONNX files or by torch-tensorrt."""
