"""Lines that a measuring process leaves, one for what it begins and one for what it found."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# without a line for so long a process hangs; the first has to import and to build launchers
SILENT_S, START_S = 12.0, 40.0


def run(
    script: str, options: argparse.Namespace, work: Callable[[argparse.Namespace], None], site: Path
) -> int:
    """What a sweep does: its work as a child of `supervise`, or, without a GPU, as one process.

    Args:
        script: the sweep's file.
        options: its command line, with `is_child`, `dry_run` and `output`.
        site: a folder for PYTHONPATH.
    Returns:
        exit status.
    """
    if options.is_child:
        work(options)
        return 0
    if options.dry_run:
        lines = Path(f"{options.output}.lines")
        lines.unlink(missing_ok=True)
        work(options)
        assemble(lines, options.output)
        return 0
    # ends what runs, and writes what is known
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return supervise(script, options, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})


def supervise(script: str, options: argparse.Namespace, environment: dict[str, str]) -> int:
    """Run the work, again after a process that died or was silent for too long."""
    begin = time.time()
    until = begin + options.seconds
    lines = Path(f"{options.output}.lines")
    lines.parent.mkdir(parents=True, exist_ok=True)
    lines.unlink(missing_ok=True)
    command = [sys.executable, "-P", script, *sys.argv[1:], "--is-child", "--until", str(until)]
    status = 1
    try:
        while status and time.time() < until - 3:
            before = len(read(lines))
            child = subprocess.Popen(command, env=environment)
            try:
                status = watch(child, lines, until)
            finally:
                child.kill()
                child.wait()
            if status and len(read(lines)) == before:
                # whatever keeps it from its work will do so again
                break
            if status:
                append(lines, {"event": "lost", "status": status})
    finally:
        print(*summary(assemble(lines, options.output)), sep="\n", flush=True)
    return 0 if status == 0 else 1


def watch(child: subprocess.Popen[bytes], lines: Path, until: float) -> int:
    """Exit status; of one that is silent or late, -1."""
    began, size = time.time(), -1
    heard, limit = began, START_S
    while (status := child.poll()) is None:
        time.sleep(0.1)
        now = time.time()
        found = lines.stat().st_size if lines.exists() else 0
        if found != size:
            limit = START_S if size < 0 else SILENT_S
            heard, size = now, found
        if now > until + 2 or now - heard > limit:
            return -1
    return status


def append(lines: Path, event: dict[str, Any]) -> None:
    with lines.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def read(lines: Path) -> list[dict[str, Any]]:
    """Events so far; the last line of a process that died may be cut."""
    found = []
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def assemble(lines: Path, output: Path) -> dict[str, Any]:
    """Lines as one file, and what it has; what was begun by a process that died has an error."""
    result: dict[str, Any] = {"found": [], "layers": [], "facts": {}}
    begun: dict[str, Any] | None = None
    for event in read(lines):
        kind = event.pop("event")
        if kind == "begin":
            begun = event
        elif kind == "lost":
            if begun is not None:
                result["found"].append(begun | {"error": f"process lost: {event['status']}"})
            begun = None
        elif kind == "facts":
            result["facts"] |= event
        else:
            result.setdefault(kind, []).append(event)
            begun = None
    best: dict[str, Any] = {}
    for item in result["found"]:
        if "us" in item and item["candidate"] != "product":
            kind = "dependent" if item["is_dependent"] else "ordinary"
            ranked = best.setdefault(f"{item['shape']} rows {item['rows']}", {})
            ranked.setdefault(kind, []).append((item["us"], item["candidate"]))
    for ranked in best.values():
        for kind in ranked:
            ranked[kind] = [list(pair) for pair in sorted(ranked[kind])[:8]]
    result["best"] = best
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def summary(result: dict[str, Any]) -> Iterator[str]:
    """Lines for a terminal: the library's and the best of each shape, and layers."""
    errors = [item for item in result["found"] if "error" in item]
    yield f"{len(result['found'])} measured, {len(errors)} of them failed"
    library = {
        f"{item['shape']} rows {item['rows']}": item.get("us")
        for item in result["found"]
        if item["candidate"] == "library"
    }
    for name, ranked in result["best"].items():
        yield f"{name}: library {library.get(name)}"
        for kind, pairs in ranked.items():
            yield f"  {kind}: " + ", ".join(f"{us} {candidate}" for us, candidate in pairs[:3])
    for item in result["layers"]:
        kind = "dependent" if item["is_dependent"] else "ordinary"
        found = item.get("us", item.get("error"))
        yield f"layer of {item['model']} rows {item['rows']} {item['choice']} {kind}: {found}"
