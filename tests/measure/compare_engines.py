"""Compare two engine directories file by file, such as those of two versions of specc.

    python tests/measure/compare_engines.py out/before out/after --json out.json

The exit status is 1 if graphs, steps or weights differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from specc.system.machine import describe_machine
from specc.version import __version__

# what says when and for how long an engine was compiled, and the hashes of everything else
RECORDS = ("manifest.json", "report.json")


def hashes(engine: Path) -> dict[str, str]:
    """Of every file, by its path in the engine."""
    files = sorted(path for path in engine.rglob("*") if path.is_file())
    return {
        str(path.relative_to(engine)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def compare(before: Path, after: Path) -> dict[str, Any]:
    """Files that are the same, and that differ."""
    old, new = hashes(before), hashes(after)
    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    same = sorted(old.keys() - {*differing})
    return {"same": same, "differing": differing}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    found = compare(args.before, args.after)
    print(f"{len(found['same'])} files are the same; not {', '.join(found['differing']) or 'none'}")
    if args.json:
        about = {"machine": describe_machine(), "specc": __version__}
        about |= {"date": time.strftime("%Y-%m-%d")}
        args.json.write_text(json.dumps(about | found, indent=1) + "\n", encoding="utf-8")
    rest = [name for name in found["differing"] if name not in RECORDS]
    return int(any(name.endswith((".json", ".safetensors")) for name in rest))


if __name__ == "__main__":
    sys.exit(main())
