"""Several processes run one engine: rank 0 leads, the others follow its orders."""
