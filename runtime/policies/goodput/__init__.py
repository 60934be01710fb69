"""How much to speculate by expected tokens over predicted seconds."""
