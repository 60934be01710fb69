"""Programs for a GPU: phases before capture, and the sizes of passes."""
