"""Engines of somebody else: whatever their numbers say is an error, soon, or harmless.

Every number of a manifest, a program and a step is replaced by those that nobody expects, and a few
tokens are generated on the backend `eager`, which is for such engines.
"""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import time
import types
import typing
from typing import Any

import pytest

from specc.artifact.manifest import Manifest
from specc.bounds import bounds_of
from specc.errors import EngineError, SpeccError
from tests.specc.artifact.hostile_engines import (
    HOSTILE,
    Place,
    changed,
    copy_engine,
    numbers,
    replaced,
    run,
    write,
)
from tests.tiers import every

FILES = ("manifest.json", "target/program.json", "draft-0/program.json", "steps/tree-2-1.json")
# seconds that loading and six tokens may take on a busy machine; memory that they may add
MOST_SECONDS, MOST_BYTES = 30, 1 << 30
# of each file and part
NUM_CASES = 24


def _cases(data: Any, name: str, part: int) -> list[tuple[Place, Any]]:
    rng = random.Random(f"{name}/{part}")
    places = list(numbers(data))
    return [(rng.choice(places), rng.choice(HOSTILE)) for _ in range(NUM_CASES)]


@pytest.mark.default("0-manifest.json")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", every(8, range(8)))
def test_any_number_is_refused_or_harmless(tiny_engine, tmp_path, name, part):
    data = json.loads((tiny_engine / name).read_bytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number, (place, value) in enumerate(_cases(data, name, part)):
        begin = time.perf_counter()
        made = replaced(data, place, value)
        outcome = changed(tiny_engine, tmp_path / str(number), name, lambda _, made=made: made)
        assert time.perf_counter() - begin < MOST_SECONDS, (place, value)
        if isinstance(outcome, SpeccError):
            refused += 1
            assert len(str(outcome)) < 4000, (place, value)
    # most do not fit; of those that fit, some say nothing about what is computed
    assert refused > NUM_CASES // 3
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < MOST_BYTES


def _call(name: str, target: str, *args: Any) -> dict[str, Any]:
    return {"name": name, "op": "call_function", "target": target, "args": list(args)}


def _grown(data: Any, levels: int, target: str, *rest: Any) -> Any:
    """A program whose logits are joined with themselves again and again."""
    nodes = data["graph"]["nodes"]
    output = data["graph"]["output"]
    last = output if isinstance(output, dict) else output[0]
    for level in range(levels):
        args = [[last, last], 0] if target == "aten.cat.default" else [last, *rest]
        nodes.append(_call(f"grown_{level}", target, *args))
        last = {"node": f"grown_{level}"}
    nodes.append(_call("unused", "aten.mul.Tensor", last, 1))
    return data


@pytest.mark.parametrize(
    ("levels", "target", "rest"),
    [
        pytest.param(40, "aten.cat.default", (), id="joined"),
        pytest.param(40, "aten.repeat.default", ([2, 1],), id="repeated"),
        pytest.param(3, "aten.repeat_interleave.self_int", (10**5, 0), id="interleaved"),
        pytest.param(3, "aten.constant_pad_nd.default", ([0, 2**27],), id="padded"),
    ],
)
def test_what_grows_without_end_is_noticed(tiny_engine, tmp_path, levels, target, rest):
    """Each call is one that programs make; all together would take more than there is."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = changed(
        tiny_engine,
        tmp_path / "engine",
        "target/program.json",
        lambda data: _grown(data, levels, target, *rest),
    )
    assert isinstance(outcome, EngineError)
    assert "at a time; at most" in outcome.found or "cannot run" in outcome.found
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < 256 << 20


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("manifest.json", b'{"schema_version": 1, "schema_version": 5}'),
        ("target/program.json", b'{"name": "a", "name": "target", "inputs": []}'),
        ("draft-0/program.json", b'{"inputs": [{"name": "a", "name": "b"}], "name": "draft_0"}'),
        ("steps/off.json", b'{"plan": {}, "plan": {"name": "off"}}'),
        ("target/program.json", b'{"name": NaN}'),
    ],
)
def test_what_json_leaves_open_is_refused(tiny_engine, tmp_path, name, text):
    """Readers do not agree which of two equal keys counts, nor whether NaN is a number."""
    engine = copy_engine(tiny_engine, tmp_path / "engine")
    write(engine, name, text)
    outcome = run(engine)
    assert isinstance(outcome, SpeccError)
    assert "comes twice" in outcome.found or "no number" in outcome.found


@pytest.mark.parametrize("name", ["manifest.json", "target/program.json", "steps/off.json"])
def test_files_that_no_engine_comes_near_are_not_read(tiny_engine, tmp_path, name):
    engine = copy_engine(tiny_engine, tmp_path / "engine")
    data = (engine / name).read_bytes()
    write(engine, name, data + b" " * (33 << 20))
    outcome = run(engine)
    assert isinstance(outcome, EngineError)
    assert "bytes, at most" in outcome.found


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("limits", "max_batch_size"), 0),
        (("limits", "max_batch_size"), 5000),
        (("limits", "max_nodes"), 10**9),
        (("limits", "block_size"), 10**12),
        (("limits", "max_seq_len"), 2**32),
        (("limits", "prefill_chunk"), 0),
        (("limits", "kv_cache_tokens"), 2**62),
        (("models", 0, "vocab_size"), 10**12),
        (("models", 0, "vocab_size"), 0),
        (("models", 0, "max_position"), 95),
        (("models", 1, "max_position"), 95),
        (("models", 0, "layers", 0, "window"), -5),
        (("models", 0, "layers", 0, "head_dim"), 0),
        (("models", 0, "layers", 0, "head_dim"), 2**62),
        (("models", 0, "slabs", 0, "head_dim"), 0),
        (("models", 0, "slabs", 0, "num_layers"), 10**9),
        (("models", 0, "slabs", 0, "num_layers"), 3),
        (("memory_plan", "target", "cache"), 2**62),
    ],
    ids=lambda value: ".".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_numbers_of_a_manifest_have_ends(tiny_engine, tmp_path, place, value):
    def change(data: Any) -> Any:
        return replaced(data, place, value)

    outcome = changed(tiny_engine, tmp_path / "engine", "manifest.json", change)
    assert isinstance(outcome, EngineError)
    assert "the manifest is invalid" in outcome.found
    assert str(value) in outcome.found or "total" in outcome.found


def test_a_cache_is_compared_with_the_memory_that_there_is(tiny_engine, tmp_path):
    """What the manifest plans for it is what its author says."""

    def change(data: Any) -> Any:
        data["limits"] |= {"max_batch_size": 4096, "max_seq_len": 1 << 30}
        for model in data["models"]:
            model["max_position"] = 1 << 30
        return data

    outcome = changed(tiny_engine, tmp_path / "engine", "manifest.json", change)
    assert isinstance(outcome, EngineError)
    assert "caches of" in outcome.found


def _entries(kind: Any, found: dict[Any, None]) -> dict[Any, None]:
    """All dataclasses that a manifest is made of."""
    if dataclasses.is_dataclass(kind) and kind not in found:
        found[kind] = None
        for hint in typing.get_type_hints(kind).values():
            _entries(hint, found)
    for argument in typing.get_args(kind):
        _entries(argument, found)
    return found


def _holds_numbers(kind: Any) -> bool:
    if kind in (int, float):
        return True
    if dataclasses.is_dataclass(kind) or kind is types.NoneType:
        return False
    return any(map(_holds_numbers, typing.get_args(kind)))


ENTRIES = list(_entries(Manifest, {}))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_every_number_of_a_manifest_says_what_it_may_be(entry):
    hints = typing.get_type_hints(entry)
    for field in dataclasses.fields(entry):
        bounds = bounds_of(field)
        assert (bounds is not None) == _holds_numbers(hints[field.name]), field.name
        if bounds is not None:
            assert bounds.least < bounds.most < 2**60


def test_entries_are_found():
    assert len(ENTRIES) > 15
