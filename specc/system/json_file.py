"""JSON of files that anybody may have written: whatever is wrong with it is one error.

Python's own reader raises RecursionError for text that is nested deeply, and so does code that
walks what it has read: nesting has a bound here.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

from specc.errors import EngineError, SpeccError

# objects and lists inside each other; a program needs 10
MAX_NESTING = 64
# of a file of an engine: programs of the largest models take 3 MB
MOST_ENGINE_BYTES = 32 << 20
# of the name of a key, or of a number, in an error
_MOST_TEXT = 40

_BRACKETS = b"{[]}"
_NO_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_STEPS = bytes.maketrans(_BRACKETS, bytes((1, 1, 0, 0)))


class JsonError(ValueError):
    """Text that is no JSON, or that nobody writes; the message says which."""


def parse_json(text: str | bytes, exact: bool = False) -> Any:
    """Decode JSON.

    Args:
        text: JSON; bytes are UTF-8.
        exact: refuse what Python accepts beyond the standard, or resolves by itself: NaN,
            infinity, keys that come twice.
    Raises:
        JsonError: no JSON, no UTF-8, or more than MAX_NESTING levels.
    """
    hooks: dict[str, Any] = {}
    if exact:
        hooks = {"parse_constant": _refuse_constant, "object_pairs_hook": _unique_keys}
    try:
        data = json.loads(text, **hooks)
    except RecursionError as error:
        raise JsonError(f"nested more than {MAX_NESTING} levels deep") from error
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(str(error)) from error
    if _bound_of_nesting(text) > MAX_NESTING and _nests_too_deep(data):
        raise JsonError(f"nested more than {MAX_NESTING} levels deep")
    return data


def read_json(
    path: Path,
    error: type[SpeccError],
    needed: str,
    do: str,
    exact: bool = False,
    max_bytes: int | None = None,
) -> Any:
    """Decode a JSON file.

    Args:
        needed: what the file should have been, for them.
        exact: see `parse_json`.
        max_bytes: of the file; None: any number.
    Raises:
        SpeccError: `error`: the file cannot be read, is larger, or `parse_json` refuses what is in
            it.
    """
    try:
        size = path.stat().st_size
        if max_bytes is not None and size > max_bytes:
            raise error(f"{path} has {size} bytes, at most {max_bytes}", needed, do)
        return parse_json(path.read_bytes(), exact)
    except OSError as found:
        raise error(f"{path} cannot be read: {found.strerror}", needed, do) from found
    except JsonError as found:
        raise error(f"{path} is no JSON: {found}", needed, do) from found


def read_engine_json(path: Path, needed: str, do: str) -> Any:
    """Decode a JSON file of an engine: exactly, and none that no engine comes near in size.

    Raises:
        EngineError: see `read_json`.
    """
    return read_json(path, EngineError, needed, do, exact=True, max_bytes=MOST_ENGINE_BYTES)


def _refuse_constant(name: str) -> Any:
    raise JsonError(f"{name} is no number of JSON")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"the key {twice[:_MOST_TEXT]!r} comes twice")
    return data


def _bound_of_nesting(text: str | bytes) -> int:
    """Levels at most: counts brackets inside of strings, too."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    brackets = data.translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(2 * step - 1 for step in brackets), default=0)


def _nests_too_deep(data: Any) -> bool:
    level = [data]
    for _ in range(MAX_NESTING):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True
