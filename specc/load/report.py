"""What `specc bench serve` has found, as one JSON document."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specc.bench.report import report_head
from specc.bench.rounds import Spread, uneven_rounds
from specc.cost.latency_table import LatencyTable
from specc.load.sweep import SweepResult
from specc.runtime.engine import Engine
from specc.system.machine import describe_machine

# share of the machine's cores that others may have used before the runs
_BUSY = 0.5
# seconds of passes after the runs over those before, beyond which no simulation can agree
_DRIFTED = 1.1
# of a rate's mean latency, by which a client that is late is worth a note
_LATE = 0.05


@dataclass(frozen=True)
class LoadBench:
    """A finished benchmark, before it is turned into figures.

    Args:
        subject: what served: an engine directory, a URL, or the latency table of a simulation.
        objectives: see `parse_objectives`.
        engine: None where none was loaded.
        table: of the simulation, or that goodput started from; None where there is none.
        predicted: the same sweep, simulated; None where nobody asked.
        drift: seconds of passes after the runs, over those in `table`; None where nobody looked.
        acceptance: of the simulation's dice; None where there is none.
        load_before: of the machine, before the first run.
    """

    subject: str
    result: SweepResult
    settings: Mapping[str, Any]
    objectives: Mapping[str, float] = field(default_factory=dict)
    engine: Engine | None = None
    table: LatencyTable | None = None
    predicted: SweepResult | None = None
    drift: float | None = None
    acceptance: list[list[float]] | None = None
    load_before: tuple[float, float, float] | None = None


def make_load_report(bench: LoadBench, command: str) -> dict[str, Any]:
    """All figures of a benchmark, ready for JSON; the schema is in docs/guide/load.md."""
    cells = bench.result.to_json(bench.objectives, bench.predicted)
    runs = list(bench.result.runs.values())
    return report_head(command) | {
        # of the last 1, 5 and 15 minutes; its own work is in what comes after
        "load_average": {"before": bench.load_before, "after": load_average()},
        "subject": bench.subject,
        "engine": _engine(bench.engine, bench.subject),
        "is_virtual": all(run.is_virtual for run in runs),
        "settings": dict(bench.settings),
        "objectives_ms": dict(bench.objectives),
        "acceptance": bench.acceptance,
        "latency_drift": bench.drift,
        "latency_table": None if bench.table is None else bench.table.to_json(),
        "cells": cells,
        "notes": [
            *_failures(cells),
            *_uneven(cells),
            *_busy(bench),
            *_drifted(bench),
            *_late(bench.result),
        ],
    }


def load_average() -> tuple[float, float, float] | None:
    """Of the last 1, 5 and 15 minutes; None where the system does not tell."""
    return os.getloadavg() if hasattr(os, "getloadavg") else None


def result_lines(result: SweepResult) -> list[dict[str, Any]]:
    """Every request of every run."""
    return [
        {"request_rate": rate, "policy": policy, "round": number} | one.to_json()
        for (rate, policy, number), run in result.runs.items()
        for one in run.results
    ]


def name_of(cell: Mapping[str, Any]) -> str:
    """A cell as notes and tables call it."""
    rate = cell["request_rate"]
    return f"{cell['policy']} at {'inf' if rate is None else f'{rate:g}'}/s"


def _engine(engine: Engine | None, directory: str) -> dict[str, Any] | None:
    if engine is None:
        return None
    manifest = engine.manifest
    return {
        "path": str(Path(directory)),
        "backend": engine.backend,
        "plans": list(engine.plans),
        "dtype": manifest and manifest.dtype,
        "max_num_seqs": engine.cache.shape.max_num_seqs,
        "max_seq_len": engine.max_seq_len,
        "prefill_chunk": engine.prefill_chunk,
        "models": [
            {"name": m.name, "source": m.source, "num_parameters": m.num_parameters}
            for m in (manifest.models if manifest else ())
        ],
    }


def _failures(cells: list[dict[str, Any]]) -> list[str]:
    notes = []
    for cell in cells:
        failed = sum(figures["failed"] for figures in cell["rounds"])
        if failed:
            reason = next(
                iter(figures["errors"]) for figures in cell["rounds"] if figures["errors"]
            )
            notes.append(f"{name_of(cell)}: {failed} requests failed, most often: {reason}")
    return notes


def _uneven(cells: list[dict[str, Any]]) -> list[str]:
    measured = {name_of(cell): cell["mean_e2el_ms"] for cell in cells}
    spreads = {name: Spread(**spread) for name, spread in measured.items() if spread}
    return uneven_rounds(spreads, "more requests or a quiet machine narrow this")


def _busy(bench: LoadBench) -> list[str]:
    cores = describe_machine()["usable_cores"]
    if bench.engine is None or not bench.load_before or bench.load_before[0] < _BUSY * cores:
        return []
    return [
        f"load average {bench.load_before[0]:.1f} on {cores} cores before the first run: repeat"
        " this on a machine without other work"
    ]


def _drifted(bench: LoadBench) -> list[str]:
    if bench.drift is None or 1 / _DRIFTED < bench.drift < _DRIFTED:
        return []
    return [
        f"passes took {bench.drift:.2f} times as long after the runs as in the latency table:"
        " other work disturbed one of them, so the simulation says nothing about the runs"
    ]


def _late(result: SweepResult) -> list[str]:
    """A client that hands requests in late, counted as latency of the engine."""
    late = []
    for (rate, policy, _), run in result.runs.items():
        done = [one for one in run.results if one.is_ok and one.late_s is not None]
        latency_s = sum(one.latency_s for one in done)
        share = sum(one.late_s or 0.0 for one in done) / latency_s if latency_s else 0.0
        if share > _LATE:
            late.append(f"{policy} at {rate:g}/s: {share:.0%}")
    if not late:
        return []
    return [f"share of the latency in which the client was late: {', '.join(late)}"]
