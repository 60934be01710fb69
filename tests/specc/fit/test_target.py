"""The target of a fit: weights of every checkpoint that is compiled, and layers counted alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specc.errors import ConfigError, NotCausalLMError, UnsupportedGraphError
from specc.fit import target as module
from specc.fit.target import TOP, Target
from specc.progress import ignore
from tests import models
from tests.gguf_files import write_model
from tests.passes.rewrite.test_tap_features import hidden_states
from tests.tiers import only

TOKENS = torch.randint(0, models.VOCAB, (2, 11), generator=torch.Generator().manual_seed(3))
NAMES = ("llama", "gemma3", "opt", "qwen3_5", "lfm2", "granite4_hybrid", "falcon_h1")


def read(target: Target, boundaries: tuple[int, ...]) -> Any:
    begins, ends = torch.ones(2, dtype=torch.int64), torch.full((2,), 11)
    return target.read(TOKENS, boundaries, begins, ends, False, is_exact=True)


@pytest.mark.parametrize("name", only(("gemma3", "qwen3_5"), NAMES))
def test_a_checkpoint_computes_what_its_model_does(name: str, tmp_path: Path) -> None:
    """Weights, buffers, tied ones; hidden states by the numbers that an engine has for them."""
    directory = models.save_tiny(name, tmp_path / "model")
    original, target = models.build_model(name), Target.load(str(directory), "cpu", ignore)
    boundaries = tuple(range(target.sizes.num_layers))
    texts = read(target, boundaries)
    with torch.no_grad():
        for row, tokens in enumerate(TOKENS):
            states = hidden_states(original, tokens)
            wanted = torch.cat([states[b] for b in boundaries], -1)
            torch.testing.assert_close(texts.taps[row], wanted, rtol=1e-4, atol=1e-4)
            logits = original(input_ids=tokens[None], use_cache=False).logits[0]
            best = logits.softmax(-1).topk(TOP)
            assert texts.ids[row, :, 0].equal(best.indices[:, 0].int())
            torch.testing.assert_close(texts.odds[row].float(), best.values, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("vocab_size", [70, 512 * 300, 131 * 512 + 64, 40_001])
def test_likeliest_tokens_of_any_vocabulary(vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 4 * torch.randn(1, 70, vocab_size, generator=generator)
    ids, odds = module.likeliest(logits)
    best = logits.softmax(-1).topk(min(TOP, vocab_size))
    assert ids.equal(best.indices.int())
    torch.testing.assert_close(odds.float(), best.values, rtol=1e-2, atol=0.0)


def test_greedy_text_is_that_of_the_model_whatever_is_beside_it(tmp_path: Path) -> None:
    """Prompts are filled up on the left: rows do not see what fills them up."""
    target = Target.load(str(models.save_tiny("qwen3_5", tmp_path)), "cpu", ignore)
    original = models.build_model("qwen3_5")
    prompts = [[5, 9, 3, 7, 40, 2, 8], [17], [22, 6, 60]]
    found = target.write(prompts, 12, 0.0, is_exact=True)
    for prompt, tokens in zip(prompts, found, strict=True):
        wanted = list(prompt)
        for _ in range(12):
            with torch.no_grad():
                logits = original(input_ids=torch.tensor([wanted]), use_cache=False).logits
            wanted.append(int(logits[0, -1].argmax()))
        assert tokens == wanted


def test_texts_end_where_the_target_ends_them(tmp_path: Path) -> None:
    target = Target.load(str(models.save_tiny("llama", tmp_path)), "cpu", ignore)
    prompts = [[5, 9, 3], [7]]
    whole = target.write(prompts, 12, 0.0, is_exact=True)
    end = whole[0][6]
    ending = Target(target.module, "tiny", None, (end,))
    cut = ending.write(prompts, 12, 0.0, is_exact=True)
    assert cut[0] == whole[0][: whole[0].index(end, 3) + 1]
    assert len(cut[1]) <= len(whole[1])


def test_a_gguf_file_is_read_as_what_its_integers_stand_for(tmp_path: Path) -> None:
    source = models.save_tiny("llama", tmp_path / "source", hidden_size=64)
    config = models.tiny_config("llama", hidden_size=64)
    made = write_model(source, tmp_path, "llama", lambda name: "Q8_0", config)
    target = Target.load(str(made.quantized), "cpu", ignore)
    exact = Target.load(str(made.exact), "cpu", ignore)
    found, wanted = read(target, (0, 1)), read(exact, (0, 1))
    torch.testing.assert_close(found.taps, wanted.taps, rtol=1e-4, atol=1e-4)
    assert found.ids[..., 0].equal(wanted.ids[..., 0])


def test_models_that_keep_no_hidden_states_are_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_materialize", lambda *_: pytest.fail("weights were read"))
    directory = models.save_tiny("gemma3n", tmp_path)
    with pytest.raises((UnsupportedGraphError, NotCausalLMError)) as caught:
        Target.load(str(directory), "cpu", ignore)
    assert "smaller model" in caught.value.do


def test_large_targets_are_for_other_trainers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_PARAMETERS", {"cpu": 1000, "cuda": 1000})
    with pytest.raises(ConfigError, match="billion parameters") as caught:
        Target.load(str(models.save_tiny("llama", tmp_path)), "cpu", ignore)
    assert "SpecForge" in caught.value.do
    assert "speculators" in caught.value.do


def test_a_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    directory = models.save_tiny("llama", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"model\.norm\.weight"):
        Target.load(str(directory), "cpu", ignore)


def test_scaled_embeddings_are_noticed(tmp_path: Path) -> None:
    found = {
        name: Target.load(str(models.save_tiny(name, tmp_path / name)), "cpu", ignore).sizes
        for name in ("gemma3", "llama")
    }
    assert found["gemma3"].is_scaled
    assert not found["llama"].is_scaled


@pytest.mark.parametrize(
    ("num_layers", "taps"),
    [(1, (0,)), (2, (0, 1)), (4, (0, 2, 3)), (18, (2, 9, 15)), (32, (2, 16, 29))],
)
def test_default_taps_are_those_of_readers(num_layers: int, taps: tuple[int, ...]) -> None:
    one = torch.zeros(1, 1)
    sizes = module.Sizes(1, num_layers, 1, 1e-6, None, None, one, one)
    assert sizes.default_taps() == taps
