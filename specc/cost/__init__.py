"""What a step costs and earns, and the trees that are worth most by that."""
