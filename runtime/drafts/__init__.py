"""What the host does for drafts: lookups of its index, weights of votes."""
