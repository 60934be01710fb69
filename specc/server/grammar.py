"""Grammars of requests over HTTP: compiled beside the event loop, and for nobody who has gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

from specc.errors import OverloadError
from specc.runtime.constraints.grammar import GrammarState
from specc.runtime.constraints.grammars import Grammars
from specc.runtime.processes.bounded_pool import Cancellation
from specc.sampling.structured import StructuredOutputsParams

Result = TypeVar("Result")


async def start_grammar(
    grammars: Grammars, params: StructuredOutputsParams, timeout_s: float | None
) -> GrammarState:
    """The grammar of a request, at its beginning.

    Args:
        grammars: of the engine.
        params: of the request.
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
