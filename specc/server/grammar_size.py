"""How large a grammar a client may send: found in the parsed body, before anything looks at it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specc.server.errors import bad_request

# fields that hold nothing but a grammar, and may be of any size
_FIELDS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "structured_outputs", "response_format",
)  # fmt: skip
# of each value in JSON, beside its characters: quotes, a comma and a space
_PER_VALUE = 4


def check_grammar_size(body: Mapping[str, Any], max_chars: int) -> None:
    """Refuse a grammar that is too long, without a look at more of it than that.

    Args:
        body: of a request, parsed; of any form otherwise.
        max_chars: of a grammar, schema, regex, or all choices together, as in JSON.
    Raises:
        ApiError: it has more.
    """
    for name in _FIELDS:
        num_chars = 0
        for size in _sizes(body.get(name)):
            num_chars += size
            if num_chars > max_chars:
                raise bad_request(
                    f"{name} of more than {max_chars} characters",
                    f"at most {max_chars}",
                    "send a smaller grammar, or start the server with a larger --max-grammar-chars",
                    name,
                )


def _sizes(value: Any) -> Iterator[int]:
    """Characters of each value and key in it; levels are few, see `MAX_DEPTH`."""
    if isinstance(value, str):
        yield len(value) + _PER_VALUE
    elif isinstance(value, Mapping):
        yield _PER_VALUE
        for key, item in value.items():
            yield len(key) + _PER_VALUE
            yield from _sizes(item)
    elif isinstance(value, list):
        yield _PER_VALUE
        for item in value:
            # without a generator for each: there can be 100,000 of them
            if isinstance(item, str):
                yield len(item) + _PER_VALUE
            else:
                yield from _sizes(item)
    elif value is not None:
        yield _PER_VALUE
