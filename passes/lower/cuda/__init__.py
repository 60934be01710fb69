"""Programs for a GPU: phases before capture, and packages of fixed sizes."""
