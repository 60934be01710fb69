"""From programs to what a backend runs."""
