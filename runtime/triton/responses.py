"""Responses of open requests, sent by a thread of their own, and clients that have gone away.

The engine's thread only notes what is new; tensors are made and sent by another one, which also
asks twenty times a second whether somebody has cancelled. That is one thread on purpose: a sender
must not be asked any more once its last response is out.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specc.errors import FaultError, OverloadError, RequestError
from specc.runtime.triton.request import TritonRequest
from specc.speculation.metrics import SpecStats
from specc.triton.tensors import OUTPUT_IDS, OUTPUTS, TEXT, TritonTensor

if TYPE_CHECKING:
    from specc.runtime.outputs.logprobs import TokenLogprobs
    from specc.runtime.service.service import Service, Ticket, Update

# seconds between two looks at what was cancelled
_POLL_S = 0.05
_IDLE_S = 1.0
_OUTPUTS = {tensor.name: tensor for tensor in OUTPUTS}
_DTYPES = {"STRING": np.object_, "INT32": np.int32, "UINT32": np.uint32}
_DTYPES |= {"INT64": np.int64, "FP32": np.float32}
_log = logging.getLogger("specc.triton")


class OpenRequest:
    """A request whose last response is not out.

    Args:
        sender: Triton's, of the request.
        request: as it was read.
    """

    def __init__(self, sender: Any, request: TritonRequest) -> None:
        self.sender = sender
        self.request = request
        # for clients; the wall clock can jump, so all other times are told by the second one
        self.arrival_ns, self.begin_ns = time.time_ns(), time.monotonic_ns()
        # from here on guarded by the lock of `ResponseSender`
        self.ticket: Ticket | None = None
        self.news: Update | None = None
        self.is_queued = False
        # of the thread that sends
        self.is_first = True
        self.is_cancelled = False
        self.cumulative_logprob = 0.0

    @property
    def is_ready(self) -> bool:
        """There is something to send, and the request is known by its ticket."""
        if self.ticket is None or self.news is None:
            return False
        if self.news.is_last:
            return True
        # tokens whose text is not certain yet are no news to somebody who reads text
        is_new = self.news.text or OUTPUT_IDS.name in self.request.outputs
        return self.request.is_streamed and bool(is_new)


class ResponseSender:
    """All open requests of a model.

    Args:
        pb_utils: Triton's module `triton_python_backend_utils`.
        on_tick: called now and then in the sending thread, for metrics.
    """

    def __init__(self, service: Service, pb_utils: Any, on_tick: Callable[[], object]) -> None:
        self._service = service
        self._pb_utils = pb_utils
        self._on_tick = on_tick
        self._changed = threading.Condition()
        self._ready: deque[OpenRequest] = deque()
        self._open: set[OpenRequest] = set()
        self._is_closed = self._has_arrived = False
        self._thread = threading.Thread(target=self._run, name="specc-triton", daemon=True)
        self._thread.start()

    def add(self, opened: OpenRequest, ticket: Ticket) -> None:
        """The request is with the service; its first updates may be here already."""
        with self._changed:
            opened.ticket = ticket
            self._open.add(opened)
            self._has_arrived = True
            self._queue(opened)
            self._changed.notify()

    def put(self, opened: OpenRequest, update: Update) -> None:
        """Take an update; from the engine's thread."""
        with self._changed:
            opened.news = update if opened.news is None else opened.news.followed_by(update)
            self._queue(opened)

    def refuse(self, sender: Any, error: Exception) -> None:
        """Respond to a request that was not taken; from any thread."""
        self._send(sender, self._failed(error), is_last=True)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is left; requests still open get an error. The service is closed by now."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _queue(self, opened: OpenRequest) -> None:
        if opened.is_ready and not opened.is_queued:
            opened.is_queued = True
            self._ready.append(opened)
            self._changed.notify()

    def _run(self) -> None:
        next_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ready or self._has_arrived or self._is_closed,
                    max(0.0, next_s - time.monotonic()),
                )
                work = [(opened, opened.news) for opened in self._ready]
                for opened in self._ready:
                    opened.news, opened.is_queued = None, False
                self._ready.clear()
                self._has_arrived = False
                is_closed, was_open = self._is_closed, bool(self._open)
            for opened, update in work:
                assert update is not None
                self._respond(opened, update)
            now_s = time.monotonic()
            if now_s >= next_s or is_closed:
                self._look_around()
                next_s = now_s + (_POLL_S if was_open else _IDLE_S)
            elif was_open:
                next_s = min(next_s, now_s + _POLL_S)
            if is_closed:
                self._give_up()
                return

    def _look_around(self) -> None:
        """Look for cancelled requests, and write metrics."""
        with self._changed:
            everyone = list(self._open)
        for opened in everyone:
            try:
                if not opened.is_cancelled and opened.sender.is_cancelled():
                    opened.is_cancelled = True
                    self._cancel(opened)
            except Exception:
                _log.exception("asking whether a request is cancelled has failed")
        try:
            self._on_tick()
        except Exception:
            _log.exception("writing metrics has failed")

    def _give_up(self) -> None:
        """The service has ended and these have no last update: its engine hangs."""
        error = OverloadError(
            "the model is being unloaded", "a model that is loaded", "send the request again later"
        )
        for opened in list(self._open):
            self._send(opened.sender, self._failed(error), is_last=True)
        self._open.clear()

    def _respond(self, opened: OpenRequest, update: Update) -> None:
        if update.is_last:
            with self._changed:
                self._open.discard(opened)
        if update.error is not None:
            self._send(opened.sender, self._failed(update.error), is_last=True)
        elif update.finish_reason == "abort":
            self._send(opened.sender, self._aborted(opened), is_last=True)
        elif not opened.is_cancelled or update.is_last:
            try:
                response = self._response(opened, update)
            except Exception as error:
                _log.exception("a response cannot be made")
                response = self._failed(error)
            if not self._send(opened.sender, response, update.is_last) and not update.is_last:
                self._cancel(opened)
            opened.is_first = False

    def _cancel(self, opened: OpenRequest) -> None:
        assert opened.ticket is not None
        self._service.cancel(opened.ticket)

    def _response(self, opened: OpenRequest, update: Update) -> Any:
        """Tensors of an update; those of the whole request with the last one."""
        values = self._values(opened, update)
        tensors = [
            self._tensor(_OUTPUTS[name], values[name])
            for name in _OUTPUTS
            if name in values and name in opened.request.outputs
        ]
        return self._pb_utils.InferenceResponse(output_tensors=tensors)

    def _values(self, opened: OpenRequest, update: Update) -> dict[str, Any]:
        assert opened.ticket is not None
        values: dict[str, Any] = {
            TEXT.name: (opened.request.echoed if opened.is_first else "") + update.text,
            "output_ids": update.token_ids,
            "num_input_tokens": opened.ticket.num_prompt_tokens,
            "num_output_tokens": len(update.token_ids),
        }
        if update.logprobs is not None:
            opened.cumulative_logprob += sum(
                entries[token].logprob
                for token, entries in zip(update.token_ids, update.logprobs, strict=True)
            )
            values["logprobs"] = _scores(update.logprobs)
        if opened.is_first and (scores := opened.ticket.prompt_logprobs) is not None:
            values["prompt_logprobs"] = _scores(scores)
        if update.is_last:
            values["finish_reason"] = update.finish_reason
            if update.logprobs is not None:
                values["cumulative_logprob"] = opened.cumulative_logprob
            if update.metrics is not None:
                now_ns = opened.arrival_ns + time.monotonic_ns() - opened.begin_ns
                values |= _perf_metrics(update.metrics, opened.arrival_ns, now_ns)
        return values

    def _tensor(self, tensor: TritonTensor, value: Any) -> Any:
        values = value if tensor.holds_many else [value]
        if tensor.kind == "STRING":
            values = [text.encode() for text in values]
        array: Any = np.array(values, dtype=_DTYPES[tensor.kind]).reshape(1, -1)
        return self._pb_utils.Tensor(tensor.name, array)

    def _aborted(self, opened: OpenRequest) -> Any:
        """The client has asked for it, or the model is being unloaded."""
        kind = self._pb_utils.TritonError
        if opened.is_cancelled:
            error = kind("the request was cancelled", kind.CANCELLED)
        else:
            error = kind("the model is being unloaded: send the request again", kind.UNAVAILABLE)
        return self._pb_utils.InferenceResponse(error=error)

    def _failed(self, error: Exception) -> Any:
        kind = self._pb_utils.TritonError
        if isinstance(error, RequestError):
            failure = kind(str(error), kind.INVALID_ARG)
        elif isinstance(error, OverloadError | FaultError):
            failure = kind(str(error), kind.UNAVAILABLE)
        else:
            # a bug, or meant for whoever runs the server: it may name files
            failure = kind("specc failed on this request: see the server's log", kind.INTERNAL)
        return self._pb_utils.InferenceResponse(error=failure)

    def _send(self, sender: Any, response: Any, is_last: bool) -> bool:
        flags = self._pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        try:
            sender.send(response, flags=flags)
            return True
        except Exception:
            _log.exception("a response cannot be sent")
            return False


def _scores(rows: Sequence[TokenLogprobs | None]) -> str:
    """JSON: token id → log probability, of each token; null where it has none."""
    return json.dumps(
        [
            None if row is None else {str(token): entry.logprob for token, entry in row.items()}
            for row in rows
        ]
    )


def _perf_metrics(stats: SpecStats, arrival_ns: int, now_ns: int) -> dict[str, Any]:
    """Acceptance and times of a whole request; nanoseconds since 1970."""
    return {
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "total_accepted_draft_tokens": stats.num_accepted_tokens,
        "total_draft_tokens": stats.num_draft_tokens,
        "accepted_prediction_tokens": stats.accepted_prediction_tokens,
        "rejected_prediction_tokens": stats.rejected_prediction_tokens,
        "arrival_time_ns": arrival_ns,
        "first_scheduled_time_ns": now_ns - round(stats.elapsed_s * 1e9),
        "first_token_time_ns": arrival_ns + round(stats.first_token_s * 1e9),
        "last_token_time_ns": now_ns,
    }
