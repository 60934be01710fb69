"""Backends that no GPU has run: chosen only where they are asked for by name."""
