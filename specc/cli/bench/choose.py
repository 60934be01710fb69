"""What `specc bench` measures: an engine, or shapes with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specc.cli.options.bench import BenchOptions, ShapesOptions
from specc.errors import ConfigError


def choose_subject(directory: Path | None, shapes: ShapesOptions, options: BenchOptions) -> None:
    """Measure the engine or the shapes, whichever is there.

    Raises:
        ConfigError: both, neither, or options of the other.
        SpeccError: see `run_bench`, `run_shapes_bench` and `run_estimate`.
    """
    if shapes.synthetic is None and directory is None:
        raise ConfigError(
            "no engine to measure",
            "an engine directory, or shapes to draw random weights for",
            "specc bench ENGINE, or specc bench --synthetic llama-3.1-8b/llama-3.2-1b",
        )
    if shapes.synthetic is None:
        _refuse_options(shapes.named(), "an engine", "--synthetic", "leave it out")
        assert directory is not None
        from specc.cli.bench.engine import run_bench

        run_bench(directory, options)
        return
    if directory is not None:
        raise ConfigError(
            f"both {directory} and --synthetic {shapes.synthetic}",
            "one of them",
            "leave out the engine, or --synthetic",
        )
    do = "leave it out; shapes take --tree or --num-speculative-tokens, --context and --tokens"
    _refuse_options(options.named(), "--synthetic", "an engine", do)
    if shapes.estimate:
        from specc.cli.bench.estimate import run_estimate

        run_estimate(shapes, options)
        return
    from specc.cli.bench.synthetic import run_shapes_bench

    run_shapes_bench(shapes, options)


def _refuse_options(given: Mapping[str, object], subject: str, other: str, do: str) -> None:
    for name, value in given.items():
        if value not in (None, ()):
            raise ConfigError(f"{name} with {subject}", f"{name} with {other} only", do)
