"""Which plan the next step runs."""
