"""Options and help of each subcommand; what takes long to load is imported when it runs."""
