"""The body of a request: read up to a limit, and parsed strictly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import numpy as np
from starlette.requests import Request

from specc.server.config import MAX_CONTAINERS, MAX_DEPTH, MAX_FIELDS, MAX_VALUES, ServeConfig
from specc.server.errors import ApiError, bad_request, overloaded, shorten

# from this size on, what a body holds is counted before it is parsed
COUNTED_BODY_BYTES = 64 << 10
# what is read and dropped of a body that is too large, so that the client gets to read the answer
_DROPPED_BYTES, _DROP_S = 64 << 20, 2.0
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


# headers, one of which at least comes with whatever a page posts
_OF_BROWSERS = frozenset(("origin", "sec-fetch-site"))
# what `curl -d` says, whatever it sends
_OF_CURL = "application/x-www-form-urlencoded"
# bytes a second of a body that comes for longer than its timeout
_MIN_RATE = 1 << 10
# largest bodies that may be in memory at a time; short ones are not counted
_NUM_LARGEST = 16


class BodyBudget:
    """Memory that long bodies share until they are parsed, however many connections send some."""

    def __init__(self, config: ServeConfig) -> None:
        self._num_free = _NUM_LARGEST * config.max_body_bytes

    def take(self, num_bytes: int) -> None:
        """Raises ApiError: there is not so much left."""
        if num_bytes > self._num_free:
            raise overloaded(
                "there are many long requests at a time", "fewer, or shorter ones",
                "try again later", {"Connection": "close"},
            )  # fmt: skip
        self._num_free -= num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._num_free += num_bytes


class ClientGone(Exception):
    """The client has closed the connection; nobody reads an answer."""


@contextlib.asynccontextmanager
async def read_body(request: Request, config: ServeConfig) -> AsyncIterator[bytes]:
    """The body of a request; while this is open, it counts among those that are in memory.

    Raises:
        ApiError: no JSON by its name, a body that is too large, or that does not come.
        ClientGone: there is nobody any more.
    """
    given = request.headers.get("content-type")
    media_type = (given or "").partition(";")[0].strip().lower()
    is_json = media_type == "application/json" or media_type.endswith("+json")
    # a page of another origin can send these types, too, but then its browser tells
    is_trusted = given is None or media_type == _OF_CURL
    if not is_json and not (is_trusted and _OF_BROWSERS.isdisjoint(request.headers)):
        raise ApiError(
            415,
            f"The body is of type {shorten(media_type) or 'unknown'}; expected application/json."
            " Please send the header Content-Type: application/json.",
            code="unsupported_media_type",
        )
    async with _counted(request.app.state.bodies) as count:
        yield await _read(request, config, count)


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in a body.

    Raises:
        ApiError: it is none, or holds more than requests need.
    """
    if len(body) < COUNTED_BODY_BYTES:
        return parse_object(body)
    # without what would hold the interpreter's lock for long, and so everybody up
    check_counts(body)
    return parse_object(body, is_flat=True)


def check_counts(body: bytes) -> None:
    """Count what a body holds, before it is parsed: a parser holds the interpreter's lock.

    Raises:
        ApiError: more values, fields, or lists and objects than requests need, or more levels.
    """
    # each run of backslashes begins with one that is not escaped
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
    data = np.frombuffer(plain, np.uint8)
    # after an odd number of quotes: in a string
    is_inside = np.bitwise_xor.accumulate((data == ord('"')).view(np.uint8)).view(bool)
    outside = data[~is_inside]
    for characters, limit, what in (
        (b",", MAX_VALUES, "values"),
        (b":", MAX_FIELDS, "fields"),
        (b"[{", MAX_CONTAINERS, "lists and objects"),
    ):
        found = sum(int(np.count_nonzero(outside == character)) for character in characters)
        if found > limit:
            raise bad_request(
                f"a body of more than {limit} {what}", f"at most {limit}", "send less in a request"
            )
    opened = (outside == ord("[")) | (outside == ord("{"))
    closed = (outside == ord("]")) | (outside == ord("}"))
    levels = np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int32)
    if levels.max(initial=0) > MAX_DEPTH:
        raise _too_deep()


def parse_object(body: bytes, is_flat: bool = False) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, without what only Python takes for JSON.

    Args:
        is_flat: its levels are known to be few.
    Raises:
        ApiError: it is none.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_request(
            f"a body that is no UTF-8 at byte {error.start}", "UTF-8", "encode it as UTF-8"
        ) from error
    try:
        data = json.loads(
            text, parse_constant=_refuse_constant, object_pairs_hook=_with_unique_keys
        )
    except json.JSONDecodeError as error:
        raise bad_request(
            f"malformed JSON: {error.msg} at line {error.lineno} column {error.colno}",
            "a JSON object",
            "correct the body",
        ) from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # an integer of thousands of digits
        raise bad_request("a number that is too long", "shorter numbers", "correct it") from error
    if not isinstance(data, dict):
        raise bad_request(
            f"a body that is a JSON {_KIND_OF[type(data)]}", "a JSON object", "correct the body"
        )
    if not is_flat:
        _check_depth(data)
    if _SURROGATE.search(body):
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise bad_request(
                "a lone surrogate in a string",
                "text that can be written as UTF-8",
                "decode the text with the encoding that it has",
            ) from error
    return data


@contextlib.asynccontextmanager
async def _counted(budget: BodyBudget) -> AsyncIterator[Callable[[int], None]]:
    """What is to be told a body's size as it grows; it counts beyond that of short ones."""
    taken = 0

    def count(size: int) -> None:
        nonlocal taken
        more = max(0, size - COUNTED_BODY_BYTES - taken)
        budget.take(more)
        taken += more

    try:
        yield count
    finally:
        budget.give_back(taken)


async def _read(request: Request, config: ServeConfig, count: Callable[[int], None]) -> bytes:
    limit, size = config.max_body_bytes, 0
    parts: list[bytes] = []
    begin_s = time.monotonic()
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        await _drop(request)
        raise _too_large(limit)
    while True:
        left_s = begin_s + config.body_timeout_s + size / _MIN_RATE - time.monotonic()
        message = await _receive(request, config.body_timeout_s, left_s)
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            await _drop(request)
            raise _too_large(limit)
        is_all = not message.get("more_body", False)
        try:
            count(size)
        except ApiError:
            parts.clear()  # there is no memory for it
            if not is_all:
                await _drop(request)
            raise
        parts.append(part)
        if is_all:
            return b"".join(parts)


async def _receive(request: Request, timeout_s: float, left_s: float) -> Any:
    try:
        message = await asyncio.wait_for(request.receive(), min(timeout_s, max(0.0, left_s)))
    except TimeoutError as error:
        found = f"No more of the body came for {timeout_s:g} s"
        if left_s < timeout_s:
            found = f"Less than {_MIN_RATE} bytes of the body came a second"
        raise ApiError(
            408,
            f"{found}. Please send the request again.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from error
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message


async def _drop(request: Request) -> None:
    """Read on for a while, and keep nothing."""
    if "100-continue" in request.headers.get("expect", "").lower():
        return  # the client waits for the answer before it sends anything
    end_s, left = time.monotonic() + _DROP_S, _DROPPED_BYTES
    while left > 0 and (seconds := end_s - time.monotonic()) > 0:
        try:
            message = await asyncio.wait_for(request.receive(), seconds)
        except TimeoutError:
            return
        left -= len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


def _check_depth(data: Any) -> None:
    """Without recursion, as the data may be deep."""
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            below.extend(child for child in children if isinstance(child, (dict, list)))
        level = below


def _refuse_constant(name: str) -> NoReturn:
    raise bad_request(f"{name}, which is no JSON", "finite numbers", "correct the body")


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key that comes twice, readers take different values."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise bad_request(
            f"the key {shorten(twice, 40)!r} twice in one object", "each key once", "leave one out"
        )
    return found


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is too large; expected at most {limit} bytes. Please send less, or start the"
        " server with a larger --max-body-bytes.",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _too_deep() -> ApiError:
    return bad_request(
        f"JSON of more than {MAX_DEPTH} levels", f"at most {MAX_DEPTH}", "nest it less"
    )


_KIND_OF = {
    list: "array",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
