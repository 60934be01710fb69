"""Which requests run: queue, admission, batches, blocks of caches."""
