"""Which operators the compiler writes into engines: run, and kept.

    python -m tests.emitted_operators            every architecture, for every backend
    pytest -p tests.emitted_operators FILE…      what these tests compile, added to it

The result, operator → what it was first seen in, is tests/specc/artifact/emitted_operators.json;
tests/specc/artifact/test_graph_operators.py compares it with the list of what engines may call.
Nothing is refused while operators are looked for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import fx

import specc.kernels.ops  # noqa: F401  registers the operators
from specc.artifact import graph_io
from specc.artifact.graph_io import graph_to_json, target_name
from tests import kept

RESULTS = Path(__file__).parent / "specc" / "artifact" / "emitted_operators.json"
# options of compilation with which backends lower programs in different ways: of every architecture
# the first, of every sixth all of them
VARIANTS: tuple[dict[str, Any], ...] = (
    {"backend": "cpu"},
    {"backend": "cuda", "dtype": "bfloat16"},
    {"backend": "eager", "kv_cache_dtype": "int8"},
    {"backend": "cpu", "quantize": "int8"},
    {"backend": "cuda", "quantize": "int4", "dtype": "bfloat16"},
    {"backend": "eager", "tensor_parallel_size": 2},
)
# compiled for the first variant to the end: what Inductor is given has operators of its own
WHOLE = ("llama", "mixtral")


class Recorder:
    """Notes the operators of all graphs that are stored, in place of checking them."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.where = ""

    def store(self, graph: fx.Graph) -> dict[str, Any]:
        for node in graph.nodes:
            if node.op == "call_function":
                self.found.setdefault(target_name(node.target), self.where)
        self.check(graph)
        return graph_to_json(graph)

    def check(self, graph: fx.Graph) -> None:
        try:
            _check_graph(graph)
        except ValueError as error:
            self.refused.setdefault(str(error), self.where)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from specc.passes import program_json
        from specc.passes.step import fuse_step

        monkeypatch.setattr(graph_io, "check_graph", self.check)
        for module in (program_json, fuse_step):
            monkeypatch.setattr(module, "store_graph", self.store)

    def save(self) -> None:
        """Add what was found to what is known."""
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        found = self.found | known
        RESULTS.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")
        while self.refused:
            text, where = self.refused.popitem()
            print(f"refused in {where}: {text}")


_check_graph = graph_io.check_graph
_recorder = Recorder()


def pytest_sessionstart(session: pytest.Session) -> None:
    monkeypatch = pytest.MonkeyPatch()
    _recorder.patch(monkeypatch)
    # engines that were kept were compiled when nobody looked
    monkeypatch.setattr(kept, "_obtain", _make_anew)


def _make_anew(kind: str, make: Callable[[Path], Path], *key: Any) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        return make(Path(scratch)).read_bytes()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _recorder.where = str(item.path.relative_to(Path(__file__).parents[1]))
    yield


def pytest_sessionfinish(session: pytest.Session) -> None:
    _recorder.save()


class _Written(Exception):
    """Programs are written; what follows takes long, and writes no graphs."""


def compile_all(names: list[str]) -> None:
    """Compile architectures with all variants, as far as their programs."""
    from specc.compiler import build
    from specc.config import CompileConfig
    from specc.errors import SpeccError
    from specc.speculation.plans import SpecPlan
    from tests import models

    write_weights = build.write_engine_weights

    def stop(engine: object) -> list[str]:
        raise _Written

    plans = tuple(SpecPlan.from_widths(widths) for widths in ((1, 1), (2, 1)))
    with pytest.MonkeyPatch.context() as monkeypatch, tempfile.TemporaryDirectory() as root:
        _recorder.patch(monkeypatch)
        for place, name in enumerate(names):
            path = models.save_tiny(name, Path(root, name))
            for number, variant in enumerate(VARIANTS[: None if place % 6 == 0 else 1]):
                config = CompileConfig(plans=plans, max_seq_len=128, probe=False, **variant)
                _recorder.where = " ".join((name, *map(str, variant.values())))
                is_whole = name in WHOLE and number == 0
                write = write_weights if is_whole else stop
                monkeypatch.setattr(build, "write_engine_weights", write)
                try:
                    build.build(path, path, Path(root, f"{name}-{number}"), config)
                except _Written:
                    pass
                except SpeccError as error:
                    print(f"{_recorder.where}: {error.found}")
            _recorder.save()
            print(name, len(_recorder.found), flush=True)


if __name__ == "__main__":
    import sys

    from tests.models import ARCHITECTURES, MORE_ARCHITECTURES, ROTARY_VARIANTS

    compile_all(sys.argv[1:] or [*ARCHITECTURES, *ROTARY_VARIANTS, *MORE_ARCHITECTURES])
