"""What tests know of a kind of draft, for the contract of all that are no ordinary models.

Each module of this folder has `RIGS`; `tests/runtime/drafters/test_contract.py` asks every one the
same.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specc.drafters.drafter import Drafter
from tests import draft_kinds, engines
from tests.lossless import Zoo
from tests.runtime.draft_cases import open_target, write_target
from tests.runtime.head_rig import options


@dataclass(frozen=True)
class Said:
    """What an engine says of its draft.

    Args:
        boundaries: of the target, that it reads.
        shared: parameters that are the target's.
        is_last_normed: the last boundary is taken after the final norm.
        width: columns that a token hands on.
        cache_columns: of all that its caches hold of a token; None is not said.
        lines: parts of what `specc inspect` prints.
    """

    boundaries: tuple[int, ...]
    layout: str
    shared: tuple[str, ...] = ()
    is_last_normed: bool = False
    width: int = 0
    cache_columns: int | None = 0
    lines: tuple[str, ...] = ()


class DraftRig:
    """A kind, and the case of it that the default tier runs.

    Args:
        case: a name in `cases`.
        is_first: of those of its kind; the others run fewer clauses in the default tier.
    """

    # name → what is written; and what names of directories begin with
    cases: Mapping[str, Any]
    prefix: str
    said: Said

    def __init__(self, kind: str, case: str, sample: Drafter, is_first: bool = True) -> None:
        self.kind, self.case, self.sample, self.is_first = kind, case, sample, is_first

    def __str__(self) -> str:
        return f"{self.kind}-{self.case}"

    def write(self, path: Path, case: str) -> object:
        """Write a checkpoint of the draft."""
        raise NotImplementedError

    def target(self, zoo: Zoo, case: str) -> Path:
        return write_target(zoo)

    def draft(self, zoo: Zoo, case: str) -> Path:
        return zoo.once(f"{self.prefix}-{case}", lambda path: self.write(path, case))

    def engine(self, zoo: Zoo, case: str = "", label: str = "eager", **changes: Any) -> Path:
        """An engine with this draft alone.

        Args:
            case: of `cases`; empty is the rig's.
        """
        case = case or self.case
        return zoo.once(
            f"{self.prefix}s-{case}-{label}",
            lambda path: self.compile(zoo, case, path, **changes),
        )

    def compile(self, zoo: Zoo, case: str, path: Path, **changes: Any) -> object:
        target, draft = self.target(zoo, case), self.draft(zoo, case)
        return engines.build(target, draft, path, options(**changes))

    def oracle(self, zoo: Zoo, case: str = "", number: int = 0) -> Any:
        """What compares a draft with its formulas."""
        raise NotImplementedError

    def num_looked(self, oracle: Any) -> int:
        """Passes, or nodes, that it has compared."""
        return int(oracle.num_passes)


@functools.cache
def opened(path: Path) -> Any:
    """A target as transformers runs it."""
    return open_target(path)


def all_rigs() -> Iterator[DraftRig]:
    """Of every module of this folder that has some."""
    for module in pkgutil.iter_modules(draft_kinds.__path__):
        made = importlib.import_module(f"{draft_kinds.__name__}.{module.name}")
        yield from getattr(made, "RIGS", ())
