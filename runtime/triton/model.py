"""What the Triton Inference Server calls: one instance of a model, on specc's own scheduler.

Triton finds it through a `model.py` of a few lines, beside an engine or as the backend `specc`.
Nothing heavy is imported before `initialize` has settled which devices this process sees.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specc.errors import ConfigError, SpeccError
from specc.triton.tensors import INPUTS, OUTPUTS

if TYPE_CHECKING:
    from specc.runtime.constraints.grammar import GrammarState
    from specc.runtime.engine_args import AsyncEngineArgs
    from specc.runtime.service.service import Service
    from specc.runtime.triton.metrics import TritonMetrics
    from specc.runtime.triton.responses import OpenRequest, ResponseSender

_log = logging.getLogger("specc.triton")


class TritonModel:
    """Base class of the `TritonPythonModel` in a `model.py`, which sets `pb_utils`."""

    # Triton's module `triton_python_backend_utils`, which exists in its own processes only
    pb_utils: Any = None

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Fill in what a short config.pbtxt leaves out: tensors, no batches, many responses."""
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        for tensor in INPUTS:
            entry = {"name": tensor.name, "data_type": tensor.data_type, "dims": [*tensor.dims]}
            config.add_input(entry | {"optional": True})
        for tensor in OUTPUTS:
            config.add_output(
                {"name": tensor.name, "data_type": tensor.data_type, "dims": [*tensor.dims]}
            )
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine.

        Raises:
            TritonModelException: what is wrong with config.pbtxt or engine, for the server's log.
        """
        from specc.runtime.triton.options import TritonOptions

        _log_through(self.pb_utils.Logger)
        try:
            self._options = TritonOptions.from_args(args)
            if self._options.devices is not None and "torch" in sys.modules:
                raise ConfigError(
                    "torch was imported before specc chose its devices",
                    "a model.py that imports nothing else first",
                    "write it again with specc triton",
                )
            self._options.place(os.environ)
            self._service = _load(self._options.args)
            self._serve()
        except SpeccError as error:
            raise self.pb_utils.TritonModelException(f"\n{error}") from None

    def execute(self, requests: Sequence[Any]) -> None:
        """Hand requests in; their responses are sent as they come. Never raises."""
        for request in requests:
            self._take(request)

    def finalize(self) -> None:
        """Wait for open requests, within `drain_s`, end the others, and free the engine."""
        # requests that only begin: their threads end soon after
        self._service.engine.grammars.close()
        for thread in list(self._beginning):
            thread.join(self._options.drain_s)
        if not self._service.drain(self._options.drain_s):
            _log.warning("%d requests are still open", self._service.num_open)
        self._service.close(self._options.drain_s)
        self._responses.close()
        self._metrics.close()

    def _serve(self) -> None:
        from specc.runtime.triton.metrics import TritonMetrics
        from specc.runtime.triton.responses import ResponseSender

        labels = self._options.labels or {}
        self._metrics: TritonMetrics = TritonMetrics(self._service, self.pb_utils, labels)
        self._has_stopped = False
        # of requests whose grammars are compiled
        self._beginning: set[threading.Thread] = set()
        self._responses: ResponseSender = ResponseSender(self._service, self.pb_utils, self._tick)

    def _take(self, request: Any) -> None:
        from specc.runtime.triton.request import read_request
        from specc.runtime.triton.responses import OpenRequest

        sender = None
        try:
            sender = request.get_response_sender()
            asked = read_request(
                {tensor.name(): tensor.as_numpy() for tensor in request.inputs()},
                request.parameters(),
                request.requested_output_names(),
                self._service.core.defaults,
            )
            opened = OpenRequest(sender, asked)
            structured, grammar = asked.params.structured_outputs, None
            if structured is not None:
                grammar = self._service.engine.grammars.start_compiled(structured)
                if grammar is None:
                    # Triton hands in the next request when this one was taken
                    self._begin(partial(self._submit, opened))
                    return
            self._submit(opened, grammar)
        except Exception as error:
            self._refuse(sender, error)

    def _submit(self, opened: OpenRequest, grammar: GrammarState | None = None) -> None:
        asked = opened.request
        try:
            ticket = self._service.submit(
                asked.prompt,
                asked.params,
                partial(self._responses.put, opened),
                priority=asked.priority,
                timeout_s=asked.timeout_s,
                grammar=grammar,
                prediction=asked.prediction,
                cache_salt=asked.cache_salt,
            )
            self._responses.add(opened, ticket)
        except Exception as error:
            self._refuse(opened.sender, error)

    def _begin(self, call: Callable[[], object]) -> None:
        def run() -> None:
            call()
            self._beginning.discard(thread)

        thread = threading.Thread(target=run, name="specc-triton-grammar", daemon=True)
        self._beginning.add(thread)
        thread.start()

    def _refuse(self, sender: Any, error: Exception) -> None:
        if not isinstance(error, SpeccError):
            _log.error("a request cannot be taken", exc_info=error)
        if sender is not None:
            self._responses.refuse(sender, error)

    def _tick(self) -> None:
        from specc.runtime.service.state import Health

        self._metrics.update()
        is_dead = self._service.health is Health.DEAD
        if is_dead and self._options.stops_server and not self._has_stopped:
            self._has_stopped = True
            _log.error("the engine has failed for good: stopping the server, as on_fault says")
            # of a stub, that is the server
            os.kill(os.getppid(), signal.SIGTERM)


def _load(args: AsyncEngineArgs) -> Service:
    from specc.runtime.service.service import Service

    return Service(args.make_core(), args.max_waiting)


class _TritonHandler(logging.Handler):
    """Log lines to Triton's log."""

    def __init__(self, logger: Any) -> None:
        super().__init__()
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            if record.levelno >= logging.ERROR:
                self._logger.log_error(text)
            elif record.levelno >= logging.WARNING:
                self._logger.log_warn(text)
            else:
                self._logger.log_info(text)
        except Exception:
            self.handleError(record)


def _log_through(logger: Any) -> None:
    root = logging.getLogger("specc")
    if not any(isinstance(handler, _TritonHandler) for handler in root.handlers):
        root.addHandler(_TritonHandler(logger))
    if root.level == logging.NOTSET:
        root.setLevel(logging.INFO)
