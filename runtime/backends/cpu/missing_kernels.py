"""Operators of an engine's graphs that the library has no kernel for: torch runs them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from specc.artifact.graph_io import read_graph
from specc.artifact.manifest import Manifest
from specc.kernels import native
from specc.runtime.backends.cpu.encoder import has_kernel, name_of
from specc.runtime.backends.program_files import read_json


def missing_kernels(engine: Path, manifest: Manifest) -> Counter[str]:
    """Name of an operator → calls of it in all programs and steps, of those without a kernel.

    Args:
        manifest: of it, of the backend cpu.
    Raises:
        EngineError: there is no library for this machine, or a file cannot be read.
    """
    native.load()
    files = [program.program_file for program in (*manifest.models, *manifest.self_drafts)]
    files += [*manifest.step_files.values(), *manifest.winners_files.values()]
    modules = [*(m.name for m in manifest.models), *(d.name for d in manifest.self_drafts)]
    found = Counter[str]()
    for name in dict.fromkeys(files):
        for graph in _graphs(read_json(engine / name), modules):
            found.update(
                name_of(node.target)
                for node in graph.nodes
                if isinstance(node.target, torch._ops.OpOverload) and not has_kernel(node)
            )
    return found


def _graphs(program: Mapping[str, Any], modules: Collection[str]) -> Iterator[fx.Graph]:
    """Of a model, or of the stages of a step."""
    for part in program.get("stages", [program]):
        yield read_graph(part["graph"], modules)
