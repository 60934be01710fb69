"""What callers get back: texts, log probabilities, outputs of requests."""
