"""Loads for an engine, a server or the simulator, and reports of them."""
