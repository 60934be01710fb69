"""What the tests of trainers share: the script."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples" / "training"
_MODULES = (
    "train_hybrid", "train_pard", "delta_rule", "hybrid_eval", "hybrid_model", "pair_data",
    "pair_eval", "pair_parts", "pair_policy",
)  # fmt: skip


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """An example; it and the modules beside it are no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "passive")
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.syspath_prepend(str(_EXAMPLES))
        for module in _MODULES:
            patch.delitem(sys.modules, module, raising=False)
        yield importlib.import_module(name)
        for module in _MODULES:
            sys.modules.pop(module, None)
