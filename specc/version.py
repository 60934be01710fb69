"""The version of specc, as pyproject.toml has it."""

from __future__ import annotations

__version__ = "0.1.0"
