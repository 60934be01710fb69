"""Rank 0's thread that starts the others, hears from them, and sees which is lost."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

from specc.errors import EngineError, FaultError, SpeccError
from specc.runtime.ranks.job import Follower, Job
from specc.runtime.ranks.lost_rank import ended, lost, state_of
from specc.runtime.ranks.orders import Kind, Message, bytes_of, json_message, json_of
from specc.runtime.ranks.ticks import Ticks

# yields the followers as they come; until all are there, or the job is to end
OpenFollowers = Callable[[Job], Iterator[Follower]]

# without a sign of a rank, more than it takes to send one
_QUIET_S = 1.0
# seconds until a process whose connection has ended is gone, too
_GONE_S = 2.0
# for ranks that were told to end
_END_S = 5.0
# for open requests to be answered, before the process ends
_ANSWER_S = 2.0
_log = logging.getLogger("specc.ranks")


class Watch(threading.Thread):
    """Starts and watches the followers of a job until it ends.

    Linux kills a process with the thread that has started it, if it asks for that as followers do:
    so this thread starts them, which lives as long as the job.

    Args:
        job: of rank 0.
        open_followers: starts processes, or waits for those that somebody else has started.
    """

    def __init__(self, job: Job, open_followers: OpenFollowers) -> None:
        super().__init__(name="specc-ranks", daemon=True)
        self._job = job
        self._open = open_followers
        self._ticks = Ticks(job.options.silence_s)
        self._told_s: float | None = None

    def run(self) -> None:
        job = self._job
        try:
            self._start()
            while not self._is_over():
                self._hear()
                self._look()
        except SpeccError as error:
            job.fail(error)
        except BaseException as error:
            _log.exception("the thread that watches the ranks has failed")
            job.fail(lost(f"nobody watches the ranks: {error}"))
        finally:
            self._clean_up()
        if job.failure is not None and job.is_started:
            self._end_process()

    def _start(self) -> None:
        job = self._job
        for follower in self._open(job):
            job.followers.append(follower)
            setup = {**job.setup, "rank": follower.rank, "group": job.group.ticket}
            try:
                follower.orders.send(json_message(Kind.SETUP, setup))
            except OSError:
                # how it ended is said later
                follower.signs.is_ended = True
        self._begin_s = time.monotonic()
        for follower in job.followers:
            follower.beat_s = follower.moved_s = self._begin_s
        self._ticks.begin()

    def _is_over(self) -> bool:
        if self._job.failure is not None:
            return True
        if not self._job.is_closing:
            return False
        now = time.monotonic()
        self._told_s = now if self._told_s is None else self._told_s
        are_gone = all(follower.signs.is_ended for follower in self._job.followers)
        return are_gone or now - self._told_s > _END_S

    def _hear(self) -> None:
        """Wait for messages, for a moment."""
        poll = select.poll()
        heard = [one for one in self._job.followers if not one.signs.is_ended]
        for follower in heard:
            poll.register(follower.signs.fileno(), select.POLLIN)
        poll.poll(1000 * self._ticks.seconds)
        for follower in heard:
            try:
                messages = follower.signs.received()
            except FaultError as error:
                raise lost(f"{follower.name} sent {error.found}") from error
            for message in messages:
                self._take(follower, message)

    def _take(self, follower: Follower, message: Message) -> None:
        job = self._job
        if message.kind is Kind.BEAT:
            (values,) = message.tensors
            if values is not None and values.shape == (2,):
                follower.done, follower.position = map(int, values.tolist())
        elif message.kind is Kind.HELLO:
            self._greet(follower, message)
        elif message.kind is Kind.ERROR:
            raise self._reported(follower, message)
        with job.changed:
            if message.kind is Kind.OFFER:
                job.offers[follower.rank] = json_of(message)
            if message.kind is Kind.READY:
                follower.is_ready = True
            elif message.kind is Kind.SUM:
                follower.sums[message.sequence] = b"".join(
                    bytes_of(part) for part in message.tensors if part is not None
                )
            job.changed.notify_all()
        follower.beat_s = time.monotonic()

    def _greet(self, follower: Follower, message: Message) -> None:
        """Raises EngineError: the rank is of another installation, or has another engine."""
        data = json_of(message)
        follower.pid, follower.host = int(data["pid"]), str(data["host"])
        for name, own in self._job.facts.items():
            if (found := data.get(name)) != own:
                raise EngineError(
                    f"{follower.name} with {name} {found}",
                    f"{name} {own}, as rank 0 has it",
                    "give all ranks the same engine and the same installation of specc",
                )

    def _reported(self, follower: Follower, message: Message) -> SpeccError:
        data = json_of(message)
        found, needed, do = (str(data.get(key, "")) for key in ("found", "needed", "do"))
        if self._job.is_started:
            return lost(f"{follower.name} failed: {found}")
        return EngineError(f"{follower.name}: {found}", needed, do)

    def _look(self) -> None:
        """Raises SpeccError: a rank is lost."""
        job = self._job
        if job.is_closing:
            return
        for follower in job.followers:
            if follower.signs.is_ended:
                raise self._gone(follower)
        if (late_s := self._ticks.pass_by()) > 0:
            # this process itself was stopped: what the others sent meanwhile comes now
            for follower in job.followers:
                follower.beat_s += late_s
                follower.moved_s += late_s
        if self._ticks.is_time_for_beat():
            for follower in job.followers:
                follower.signs.offer(Message(Kind.BEAT))
        now = time.monotonic()
        self._look_for_silent(now)
        if job.is_started:
            self._look_for_hung(now)
            return
        for follower in job.followers:
            follower.moved_s = now
        if now - self._begin_s > job.options.start_timeout_s:
            names = ", ".join(one.name for one in job.followers if not one.is_ready)
            raise EngineError(
                f"{names or 'rank 0'}: not ready after {job.options.start_timeout_s:g} s",
                "ranks that load the engine in this time",
                "look at what they write, at the disk and at the memory, or give them more time",
            )

    def _look_for_silent(self, now: float) -> None:
        options = self._job.options
        # a rank that loads may be kept from everything by a library that it loads
        limit_s = options.silence_s if self._job.is_started else options.timeout_s
        for follower in self._job.followers:
            # before its first word it imports packages
            if follower.pid is not None and now - follower.beat_s > limit_s:
                why = state_of(follower.pid) if follower.process is not None else ""
                raise lost(f"{follower.name} has given no sign of life for {limit_s:g} s{why}")

    def _look_for_hung(self, now: float) -> None:
        job = self._job
        for follower in job.followers:
            if follower.done >= job.sent or follower.done != follower.last_done:
                follower.moved_s = now
                follower.last_done = follower.done
        if any(now - one.beat_s > _QUIET_S for one in job.followers):
            # soon it counts as silent, and the others may wait for it
            return
        limit_s = job.options.timeout_s
        if any(now - one.moved_s > limit_s for one in job.followers):
            # those that wait for each other stood still at about the same time
            still = [one for one in job.followers if now - one.moved_s > limit_s / 2]
            first = min(still, key=lambda one: (one.done, one.position))
            raise lost(
                f"{first.name} does not get on with order {first.done + 1} of {job.sent},"
                f" {limit_s:g} s after it was given"
            )

    def _gone(self, follower: Follower) -> SpeccError:
        """The error of a rank whose connection has ended."""
        code = None
        if (process := follower.process) is not None:
            follower.pid = process.pid
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_GONE_S)
        if not self._job.is_started:
            return EngineError(
                f"{follower.name} {ended(code)} while it loaded the engine",
                f"{self._job.options.num_ranks} ranks that load it",
                "see what it wrote before, and the machine's memory: every rank needs its own",
            )
        doing = "idle" if follower.done >= self._job.sent else f"in order {follower.done + 1}"
        return lost(f"{follower.name} {ended(code)}, {doing}")

    def _clean_up(self) -> None:
        """Leave no process and no connection."""
        job = self._job
        if job.failure is not None and job.is_started:
            _log.critical("%s", job.failure)
        for follower in job.followers:
            if follower.process is not None:
                try:
                    follower.process.wait(_GONE_S)
                except subprocess.TimeoutExpired:
                    follower.process.kill()
                    follower.process.wait()
            follower.signs.close()
            # whoever writes orders finds out by itself
            follower.orders.shut()
        job.group.close()

    def _end_process(self) -> None:
        """End the process unless its owner has let go of the engine by then."""
        job = self._job
        if not job.options.ends_process:
            return
        with job.changed:
            if job.changed.wait_for(lambda: job.is_closing, _ANSWER_S):
                return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)
