"""Files, processes, this machine, and what is installed on it."""
