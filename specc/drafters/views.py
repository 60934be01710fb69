"""Self-drafts: the target's own program, called over a part of its own cache.

A view is a short block table over the rows of a sequence: the blocks of its first `sink` rows,
those that the target attended to most, and those of its last `window` rows. The target draws draft
tokens from what it sees there. Keys are as they were rotated when they were written, so positions
stay true. Source: MagicDec, arXiv:2408.11049, whose drafts keep a cache of their own; a view reads
the target's. Of the choice: SnapKV, arXiv:2404.14469, by block instead of by row and head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from specc.close_name import advice
from specc.errors import ConfigError

DEFAULT_SINK = 4
# what is written for a user, key by key, and the name of a plan's draft
_OPTION = re.compile(r"(window|sink|blocks)=(\d+)")
# also those of layers and of weights, which are read before
_KEYS = ("window", "sink", "blocks", "layers", "skip", "int8", "int4", "fp8")
_NAME = re.compile(r"self_w(\d+)_s(\d+)(?:_b(\d+))?")
# committed rows after which nodes of a step vote again: at most, and while few have voted
MOST_ROWS, FEW_ROWS = 256, 32
# beyond the positions of any model
_MOST = 1 << 24


@dataclass(frozen=True)
class View:
    """What a self-draft sees of the committed rows of a sequence.

    Args:
        window: last rows that it sees, at least: they begin at the beginning of a block.
        sink: first rows, at least: they end at the end of a block.
        chosen: rows between these, at least: the blocks that got most attention. 0 is none.
    Raises:
        ConfigError: no row, or more than any model has.
    """

    window: int
    sink: int = DEFAULT_SINK
    chosen: int = 0

    def __post_init__(self) -> None:
        others = max(self.sink, self.chosen), min(self.sink, self.chosen)
        if not (1 <= self.window <= _MOST and others[0] <= _MOST and others[1] >= 0):
            raise ConfigError(
                f"--draft {self.option}",
                f"a window of 1 … {_MOST} rows, and a sink and blocks of 0 … {_MOST}",
                "for example --draft self:window=512",
            )

    @classmethod
    def parse(cls, text: str) -> View | None:
        """A view as `--draft` has it, `self:window=512,sink=4`; None of what is none.

        Keys come in any order. Blocks alone have a window of as many rows.

        Raises:
            ConfigError: it begins like one, and is malformed.
        """
        kind, _, rest = text.partition(":")
        if kind != "self":
            return None
        found = [_OPTION.fullmatch(part) for part in rest.split(",")]
        rows = {match[1]: int(match[2]) for match in found if match}
        if len(rows) < len(found) or not rows.keys() & {"window", "blocks"}:
            slips = [x for part in rest.split(",") if (x := part.partition("=")[0]) not in _KEYS]
            raise ConfigError(
                f"--draft {text}",
                "self:window=W, self:window=W,sink=S or self:blocks=B,window=W,sink=S, in rows of"
                " the target's cache, layers, or int8, int4 or fp8",
                advice(
                    slips[0] if slips else "",
                    _KEYS,
                    "for example --draft self:window=512 or --draft self:layers=0-5; a directory"
                    " named self is ./self",
                ),
            )
        chosen = rows.get("blocks", 0)
        return cls(rows.get("window", chosen), rows.get("sink", DEFAULT_SINK), chosen)

    @classmethod
    def named(cls, draft: str) -> View | None:
        """The view of a plan's draft, `self_w512_s4`; None of other drafts."""
        match = _NAME.fullmatch(draft)
        return cls(*(int(rows or 0) for rows in match.groups())) if match else None

    @property
    def num_rows(self) -> int:
        """Committed rows that it is to see, before they are rounded up to blocks."""
        return self.window + self.sink + self.chosen

    @property
    def name(self) -> str:
        """What plans call it."""
        return f"self_w{self.window}_s{self.sink}" + (f"_b{self.chosen}" if self.chosen else "")

    @property
    def option(self) -> str:
        """What users call it."""
        blocks = f"blocks={self.chosen}," if self.chosen else ""
        return f"self:{blocks}window={self.window},sink={self.sink}"

    def blocks(self, block_size: int) -> tuple[int, int, int]:
        """Blocks of the sink, those that are chosen, and those of the window before the one that
        is being filled.
        """
        sink, chosen, window = (-(-n // block_size) for n in (self.sink, self.chosen, self.window))
        return sink, chosen, window

    def most_rows(self, block_size: int) -> int:
        """Committed rows that it sees at most."""
        return sum(self.blocks(block_size)) * block_size + block_size - 1

    def choose(self, mass: Tensor | None, length: int, block_size: int) -> list[int]:
        """The blocks that it sees between sink and window.

        A choice stays one as a sequence grows: its window moves away from them.

        Args:
            mass: [n] float32 by column of the block table: the more, the better; of equals, the
                later one. Columns that it does not have count 0. None is 0 of all.
            length: committed rows, or fewer.
            block_size: rows of a block.
        Returns:
            columns of the sequence's block table, ascending, always as many as `blocks` says;
            where a sequence has no more before its window, all of them.
        """
        sink, chosen, window = self.blocks(block_size)
        end = max(length // block_size - window, sink + chosen)
        worth = [0.0] * end
        if mass is not None and end > sink + chosen:
            known = mass[:end].tolist()
            worth[: len(known)] = known
        order = sorted(range(sink, end), key=lambda column: (worth[column], column))
        return sorted(order[len(order) - chosen :])

    def columns(
        self, length: int, block_size: int, mass: Tensor | None = None
    ) -> tuple[list[int], int]:
        """What it sees of a sequence with room for one more token.

        Args:
            length: committed rows.
            block_size: rows of a block.
            mass: see `choose`.
        Returns:
            columns of the sequence's block table, and how many committed rows are in them.
        """
        sink, chosen, window = self.blocks(block_size)
        own = length // block_size
        first = max(own - window, sink + chosen)
        before = [*range(sink), *self.choose(mass, length, block_size)]
        seen = length - (first - len(before)) * block_size
        return [*(c for c in before if c <= own), *range(first, own + 1)], seen

    def num_columns(self, block_size: int, num_rows: int) -> int:
        """Columns of its block table.

        Args:
            block_size: rows of a block.
            num_rows: rows after the committed ones that a step writes. They begin in the block
                that is being filled, perhaps in its last row.
        """
        return sum(self.blocks(block_size)) + 1 + -(-(num_rows - 1) // block_size)


def rows_between_votes(views: Sequence[View], is_known: bool = True) -> int:
    """Committed rows after which nodes of a step vote again on the blocks that drafts see.

    As many as the smallest window has: a block that leaves it has been voted on by then.

    Args:
        views: of a plan; one of them chooses blocks.
        is_known: enough queries have voted by now.
    """
    if not is_known:
        return FEW_ROWS
    return min(MOST_ROWS, max(FEW_ROWS, min(view.window for view in views if view.chosen)))


def is_view(draft: str) -> bool:
    """Whether a draft is the target over a view, by all of its layers."""
    return _NAME.fullmatch(draft) is not None
