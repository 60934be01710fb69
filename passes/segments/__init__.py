"""One graph becomes several that run one after another: segments of a model."""
