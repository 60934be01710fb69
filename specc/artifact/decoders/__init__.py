"""Quantized checkpoints: which rows of integers, scales and zero points their tensors stand for."""
