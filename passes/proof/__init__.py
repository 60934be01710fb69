"""What is proved of programs between phases."""
