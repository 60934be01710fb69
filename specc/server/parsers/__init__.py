"""What a model's text says besides content: thinking, and calls of tools, as the text comes."""
