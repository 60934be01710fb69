"""What may run a product, and how long it takes: each candidate is held to the library's results.

A candidate is the library's product with the kernels around it, or a tile of the kernel for few
rows, launched in the ordinary way or early (`specc.kernels.cuda.dependent`). Launches of one kernel
are timed one after another, over the weights of all layers, so an early one starts while the one
before it still runs, as it does in a step whose kernels are all launched so.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specc.kernels.cuda.launch import dependent_launches
from specc.runtime.backends.graph_device import GraphDevice

# a kernel that saves less than this share may be as fast as the library's: it is not chosen
_LEAST_GAIN = 0.01
# tiles are timed as early launches, too, if they are this close to the fastest tile, and that is
# this close to the library: what an early launch saves is a gap, a part of a small product
_NEAR_TILE, _NEAR_LIBRARY = 1.08, 1.5
# an early launch may take as much more than the fastest: it lets the next kernel start early
_EARLY_LOSS = 0.03
_REPEATS, _REPLAYS = 3, 5
# one that takes as much more than the fastest is timed no further
_TOO_SLOW = 1.3
# of a single replay, seconds that launching and waiting take at most; and of several the fewest
# seconds: a product that a model has once takes no longer than a wait
_WAIT_S, _LEAST_S = 1e-4, 5e-4
# difference of two results over the size of one: what roundings and another order of a sum leave,
# and far less than a kernel that is compiled wrongly
_MOST_OFF = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class ProductWarning(UserWarning):
    """A kernel that does not run here; the library's product takes its place."""


class Candidate(NamedTuple):
    """One of them.

    Args:
        number: of a tile; None is the library's product.
        is_early: its launches may be dependent.
    """

    number: int | None = None
    is_early: bool = False

    @classmethod
    def named(cls, name: str) -> Candidate:
        """That of a name."""
        if name == LIBRARY.name:
            return LIBRARY
        return cls(int(name.split("-")[1]), name.endswith("-early"))

    @property
    def name(self) -> str:
        """`library`, `tile-1`, `tile-1-early`."""
        if self.number is None:
            return "library"
        return f"tile-{self.number}{'-early' if self.is_early else ''}"

    @contextlib.contextmanager
    def forced(self) -> Iterator[None]:
        """Operators of this thread run it."""
        # Triton is optional where an engine runs on any other backend
        from specc.kernels.cuda import few_rows

        with few_rows.forced(self.number), dependent_launches(self.is_early):
            yield


LIBRARY = Candidate()

# seconds of some work, which may be captured; the second is that of the fastest so far
Timer = Callable[[Callable[[], object], float], float]
# seconds of all calls; None where a candidate does not run, or gives other results
Found = Mapping[Candidate, float]


class Stopwatch:
    """Seconds that the parts of a measurement take."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """What was spent since the last call."""
        taken, self._seconds = self._seconds, {}
        return {name: round(seconds, 4) for name, seconds in taken.items()}


def graph_timer(graphs: GraphDevice, watch: Stopwatch | None = None) -> Timer:
    """Times replays by the host's clock, several at a time: launches cost nothing then.

    Args:
        watch: gets the seconds of `run`, `capture` and `replay`.
    """
    watch = watch or Stopwatch()

    def replays(graph: Any, count: int) -> float:
        graphs.record_event().synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            graph.replay()
        graphs.record_event().synchronize()
        return (time.perf_counter() - begin) / count

    def seconds(run: Callable[[], object], best: float) -> float:
        with watch.part("run"):
            run()
        with watch.part("capture"):
            graph = graphs.capture(run)
        with watch.part("replay"):
            # the first one prepares the graph
            graph.replay()
            first = replays(graph, 1)
            if first - _WAIT_S > _TOO_SLOW * best:
                return first
            count = max(_REPLAYS, math.ceil(_LEAST_S / first))
            return statistics.median(replays(graph, count) for _ in range(_REPEATS))

    return seconds


def measure(
    bound: Sequence[Callable[[], object]],
    num_tiles: int,
    can_start_early: bool,
    timer: Timer,
    watch: Stopwatch | None = None,
) -> Iterator[tuple[Candidate, float | None]]:
    """Candidates, and seconds of all calls with each.

    None instead of seconds where one does not run, or gives other results.

    Args:
        bound: calls of the product, one of each layer.
        num_tiles: of its kernel.
        can_start_early: launches may be dependent.
        watch: gets the seconds of `check`.
    """
    watch = watch or Stopwatch()

    def run() -> None:
        for call in bound:
            call()

    with LIBRARY.forced():
        wanted = bound[0]()
    found: dict[Candidate, float] = {}

    def timed(candidate: Candidate) -> float | None:
        with candidate.forced():
            try:
                if candidate != LIBRARY:
                    with watch.part("check"):
                        _check_result(bound[0](), wanted)
                seconds = found[candidate] = timer(run, min(found.values(), default=math.inf))
            except Exception as error:
                if candidate == LIBRARY:
                    raise
                # whatever ails it: the step runs without this kernel
                warnings.warn(
                    f"a kernel for few rows does not run on this device and is not used: {error}",
                    ProductWarning,
                    stacklevel=7,
                )
                return None
            return seconds

    for candidate in (LIBRARY, *map(Candidate, range(num_tiles))):
        yield candidate, timed(candidate)
    for candidate in early_candidates(found) if can_start_early else ():
        yield candidate, timed(candidate)


def early_candidates(found: Found) -> list[Candidate]:
    """Which tiles are worth timing as early launches, after all of them were timed otherwise."""
    tiles = {candidate: own for candidate, own in found.items() if candidate != LIBRARY}
    fastest = min(tiles.values(), default=math.inf)
    if fastest > _NEAR_LIBRARY * found[LIBRARY]:
        return []
    return [Candidate(c.number, True) for c, own in tiles.items() if own <= _NEAR_TILE * fastest]


def best_ordinary(found: Found) -> Candidate:
    """The fastest of ordinary launches; a tile only where it clearly beats the library."""
    ordinary = {candidate: own for candidate, own in found.items() if not candidate.is_early}
    best = min(ordinary, key=lambda candidate: ordinary[candidate])
    return best if found[best] < (1 - _LEAST_GAIN) * found[LIBRARY] else LIBRARY


def best_dependent(found: Found) -> Candidate:
    """The fastest where launches may be dependent: the best ordinary one, or an early one."""
    other = best_ordinary(found)
    early = [candidate for candidate in found if candidate.is_early]
    if not early:
        return other
    best = min(early, key=lambda candidate: found[candidate])
    return best if found[best] <= (1 + _EARLY_LOSS) * found[other] else other


def _check_result(found: object, wanted: object) -> None:
    """Raises ArithmeticError: a kernel's result is not the library's but for roundings."""
    for own, other in zip(_tensors(found), _tensors(wanted), strict=True):
        size = torch.linalg.vector_norm(other.float())
        off = float(torch.linalg.vector_norm(own.float() - other.float()) / size)
        # neither where the difference is no number
        if not off <= _MOST_OFF[other.dtype]:
            raise ArithmeticError(f"its results differ from those of separate kernels by {off:.2g}")


def _tensors(value: object) -> Sequence[Tensor]:
    return (value,) if isinstance(value, Tensor) else value  # type: ignore[return-value]
