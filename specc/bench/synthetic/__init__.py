"""Benchmarks of shapes with random weights, measured or estimated."""
