"""Child processes for work on data of strangers, and threads of special kinds."""
