"""Work that an engine does while no request runs: when, what it says, and how it fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.service.service import Service
from specc.runtime.service.state import Health
from specc.sampling.params import SamplingParams
from tests.runtime.service.test_service import PROMPT
from tests.runtime.service_reader import ask
from tests.specc.server.serving import wait_for

PARAMS = SamplingParams(max_tokens=9, temperature=0.0)


class Work:
    """Counts its slices; each waits until the test lets it go on.

    Args:
        fails_at: slice that raises; None is none.
    """

    def __init__(self, total: int, fails_at: int | None = None) -> None:
        self.total, self.fails_at = total, fails_at
        self.done = self.num_pauses = 0
        self.core: EngineCore | None = None
        self.seen: list[int] = []
        self.begun, self.goes_on = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def progress(self) -> tuple[int, int]:
        return self.done, self.total

    def advance(self) -> bool:
        if self.done == self.total:
            return False
        assert self.core is not None
        scheduler = self.core.scheduler
        self.seen.append(len(scheduler.running) + len(scheduler.waiting))
        self.begun.release()
        assert self.goes_on.acquire(timeout=30)
        if self.done == self.fails_at:
            raise RuntimeError("a pass cannot be timed")
        self.done += 1
        return True

    def pause(self) -> None:
        self.num_pauses += 1


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


def serve(engine: Engine, work: Work) -> Service:
    work.core = EngineCore(engine)
    return Service(work.core, idle_work=work)


def wait(work: Work) -> None:
    assert work.begun.acquire(timeout=30), "no slice began"


def test_slices_run_between_requests_and_never_beside_one(
    engine: Engine, greedy: Callable[..., list[int]]
) -> None:
    work = Work(3)
    with serve(engine, work) as service:
        wait(work)  # before any request
        assert service.state().measured == 0
        # during a slice: it waits for no more than that
        reader = ask(service, PROMPT, PARAMS)
        work.goes_on.release()
        assert reader.output() == greedy(PROMPT, 9)
        assert work.done == 1
        assert work.num_pauses == 1
        for _ in range(2):
            wait(work)
            work.goes_on.release()
        assert ask(service, PROMPT, PARAMS).output() == greedy(PROMPT, 9)
        wait_for(lambda: service.state().measured is None, "the work never ends")
    assert work.done == 3
    assert work.seen == [0, 0, 0]


def test_work_that_fails_is_given_up_and_requests_go_on(
    engine: Engine, greedy: Callable[..., list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    work = Work(3, fails_at=0)
    with serve(engine, work) as service:
        wait(work)
        work.goes_on.release()
        assert ask(service, PROMPT, PARAMS).output() == greedy(PROMPT, 9)
        assert service.health is Health.OK
        assert service.state().measured is None
    assert (work.done, work.num_pauses) == (0, 1)
    assert "a pass cannot be timed" in caplog.text


def test_a_service_ends_in_the_middle_of_its_work(engine: Engine) -> None:
    work = Work(100)
    service = serve(engine, work)
    wait(work)
    work.goes_on.release(100)
    service.close()
    assert not service._thread.is_alive()
    assert work.done < 100
