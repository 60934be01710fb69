"""Oracles of specc's operators in plain torch."""
