"""GGUF files alone: the configuration and the tokenizer that their own fields say."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from specc.artifact.decoders.gguf_file import GGUFReader
from specc.errors import SpeccError, VocabMismatchError, WeightError
from specc.passes.frontend import hf_model
from specc.passes.frontend.checkpoint import CheckpointMap
from specc.passes.frontend.gguf_config import config_of
from specc.passes.frontend.gguf_directory import directory_of
from specc.passes.frontend.gguf_tokenizer import tokenizer_of
from specc.passes.frontend.model_source import ModelSource
from specc.sampling.generation_config import read_defaults
from tests import gguf_files
from tests.models import build_model, save_tiny, tiny_config

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


def factors_of(config: Any) -> torch.Tensor:
    """What a converter writes of Llama 3.1's scaling, from transformers' own frequencies."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    base = config.rope_parameters["rope_theta"]
    plain = 1.0 / base ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    return plain / scaled


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip


def tensor(values: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return "F32", tuple(values.shape), values.numpy().tobytes()


@pytest.mark.parametrize("is_known", [True, False])
def test_factors_of_frequencies(tmp_path, is_known) -> None:
    """Of Llama 3.1 a tensor of factors says what its configuration says in four numbers."""
    config = tiny_config("llama", head_dim=64, rope_parameters=LLAMA3)
    values = factors_of(config) * (1.0 if is_known else 1.01)
    fields = gguf_files.model_fields("llama", config) | {"llama.rope.freq_base": 500000.0}
    tensors = {"token_embd.weight": ("F32", (3, 2), bytes(24))}
    tensors["rope_freqs.weight"] = tensor(values)
    gguf_files.write_file(tmp_path / "a.gguf", fields, tensors)
    reader = GGUFReader(tmp_path / "a.gguf", reads_lists=True)
    if not is_known:
        with pytest.raises(WeightError, match=r"not those of Llama 3\.1"):
            config_of(reader)
        return
    assert config_of(reader)["rope_parameters"] == LLAMA3


def test_parts_are_one_model(tmp_path) -> None:
    """Any of them, the directory, and links of a cache of downloads: the same, with its head."""
    whole = plain_file(tmp_path, "llama")
    fields, tensors = gguf_files.read_file(whole)
    stem = tmp_path / "parts" / "m"
    stem.parent.mkdir()
    files = gguf_files.write_parts(stem, fields, tensors, [1, len(tensors) - 2, 1])
    directory = hf_model.resolve_directory(files[0])
    for given in (files[1], files[2], stem.parent):
        assert hf_model.resolve_directory(given) == directory
    names = [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    assert [(directory / name).resolve() for name in names] == files
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"] is False
    source = ModelSource.load("target", files[1], torch.float32)
    alone = ModelSource.load("target", whole, torch.float32)
    for key in alone.reader.keys():  # noqa: SIM118 - a reader is no mapping
        chunks = [b"".join(map(bytes, s.reader.read_chunks(key))) for s in (source, alone)]
        assert chunks[0] == chunks[1], key
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, file in enumerate(files):
        blob = file.rename(tmp_path / f"blob-{number}")
        (snapshot / file.name).symlink_to(blob)
    linked = hf_model.resolve_directory(snapshot / files[2].name)
    assert [(linked / name).resolve().name for name in names] == ["blob-0", "blob-1", "blob-2"]
    (snapshot / files[2].name).unlink()
    with pytest.raises(WeightError, match=r"m-00003-of-00003\.gguf is not beside it"):
        hf_model.resolve_directory(snapshot / files[0].name)


@pytest.mark.parametrize(
    ("name", "more", "found"),
    [
        ("llama", {"blk.0.attn_output.bias": (64,)}, "blk.0.attn_output.bias"),
        ("llama", {"blk.1.ffn_down.bias": (64,)}, "blk.1.ffn_down.bias"),
        ("qwen2", {"output.bias": (128,)}, "output.bias"),
        ("qwen3", {"blk.0.attn_q.bias": (64,)}, "blk.0.attn_q.bias"),
        ("llama", {"blk.9.attn_norm.weight": (64,)}, "blk.9.attn_norm.weight"),
        ("llama", {"blk.0.attn_rot_embd.weight": (8,)}, "blk.0.attn_rot_embd.weight"),
        ("llama", {"output_norm.bias": (64,)}, "output_norm.bias"),
    ],
)
def test_tensors_that_no_model_reads(tmp_path, name, more, found) -> None:
    fields, tensors = gguf_files.read_file(plain_file(tmp_path, name))
    tensors |= {key: tensor(torch.ones(shape)) for key, shape in more.items()}
    gguf_files.write_file(tmp_path / "more.gguf", fields, tensors)
    with pytest.raises(WeightError) as caught:
        ModelSource.load("target", tmp_path / "more.gguf", torch.float32)
    assert f"more.gguf holds {found}, which is no part of" in caught.value.found


@pytest.mark.parametrize(
    ("name", "lost", "own"),
    [
        ("llama", "blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("llama", "output_norm.weight", "model.norm.weight"),
        ("qwen2", "blk.1.attn_k.bias", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "blk.1.attn_q_norm.weight", "model.layers.1.self_attn.q_norm.weight"),
    ],
)
def test_tensors_that_a_model_lacks(tmp_path, name, lost, own) -> None:
    """What llama.cpp calls optional, too: a bias that is not there is no bias of zeros."""
    fields, tensors = gguf_files.read_file(plain_file(tmp_path, name))
    del tensors[lost]
    gguf_files.write_file(tmp_path / "fewer.gguf", fields, tensors)
    source = ModelSource.load("target", tmp_path / "fewer.gguf", torch.float32)
    checkpoint = CheckpointMap(source.module, source.reader)
    with pytest.raises(WeightError, match=f"holds no tensor {re.escape(own)}"):
        checkpoint.sources(own)


@pytest.mark.parametrize("is_said", [True, False])
def test_frequencies_of_a_configuration_beside(tmp_path, is_said) -> None:
    """A scaling that config.json leaves out would be passed over."""
    rope = LLAMA3 if is_said else {"rope_type": "default", "rope_theta": 500000.0}
    config = tiny_config("llama", head_dim=16, rope_parameters=LLAMA3)
    fields, tensors = gguf_files.read_file(plain_file(tmp_path, "llama"))
    tensors["rope_freqs.weight"] = tensor(factors_of(config))
    directory = tmp_path / "beside"
    tiny_config("llama", rope_parameters=rope).save_pretrained(directory)
    fields["llama.rope.freq_base"] = 500000.0
    gguf_files.write_file(directory / "model.gguf", fields, tensors)
    if is_said:
        ModelSource.load("target", directory, torch.float32)
        return
    with pytest.raises(WeightError, match=r"that config\.json does not say"):
        ModelSource.load("target", directory, torch.float32)


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
        ({"general.architecture": "rwkv7"}, "of the architecture rwkv7"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale 0.5"),
        ({"llama.context_length": None}, "no llama.context_length"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count 8"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type dynamic"),
        ({"llama.rope.scaling.type": "yarn"}, "no llama.rope.scaling.factor"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type longrope"),
        ({"tokenizer.ggml.model": "rwkv"}, "of the kind rwkv"),
        ({"tokenizer.ggml.pre": "my-own"}, "in the way my-own"),
        ({"tokenizer.ggml.merges": None}, "no list tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "types of 2"),
        ({"tokenizer.ggml.add_bos_token": True}, "a token bos around texts, which is number None"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1] * 3}, "twice"),
        ({"tokenizer.ggml.tokens": None}, "no list tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": 7}, "no list tokenizer.ggml.tokens"),
        ({"general.type": "adapter"}, "of the type adapter"),
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


def test_advised_sampling_becomes_that_of_a_checkpoint(tmp_path) -> None:
    """As converters keep it; what a file does not say stays as it is."""
    advised = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "penalty_repeat": 1.05, "mirostat": 0}
    fields = {f"general.sampling.{name}": value for name, value in advised.items()}
    defaults = read_defaults(directory_of(plain_file(tmp_path, **fields)))
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert defaults.values == wanted
    (tmp_path / "silent").mkdir()
    assert read_defaults(directory_of(plain_file(tmp_path / "silent"))).values == {}


CHAT = "tokenizer.chat_template"


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({CHAT: "D"}, "D"),
        (
            {"tokenizer.chat_templates": ["tool_use"], CHAT: "D", f"{CHAT}.tool_use": "T"},
            [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}],
        ),
        # without a default one, and without the list of names
        ({f"{CHAT}.rag": "R"}, [{"name": "rag", "template": "R"}]),
        ({}, None),
    ],
)
def test_chat_templates_by_name(tmp_path, fields, want) -> None:
    directory = hf_model.resolve_directory(plain_file(tmp_path, **fields))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert config.get("chat_template") == want


def test_special_tokens_by_name(tmp_path) -> None:
    """A word of the language, with which batches are filled up, is none."""
    own = "tokenizer.ggml."
    types = [1] * 128
    types[3] = types[4] = 3
    numbers = {
        "bos": 3,
        "eos": 4,
        "unknown": 3,
        "seperator": 4,
        "mask": 4,
        "padding": 5,
        "cls": 999,
    }
    fields = {f"{own}{name}_token_id": number for name, number in numbers.items()}
    file = plain_file(tmp_path, **fields, **{f"{own}token_type": types})
    config = json.loads((hf_model.resolve_directory(file) / "tokenizer_config.json").read_text())
    tokens = gguf_files.byte_fields()[f"{own}tokens"]
    found = {name: text for name, text in config.items() if name.endswith("_token")}
    assert found == {
        "bos_token": tokens[3], "eos_token": tokens[4], "unk_token": tokens[3],
        "sep_token": tokens[4], "mask_token": tokens[4],
    }  # fmt: skip
