"""Engines that tests compile, each of them once; see tests/kept.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
    key: tuple[Any, ...] = (),
    sources: tuple[str, ...] = (),
) -> Path:
    """Compile an engine, or take the one that was compiled of the same before.

    Args:
        is_probed: whether the engine is probed, as the command does.
        builder: compiles in place of `specc.compiler.build.build`.
        key: what the builder makes it of besides; told apart by `repr`.
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
    keep(path, make, config, *hashes, *key, sources=(*COMPILER, *probed_by, *sources))
    _say_where(path / MANIFEST_FILE, checkpoints)
    return path


def _say_where(manifest: Path, checkpoints: Sequence[Path]) -> None:
    """Let a manifest name the checkpoints of now: those that it was made of may be gone."""
    data = json.loads(manifest.read_bytes())
    for model, checkpoint in zip(data["models"], checkpoints, strict=False):
        if model.get("location") is not None:
            model |= {"source": str(checkpoint), "location": str(checkpoint.resolve())}
    manifest.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def build_cut(root: Path, num_ranks: int = 2, positions: int = 4096) -> Path:
    """A tiny Llama with a tokenizer, cut for ranks, and a draft that is right at times.

    Args:
        root: directory that gets the checkpoints and the engine.
        num_ranks: that share the target.
        positions: room for requests that are under way for long.
    Returns:
        the engine directory.
    """
    import torch
    from safetensors.torch import load_file, save_file

    from specc.speculation.plans import SpecPlan
    from tests.conftest import save_tiny_llama

    for name in ("target", "draft"):
        save_tiny_llama(root / name, 1, 1, max_position_embeddings=positions)
    weights = load_file(root / "draft" / "model.safetensors")
    torch.manual_seed(2)
    noisy = {name: w + 0.05 * torch.randn(w.shape) * w.std() for name, w in weights.items()}
    save_file(noisy, root / "draft" / "model.safetensors", {"format": "pt"})
    config = CompileConfig(
        plans=(SpecPlan.from_widths((2, 1)),),
        max_seq_len=positions,
        max_batch_size=4,
        backend="eager",
        probe=False,
        tensor_parallel_size=num_ranks,
    )
    return build(root / "target", root / "draft", root / "engine", config)
