"""Candidates of products, timed one by one: what the sweeps of tiles have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.gpu.results import Device, Results

# candidates of a product that a note lists
LISTED = 8


class Sweep:
    """Measurements until time is over, each once, whatever becomes of the process.

    Args:
        results: get one for each candidate: the words that say which it is, and `us`, or `error`.
            Those of a process before this one are known.
        seconds: from now on.
    """

    def __init__(self, results: Results, device: Device, seconds: float) -> None:
        from tests.gpu.graph_timer import Graphs, NoGraphs

        self.results = results
        self.graphs: Any = Graphs() if device.kind == "cuda" else NoGraphs()
        self.until = time.monotonic() + seconds
        self.found = [
            value
            for value in results.known.values()
            if isinstance(value, dict) and "candidate" in value
        ]

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until

    def measure(
        self,
        shape: str,
        rows: int,
        candidate: str,
        is_dependent: bool,
        time_it: Callable[[], dict[str, Any]],
    ) -> None:
        """Time a candidate unless that was done before.

        Args:
            shape: of the product, whose name it is.
            is_dependent: whether it is launched so.
            time_it: its figures, `us` among them. A candidate that raises has an error, and fails
                nothing.
        """
        item: dict[str, Any] = {"shape": shape, "rows": rows, "candidate": candidate}
        item["is_dependent"] = is_dependent
        name = f"{shape}, rows {rows}, {candidate}{', dependent' if is_dependent else ''}"
        if self.is_over:
            return

        def run() -> dict[str, Any]:
            try:
                found = item | time_it()
            except Exception as error:
                found = item | {"error": f"{type(error).__name__}: {error}"[:300]}
            self.found.append(found)
            return found

        self.results.check(name, run)
        # where a kernel has broken the device this process ends, and another one goes on
        self.graphs.wait()

    def times(self, shape: str, rows: int, is_dependent: bool = False) -> dict[str, float]:
        """Microseconds of the candidates that ran, the fastest first."""
        key = (shape, rows, is_dependent)
        found = {
            item["candidate"]: item["us"]
            for item in self.found
            if (item["shape"], item["rows"], item["is_dependent"]) == key and "us" in item
        }
        return dict(sorted(found.items(), key=lambda pair: pair[1]))

    def note_best(self) -> None:
        """Leave the best of each product with the results."""
        best: dict[str, Any] = {}
        for item in self.found:
            shape, rows = item["shape"], item["rows"]
            for is_dependent, kind in ((False, "ordinary"), (True, "dependent")):
                if times := self.times(shape, rows, is_dependent):
                    ranked = [[us, name] for name, us in times.items()][:LISTED]
                    best.setdefault(f"{shape}, rows {rows}", {})[kind] = ranked
        self.results.note(best=best)
