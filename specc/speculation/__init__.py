"""What a step proposes: trees, plans, and the counters of what was accepted."""
