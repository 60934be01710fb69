"""Pictures: trees, steps, benchmarks and loads."""
