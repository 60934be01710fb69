"""Weights that a draft's program reads from the file of its target.

An input of `program.json` with `of_target` is a weight of the target, and says its key there; where
it `is_lent`, the draft's own file has it not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

LENT = "target:"
T = TypeVar("T")


def bound_key(item: Mapping[str, Any]) -> str:
    """By which key a program finds a weight or a constant, see `with_lent`.

    Args:
        item: of its inputs, in `program.json`.
    """
    key: str = f"{LENT}{item['of_target']}" if item.get("is_lent") else item["key"]
    return key


def lent_keys(program: Mapping[str, Any]) -> list[str]:
    """Keys of the target's file that a draft's program reads; content of its `program.json`."""
    return [item["of_target"] for item in program["inputs"] if item.get("is_lent")]


def with_lent(own: Mapping[str, T], target: Mapping[str, T]) -> dict[str, T]:
    """What a draft's program may read."""
    return {f"{LENT}{key}": value for key, value in target.items()} | dict(own)
