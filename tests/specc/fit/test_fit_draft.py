"""`specc fit-draft` to its end: what it makes drafts in an engine, as well as its report says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.fit import run, trainer, training_data
from specc.fit.drafters.block import BlockFitter
from specc.fit.drafters.eagle3 import EagleFitter
from specc.fit.options import FitOptions
from specc.fit.run import fit_draft
from specc.fit.target import Target
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan
from tests import models
from tests.command_line import assert_refused, invoke

TOKENS = 40
SIZES = ("--length", 64, "--generate", 2000, "--num-threads", 1, "--num-speculative-tokens", 3)


@pytest.fixture(scope="module")
def loaded() -> dict[str, Target]:
    return {}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, loaded: dict[str, Target]) -> None:
    """A few short texts and walks; a target is loaded once, which takes seconds."""
    load = Target.load

    def load_once(label: str, *others: Any) -> Target:
        if label not in loaded:
            loaded[label] = load(label, *others)
        return loaded[label]

    monkeypatch.setattr(Target, "load", load_once)
    monkeypatch.setattr(training_data, "CONTINUATION", 40)
    monkeypatch.setattr(EagleFitter, "batch_tokens", 512)
    monkeypatch.setattr(BlockFitter, "batch_tokens", 128)
    monkeypatch.setattr(run, "_WALKS", 6)
    monkeypatch.setattr(run, "_WALK_TOKENS", TOKENS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save_tiny("llama", tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty documents of words, of letters that the tokenizer has."""
    directory, draw = tmp_path_factory.mktemp("texts"), random.Random(4)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 5))) for _ in range(12)]
    for number in range(40):
        lines = (" ".join(draw.choices(words, k=8)) for _ in range(10))
        (directory / f"{number}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory


def fitted(
    target: Path, texts: Path, output: Path, *options: Any, kind: str = "eagle3"
) -> dict[str, Any]:
    words = ["--kind", kind, "--texts", texts, "-o", output, *SIZES, *options, "--json"]
    result = invoke("fit-draft", target, *words)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def accepted(target: Path, head: Path, root: Path) -> float:
    """Tokens a step of an engine along the head's held-out prompts, all of them as of `off`."""
    plan = SpecPlan.from_widths((1, 1, 1))
    config = CompileConfig(
        plans=(plan,), max_batch_size=8, max_seq_len=192, backend="cpu", probe=False
    )
    build(target, head, root, config)
    lines = (head / "held_out.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    engine, found = Engine.load(root), {}
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    for name in ("off", plan.name):
        llm = LLM(engine, plan=name)
        found[name] = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    assert found["off"] == found[plan.name]
    return llm.get_metrics().mean_acceptance_length


def test_a_fitted_head_drafts_better_than_a_fresh_one_and_as_reported(
    target: Path, texts: Path, tmp_path: Path
) -> None:
    found = {
        steps: fitted(target, texts, tmp_path / f"{steps}", "--steps", steps) for steps in (1, 60)
    }
    begin, end = found[60]["training"]["loss"]
    assert end < 0.9 * begin
    assert found[60]["tokens"]["greedy"] + found[60]["tokens"]["sampled"] >= 2000
    head = tmp_path / "60"
    assert sorted(path.name for path in head.iterdir()) == [
        "config.json", "fit.json", "held_out.jsonl", "model.safetensors",
    ]  # fmt: skip
    assert f"--draft {head}" in found[60]["compile"]
    reached = {
        steps: accepted(target, tmp_path / f"{steps}", tmp_path / f"engine-{steps}")
        for steps in found
    }
    for steps, value in reached.items():
        said = found[steps]["greedy_chains"]["held out"]["acceptance_length"]
        assert value == pytest.approx(said, abs=1e-3)
    # of a random target, which nobody can foresee by much
    assert reached[60] > reached[1] + 0.03


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("jetspec", "DFlashDraftModel"),
        ("dflash2", "DFlash2DraftModel"),
        ("lilicorr", "LiLiCorrDraftModel"),
    ],
)
def test_a_fitted_block_drafter_drafts_as_reported(
    target: Path, texts: Path, tmp_path: Path, kind: str, architecture: str
) -> None:
    found = fitted(target, texts, tmp_path / "draft", "--steps", 2, kind=kind)
    assert found["training"]["steps"] == 2
    config = json.loads((tmp_path / "draft" / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == [architecture]
    value = accepted(target, tmp_path / "draft", tmp_path / "engine")
    said = found["greedy_chains"]["held out"]["acceptance_length"]
    assert value == pytest.approx(said, abs=1e-3)


def test_a_run_that_was_ended_goes_on_to_the_same_weights(
    target: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def options(name: str, resume: bool = False) -> FitOptions:
        return FitOptions(
            "eagle3", tmp_path / name, (texts,), steps=12, generate=400, length=64, num_threads=1,
            num_speculative_tokens=2, draft_vocab_size=50, resume=resume,
        )  # fmt: skip

    whole = fit_draft(str(target), options("whole"))
    monkeypatch.setattr(trainer.Checkpoint, "every_s", 0.0)
    original, calls = EagleFitter.losses, [0]

    def losses(self: EagleFitter, *given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 7:
            raise KeyboardInterrupt
        return original(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(EagleFitter, "losses", losses)
        with pytest.raises(KeyboardInterrupt):
            fit_draft(str(target), options("parts"))
    assert (tmp_path / "parts" / "fitting" / "training.pt").is_file()
    result = invoke("fit-draft", target, "--kind", "eagle3", "--texts", texts, "-o",
                    tmp_path / "parts", *SIZES)  # fmt: skip
    assert_refused(result, "exists", "--resume")
    result = invoke("fit-draft", target, "--kind", "eagle3", "--texts", texts, "-o",
                    tmp_path / "parts", *SIZES, "--resume")  # fmt: skip
    assert_refused(result, "--num-speculative-tokens 3, and 2")
    again = fit_draft(str(target), options("parts", resume=True))
    assert again.result.steps == whole.result.steps == 12
    first, second = (load_file(tmp_path / x / "model.safetensors") for x in ("whole", "parts"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    assert first["d2t"].shape == (50,)
    assert first["t2d"].sum() == 50


def test_texts_that_take_all_minutes_are_kept_for_a_longer_run(
    target: Path, texts: Path, tmp_path: Path
) -> None:
    command = ("fit-draft", target, "--kind", "eagle3", "--texts", texts, "-o", tmp_path / "draft")
    result = invoke(*command, *SIZES, "--minutes", "0.001", "--generate", "200")
    assert_refused(result, "--minutes 0.001", "--resume --minutes 2")
    written = tmp_path / "draft" / "fitting" / "complete"
    before = written.stat().st_mtime_ns
    result = invoke(*command, *SIZES, "--resume", "--steps", "2")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "draft" / "model.safetensors").is_file()
    assert not written.exists()
    assert before


def test_chats_prompts_and_a_file_of_prompts(target: Path, texts: Path, tmp_path: Path) -> None:
    """Prompts alone are continued; of a document that holds a prompt of the file, nothing is."""
    known = (texts / "3.txt").read_text(encoding="utf-8")[40:90]
    (tmp_path / "known.jsonl").write_text(json.dumps({"prompt": known}) + "\n", encoding="utf-8")
    lines = [json.dumps({"prompt": f"abc {number} fed"}) for number in range(40)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = FitOptions(
        "eagle3", tmp_path / "head", (tmp_path / "x.jsonl", texts / "3.txt"), steps=2,
        generate=160, length=64, prompts=tmp_path / "known.jsonl",
    )  # fmt: skip
    fit = fit_draft(str(target), options)
    # nothing but what the target has written
    assert fit.tokens.keys() == {"greedy", "sampled"}
    assert fit.followed["prompts"].num_texts == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kind", "eagle9"), ("--kind eagle9", "eagle3 or block or dflash")),
        (("--kind", "hydra"), ("a draft that is not fitted here",)),
        (("--kind", "eagle3", "--taps", "0,7"), ("--taps 0,7", "layers 0 … 1")),
        (("--kind", "eagle3", "--taps", "1,2"), ("the first of which is not 1",)),
        (("--kind", "eagle3", "--device", "cuda:7"), ("--device cuda:7", "finds a GPU")),
        (("--kind", "eagle3", "--resume"), ("no run that was ended there",)),
        (("--kind", "block", "--width", "32"), ("--width 32 of --kind block",)),
        (("--kind", "eagle3", "--minutes", "0"), ("--minutes 0", "above 0")),
        (("--kind", "eagle3", "--prompts", "nowhere.jsonl"), ("nowhere.jsonl",)),
    ],
)
def test_what_does_not_go_is_refused(
    target: Path, texts: Path, tmp_path: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    if "cuda:7" in options and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    base = ("--texts", texts, "-o", tmp_path / "head", "--generate", 100, "--steps", 1)
    assert_refused(invoke("fit-draft", target, *base, "--length", 64, *options), *words)


def test_a_head_of_a_target_that_scales_its_embedding(texts: Path, tmp_path: Path) -> None:
    """Its files hold the rows that it was trained with, since the target's would be scaled."""
    scaled = models.save_tiny("gemma3", tmp_path / "gemma3")
    # Gemma's own class wants words that these letters lack
    (scaled / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
    )
    found = fitted(scaled, texts, tmp_path / "head", "--steps", 2, "--generate", 200)
    rows = load_file(tmp_path / "head" / "model.safetensors")["embed_tokens.weight"]
    theirs = load_file(scaled / "model.safetensors")["model.embed_tokens.weight"]
    assert rows.equal(theirs.bfloat16())
    reported = found["greedy_chains"]["held out"]["acceptance_length"]
    assert accepted(scaled, tmp_path / "head", tmp_path / "engine") == pytest.approx(
        reported, abs=1e-3
    )


def test_other_targets_and_outputs_are_refused(texts: Path, tmp_path: Path) -> None:
    scaled = models.save_tiny("gemma3", tmp_path / "gemma3")
    words = ("--kind", "block", "--texts", texts, "-o", tmp_path / "x", "--steps", 1)
    assert_refused(invoke("fit-draft", scaled, *words), "multiplies its embeddings", "eagle3")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    words = ("--kind", "eagle3", "--texts", texts, "-o", tmp_path / "full")
    assert_refused(invoke("fit-draft", scaled, *words), "exists", "choose another --output")
    (scaled / "tokenizer.json").unlink()
    words = ("--kind", "eagle3", "--texts", texts, "-o", tmp_path / "y", "--steps", 1)
    assert_refused(invoke("fit-draft", scaled, *words), "no tokenizer")
    assert not (tmp_path / "y").exists()
    assert_refused(invoke("fit-draft", tmp_path / "none", *words[:4], "-o", tmp_path / "z"), "none")
