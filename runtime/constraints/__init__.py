"""What outputs may hold: grammars and controls, as masks of trees."""
