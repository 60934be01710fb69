"""ONNX files beside an engine's weights."""
