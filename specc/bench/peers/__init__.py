"""Other programs that `specc bench --against` measures, each in processes of its own."""
