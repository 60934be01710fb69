"""How engines are compiled for each backend: one module for each, found by its name."""
