"""What the layers of a draft model attend to: all rows of its cache, or some.

A window bounds what a draft token costs at long context, and lets a draft with rotary positions
work past the length that it was trained for: no query meets a key that is further back than the
window, and rotary embedding sees nothing but that distance. Keys keep the rotation that they were
written with. Source: StreamingLLM, arXiv:2309.17453, which counts positions inside its cache
instead; the two differ in the distance to the sink alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specc.close_name import advice
from specc.drafters.views import DEFAULT_SINK
from specc.errors import ConfigError

_OPTION = re.compile(r"window=\d+(?:,sink=\d+)?|sink=\d+,window=\d+")
FULL = "full"
# beyond the positions of any model
_MOST = 1 << 24


@dataclass(frozen=True)
class KVWindow:
    """Rows that a draft token attends to, in each layer.

    Args:
        window: the last rows, its own included.
        sink: the first rows of the sequence.
    Raises:
        ConfigError: no row, or more than any model has.
    """

    window: int
    sink: int = DEFAULT_SINK

    def __post_init__(self) -> None:
        if not (1 <= self.window <= _MOST and 0 <= self.sink <= _MOST):
            raise ConfigError(
                f"--draft-kv {self.option}",
                f"a window of 1 … {_MOST} rows, and a sink of 0 … {_MOST}",
                "for example --draft-kv window=512",
            )

    @classmethod
    def parse(cls, text: str) -> KVWindow | None:
        """A window as `--draft-kv` has it, `window=512,sink=4`; None of `full`, all rows.

        Raises:
            ConfigError: neither of these.
        """
        text = text.strip()
        if text == FULL:
            return None
        if _OPTION.fullmatch(text) is None:
            key = text.partition("=")[0]
            unknown = () if key in ("window", "sink") else ("window", "sink", FULL)
            raise ConfigError(
                f"--draft-kv {text}",
                "window=W or window=W,sink=S, in rows of the draft's cache, or full",
                advice(key, unknown, "for example --draft-kv window=512"),
            )
        return cls(**{key: int(rows) for key, rows in (x.split("=") for x in text.split(","))})

    @property
    def option(self) -> str:
        return f"window={self.window},sink={self.sink}"
