"""One process of the GPU check: does a task, and leaves a line for everything that it finds.

    python -P -m tests.gpu.child JOB

The job is a JSON file: `entry` (module:function), `arguments` of it, `events` (the file that gets
the lines), `known` (results, by name, that need not be found again) and `device`. Lines are in the
file before the next thing starts, so a process that dies loses what it was at, and nothing else.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
from pathlib import Path

from tests.gpu.results import LONGEST, Device, Results, Skipped


def main(job_file: str) -> None:
    # a process that is told to abort says where it was
    faulthandler.enable()
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    results = Results(Path(job["events"]), job["known"])
    module, _, name = job["entry"].partition(":")
    device = Device(job["device"])
    try:
        getattr(importlib.import_module(module), name)(results, device, **job["arguments"])
    except Skipped as reason:
        results.note(skipped=str(reason))
    except Exception:
        results.note(error=traceback.format_exc(limit=-6)[-LONGEST:])
        if device.is_lost():
            results.lose()
        sys.exit(1)
    results.finish()


if __name__ == "__main__":
    main(sys.argv[1])
