"""Draft heads that read a target's hidden states: published checkpoints, as modules to trace."""
