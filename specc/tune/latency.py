"""Measure an engine's latency table on this machine, within a given time."""

from __future__ import annotations

import logging
import math
import statistics
import time

import torch

from specc.cost.latency_table import LatencyTable, PassPoint, PassSeconds
from specc.drafters.facts import Cache
from specc.errors import ConfigError
from specc.progress import Advance, ignore
from specc.runtime.backends.step import Model
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.kept_latency import KeptLatency, device_name
from specc.system.machine import describe_machine
from specc.tune.overheads import ROUNDS, SHORT, Overheads
from specc.tune.timed_pass import time_pass, vote_s

_log = logging.getLogger("specc.latency")
_WIDTHS = (2, 3, 4, 5, 9, 16, 32, 64, 128, 256, 512)
# sequences with several tokens each, as a verified batch has
_BATCH_WIDTHS = (2, 3, 5, 9)
# in place of a model: what votes add to a pass of the target
_VOTES = "votes"
# model, sequences, tokens of each, committed rows of each
_Cell = tuple[str, int, int, int]


def measure_latency(
    engine: Engine, advance: Advance = ignore, budget_s: float = 30.0
) -> LatencyTable:
    """Time passes of target and drafts by sequences, tokens and context, interleaved; medians.

    Every pass runs once to warm up and once to count, however long that takes; up to five rounds
    more as long as the time lasts.

    Args:
        engine: with nobody else at work.
        advance: told how far this is.
        budget_s: seconds after which no further round begins.
    Raises:
        ConfigError: the cache holds not even one sequence of full length.
    """
    measurement = LatencyMeasurement(engine, budget_s)
    while measurement.advance():
        advance(*measurement.progress)
    return measurement.table()


class LatencyMeasurement:
    """The same in slices of a pass or an iteration each, between which others may use the engine.

    Args:
        engine: with nobody else at work during a slice.
        budget_s: seconds of slices after which no further round begins.
    Raises:
        ConfigError: the cache holds not even one sequence of full length.
    """

    def __init__(self, engine: Engine, budget_s: float = 30.0) -> None:
        self._engine = engine
        self._budget_s = budget_s
        cache = engine.cache
        self._models: dict[str, Model] = {"target": engine.target}
        self._models |= {f"draft_{i}": draft for i, draft in enumerate(engine.drafts)}
        self._models |= engine.self_drafts
        # a small pool holds fewer sequences of full length
        free = cache.allocator.num_free // cache.shape.blocks_per_sequence
        most = min(cache.shape.max_num_seqs, free)
        if most < 1:
            raise ConfigError(
                f"a cache of {cache.shape.num_blocks} blocks, {cache.allocator.num_free} of them"
                " free",
                f"{cache.shape.blocks_per_sequence}, to measure a sequence of full length",
                "give the cache more tokens, or leave the measurement out",
            )
        # the manifest says it, not plans: an engine that is tuned has none but off at first
        entries = engine.manifest.models if engine.manifest else ()
        flat = {x.name for x in entries if x.head is not None and x.head.facts.cache is Cache.NONE}
        sizes = _sizes(engine, most)
        cells = [
            (name, *s) for name in self._models for s in sizes if s[1] == 1 or name not in flat
        ]
        if cache.block_mass is not None:
            cells += [(_VOTES, *s) for s in sizes if s[1] in _BATCH_WIDTHS]
        self._times: dict[_Cell, list[float]] = {cell: [] for cell in cells}
        self._overheads = Overheads(engine, budget_s / 4)
        self._seconds = 0.0
        # of the rounds, the last of which may become fewer
        self._num_rounds, self._num_done = ROUNDS, 0

    @property
    def progress(self) -> tuple[int, int]:
        """Slices that are done, and of all, as far as they can be foreseen."""
        passes = self._num_rounds * len(self._times)
        done, total = self._overheads.progress
        return self._num_done + done, passes + total

    def advance(self) -> bool:
        """Run a slice; False where nothing is left to measure."""
        if self._num_done == self._num_rounds * len(self._times):
            return self._overheads.advance()
        number, place = divmod(self._num_done, len(self._times))
        cell = list(self._times)[place]
        begin_s = time.perf_counter()
        seconds = self._time(cell)
        self._seconds += time.perf_counter() - begin_s
        if number:
            self._times[cell].append(seconds)
        self._num_done += 1
        if place == len(self._times) - 1:
            # how many more begin before the time is over
            left_s, round_s = self._budget_s - self._seconds, self._seconds / (number + 1)
            more = math.ceil(left_s / round_s) if left_s > 0 < round_s else 0
            self._num_rounds = min(ROUNDS, max(2, number + 1 + more))
        return True

    def pause(self) -> None:
        """Others use the engine now: give back what is held."""
        self._overheads.pause()

    def table(self) -> LatencyTable:
        """What was measured; `advance` has returned False."""
        passes = {
            name: PassSeconds.from_points(
                [
                    PassPoint(rows, rows * width, rows * context, statistics.median(values))
                    for (model, rows, width, context), values in self._times.items()
                    if model == name
                ],
                name,
            )
            for name in dict.fromkeys(cell[0] for cell in self._times)
        }
        votes = passes.pop(_VOTES, None)
        about = {
            "source": "measured",
            "machine": describe_machine(),
            "backend": self._engine.backend,
            "device": device_name(self._engine),
            "threads": torch.get_num_threads(),
            "rounds": self._num_rounds - 1,
        }
        iteration_s, step_s = self._overheads.seconds()
        target = passes.pop("target")
        return LatencyTable(target, passes, iteration_s, step_s, about, votes)

    def _time(self, cell: _Cell) -> float:
        name, rows, width, context = cell
        cache = self._engine.cache
        blocks = [cache.allocator.allocate(cache.shape.blocks_per_sequence) for _ in range(rows)]
        try:
            table = cache.block_table(blocks).to(cache.device)
            if name == _VOTES:
                return vote_s(self._engine, table, context, width)
            return time_pass(self._engine, self._models[name], table, context, width)
        finally:
            for one in blocks:
                cache.allocator.free(one)


class IdleLatency:
    """The same for a server, while no request runs: what is measured is kept, and used at once.

    Args:
        budget_s: see `LatencyMeasurement`.
    Raises:
        ConfigError: see `LatencyMeasurement`.
    """

    def __init__(self, core: EngineCore, budget_s: float) -> None:
        self._core = core
        self._measurement = LatencyMeasurement(core.engine, budget_s)
        self._begin_s = time.monotonic()
        _log.info(
            "measuring how long passes take, while no request runs; until then, plans are chosen"
            " by a guess, which requests correct"
        )

    @property
    def progress(self) -> tuple[int, int]:
        return self._measurement.progress

    def advance(self) -> bool:
        if self._measurement.advance():
            return True
        table, kept = self._measurement.table(), KeptLatency(self._core.engine)
        self._core.scheduler.policy.use_latency(table)
        kept.write(table)
        seconds, place = time.monotonic() - self._begin_s, kept.place or "nowhere"
        _log.info("measured how long passes take, in %.1f s; kept in %s", seconds, place)
        return False

    def pause(self) -> None:
        self._measurement.pause()


def _sizes(engine: Engine, most_rows: int) -> list[tuple[int, int, int]]:
    """Sequences, tokens of each, and committed rows of each, that a pass is measured with."""
    shape = engine.cache.shape
    most_tokens = engine.prefill_chunk
    rows = [1 << i for i in range(most_rows.bit_length())]
    rows = sorted({*(count for count in rows if count <= most_rows), most_rows})
    widths = [(1, width) for width in _WIDTHS if width <= most_tokens]
    widths += [(most_rows, width) for width in _BATCH_WIDTHS]
    sizes = {(count, 1) for count in rows} | set(widths)
    found = []
    for count, width in sorted(sizes):
        longest = shape.max_seq_len - width
        if count * width > max(most_tokens, most_rows) or longest < 1:
            continue
        found += [(count, width, context) for context in {min(SHORT, longest), longest}]
    return found
