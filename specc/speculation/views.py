"""Self-drafts: the target's own program, called over a part of its own cache.

A view is a short block table over the rows of a sequence: the blocks of its first `sink` rows, and
those of its last `window`. The target draws draft tokens from what it sees there. Keys are as they
were rotated when they were written, so positions stay true. Source: MagicDec, arXiv:2408.11049,
whose drafts keep a cache of their own; a view reads the target's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specc.errors import ConfigError

DEFAULT_SINK = 4
# what is written for a user, and the name of a plan's draft
_OPTION = re.compile(r"self:(window=\d+(?:,sink=\d+)?|sink=\d+,window=\d+)")
_NAME = re.compile(r"self_w(\d+)_s(\d+)")
# beyond the positions of any model
_MOST = 1 << 24


@dataclass(frozen=True)
class View:
    """What a self-draft sees of the committed rows of a sequence.

    Args:
        window: last rows that it sees, at least: they begin at the beginning of a block.
        sink: first rows, at least: they end at the end of a block.
    Raises:
        ConfigError: no row, or more than any model has.
    """

    window: int
    sink: int = DEFAULT_SINK

    def __post_init__(self) -> None:
        if not (1 <= self.window <= _MOST and 0 <= self.sink <= _MOST):
            raise ConfigError(
                f"--draft self:window={self.window},sink={self.sink}",
                f"a window of 1 … {_MOST} rows, and a sink of 0 … {_MOST}",
                "for example --draft self:window=512",
            )

    @classmethod
    def parse(cls, text: str) -> View | None:
        """A view as `--draft` has it, `self:window=512,sink=4`; None of what is none.

        Raises:
            ConfigError: it begins like one, and is malformed.
        """
        kind, _, rest = text.partition(":")
        if kind != "self":
            return None
        if _OPTION.fullmatch(text) is None:
            raise ConfigError(
                f"--draft {text}",
                "self:window=W or self:window=W,sink=S, in rows of the target's cache, or layers",
                "for example --draft self:window=512 or --draft self:layers=0-5; a directory named"
                " self is ./self",
            )
        return cls(**{key: int(rows) for key, rows in (x.split("=") for x in rest.split(","))})

    @classmethod
    def named(cls, draft: str) -> View | None:
        """The view of a plan's draft, `self_w512_s4`; None of other drafts."""
        match = _NAME.fullmatch(draft)
        return cls(int(match[1]), int(match[2])) if match else None

    @property
    def num_rows(self) -> int:
        """Committed rows that it is to see, before they are rounded up to blocks."""
        return self.window + self.sink

    @property
    def name(self) -> str:
        """What plans call it."""
        return f"self_w{self.window}_s{self.sink}"

    @property
    def option(self) -> str:
        """What users call it."""
        return f"self:window={self.window},sink={self.sink}"

    def blocks(self, block_size: int) -> tuple[int, int]:
        """Blocks of the sink, and those of the window before the one that is being filled."""
        return -(-self.sink // block_size), -(-self.window // block_size)

    def most_rows(self, block_size: int) -> int:
        """Committed rows that it sees at most."""
        return sum(self.blocks(block_size)) * block_size + block_size - 1

    def columns(self, length: int, block_size: int) -> tuple[list[int], int]:
        """What it sees of a sequence with room for one more token.

        Args:
            length: committed rows.
            block_size: rows of a block.
        Returns:
            columns of the sequence's block table, and how many committed rows are in them.
        """
        sink, window = self.blocks(block_size)
        own = length // block_size
        first = max(own - window, sink)
        seen = length - (first - sink) * block_size
        return [*range(min(sink, own + 1)), *range(first, own + 1)], seen

    def num_columns(self, block_size: int, num_rows: int) -> int:
        """Columns of its block table.

        Args:
            block_size: rows of a block.
            num_rows: rows after the committed ones that a step writes. They begin in the block
                that is being filled, perhaps in its last row.
        """
        return sum(self.blocks(block_size)) + 1 + -(-(num_rows - 1) // block_size)


def is_view(draft: str) -> bool:
    """Whether a draft is the target over a view, by all of its layers."""
    return _NAME.fullmatch(draft) is not None
