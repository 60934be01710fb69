"""From models to an engine directory: checks, phases, weights, manifest."""
