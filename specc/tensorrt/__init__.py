"""TensorRT as compiler and runtime share it: the library, and layers of its engines."""
