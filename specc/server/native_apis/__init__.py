"""Requests and answers of other servers, over the same endpoints."""
