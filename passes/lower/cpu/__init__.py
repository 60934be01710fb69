"""Compiled programs for the CPU."""
