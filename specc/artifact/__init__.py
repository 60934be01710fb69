"""The engine directory: manifest, graphs, weights, and how they lie in files."""
