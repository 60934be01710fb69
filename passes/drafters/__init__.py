"""What the compiler does for each kind of draft: a module for each, found by its name."""
