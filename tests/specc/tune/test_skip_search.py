"""`specc tune --skip auto`: which layers are tried, and what is said of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from specc.artifact.directory import open_engine
from specc.cli.main import app
from specc.cli.tune import _skip_verdict
from specc.compiler.stored_models import SkippedLayers
from specc.config import CompileConfig
from specc.drafters.self import SelfDraft
from specc.errors import ConfigError
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.engine_cache import caches_of
from specc.runtime.engine import Engine
from specc.speculation.plans import SpecPlan
from specc.tune.drafters.skip_search import MOST_CHOICES, SkipChoice, SkipSearch, greedily
from specc.tune.options import TuneOptions
from tests import engines, models

LAYERS = 4
DRAFT = "self_x1_3"
CONFIG = CompileConfig(
    plans=(SpecPlan.from_widths((1, 1), (DRAFT,)),),
    max_seq_len=96,
    max_batch_size=2,
    block_size=16,
    backend="eager",
    probe=False,
)


@pytest.fixture(scope="module")
def engine_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine that has such a draft, too: its program is what a search would try."""
    root = tmp_path_factory.mktemp("skips")
    models.save_tiny("qwen3", root / "target", num_hidden_layers=LAYERS)
    return engines.build(root / "target", [], root / "engine", CONFIG)


def judged(worth: dict[int, float], asked: list[tuple[int, ...]]):
    """A judge by the sum of what each layer is worth."""

    def judge(choices: Sequence[tuple[int, ...]]) -> list[SkipChoice]:
        asked.extend(choices)
        return [SkipChoice(c, 0.9, 2, 2.5, 0.8, 1.0 + sum(worth[n] for n in c)) for c in choices]

    return judge


def test_the_best_layers_are_left_out_one_after_the_other() -> None:
    asked: list[tuple[int, ...]] = []
    worth = {n: -0.1 for n in range(8)} | {2: 0.05, 5: 0.04, 6: 0.03}
    greedily(8, judged(worth, asked))
    assert asked[:8] == [(n,) for n in range(8)]
    assert (2, 5) in asked
    assert (2, 5, 6) in asked
    # then two more layers have made it worse, three choices each
    assert max(map(len, asked)) == 5
    assert len(asked) == len(set(asked)) == 8 + 4 * 3


def test_it_ends_where_everything_makes_it_worse() -> None:
    asked: list[tuple[int, ...]] = []
    greedily(8, judged(dict.fromkeys(range(8), -0.05), asked))
    assert max(map(len, asked)) == 3
    assert len(asked) == 8 + 2 * 3


@pytest.mark.parametrize("count", [2, 3, 24, 80])
def test_targets_of_few_and_of_many_layers(count: int) -> None:
    """Never more choices than the limit, never a draft without a layer; no layer is unknown."""
    asked: list[tuple[int, ...]] = []
    greedily(count, judged({n: 0.01 + 0.001 * n for n in range(count)}, asked))
    assert len(asked) == len(set(asked)) <= MOST_CHOICES
    assert all(0 < len(c) < count and set(c) <= set(range(count)) for c in asked)
    # the first and the last layer are among those that are tried alone
    assert {(0,), (count - 1,)} <= set(asked)


@torch.inference_mode()
@pytest.mark.parametrize("segments", [False, True], ids=["whole", "segments"])
def test_what_is_tried_is_what_would_be_compiled(
    engine_path: Path, tmp_path: Path, segments: bool
) -> None:
    """The same logits, over the same caches, as the second program of the engine."""
    if segments:
        models.save_tiny("qwen3", tmp_path / "target", num_hidden_layers=LAYERS)
        engine_path = engines.build(
            tmp_path / "target", [], tmp_path / "engine", replace(CONFIG, segments=True)
        )
    engine = Engine.load(engine_path)
    manifest = open_engine(engine_path, None)
    layers = SkippedLayers(engine_path, manifest)
    assert layers.num_layers == LAYERS
    caches = caches_of(manifest.models[0], engine.cache)
    made = ModelProgram(layers.program((1, 3)), engine.target.weights, caches)
    torch.manual_seed(1)
    (slab,) = engine.cache.slabs["target"]
    slab.normal_()
    held = slab.clone()
    inputs = (
        torch.tensor([9]), torch.tensor([20]), torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32), torch.tensor([20], dtype=torch.int32),
        torch.ones(1, 1, dtype=torch.int64), torch.arange(6, dtype=torch.int32)[None],
        torch.tensor([0]),
    )  # fmt: skip
    wanted, rows = engine.self_drafts[DRAFT](*inputs), slab.clone()
    slab.copy_(held)
    assert torch.equal(made(*inputs), wanted)
    assert torch.equal(slab, rows)
    assert not torch.equal(rows, held)


def test_share_of_weights(engine_path: Path) -> None:
    """Half of the layers, and the head; the embedding of a token is no pass over all of it."""
    found = SkippedLayers(engine_path, open_engine(engine_path, None)).weight_share((1, 3))
    model = models.build_model("qwen3", num_hidden_layers=LAYERS)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    whole = sum(size for name, size in sizes.items() if "embed_tokens" not in name)
    gone = sum(size for name, size in sizes.items() if ".1." in name or ".3." in name)
    assert found == pytest.approx((whole - gone) / whole)


@pytest.mark.slow
def test_the_command_searches_and_changes_nothing(engine_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt_token_ids": ids}) for ids in models.prompts()[1:]]
    prompts.write_text("\n".join(lines) + "\n")
    before = {file: file.read_bytes() for file in engine_path.rglob("*") if file.is_file()}
    options = ["--skip", "auto", "--tokens", "12", "--max-depth", "3"]
    arguments = ["tune", str(engine_path), "--prompts", str(prompts), *options]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["num_layers"] == LAYERS
    tried = [tuple(choice["skipped"]) for choice in report["choices"]]
    assert {(n,) for n in range(LAYERS)} <= set(tried)
    for choice in report["choices"]:
        assert 0 <= choice["acceptance"] <= 1
        assert 0 < choice["pass_share"] < 1
    # some layer matters, and not all of what is left out alone is the same
    assert len({choice["acceptance"] for choice in report["choices"]}) > 1
    best = max(report["choices"], key=lambda choice: choice["predicted_speedup"])
    assert report["best"] == best
    assert report["pays"] == (best["predicted_speedup"] >= report["least_speedup"])
    assert {file: file.read_bytes() for file in engine_path.rglob("*") if file.is_file()} == before


def test_what_the_command_says() -> None:
    poor = SkipChoice((5,), 0.98, 2, 2.9, 0.88, 0.95)
    search = SkipSearch(8, 1, 100, [poor])
    assert not search.pays
    said = _skip_verdict(search)
    assert said.startswith("none pays: the best of 1, self:skip=5, promises 2.90 tokens a step")
    assert "0.95 times plain decoding; 1.03 is the least" in said
    search.choices.append(SkipChoice((3, 5), 0.9, 3, 3.2, 0.5, 1.2))
    assert search.pays
    said = _skip_verdict(search)
    assert said.startswith("compile with --draft self:skip=3+5 --num-speculative-tokens 3: ")


def test_what_is_refused(engine_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        SelfDraft.parse("self:skip=auto")
    assert "specc tune ENGINE --prompts FILE --skip auto" in caught.value.do
    with pytest.raises(ConfigError, match="--skip 3"):
        TuneOptions(skip="3")
    manifest = open_engine(engine_path, None)
    object.__setattr__(manifest, "backend", "cuda")
    with pytest.raises(ConfigError, match="backend cuda"):
        SkippedLayers(engine_path, manifest)
