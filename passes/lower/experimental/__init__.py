"""Lowerings that no GPU has run: packages of AOTInductor, engines of torch-tensorrt."""
