"""Parts of the runner: inputs of passes, tensors of a batch, results on their way."""
