"""Kinds of drafts that read hidden states, as tests write, compute and compare them."""
