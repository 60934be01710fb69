"""The real scheduler and policies on simulated seconds."""
