"""How a model is cut for several ranks: the plan as data, and a rank's part of each weight."""
