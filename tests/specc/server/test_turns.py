"""What one connection brings is parsed in parts, between which others have their turn."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from unittest.mock import Mock

from specc.server.turns import FREE_BYTES, TURN_BYTES, LongTurns, Turns


def run(feed: int, *, pause_at: int | None = None, close_at: int | None = None) -> list[str]:
    """What happens, in order, when so many parts come at once."""
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        transport = Mock(spec=asyncio.Transport)
        transport.is_closing.return_value = False
        transport.pause_reading.side_effect = lambda: seen.append("pause")
        transport.resume_reading.side_effect = lambda: seen.append("resume")

        def take(data: bytes) -> None:
            seen.append(data[:1].decode())
            loop.call_soon(seen.append, "other")
            if len(taken) == pause_at:
                turns.pause_reading()
            transport.is_closing.return_value = len(taken) == close_at
            taken.append(data)

        taken: list[bytes] = []
        turns = Turns(transport, take, LongTurns())
        turns.feed(b"".join(b"%d" % i * TURN_BYTES for i in range(feed)))
        for _ in range(9):
            await asyncio.sleep(0)
        if pause_at is not None:
            seen.append("-")
            turns.resume_reading()
            for _ in range(9):
                await asyncio.sleep(0)
        assert b"".join(taken)[:TURN_BYTES] == b"0" * TURN_BYTES
        turns.close()
        await asyncio.sleep(0)

    asyncio.run(main())
    return seen


def test_others_have_their_turn() -> None:
    assert run(1) == ["0", "resume", "other"]
    assert run(3) == ["0", "pause", "other", "1", "pause", "other", "2", "resume", "other"]


def test_what_is_left_waits_for_who_reads_it() -> None:
    """Where a body is not read, uvicorn pauses: what has come is parsed before more is read."""
    seen = run(3, pause_at=0)
    assert seen[: seen.index("-")] == ["0", "pause", "pause", "other"]
    assert seen[seen.index("-") :] == ["-", "1", "pause", "other", "2", "resume", "other"]
    assert run(2, pause_at=1)[-2:] == ["-", "resume"]


def test_nothing_is_parsed_after_the_end() -> None:
    assert run(3, close_at=0) == ["0", "other"]


def test_long_requests_have_one_turn_at_a_time_and_rests() -> None:
    """A part of each of them in every loop would hold up all others, and so would no rest."""
    parts: list[tuple[str, float, float]] = []
    num_free, num_long = FREE_BYTES // TURN_BYTES, 3

    async def main() -> None:
        long, all_turns = LongTurns(), []
        for name in "abc":
            transport = Mock(spec=asyncio.Transport)
            transport.is_closing.return_value = False

            def take(data: bytes, name: str = name) -> None:
                begin_s = time.monotonic()
                time.sleep(2e-3)
                parts.append((name, begin_s, time.monotonic()))

            all_turns.append(Turns(transport, take, long))
        for turns in all_turns:
            turns.feed(bytes(TURN_BYTES * (num_free + num_long)))
        async with asyncio.timeout(30):
            while len(parts) < 3 * (num_free + num_long):
                await asyncio.sleep(1e-3)

    asyncio.run(main())
    # all of them in each loop as long as they are short; then each waits for the others' turns
    assert [name for name, *_ in parts] == [*"abc"] * (num_free + num_long)
    last = parts[3 * num_free :]
    for (_, begin_s, end_s), (_, next_s, _) in pairwise(last):
        assert next_s - end_s > 0.9 * (end_s - begin_s)
    # what is short waits for nobody
    first = parts[: 3 * num_free]
    gaps = [next_s - end_s for (_, _, end_s), (_, next_s, _) in pairwise(first)]
    assert sorted(gaps)[len(gaps) // 2] < 1e-3
