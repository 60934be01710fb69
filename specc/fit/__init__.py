"""Fitting a draft to a target: texts, what the target computes along them, and training."""
