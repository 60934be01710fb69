"""Options and help of each subcommand; what it does is imported when it runs."""
