"""Options of a request: when it stops, how its tokens are drawn, what they may be."""
