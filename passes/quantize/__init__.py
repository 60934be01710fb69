"""Weights as integers: which projections and experts read them, on every backend."""
