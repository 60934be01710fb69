"""Programs of an engine, ready to run: what all backends share, and eager ones."""
