"""Traces that are kept on disk: what a new trace is, and made anew when what makes them changes."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch
from torch import Tensor

from specc.artifact.graph_io import graph_to_json
from specc.passes.frontend.trace import trace
from specc.passes.frontend.trace_padded import trace_padded
from specc.passes.pipeline import Pipeline
from specc.passes.program import Program
from tests import models, traces
from tests.import_graph import import_graph, linked_package
from tests.kept import ROOT
from tests.traces import fingerprint, pack, stable_repr, trace_once, unpack


def described(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    return str(value.shape), str(value.stride()), value.dtype, value.device, value.storage_offset()


def content(program: Program) -> list[Any]:
    """All that passes can read of a trace."""
    nodes = [
        (node.name, {**node.meta, "val": described(node.meta.get("val"))})
        for node in program.graph.nodes
    ]
    values: Any = program.graph.find_nodes(op="placeholder")[-1].meta["val"]
    symbols = values.fake_mode.shape_env
    constants = {key: value.tolist() for key, value in program.constants.items()}
    mode = {key: value for key, value in vars(values.fake_mode).items() if type(value) is bool}
    return [
        graph_to_json(program.graph),
        {name: {key: repr(item) for key, item in meta.items()} for name, meta in nodes},
        program.weights,
        constants,
        program.runtime_inputs,
        mode,
        {str(key): repr(value) for key, value in vars(symbols).items() if "var_to_" in key},
    ]


@pytest.mark.default("gpt2-trace_padded")
@pytest.mark.parametrize(("name", "how"), [("gemma3", trace), ("gpt2", trace_padded)])
def test_what_was_kept_is_the_trace(name: str, how: Any) -> None:
    """Before passes, and after those of every engine."""
    program = how(models.build_model(name), "target")
    found = unpack(pack(program))
    for mine, wanted in zip(content(found), content(program), strict=True):
        assert mine == wanted
    if how is trace:
        for one in (found, program):
            Pipeline().run(one)
        assert content(found) == content(program)
        assert found.layers == program.layers


def test_other_processes_take_what_one_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECC_CACHE_DIR", str(tmp_path))
    made = []

    def new(model: Any, name: str, rope_length: int | None) -> Program:
        made.append(name)
        return trace(model, name, rope_length)

    monkeypatch.setattr(traces, "trace", new)
    # by which it is found in every process
    new.__qualname__, new.__module__ = "trace", traces.__name__
    found = []
    for seed in (0, 1):
        # as of a process that has traced nothing
        monkeypatch.setattr(traces, "_known", {})
        found.append(trace_once(models.build_model("opt", seed=seed), f"draft_{seed}", how=new))
    assert made == ["draft_0"]
    assert [program.name for program in found] == ["draft_0", "draft_1"]
    first, second = (json.dumps(graph_to_json(program.graph)) for program in found)
    assert first == second
    trace_once(models.build_model("opt", num_hidden_layers=1), "draft_2", how=new)
    assert made == ["draft_0", "draft_2"]


def test_keys_are_the_same_in_every_process() -> None:
    """Addresses are not; what has one and no name is not kept."""
    key = fingerprint(models.build_model("llama"))
    text = stable_repr(key)
    assert text is not None
    assert "modeling_llama.LlamaAttention" in text
    assert stable_repr((torch.nn.Linear, 1, "x")) == "(torch.nn.modules.linear.Linear, 1, 'x')"
    assert stable_repr((1, (2,))) != stable_repr((1, 2))

    def local() -> None: ...

    for nameless in (local, lambda: None, functools.partial(local), object()):
        assert stable_repr((1, (nameless,))) is None


def test_all_that_traces_import_is_in_their_key(tmp_path: Path) -> None:
    with linked_package(tmp_path):
        graph = import_graph()
    for module in ("trace", "trace_padded"):
        start = f"specc.passes.frontend.{module}"
        for name in {start, *networkx.descendants(graph, start)}:
            parts = name.split(".")[1:]
            file = "/".join(parts if parts[0] in ("passes", "kernels") else ["specc", *parts])
            assert any(
                f"{file}.py" == source or file.startswith(f"{source}/") or file == source
                for source in traces.SOURCES
            ), file
    assert all((ROOT / source).exists() for source in traces.SOURCES)
