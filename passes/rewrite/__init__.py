"""Passes that rewrite a program: normal form, attention, logits, fusion."""
