"""Attacks a server from a process of its own, so that its work costs the other clients nothing.

Its arguments are the port, names of attacks with commas between, and seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter

from tests import api_attackers, attackers
from tests.attackers import Attack

ATTACKS: dict[str, type[Attack]] = {
    kind.name: kind
    for module in (attackers, api_attackers)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Attack) and kind.name
}


async def attack(port: int, names: list[str], seconds: float) -> Counter[str]:
    """Attack for some time; returns the answers."""
    counts: Counter[str] = Counter()
    attacks = [ATTACKS[name](port, counts) for name in names]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await asyncio.gather(*(each.run() for each in attacks))
    return counts


if __name__ == "__main__":
    # whoever attacks a server is on another machine, and takes none of its processors
    os.nice(19)
    result = asyncio.run(attack(int(sys.argv[1]), sys.argv[2].split(","), float(sys.argv[3])))
    print(json.dumps(result))
