"""Run all clients, and write the table of what came of it: `python -m tests.clients`."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

from tests.clients.actor import acting
from tests.clients.catalog import CLIENTS, FEATURES, KNOWN, LEFT_OUT, run_client, versions_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "clients.md"
BEGIN, END = "<!-- written by python -m tests.clients -->", "<!-- end -->"


def main() -> int:
    lines = ["| client | version | " + " | ".join(FEATURES) + " |"]
    lines.append("|---" * (len(FEATURES) + 2) + "|")
    notes, num_failures = [], 0
    with acting() as server:
        for client in CLIENTS:
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
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + text + rest.partition(END)[2], encoding="utf-8")
    return num_failures


if __name__ == "__main__":
    sys.exit(main())
