"""Compiled programs and steps on the CPU."""
