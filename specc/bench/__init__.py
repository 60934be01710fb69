"""What `specc bench` measures and reports."""
