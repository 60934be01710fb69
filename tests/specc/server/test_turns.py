"""What one connection brings is parsed in parts, between which others have their turn."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

from specc.server.turns import TURN_BYTES, Turns


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
        turns = Turns(transport, take)
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
