"""What was run, as reports repeat it."""

from __future__ import annotations

import shlex
import sys


def command_line() -> str:
    """This process's command, without a server's key."""
    words = ["specc", *sys.argv[1:]]
    for place, word in enumerate(words):
        if word == "--api-key" and place + 1 < len(words):
            words[place + 1] = "…"
        elif word.startswith("--api-key="):
            words[place] = "--api-key=…"
    return shlex.join(words)
