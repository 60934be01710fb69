"""The command `specc`."""
