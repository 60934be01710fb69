"""Transformers with a static cache and a compiled forward, as it decodes on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.bench import baseline as bench_transformers
from specc.bench.baseline import STATIC, TransformersContender, static_cache_options
from tests.models import build_model


@pytest.mark.slow
def test_decoding_with_a_static_cache_and_a_compiled_forward(monkeypatch):
    """The setting of a GPU, here with a backend that compiles nothing: the same tokens as plain."""
    model = build_model("llama")
    batches = [[[5, 6, 7, 8], [9, 10, 11, 12]]]
    calls = []
    compile_ = torch.compile

    def compiled(function: Any, **options: Any) -> Any:
        calls.append(options)
        return compile_(function, **options)

    monkeypatch.setattr(torch, "compile", compiled)
    plain = TransformersContender("transformers", model, batches, 8).run()
    assert not calls
    options = static_cache_options("eager", everywhere=True)
    static = TransformersContender(STATIC, model, batches, 8, options=options).run()
    assert static.outputs == plain.outputs
    assert static.num_steps == 7
    (found,) = calls
    assert found["backend"] == "eager"


def test_options_of_the_compiled_forward():
    options = static_cache_options()
    assert options["cache_implementation"] == "static"
    config = options["compile_config"].to_dict()
    assert (config["backend"], config["mode"]) == ("inductor", "reduce-overhead")


def test_a_gpu_gets_the_compiled_forward(monkeypatch):
    """Which contenders there are follows from the device alone."""

    class OnGpu:
        device = torch.device("cuda", 0)

    made: list[tuple[str, Any]] = []

    class Contender:
        def __init__(self, name: str, *args: Any, **options: Any) -> None:
            made.append((name, options))

        def run(self) -> None:
            made.append(("run", None))

    monkeypatch.setattr(bench_transformers, "TransformersContender", Contender)
    found, notes = bench_transformers.make_contenders(OnGpu(), OnGpu(), [[[1]]], 4, 3)
    assert [name for name, _ in made] == [
        "transformers",
        "transformers-assisted",
        "run",
        STATIC,
        "run",
    ]
    assert made[3][1]["options"]["cache_implementation"] == "static"
    assert (len(found), notes) == (3, [])
    found, notes = bench_transformers.make_contenders(OnGpu(), OnGpu(), [[[1], [2]]], 4, 3)
    assert len(found) == 2
    assert "one sequence" in notes[0]
