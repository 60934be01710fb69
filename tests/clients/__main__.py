"""Run all clients, or those that are named, and write the table of what came of it.

`python -m tests.clients [NAME ...]`; of others, the table keeps what it says.
"""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

from tests.clients.actor import acting
from tests.clients.catalog import CLIENTS, FEATURES, KNOWN, LEFT_OUT, run_client, versions_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "clients.md"
BEGIN, END = "<!-- written by python -m tests.clients -->", "<!-- end -->"


def main(names: list[str]) -> int:
    """How many features fail, of which nothing is known."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    earlier, _, after = rest.partition(END)
    lines = ["| client | version | " + " | ".join(FEATURES) + " |"]
    lines.append("|---" * (len(FEATURES) + 2) + "|")
    notes, num_failures = [], 0
    with acting() as server:
        for client in CLIENTS:
            if names and client.name not in names:
                said = [line for line in earlier.splitlines() if _is_of(client.name, line)]
                lines += [line for line in said if line.startswith("|")]
                notes += [line for line in said if line.startswith("-")]
                continue
            found = run_client(client, server.base)
            cells = []
            for feature in FEATURES:
                reason = found.get(feature)
                if reason is None:
                    cells.append("")
                elif not reason:
                    cells.append("works")
                else:
                    is_known = (client.name, feature) in KNOWN
                    num_failures += not is_known
                    cells.append("known" if is_known else "fails")
                    told = KNOWN.get((client.name, feature), reason).replace("|", "\\|")
                    notes.append(f"- {client.name}, {feature}: {told}")
            name = f"{client.name} | {versions_of(client)}"
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    notes += [f"- {name} was left out: it {reason}." for name, reason in LEFT_OUT.items()]
    today = datetime.datetime.now(datetime.UTC).date()
    text = "\n".join([BEGIN, f"Of {today}:", "", *lines, "", *notes, END])
    PAGE.write_text(before + text + after, encoding="utf-8")
    return num_failures


def _is_of(name: str, line: str) -> bool:
    return line.startswith((f"| {name} |", f"- {name}, "))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
