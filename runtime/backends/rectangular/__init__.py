"""What backends share whose models take rectangles of tokens."""
