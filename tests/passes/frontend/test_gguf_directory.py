"""GGUF files alone: the configuration and the tokenizer that their own fields say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from specc.errors import SpeccError, VocabMismatchError
from specc.passes.frontend import hf_model
from specc.passes.frontend.gguf_tokenizer import tokenizer_of
from tests import gguf_files
from tests.models import ROTARY_VARIANTS, build_model, save_tiny, tiny_config

TEXTS = (
    "", "a", "Hello, world!", " leading and trailing ", "two  spaces,\ttabs\n\nand lines\r\n",
    "Grüße, 世界, дом, 🙂", "it's 12345 o'clock <s> and<|end|>more", "def f(x): return x[1234]",
)  # fmt: skip
CORPUS = [*TEXTS, "the quick brown fox jumps over the lazy dog", "hello hello world 2024"] * 3


def plain_file(root: Path, name: str = "llama", **fields: Any) -> Path:
    """A model in floats, with its own fields; None leaves a field out."""
    target = save_tiny(name, root / "target")
    config = tiny_config(name)
    written = gguf_files.write_model(target, root, name, lambda key: "F32", config)
    from safetensors.torch import load_file

    tensors = {}
    for key, value in load_file(target / "model.safetensors").items():
        tensors[gguf_files.llama_name(key)] = ("F32", tuple(value.shape), value.numpy().tobytes())
    every = gguf_files.model_fields(name, config) | gguf_files.byte_fields() | fields
    for key in [key for key, value in every.items() if value is None]:
        del every[key]
    file = written.quantized / gguf_files.FILE
    gguf_files.write_file(file, every, tensors)
    for beside in ("config.json", "tokenizer.json"):
        (written.quantized / beside).unlink()
    return file


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_configuration_makes_the_same_model(tmp_path, name) -> None:
    file = plain_file(tmp_path, name)
    directory = hf_model.resolve_directory(file)
    assert (directory / "model.gguf").resolve() == file.resolve()
    # the file alone in its directory is the same
    assert hf_model.resolve_directory(file.parent) == directory
    config = hf_model.load_config(directory)
    found, want = hf_model.build_on_meta(config, torch.float32), build_model(name)
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (found, want)]
    assert shapes[0] == shapes[1]
    for field in ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(config, field) == pytest.approx(getattr(want.config, field), rel=1e-6)
    assert config.rope_parameters["rope_theta"] == want.config.rope_parameters["rope_theta"]
    # another file at the same place is another model
    file.touch()
    assert hf_model.resolve_directory(file) != directory


def test_rotary_scalings() -> None:
    """Of Llama 3.1 a tensor of factors says what its configuration says in four numbers."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from specc.passes.frontend.gguf_config import _llama3_factors

    assert "llama-llama3" in ROTARY_VARIANTS
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = tiny_config("llama", head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    torch.testing.assert_close(_llama3_factors(500000.0, 64, 32.0), plain / scaled)


def factors(values: torch.Tensor) -> dict[str, Any]:
    return {"rope_freqs.weight": ("F32", tuple(values.shape), values.numpy().tobytes())}


@pytest.mark.parametrize("is_known", [True, False])
def test_factors_of_frequencies(tmp_path, is_known) -> None:
    from specc.artifact.decoders.gguf import model_name
    from specc.artifact.decoders.gguf_file import GGUFReader
    from specc.errors import WeightError
    from specc.passes.frontend.gguf_config import _llama3_factors, config_of

    values = _llama3_factors(500000.0, 64, 8.0)
    values = values if is_known else values * 1.01
    config = tiny_config("llama", head_dim=64)
    fields = gguf_files.model_fields("llama", config) | {"llama.rope.freq_base": 500000.0}
    tensors = {"token_embd.weight": ("F32", (3, 2), bytes(24))} | factors(values)
    gguf_files.write_file(tmp_path / "a.gguf", fields, tensors)
    reader = GGUFReader(tmp_path / "a.gguf", model_name, reads_lists=True)
    if not is_known:
        with pytest.raises(WeightError, match=r"not those of Llama 3\.1"):
            config_of(reader)
        return
    rope = config_of(reader)["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("llama3", 8.0)


def trained(split: pre_tokenizers.PreTokenizer, special: list[str]) -> Tokenizer:
    """Byte-level pairs of a small text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def fields_of(tokenizer: Tokenizer, special: list[str], **more: Any) -> dict[str, Any]:
    data = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(data["vocab"], key=data["vocab"].get)
    merges = [item if isinstance(item, str) else " ".join(item) for item in data["merges"]]
    types = [3 if token in special else 1 for token in tokens]
    own = {"model": "gpt2", "tokens": tokens, "token_type": types, "merges": merges} | more
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


# as the models' own tokenizer.json have them
SPLITS = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-2": None,
}


@pytest.mark.parametrize("name", SPLITS)
def test_byte_level_tokenizers(name) -> None:
    """Ids are those of the tokenizer that the fields were made of, special tokens whole."""
    from tokenizers import Regex

    split, special = SPLITS[name], ["<s>", "<|end|>"]
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        words = pre_tokenizers.Split(Regex(split), behavior="isolated")
        own = pre_tokenizers.Sequence([words, own])
    reference = trained(own, special)
    fields = fields_of(reference, special, pre=name, bos_token_id=0, add_bos_token=True)
    found = Tokenizer.from_buffer(tokenizer_of(fields, "a file"))
    for text in TEXTS:
        ids = found.encode(text).ids
        assert ids == [0, *reference.encode(text).ids], text
        assert found.decode(ids) == text.replace("<s>", "").replace("<|end|>", "")
    assert found.token_to_id("<|end|>") == 1
    # without a word in the file, llama.cpp begins texts of Llama 3 alone
    del fields["tokenizer.ggml.add_bos_token"]
    plain = Tokenizer.from_buffer(tokenizer_of(fields, "a file")).encode("a").ids
    assert (plain[0] == 0) == (name == "llama-bpe")


def by_score(text: str, tokens: list[str], scores: list[float]) -> list[int]:
    """SentencePiece, word by word: the best pair of neighbors is merged, the leftmost of equals."""
    numbers = {token: number for number, token in enumerate(tokens)}
    parts = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        known = [
            (-scores[numbers[a + b]], place)
            for place, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in numbers
        ]
        if not known:
            break
        _, place = min(known)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    ids = []
    for part in parts:
        if part in numbers:
            ids.append(numbers[part])
        else:
            ids += [numbers[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


def test_tokenizers_by_score() -> None:
    reference = Tokenizer(models.BPE())
    reference.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    ascii_only = ["the quick brown fox", "hello world hello there", "it's a dog, it is"] * 4
    reference.train_from_iterator(ascii_only, trainer)
    vocabulary = reference.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.get)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces)]
    scores = [0.0] * 259 + [-float(place) for place in range(len(pieces))]
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    found = Tokenizer.from_buffer(tokenizer_of(fields, "a file"))
    for text in (*TEXTS[:6], "the quick brown fox is there", "hello  world"):
        ids = found.encode(text).ids
        assert ids == [1, *by_score(text, tokens, scores)], text
        assert found.decode(ids) == text
    ends = fields | {"tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.add_bos_token": False}
    ids = Tokenizer.from_buffer(tokenizer_of(ends, "a file")).encode("hello").ids
    assert ids == [*by_score("hello", tokens, scores), 2]
    plain = fields | {"tokenizer.ggml.add_space_prefix": False}
    words = Tokenizer.from_buffer(tokenizer_of(plain, "a file")).encode("hello").tokens
    assert words[1][0] == "h"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"general.architecture": "gemma2"}, "of the architecture gemma2"),
        ({"llama.expert_count": 8}, "the field llama.expert_count"),
        ({"llama.attention.sliding_window": 4096}, "the field llama.attention.sliding_window"),
        ({"llama.context_length": None}, "no llama.context_length"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8, and heads of 16"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type yarn"),
        ({"tokenizer.ggml.model": "t5"}, "of the kind t5"),
        ({"tokenizer.ggml.pre": "tekken"}, "in the way tekken"),
        ({"tokenizer.ggml.merges": None}, "no list tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "types of 2"),
        ({"tokenizer.ggml.add_bos_token": True}, "a token bos around texts, which is number None"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1] * 3}, "twice"),
    ],
)
def test_what_is_refused(tmp_path, changes, found) -> None:
    file = plain_file(tmp_path, **changes)
    with pytest.raises(SpeccError) as caught:
        hf_model.resolve_directory(file)
    assert found in caught.value.found
    assert caught.value.needed
    assert caught.value.do


def test_scores_are_needed() -> None:
    with pytest.raises(VocabMismatchError, match=r"no list tokenizer.ggml.scores"):
        tokenizer_of({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a"]}, "a file")
