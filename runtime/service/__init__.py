"""One engine for callers of many threads, and what it tells them."""
