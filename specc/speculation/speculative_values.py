"""Values of `--speculative-config`: integers, texts, trees of paths, and errors that show them."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from specc.errors import ConfigError, TreeError
from specc.speculation.tree import TokenTree

OPTION = "--speculative-config"


def tree_of(values: Mapping[str, Any]) -> TokenTree | None:
    """The tree of paths: each node is the list of child numbers that lead to it from the root.

    Raises:
        ConfigError: no list of paths, a path twice, or a node without its parent or elder sibling.
        TreeError: too many nodes.
    """
    given = values.get("speculative_token_tree")
    if given is None:
        return None
    paths = _paths(given)
    numbers: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    for path in paths:
        # tokens are the draft's best, second best, …: no rank is left out
        elder = (*path[:-1], path[-1] - 1)
        for needed in (path[:-1], elder if path[-1] else ()):
            if needed not in numbers:
                raise refused(
                    f"speculative_token_tree: {path} without {needed}",
                    "the parent and all elder siblings of every node",
                    f"add {needed} to the tree",
                )
        numbers[path] = len(parents)
        parents.append(numbers[path[:-1]])
    tree = TokenTree(tuple(parents))
    # an expansion is called by its widths
    widths = [len(tree.children(level[0])) for level in tree.levels[:-1]]
    if min(widths) < 1:
        return tree
    try:
        expansion = TokenTree.from_widths(widths)
    except TreeError:
        return tree
    return expansion if expansion.parents == tree.parents else tree


def _paths(given: Any) -> list[tuple[int, ...]]:
    """The nodes, level by level."""
    found = given
    if isinstance(given, str):
        try:
            found = ast.literal_eval(given)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            found = None
    is_list = isinstance(found, Sequence) and not isinstance(found, str) and len(found) > 0
    if not is_list or not all(map(_is_path, found)):
        raise refused(
            f"speculative_token_tree {shown(given)}",
            "a list of tuples of child numbers, from 0",
            'for example "[(0,), (1,), (0, 0)]": two first tokens, and one after the first of them',
        )
    paths = [tuple(path) for path in found]
    if len(set(paths)) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise refused(
            f"speculative_token_tree: {twice} twice", "every node once", "leave one of them out"
        )
    return sorted(paths, key=lambda path: (len(path), path))


def _is_path(path: Any) -> bool:
    return (
        isinstance(path, (tuple, list))
        and len(path) > 0
        and all(type(number) is int and number >= 0 for number in path)
    )


def integer_of(values: Mapping[str, Any], key: str, most: int | None = None) -> int | None:
    value = values.get(key)
    if value is None or (type(value) is int and 1 <= value <= (most or value)):
        return value
    needed = f"an integer of 1 … {most}" if most else "an integer of 1 or more"
    raise refused(f"{key} {shown(value)}", needed, f"correct {key}, or leave it out")


def text_of(values: Mapping[str, Any], key: str) -> str | None:
    value = values.get(key)
    if value is None or isinstance(value, str):
        return value
    raise refused(f"{key} {shown(value)}", "a string", f"correct {key}")


def check_absent(values: Mapping[str, Any], key: str, beside: str, needed: str) -> None:
    if key in values:
        raise refused(f"{beside} and {key} {shown(values[key])}", needed, f"leave out {key}")


def refused(found: str, needed: str, do: str) -> ConfigError:
    return ConfigError(f"{OPTION}: {found}", needed, do)


def shown(value: Any) -> str:
    """A value as JSON has it, cut where it is long."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
