"""`specc bench` and `specc bench serve`: from options to reports and tables."""
