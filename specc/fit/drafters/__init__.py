"""Kinds of drafts that can be fitted: modules to train, losses, and files as they are published."""
