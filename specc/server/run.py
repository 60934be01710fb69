"""`specc serve` as a process: its port, its signals, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from fastapi import FastAPI

from specc.errors import ConfigError, RequestError
from specc.runtime.core import EngineCore
from specc.runtime.engine_args import AsyncEngineArgs
from specc.runtime.kept_latency import is_of_here
from specc.runtime.requests.chat_template import load_template
from specc.runtime.service.idle_work import IdleWork
from specc.runtime.service.service import Service
from specc.runtime.service.state import Health
from specc.server.app import create_app
from specc.server.config import ConnectionLimits, Place, ServeConfig
from specc.server.connections import Connections
from specc.server.hosts import choose_hosts
from specc.server.listener import address_error, bind, fit, raise_file_limit
from specc.server.log import start_logging
from specc.server.memory import forget_garbage, share_heaps
from specc.server.tls import make_context

# exit codes: the engine has failed for good; 128 + the signal for a second one
DEAD = 1
# seconds that clients have to read the ends of their answers
_FLUSH_S = 5
# and that the process has after a second signal
_END_NOW_S = 2.0
# for threads that still work when everything else has ended
_END_S = 5.0
_LOOK_EVERY_S = 0.05
_log = logging.getLogger("specc.serve")
# what measures an engine's passes for the policy goodput while no request runs
Measure = Callable[[EngineCore], IdleWork]


def serve(
    args: AsyncEngineArgs, place: Place, config: ServeConfig, measure: Measure | None = None
) -> int:
    """Serve an engine until a signal ends it, or the engine fails for good.

    Args:
        args: the engine's directory, and how it is opened and run.
        place: where to listen.
        config: names, keys and limits.
        measure: see `start_service`.
    Returns:
        the exit code of the process: 0 after SIGTERM or SIGINT, `DEAD`, or 128 + a second signal.
    Raises:
        SpeccError: the port is taken, or the engine cannot be loaded as wanted.
    """
    start_logging(place.log_level)
    # before there are threads
    share_heaps()
    num_files = raise_file_limit()
    # first of all: loading takes longer than finding out that the port is taken
    tls = make_context(place.tls)
    listener = bind(place.host, place.port)
    try:
        address = listener.getsockname()[0]
        has_keys = bool(config.api_keys)
        hosts = choose_hosts(address, place.host, place.allowed_hosts, has_keys=has_keys)
        names = config.model_names or (args.directory.resolve().name,)
        config = replace(config, model_names=names, allowed_hosts=hosts)
        template = load_template(
            args.directory,
            place.chat_template,
            content_format=place.chat_template_content_format,
            may_be_empty=config.trust_request_chat_template,
            defaults=place.default_chat_template_kwargs,
        )
        _log.info("loading %s", args.directory)
        service = start_service(args, measure)
        place = replace(place, limits=fit(place.limits, num_files))
        if hosts is None and not has_keys:
            _log.warning("without --api-key: whoever reaches %s uses this server", address)
        try:
            app = create_app(service, config, template)
            process = _Process(app, service, listener, place, tls)
            forget_garbage()
            with _End() as end:
                code = asyncio.run(end.after(process.run()))
                service.close()
                # within the time of `_End`: at its exit, Python would wait for them without end
                app.state.endpoints.close()
                app.state.endpoints.wait()
            return code
        finally:
            service.close()
    finally:
        listener.close()


def start_service(args: AsyncEngineArgs, measure: Measure | None = None) -> Service:
    """Load an engine; goodput chooses its plans, unless the caller or the engine knows better.

    Args:
        args: how it is opened and run.
        measure: makes what measures passes for the policy goodput while no request runs, where no
            latency table of this machine is known; None lets the policy learn while it serves.
    Raises:
        SpeccError: the engine, the plan or the policy.
    """
    loaded = args.load()
    args = args.of_loaded(loaded)
    speculates = any(plan.speculates for plan in loaded.plans.values())
    is_free = args.plan is None and args.policy is None
    wants_goodput = args.policy == "goodput" or (is_free and speculates)
    core = None
    if is_free and speculates:
        try:
            core = replace(args, policy="goodput").make_core()
        except RequestError as error:
            _log.warning("no goodput policy for this engine: %s", error.found)
            wants_goodput = False
    core = core or args.make_core()
    work = None
    if wants_goodput and measure is not None:
        table = loaded.profile.get("latency")
        if table is None or not is_of_here(table, loaded):
            try:
                work = measure(core)
            except ConfigError as error:
                _log.warning("how long passes take is not measured: %s", error.found)
    return Service(core, args.max_waiting, work, args.sleep_after_s)


class HttpServer(uvicorn.Server):
    """uvicorn, with this package's connections; leaves signals to its caller.

    Args:
        tls: encrypts them; None leaves them plain.
        options: further ones of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.connections = Connections(limits, app.state.origins, tls)
        # what uvicorn calls for each connection; it need not be a class
        make: Any = self.connections.make
        config = uvicorn.Config(
            app,
            http=make,
            ws="none",
            log_config=None,
            server_header=False,
            timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
            **options,
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        async with self.connections.watched(self.server_state):
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn does not know those that it got no request from
        self.connections.end_handshakes()
        await super().shutdown(sockets)


class _End:
    """Ends the process although a thread goes on: its work is of no use to anybody."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    async def after(self, run: Coroutine[Any, Any, int]) -> int:
        code = await run
        # from here on, the event loop waits for its threads
        self._timer = threading.Timer(_END_S, os._exit, (code,))
        self._timer.daemon = True
        self._timer.start()
        return code

    def __enter__(self) -> _End:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


class _Process:
    """The event loop's side: serve, drain, end.

    Args:
        service: that the application hands requests to.
        listener: bound.
        place: where it is bound to.
        tls: encrypts connections; None leaves them plain.
    """

    def __init__(
        self,
        app: FastAPI,
        service: Service,
        listener: socket.socket,
        place: Place,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._service = service
        self._listener = listener
        self._place = place
        self._scheme = "http" if tls is None else "https"
        self._signals: list[int] = []
        self._server = HttpServer(
            app,
            place.limits,
            tls,
            access_log=place.log_level == "debug",
            timeout_graceful_shutdown=_FLUSH_S,
        )

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            # other processes can have bound it, too, as long as none of them listens
            self._listener.listen(2048)
        except OSError as error:
            raise address_error(self._place.host, self._place.port, error) from error
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        _log.info("serving at %s://%s:%d", self._scheme, shown, port)
        serving = asyncio.ensure_future(self._server.serve([self._listener]))
        watching = asyncio.ensure_future(self._watch())
        await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            self._server.should_exit = True
            self._server.force_exit = len(self._signals) > 1
            second = asyncio.ensure_future(self._second_signal())
            await asyncio.wait({serving, second}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        if len(self._signals) > 1:
            return 128 + self._signals[1]
        return 0 if self._signals and self._service.health is not Health.DEAD else DEAD

    def _on_signal(self, number: int) -> None:
        self._signals.append(number)
        if len(self._signals) == 2:
            # what is cut short is meant to be: its tracebacks tell nothing
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            # a thread that still tokenizes would keep the process
            asyncio.get_running_loop().call_later(_END_NOW_S, os._exit, 128 + number)

    async def _watch(self) -> None:
        """Return when it is time to end: nothing runs any more, or nothing should."""
        service = self._service
        was = Health.OK
        while not self._signals:
            health = service.health
            if health is Health.STALLED and was is not health:
                _log.error("an iteration of the engine does not end: /health says stalled")
            was = health
            if health is Health.DEAD:
                _log.critical("the engine has failed for good: this process ends")
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        seconds = self._place.drain_timeout_s
        _log.info("draining: %d requests are open, for %g s at most", service.num_open, seconds)
        end_s = asyncio.get_running_loop().time() + seconds
        # whoever comes now is refused, and told to go elsewhere
        service.drain(0)
        # no request that would begin only now
        service.engine.grammars.close()
        while service.num_open and service.health is not Health.DEAD and len(self._signals) < 2:
            if asyncio.get_running_loop().time() >= end_s:
                _log.warning("%d requests did not end in time", service.num_open)
                break
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.to_thread(service.close, 1.0)

    async def _second_signal(self) -> None:
        while len(self._signals) < 2:
            await asyncio.sleep(_LOOK_EVERY_S)
