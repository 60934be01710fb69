"""Which weights of an engine stay in memory, and which are read from its file in every pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from specc.artifact.safetensors_io import SafetensorsReader
from specc.artifact.segments import SegmentedModel
from specc.errors import ConfigError
from specc.system.files import format_bytes

# reads begin and end at pages of the file
PAGE = 4096
# one is read into while the other is used
NUM_BUFFERS = 2


@dataclass(frozen=True)
class Piece:
    """Weights of one segment that lie together in the engine's file.

    Args:
        segment: its number.
        offset: of the first byte, in the file.
        size: in bytes.
        keys: of the weights.
    """

    segment: int
    offset: int
    size: int
    keys: tuple[str, ...]

    @property
    def span(self) -> int:
        """Bytes that are read for it: whole pages."""
        end = -(-(self.offset + self.size) // PAGE) * PAGE
        return end - self.offset // PAGE * PAGE


@dataclass(frozen=True)
class OffloadPlan:
    """What a budget of memory allows.

    Args:
        kept: pieces that are copied to memory.
        streamed: pieces that every pass reads, in order.
        rest: keys that are neither: tables that are looked up, what several segments share, and
            constants. They stay mapped, and of tables only the rows that are read are in memory.
    """

    kept: tuple[Piece, ...]
    streamed: tuple[Piece, ...]
    rest: tuple[str, ...]

    @property
    def bytes_per_pass(self) -> int:
        """That every pass reads."""
        return sum(piece.span for piece in self.streamed)

    @property
    def buffer_bytes(self) -> int:
        """Of the buffers: each as large as the largest piece that it takes."""
        return sum(
            max((piece.span for piece in self.streamed[i::NUM_BUFFERS]), default=0)
            for i in range(NUM_BUFFERS)
        )

    @property
    def memory_bytes(self) -> int:
        """Of weights: those that are kept, and the buffers."""
        return sum(piece.span for piece in self.kept) + self.buffer_bytes


def find_pieces(
    model: SegmentedModel, places: Mapping[str, tuple[int, int]]
) -> tuple[list[Piece], list[str]]:
    """The piece of each segment that has one, and the keys of all other weights.

    Args:
        model: the segments.
        places: key → offset in the file, and bytes.
    """
    readers: dict[str, list[int]] = {}
    for number, segment in enumerate(model.segments):
        for key in segment.keys:
            readers.setdefault(key, []).append(number)
    pieces = []
    for number, segment in enumerate(model.segments):
        own = [key for key in segment.keys if readers[key] == [number]]
        # before the first layer a table is looked up: whole, it would be read for a few rows
        if number == 0 and not (segment.layers or segment.states):
            continue
        run = _longest_run(sorted(own, key=lambda key: places[key]), places)
        if run:
            offset = places[run[0]][0]
            end = sum(places[run[-1]])
            pieces.append(Piece(number, offset, end - offset, tuple(run)))
    taken = {key for piece in pieces for key in piece.keys}
    return pieces, [key for key in readers if key not in taken]


def _longest_run(keys: Sequence[str], places: Mapping[str, tuple[int, int]]) -> list[str]:
    """Neighbours in the file, of the most bytes."""
    runs: list[list[str]] = [[key] for key in keys[:1]]
    for before, key in pairwise(keys):
        if sum(places[before]) == places[key][0]:
            runs[-1].append(key)
        else:
            runs.append([key])
    return max(runs, key=lambda run: sum(places[key][1] for key in run), default=[])


def read_pieces(model: SegmentedModel, file: Path) -> tuple[list[Piece], list[str]]:
    """`find_pieces`, by the header of a file of weights.

    Raises:
        WeightError: it is no safetensors file.
    """
    with SafetensorsReader(file) as reader:
        places = {key: reader.place(key) for key in reader.keys()}  # noqa: SIM118
    return find_pieces(model, places)


def least_budget(pieces: Sequence[Piece]) -> int:
    """The least memory that weights can do with."""
    return min(plan.memory_bytes for plan in _plans(pieces, ()))


def plan_offload(
    pieces: Sequence[Piece], rest: Sequence[str], budget: int, resident: int = 0
) -> OffloadPlan:
    """The plan that reads the fewest bytes a pass within a budget.

    Pieces that are kept are spread evenly over the model, so that reading never has to wait long
    for a buffer.

    Args:
        pieces: of `find_pieces`, in order.
        rest: keys that are no pieces.
        budget: bytes of memory that weights may take.
        resident: bytes of it that these keys take, where they are not mapped.
    Raises:
        ConfigError: the budget is below two buffers of the largest segments.
    """
    left = budget - resident
    if sum(piece.span for piece in pieces) <= left:
        return OffloadPlan(tuple(pieces), (), tuple(rest))
    fitting = [plan for plan in _plans(pieces, rest) if plan.memory_bytes <= left]
    if not fitting:
        largest = max((piece.span for piece in pieces), default=0)
        needed = (
            f"two buffers for segments of up to {format_bytes(largest)}, or larger ones in memory"
        )
        if resident:
            needed = f"{format_bytes(resident)} that always stay, two buffers for weights of up to"
            needed += f" {format_bytes(largest)}, or larger ones in memory"
        least = resident + (least_budget(pieces) if pieces else 0)
        raise ConfigError(
            f"--offload-weights {format_bytes(budget)}",
            f"at least {format_bytes(least)}: {needed}",
            "raise --offload-weights",
        )
    return min(fitting, key=lambda plan: (plan.bytes_per_pass, plan.memory_bytes))


def _plans(pieces: Sequence[Piece], rest: Sequence[str]) -> Iterator[OffloadPlan]:
    for most in sorted({piece.span for piece in pieces}):
        for count in range(len(pieces)):
            yield _keep(pieces, rest, most, count)


def _keep(pieces: Sequence[Piece], rest: Sequence[str], most: int, count: int) -> OffloadPlan:
    """Keep pieces larger than `most`, and `count` of the others, evenly spread."""
    small = [piece for piece in pieces if piece.span <= most]
    count = min(count, len(small) - 1)
    places = {(2 * i + 1) * len(small) // (2 * count) for i in range(count)}
    kept = {small[place] for place in places}
    kept |= {piece for piece in pieces if piece.span > most}
    return OffloadPlan(
        tuple(piece for piece in pieces if piece in kept),
        tuple(piece for piece in pieces if piece not in kept),
        tuple(rest),
    )
