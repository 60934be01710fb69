"""What the host does for drafts: a module for each kind in which it has a part."""
