"""A process that holds one mode of a peer, loaded once: `python -m specc.bench.peers.worker`.

Messages are JSON lines. In: `{"module": …, "job": …}` once, then `{"run": setting}`. Out, one for
each: `{"settings": …}`, a measurement, or `{"not_available": reason}`, after which it ends.
Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from dataclasses import asdict
from typing import Any, TextIO

from specc.bench.peers.peer import Job, NotAvailableError
from specc.system.child_processes import die_with_parent


def main() -> None:
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        _serve(sys.stdin, replies)
    except NotAvailableError as error:
        _put(replies, {"not_available": str(error)})
    except Exception as error:
        # a library's own: what it says is for the report, where it happened for standard error
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        _put(replies, {"not_available": f"it failed ({type(error).__name__}: {reason.strip()})"})
        raise


def _serve(requests: TextIO, replies: TextIO) -> None:
    message = json.loads(requests.readline())
    job = Job(**message["job"])
    loaded = importlib.import_module(message["module"]).PEER.load(job)
    # what loading left behind is not to be collected while a run is timed
    gc.collect()
    gc.freeze()
    _put(replies, {"settings": {name: dict(own) for name, own in loaded.settings.items()}})
    for line in requests:
        _put(replies, asdict(loaded.run(json.loads(line)["run"])))


def _put(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
