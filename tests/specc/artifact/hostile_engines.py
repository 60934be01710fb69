"""Engines that somebody has changed on purpose, with hashes that fit: only content shows it."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specc.errors import SpeccError
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams

# what stands in place of a number
HOSTILE: tuple[Any, ...] = (-1, 0, 2**31, 2**62, 1e308, "x", None, [], {})
Place = tuple[str | int, ...]


def copy_engine(engine: Path, to: Path) -> Path:
    """The same files under another path; those that are written anew are no longer the same."""
    return Path(shutil.copytree(engine, to, copy_function=os.link))


def write(engine: Path, name: str, data: Any) -> None:
    """Replace a file of an engine, and what its manifest says of it."""
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    file = engine / name
    file.unlink()
    file.write_bytes(text)
    if name != "manifest.json":
        manifest = json.loads((engine / "manifest.json").read_bytes())
        entry = {"sha256": hashlib.sha256(text).hexdigest(), "bytes": len(text)}
        manifest["files"][name] |= entry
        write(engine, "manifest.json", manifest)


def numbers(data: Any, path: Place = ()) -> Iterator[Place]:
    """Where numbers are in JSON data."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from numbers(value, (*path, key))
    elif isinstance(data, list):
        for place, value in enumerate(data):
            yield from numbers(value, (*path, place))
    elif isinstance(data, int | float) and not isinstance(data, bool):
        yield path


def replaced(data: Any, path: Place, value: Any) -> Any:
    """A copy of JSON data with another value in one place."""
    data = copy.deepcopy(data)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return data


def run(engine: Path) -> list[int] | SpeccError:
    """A few tokens of an engine, or why it is refused."""
    try:
        llm = LLM(engine, backend="eager")
        params = SamplingParams(temperature=0.0, max_tokens=6)
        return llm.generate([[1, 2, 3, 4, 5]], params)[0].outputs[0].token_ids
    except SpeccError as error:
        return error


def changed(
    engine: Path, to: Path, name: str, change: Callable[[Any], Any]
) -> list[int] | SpeccError:
    """`run` of a copy in which one file is changed."""
    made = copy_engine(engine, to)
    try:
        write(made, name, change(json.loads((engine / name).read_bytes())))
        return run(made)
    finally:
        shutil.rmtree(made)
