"""What backends share whose models take padded batches."""
