"""Grammars of requests over HTTP: compiled beside the event loop, and for nobody who has gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from specc.errors import OverloadError
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.processes.bounded_pool import Cancellation
from specc.sampling.structured import StructuredOutputsParams
from specc.server.errors import bad_request

Result = TypeVar("Result")
# fields that hold nothing but a grammar, and may be of any size
_FIELDS = (
    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "guided_whitespace_pattern", "structured_outputs", "response_format",
)  # fmt: skip
# of each value in JSON, beside its characters: quotes, a comma and a space
_PER_VALUE = 4


async def start_grammar(
    grammars: Grammars, params: StructuredOutputsParams, timeout_s: float | None
) -> GrammarState:
    """The grammar of a request, at its beginning.

    Args:
        timeout_s: seconds that it may take.
    Raises:
        SpeccError: as `Grammars.start`; OverloadError, too, where the time has passed or the
            server stops.
    """
    if (compiled := grammars.start_compiled(params)) is not None:
        return compiled
    cancellation = Cancellation()
    try:
        async with asyncio.timeout(timeout_s):
            return await in_own_thread(lambda: grammars.start(params, cancellation))
    except TimeoutError as error:
        raise OverloadError(
            f"a grammar that was not compiled within the {timeout_s:g} s of its request",
            "a server with less to do, or a smaller grammar",
            "try again later",
        ) from error
    finally:
        # of no effect where it has ended
        cancellation.cancel()


async def in_own_thread(call: Callable[[], Result]) -> Result:
    """Run what takes long where nothing waits for it, neither other work nor the process's end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def finish(result: Result | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as raised:
            error = raised
        # the loop may have ended, and with it whoever waited
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="specc-grammar", daemon=True).start()
    return await future


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
