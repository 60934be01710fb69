"""Programs of an engine's target without some of its layers, to be tried operator by operator.

Nothing is compiled and nothing is written: what such a program accepts is that of the second
program which a compilation with `--draft self:skip=…` makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.manifest import Manifest
from specc.compiler.stored_models import read_model
from specc.errors import ConfigError
from specc.passes.program_json import program_to_json
from specc.passes.residual import layer_regions
from specc.passes.rewrite.skip_layers import SkipLayers


class SkippedLayers:
    """Leaves layers out of the target's graph.

    Args:
        engine: its directory.
        manifest: of it, checked.
    Raises:
        ConfigError: a target that is cut for ranks, or a backend whose graphs have other layers.
        UnsupportedGraphError: layers that a value leads past.
        EngineError: a file that cannot be read.
    """

    def __init__(self, engine: Path, manifest: Manifest) -> None:
        entry = manifest.models[0]
        if manifest.is_cut(entry):
            raise ConfigError(
                f"an engine whose target is cut for {manifest.num_ranks} ranks",
                "one rank: a second program of the target is not cut",
                "search in an engine of one rank",
            )
        facts = facts_of(manifest.backend)
        if facts.is_padded or facts.is_on_gpu:
            others = [
                name
                for name in backend_names()
                if facts_of(name).by_default and facts_of(name).takes_views
            ]
            raise ConfigError(
                f"an engine of the backend {facts.name}, whose graph joins layers or has no blocks",
                f"one of the backends {' or '.join(others)}",
                f"compile the same models with --backend {others[0]}, and search there: what is"
                " accepted is the same",
            )
        model = read_model(engine, manifest, entry)
        model.source.reader.close()  # type: ignore[attr-defined]
        self._program = model.program
        layer_regions(self._program)
        self.num_layers = len(self._program.layers)
        self._bytes = self._weight_bytes(tuple(range(self.num_layers)))

    def program(self, skipped: tuple[int, ...]) -> dict[str, Any]:
        """JSON of the program without these layers; it reads the target's weights and caches."""
        return program_to_json(self._without(skipped))

    def weight_share(self, skipped: tuple[int, ...]) -> float:
        """Bytes of weights that a pass without these layers reads, over those of a whole one.

        An embedding that is looked up counts on neither side, unless it is the head, too.
        """
        kept = tuple(n for n in range(self.num_layers) if n not in skipped)
        return self._weight_bytes(kept) / self._bytes

    def _without(self, skipped: tuple[int, ...]) -> Any:
        program = self._program.copy("target")
        kept = [n for n in range(self.num_layers) if n not in skipped]
        SkipLayers(kept).run(program)
        return program

    def _weight_bytes(self, kept: tuple[int, ...]) -> int:
        skipped = tuple(n for n in range(self.num_layers) if n not in kept)
        program, total = self._without(skipped), 0
        for name, weight in program.weights.items():
            users = program.placeholder(name).users
            if not all(_is_lookup(user.target) for user in users):
                size = weight.dtype.itemsize
                for length in weight.shape:
                    size *= length
                total += size
        return total


def _is_lookup(target: Any) -> bool:
    return "embedding" in str(target)
