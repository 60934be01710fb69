"""One engine for many callers: a thread that moves all requests on, and updates that go back.

Callers hand requests in from any thread and get the tokens of each by a callback. All endpoints
stand on this: the HTTP server, and the model of the Triton Inference Server.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specc.errors import FaultError, OverloadError, RequestError, SpeccError
from specc.refuse_running import refuse_running
from specc.runtime.requests.request_maker import Prompt
from specc.runtime.scheduling.request import Request
from specc.runtime.service.between_steps import Operator, Orders
from specc.runtime.service.idle_work import IdleTurns, IdleWork
from specc.runtime.service.state import Health, ServiceState, state_of
from specc.runtime.service.update import Update, update_of
from specc.sampling.params import SamplingParams

if TYPE_CHECKING:
    from specc.runtime.constraints.grammar import GrammarState
    from specc.runtime.core import EngineCore
    from specc.runtime.outputs.logprobs import PromptLogprobs
    from specc.speculation.metrics import SpecStats

# iterations that fail in a row, from which on the engine counts as lost
MAX_FAILURES = 3
# seconds for which a failure counts: without requests because of it, a server would not recover
_FAILING_S = 10.0
# seconds from which on an iteration counts as stuck; the slowest ones take a few
STALLED_S = 120.0
# seconds between two looks at what runs, for metrics
_STATE_EVERY_S = 0.02
_log = logging.getLogger("specc.service")


class Ticket:
    """A request that was handed in; `Service.cancel` takes it."""

    def __init__(self, request: Request, on_update: Callable[[Update], object]) -> None:
        self._request = request
        self._on_update = on_update
        # the last update is out
        self.is_done = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.token_ids[: self._request.num_prompt_tokens]

    @property
    def prompt(self) -> str | None:
        """The caller's text."""
        return self._request.prompt

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of each token of the prompt, None for the first; there with the first update."""
        return self._request.all_prompt_logprobs


class Service:
    """Serves requests of any number of callers, batched continuously.

    Args:
        core: of the engine, which nobody else uses; `AsyncEngineArgs.make_core` loads one.
        max_waiting: requests that wait for a place at most; more are refused.
        idle_work: done while no request runs; None is nothing.
        sleep_after_s: seconds without a request after which the engine sleeps until the next one,
            see `Sleep`; None is never.
    Raises:
        ConfigError: it shall sleep, and cannot.
    """

    def __init__(
        self,
        core: EngineCore,
        max_waiting: int = 1024,
        idle_work: IdleWork | None = None,
        sleep_after_s: float | None = None,
    ) -> None:
        self.core = core
        self.engine = core.engine
        if sleep_after_s is not None:
            refuse_running(core.engine.manifest, core.engine.facts, "sleep")
        core.requests.prepare()
        self._max_waiting = max_waiting
        # guards what follows; the engine thread holds it only between iterations
        self._changed = threading.Condition()
        self._inbox: deque[Ticket] = deque()
        self._cancelled: deque[Ticket] = deque()
        self._num_open = 0
        self._names: set[str] = set()
        self._is_draining = self._is_closed = False
        self._orders = Orders(self._changed)
        # what only the operator may ask
        self.operator = Operator(
            core,
            self._changed,
            self._orders,
            lambda: not self._num_open or self._is_closed or self._is_dead,
            sleep_after_s,
        )
        # of the engine thread
        self._tickets: dict[int, Ticket] = {}
        self._idle = IdleTurns(idle_work)
        self._num_failures = self._num_failed = 0  # in a row, and ever
        self._failed_s = 0.0
        # when the iteration that runs has begun
        self._iteration_s: float | None = None
        self._error: BaseException | None = None
        self._state_s = 0.0
        self._begin_s = time.perf_counter()
        self._publish(self._begin_s)
        # told the tokens of each iteration: of prompts that were read to their end, and of outputs
        self.observe_iteration: Callable[[int], object] | None = None
        self._thread = threading.Thread(target=self._run, name="specc-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_update: Callable[[Update], object],
        *,
        index: int = 0,
        request_id: str | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
        leader: Ticket | None = None,
        grammar: GrammarState | None = None,
        shown_token_ids: Set[int] = frozenset(),
        prediction: Any = None,
        cache_salt: str | None = None,
    ) -> Ticket:
        """Hand a request in; tokenizing and checking happen here, in the caller's thread.

        Args:
            prompt: text, token ids, or a dict with `prompt` or `prompt_token_ids`.
            on_update: called in the engine's thread with each `Update`, the last of which has
                `is_last`: it must be quick, must not block and must not call this service.
            index: which of the caller's prompts, for errors.
            request_id: name, of no other open request; None makes one up.
            priority: lower ones are served first.
            timeout_s: seconds after which the request ends with what it has.
            leader: a request of the same prompt, whose rows this one shares.
            grammar: see `RequestMaker.make`.
            shown_token_ids: see `RequestMaker.make`.
            prediction: likewise.
            cache_salt: likewise.
        Raises:
            RequestError: the request is invalid, or asks for several outputs: each of those is a
                request of its own, see `SamplingParams.each`.
            OverloadError: too many requests wait, or the service is about to stop.
            FaultError: the engine has failed for good.
        """
        if params.n != 1:
            raise RequestError(
                f"n={params.n}, handed to a service",
                "one output a request",
                "hand in one request for each of SamplingParams.each()",
            )
        request = self.core.requests.make(
            prompt,
            params,
            index=index,
            request_id=request_id or f"request-{uuid.uuid4().hex[:16]}",
            is_streamed=True,
            priority=priority,
            timeout_s=timeout_s,
            leader=None if leader is None else leader._request,
            grammar=grammar,
            shown_token_ids=shown_token_ids,
            prediction=prediction,
            cache_salt=cache_salt,
        )
        self.core.scheduler.check_fits(request)
        ticket = Ticket(request, on_update)
        with self._changed:
            self._refuse_if_full()
            if ticket.request_id in self._names:
                raise RequestError(
                    f"request_id {ticket.request_id!r}, which an open request has",
                    "a name of its own for each request",
                    "choose another one, or leave it out",
                )
            self._names.add(ticket.request_id)
            self._num_open += 1
            self._inbox.append(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request soon; one that has ended is left alone. Its last update says `abort`."""
        with self._changed:
            self._cancelled.append(ticket)
            self._changed.notify()

    def state(self) -> ServiceState:
        """What runs, what waits, and all counters, at most a few iterations old."""
        with self._changed:
            return self._state

    @property
    def health(self) -> Health:
        with self._changed:
            if self._is_dead:
                return Health.DEAD
            if self._is_draining:
                return Health.DRAINING
            begin_s = self._iteration_s
            if begin_s is not None and time.perf_counter() - begin_s > STALLED_S:
                return Health.STALLED
            is_recent = time.perf_counter() - self._failed_s < _FAILING_S
            return Health.FAILING if self._num_failures and is_recent else Health.OK

    @property
    def num_open(self) -> int:
        """Requests that were handed in and have not ended."""
        with self._changed:
            return self._num_open

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait for those that are open; False if some are left."""
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(lambda: not self._num_open or self._is_dead, timeout_s)

    def close(self, timeout_s: float = 10.0) -> None:
        """End all requests, with `abort`, and the thread."""
        with self._changed:
            self._is_draining = self._is_closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _is_dead(self) -> bool:
        has_ended = not self._is_closed and not self._thread.is_alive()
        has_failed = self._num_failures >= MAX_FAILURES or self.engine.is_lost
        return has_failed or self._error is not None or has_ended

    def _refuse_if_full(self) -> None:
        if self._is_dead:
            raise FaultError(
                "the engine has failed and is out of use",
                "an engine whose steps run",
                "see the server's log, and start it again",
            )
        if self._is_draining:
            raise OverloadError(
                "the server is about to stop",
                "a server that takes requests",
                "send the request to another server",
            )
        self.operator.refuse()
        num_waiting = self._num_open - len(self.core.scheduler.running)
        if num_waiting >= self._max_waiting:
            raise OverloadError(
                f"{num_waiting} requests wait already",
                f"fewer than {self._max_waiting}",
                "try again later",
            )

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._iterate()
            self._end_all(None)
        except BaseException as error:
            _log.exception("the engine's thread has ended")
            with self._changed:
                self._error = error
            self._end_all(_fault())
        finally:
            self._orders.close()
            with self._changed:
                self._changed.notify_all()

    def _take_orders(self) -> bool:
        """Wait until there is something to do, and take it in; False where it is time to end."""
        scheduler = self.core.scheduler
        with self._changed:
            while not (
                self._is_closed
                or self._inbox
                or self._cancelled
                or self._orders
                or scheduler.has_work
            ):
                scheduler.last_plans.clear()
                self._publish(time.perf_counter())
                if self.operator.is_asleep:
                    self._changed.wait()
                elif (
                    self._idle.wait(self._changed, due_s := self.operator.timeout_s) or due_s == 0.0
                ):
                    return True
            if self._is_closed:
                return False
            arrived, self._inbox = self._inbox, deque()
            cancelled, self._cancelled = self._cancelled, deque()
        if self._orders:
            self._idle.pause()
            self._orders.run(self.core)
            # what was in flight may have ended requests
            self._send_news()
        if arrived:
            self.operator.wake()
        for ticket in arrived:
            self._tickets[id(ticket._request)] = ticket
            scheduler.add(ticket._request)
        for ticket in cancelled:
            if id(ticket._request) in self._tickets:
                scheduler.abort(ticket._request)
                self._send(ticket, self._abort_update(ticket))
        return True

    def _iterate(self) -> None:
        scheduler = self.core.scheduler
        if not scheduler.has_work:
            self.core.in_flight.settle()
            if self.operator.is_asleep:
                return
            self._iteration_s = time.perf_counter()
            self._idle.advance()
            if not self._idle.has_work:
                self.operator.fall_asleep()
            self._iteration_s = None
            return
        self.operator.note_work()
        self._idle.pause()
        begin_s = self._iteration_s = time.perf_counter()
        num_before = _num_tokens(scheduler.stats)
        try:
            has_run = self.core.advance()
            self._num_failures = 0
        except Exception:
            _log.exception("an iteration of the engine has failed")
            self._num_failures += 1
            self._failed_s = time.perf_counter()
            self._num_failed += 1
            self._fail_running()
            has_run = True
        finally:
            self._iteration_s = None
        now_s = time.perf_counter()
        scheduler.stats.elapsed_s += now_s - begin_s
        num_tokens = _num_tokens(scheduler.stats) - num_before
        if self.observe_iteration is not None and num_tokens:
            self.observe_iteration(num_tokens)
        self._send_news()
        if not has_run and scheduler.has_work:
            # nobody can run although somebody waits: that would go on for ever
            raise RuntimeError("requests wait, and none of them can run")
        if now_s - self._state_s >= _STATE_EVERY_S:
            with self._changed:
                self._publish(now_s)

    def _publish(self, now_s: float) -> None:
        self._state_s = now_s
        up_s = now_s - self._begin_s
        self._state = state_of(self.core, up_s, self._num_failed, self._idle.share)

    def _fail_running(self) -> None:
        """Requests whose step failed get an error each; those that wait go on."""
        scheduler = self.core.scheduler
        for ticket in list(self._tickets.values()):
            request = ticket._request
            if self._is_dead or request.is_finished or request not in scheduler.waiting:
                scheduler.abort(request)
                self._send(ticket, Update([], "", error=_fault()))

    def _send_news(self) -> None:
        for ticket in list(self._tickets.values()):
            request = ticket._request
            if request.events:
                self._send(ticket, update_of(request))

    def _abort_update(self, ticket: Ticket) -> Update:
        return replace(
            update_of(ticket._request), finish_reason="abort", metrics=ticket._request.stats
        )

    def _end_all(self, error: SpeccError | None) -> None:
        """Every request that is open ends now."""
        with self._changed:
            arrived, self._inbox = self._inbox, deque()
        for ticket in arrived:
            self._tickets[id(ticket._request)] = ticket
        for ticket in list(self._tickets.values()):
            if error is None:
                self.core.scheduler.abort(ticket._request)
            update = Update([], "", error=error) if error else self._abort_update(ticket)
            self._send(ticket, update)
        if error is None:
            self.core.in_flight.settle()

    def _send(self, ticket: Ticket, update: Update) -> None:
        if update.is_last:
            ticket.is_done = True
            del self._tickets[id(ticket._request)]
            # whoever hears of the end may use the name again at once
            with self._changed:
                self._names.discard(ticket.request_id)
        try:
            ticket._on_update(update)
        except Exception:
            _log.exception("the callback of request %s has failed", ticket.request_id)
        if update.is_last:
            with self._changed:
                self._num_open -= 1
                self._changed.notify_all()


def _num_tokens(stats: SpecStats) -> int:
    return stats.num_prompt_tokens + stats.num_output_tokens


def _fault() -> FaultError:
    return FaultError(
        "the engine failed while it worked on this request",
        "a step that runs",
        "send the request again; the server's log has the cause",
    )
