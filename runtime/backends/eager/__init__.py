"""The graphs of any engine, run by torch operator by operator."""
