"""Many clients of a server whose draft gets other weights, and that sleeps and wakes."""

from __future__ import annotations

import concurrent.futures
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx


@dataclass
class LoadFigures:
    """What has happened. Every output was compared with that of its request alone.

    Args:
        num_refused: answers 503 while the engine slept, each with Retry-After; asked again.
        latencies_s: of requests, without the times that they were refused.
        reload_s: seconds that each reload took.
        rss_bytes: of the server's process: awake before, asleep, awake after.
    """

    num_requests: int = 0
    num_refused: int = 0
    num_reloads: int = 0
    num_sleeps: int = 0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    reload_s: list[float] = field(default_factory=list)
    rss_bytes: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Address:
    """A server, and the keys that it asks for."""

    base: str
    user: str
    admin: str
    pid: int | None = None

    def resident(self) -> int:
        if self.pid is None:
            return 0
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096


def run_load(
    address: Address,
    bodies: Sequence[dict[str, Any]],
    texts: Sequence[str],
    files: Sequence[str],
    num_requests: int,
    every_s: float,
    *,
    sleeps: bool,
    num_clients: int = 8,
) -> LoadFigures:
    """Ask, and meanwhile put in one file after the other.

    Args:
        bodies: of /v1/completions, asked in turn.
        texts: what each of them says alone.
        files: names of new weights, in turn.
        every_s: seconds between two reloads.
        sleeps: after each of them the engine sleeps, and wakes.
    """
    user = {"Authorization": f"Bearer {address.user}"}
    admin = {"Authorization": f"Bearer {address.admin}"}
    found, client = LoadFigures(), httpx.Client(timeout=300, trust_env=False)

    def ask(number: int) -> None:
        kind = number % len(bodies)
        while True:
            begin_s = time.perf_counter()
            answer = client.post(f"{address.base}/v1/completions", json=bodies[kind], headers=user)
            if answer.status_code == 503 and sleeps:
                assert int(answer.headers["Retry-After"]) >= 1
                found.num_refused += 1
                time.sleep(0.05)
                continue
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == texts[kind], f"request {number}"
            found.latencies_s.append(time.perf_counter() - begin_s)
            found.num_requests += 1
            return

    def tell(path: str, **options: Any) -> None:
        answer = client.post(f"{address.base}{path}", headers=admin, **options)
        assert answer.status_code == 200, answer.text

    begin_s, names = time.perf_counter(), itertools.cycle(files)
    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        jobs = [pool.submit(ask, number) for number in range(num_requests)]
        next_s = begin_s
        while not all(job.done() for job in jobs):
            time.sleep(max(0.0, next_s - time.perf_counter()))
            next_s = max(next_s + every_s, time.perf_counter())
            reload_s = time.perf_counter()
            tell("/v1/drafts/reload", json={"path": next(names)})
            found.reload_s.append(time.perf_counter() - reload_s)
            found.num_reloads += 1
            if sleeps:
                before = address.resident()
                tell("/sleep")
                asleep = client.get(f"{address.base}/is_sleeping").json()
                assert asleep == {"is_sleeping": True}
                resident = address.resident()
                tell("/wake_up")
                found.rss_bytes.append((before, resident, address.resident()))
                found.num_sleeps += 1
        for job in jobs:
            job.result()
    found.seconds = time.perf_counter() - begin_s
    return found
