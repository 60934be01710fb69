"""From a Hugging Face directory or a module to a traced graph."""
