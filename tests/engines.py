"""Engines that tests compile, each of them once; see tests/kept.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from specc.api import probe_engine
from specc.artifact.manifest import MANIFEST_FILE
from specc.compiler import build as compiler
from specc.config import CompileConfig
from tests.kept import COMPILER, content_hash, keep
from tests.traces import shared_traces

Builder = Callable[[Path, Sequence[Path], Path, CompileConfig], object]


def build(
    target: Path,
    drafts: Path | Sequence[Path],
    path: Path,
    config: CompileConfig,
    *,
    is_probed: bool = False,
    builder: Builder | None = None,
    sources: tuple[str, ...] = (),
) -> Path:
    """Compile an engine, or take the one that was compiled of the same before.

    Args:
        target: checkpoint.
        drafts: one checkpoint or several.
        path: directory that is made.
        config: options.
        is_probed: whether the engine is probed, as the command does.
        builder: compiles in place of `specc.compiler.build.build`.
        sources: files and folders of this repository that the builder is made of.
    Returns:
        `path`.
    """
    checkpoints = [target, drafts] if isinstance(drafts, Path) else [target, *drafts]

    def make(made: Path) -> None:
        with shared_traces():
            if builder is None:
                probe = probe_engine if is_probed else None
                compiler.build(target, checkpoints[1:], made, config, probe=probe)
            else:
                builder(target, checkpoints[1:], made, config)

    probed_by = ("runtime",) if is_probed else ()
    hashes = [content_hash(checkpoint) for checkpoint in checkpoints]
    keep(path, make, config, *hashes, sources=(*COMPILER, *probed_by, *sources))
    _tell_where_checkpoints_are(path / MANIFEST_FILE, checkpoints)
    return path


def _tell_where_checkpoints_are(manifest: Path, checkpoints: Sequence[Path]) -> None:
    """Those that it was compiled of may have been an earlier run's, and be gone."""
    data = json.loads(manifest.read_text(encoding="utf-8"))
    for model, checkpoint in zip(data["models"], checkpoints, strict=True):
        model["source"], model["location"] = str(checkpoint), str(checkpoint.absolute())
    manifest.write_text(json.dumps(data), encoding="utf-8")
