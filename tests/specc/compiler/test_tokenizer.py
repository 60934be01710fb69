"""The ids of an engine's tokenizer are those of transformers, and differences are said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import ClassVar

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from specc import LLM
from specc.compiler.build import build
from specc.compiler.candidate import Candidate
from specc.compiler.tokenizer import _TEXTS, check_tokenizers, follow_transformers
from specc.errors import VocabMismatchError
from specc.sampling.params import SamplingParams
from tests.specc.compiler.builds import options

BOS, EOS = 256, 257
TEXTS = [*_TEXTS, "<s>", "<s> and <s>", "</s>a"]


def make(path: Path, kind: str = "llama", template: str | None = None, **settings: object) -> Path:
    """A checkpoint's configuration and a byte-level tokenizer with BOS and EOS."""
    path.mkdir()
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>")])
    if template is not None:
        ids = [("<s>", BOS), ("</s>", EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=ids)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"model_type": kind}))
    if settings:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


class Config:
    bos_token_id = BOS
    eos_token_id = EOS


def check(path: Path, bos: int = BOS):
    config = Config()
    config.bos_token_id = bos
    return check_tokenizers([Candidate("target", path, path, config, "float32")], None)


def engine_ids(tokenizer, text: str) -> list[int]:
    """As the runtime does it: see `RequestMaker.tokenize`."""
    reader = Tokenizer.from_buffer(tokenizer.data)
    reader.no_truncation()
    reader.no_padding()
    ids = reader.encode(text).ids
    bos = tokenizer.entry.bos_token_id
    return [bos, *ids] if tokenizer.entry.add_bos and ids[:1] != [bos] else ids


def transformers_ids(path: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)(text)["input_ids"]


@pytest.mark.parametrize(
    ("kind", "template", "add_bos"),
    [
        pytest.param("llama", "<s> $A", True, id="llama"),
        pytest.param("gpt2", None, False, id="gpt2"),
        pytest.param("qwen3", None, False, id="qwen"),
        pytest.param("llama", "<s> $A </s>", True, id="bos-and-eos"),
        pytest.param("llama", "$A </s>", False, id="eos"),
    ],
)
def test_ids_are_those_of_transformers(tmp_path, kind, template, add_bos):
    path = make(tmp_path / "model", kind, template)
    found = check(path)
    assert found.warnings == []
    assert found.data == (path / "tokenizer.json").read_bytes()
    assert found.entry.add_bos == add_bos
    for text in TEXTS:
        assert engine_ids(found, text) == transformers_ids(path, text), text


def test_a_letter_that_is_the_bos_id(tmp_path):
    """Nothing adds it: it is just what the text "a" begins with."""
    path = make(tmp_path / "model")
    letter = Tokenizer.from_file(str(path / "tokenizer.json")).encode("a").ids[0]
    found = check(path, bos=letter)
    assert not found.entry.add_bos
    for text in TEXTS:
        assert engine_ids(found, text) == transformers_ids(path, text), text


def test_truncation_and_padding_of_the_file_are_no_difference(tmp_path):
    path = make(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_id=EOS)
    tokenizer.save(str(path / "tokenizer.json"))
    found = check(path)
    assert found.warnings == []
    assert engine_ids(found, TEXTS[2]) == transformers_ids(path, TEXTS[2])


def adding_bos(path: Path, monkeypatch) -> None:
    """Stand in for a tokenizer class of transformers that adds BOS whatever the file says."""
    from specc.passes.frontend import hf_tokenizer

    template = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])

    def load(directory: Path):
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.post_processor = template
        loaded = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        return hf_tokenizer.HfTokenizer(loaded)

    monkeypatch.setattr(hf_tokenizer.HfTokenizer, "load", load)


def test_special_tokens_of_transformers_win(tmp_path, monkeypatch):
    path = make(tmp_path / "model")
    adding_bos(path, monkeypatch)
    found = check(path)
    (warning,) = found.warnings
    assert f"around '' ([{BOS}], not [])" in warning
    assert found.entry.add_bos
    plain = Tokenizer.from_file(str(path / "tokenizer.json"))
    for text in TEXTS:
        # exactly one, also before a text that begins with one
        assert engine_ids(found, text) == [BOS, *plain.encode(text).ids], text


def test_another_splitting_is_said(tmp_path, monkeypatch):
    from specc.passes.frontend import hf_tokenizer

    class Other:
        special_tokens: ClassVar[dict[str, str]] = {}

        def encode(self, text, add_special_tokens=True):
            return [1] * len(text)

    monkeypatch.setattr(hf_tokenizer.HfTokenizer, "load", lambda directory: Other())
    path = make(tmp_path / "model")
    data, (warning,), _ = follow_transformers(path / "tokenizer.json")
    assert data == (path / "tokenizer.json").read_bytes()
    assert "transformers splits 'a' ([1], not [64])" in warning
    assert "save_pretrained" in warning


def test_what_transformers_cannot_load_is_said(tmp_path):
    path = make(
        tmp_path / "model", tokenizer_class="Mine", auto_map={"AutoTokenizer": ["a.b", "c.d"]}
    )
    found = check(path)
    assert len(found.warnings) == 1
    assert "compared with nothing" in found.warnings[0]


def test_a_class_that_does_not_fit_the_vocabulary_is_said(tmp_path):
    """Gemma's class wants an unknown token, and fails only when it encodes."""
    found = check(make(tmp_path / "model", "gemma2"))
    assert ["compared with nothing" in warning for warning in found.warnings] == [True]
    assert engine_ids(found, "a") == [64]


def test_without_tokenizer_json(tmp_path):
    path = make(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    with pytest.raises(VocabMismatchError, match="save_pretrained"):
        check(path)


def test_a_file_alone_is_taken_as_it_is(tmp_path):
    path = make(tmp_path / "model", template="<s> $A")
    (path / "config.json").unlink()
    model = Candidate("target", None, None, Config(), "float32")
    found = check_tokenizers([model], path / "tokenizer.json")
    assert found.warnings == []
    assert found.entry.add_bos


def ends(path: Path, eos: object = None, generation: object = None) -> tuple[list[int], list[str]]:
    """Tokens that end an output of a checkpoint, and what is said of them."""
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    config = Config()
    config.eos_token_id = eos
    found = check_tokenizers([Candidate("target", path, path, config, "float32")], None)
    entry = found.entry
    assert set(entry.tokenizer_eos) <= set(entry.eos_token_ids)
    return list(entry.eos_token_ids), [text for text in found.warnings if " ends " in text]


@pytest.mark.parametrize("stated", ["tokenizer_config", "map", "object", "no-class"])
def test_an_end_that_the_tokenizer_alone_knows(tmp_path, stated):
    """Outputs end there as in vLLM, and the user is told."""
    kind = "gpt2"
    if stated == "tokenizer_config":
        path = make(tmp_path / "model", kind, eos_token="</s>")
    elif stated == "object":
        path = make(tmp_path / "model", kind, eos_token={"content": "</s>"})
    else:
        path = make(tmp_path / "model", kind)
        content = {"eos_token": {"content": "</s>", "lstrip": False}}
        (path / "special_tokens_map.json").write_text(json.dumps(content))
    if stated == "no-class":
        (path / "config.json").unlink()
    found, (warning,) = ends(path, eos=7)
    assert found == [7, EOS]
    assert f"ends texts with token {EOS} ('</s>')" in warning
    assert "as in vLLM" in warning
    # one of several that the configurations name, or the only one, is no news
    assert ends(path, eos=EOS) == ([EOS], [])
    assert ends(path, generation={"eos_token_id": [3, EOS]}) == ([3, EOS], [])
    found, (warning,) = ends(path, eos=EOS, generation={"eos_token_id": 3})
    assert found == [3, EOS]
    assert "(they name 3 (" in warning
    found, (warning,) = ends(path, eos=EOS, generation={"eos_token_id": None})
    assert found == [EOS]
    assert "(they name none)" in warning


def test_ends_that_are_no_tokens(tmp_path):
    """Of a class or a file that names what the vocabulary lacks."""
    assert ends(make(tmp_path / "model", "gpt2")) == ([], [])
    assert ends(make(tmp_path / "other", "gpt2", eos_token="<|nowhere|>")) == ([], [])


# what a checkpoint says of special tokens, in its three files and its two spellings of extra ones
SPECIAL_TOKENS = {
    "configuration": {"tokenizer_config.json": {"bos_token": "<s>", "mask_token": "</s>"}},
    "map alone": {"special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>"}},
    "map of tokens": {
        "tokenizer_config.json": {"eos_token": "</s>"},
        "special_tokens_map.json": {"bos_token": {"content": "<s>", "lstrip": False}},
    },
    "map beside a decoder": {
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "added_tokens_decoder": {str(BOS): {"content": "<s>", "special": True}},
        },
        "special_tokens_map.json": {"bos_token": "<s>"},
    },
    "extra by name": {
        "tokenizer_config.json": {"extra_special_tokens": {"image_token": "<s>", "start": "</s>"}}
    },
    "extra": {"tokenizer_config.json": {"extra_special_tokens": ["<s>"], "bos_token": "<s>"}},
    "additional": {
        "tokenizer_config.json": {"additional_special_tokens": ["<s>"], "eos_token": "</s>"}
    },
    "of the model": {"tokenizer_config.json": {"image_token": "<s>", "boi_token": "</s>"}},
    "objects": {
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
            "unk_token": None,
        }
    },
    "added": {
        "tokenizer_config.json": {"eos_token": "</s>"},
        "added_tokens.json": {"<s>": BOS, "</s>": EOS},
    },
    "none": {"tokenizer_config.json": {}},
}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_special_tokens_are_those_of_transformers(tmp_path, kind, name):
    from transformers import AutoTokenizer

    path = make(tmp_path / "model", kind)
    for file, content in SPECIAL_TOKENS[name].items():
        own = content
        if file == "tokenizer_config.json":
            own = {"tokenizer_class": "PreTrainedTokenizerFast"} if kind == "gpt2" else {}
            own |= content
        (path / file).write_text(json.dumps(own))
    want = AutoTokenizer.from_pretrained(path).special_tokens_map
    assert check(path).special_tokens == want
    shown = SPECIAL_TOKENS[name].get("tokenizer_config.json", {})
    assert set(want) >= {key for key in ("bos_token", "mask_token", "image_token") if key in shown}


def test_special_tokens_where_transformers_fails(tmp_path):
    """The files are read as they are."""
    path = make(
        tmp_path / "model",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": ["a.b", "c.d"]},
        bos_token={"content": "<s>"},
        eos_token="</s>",
        unk_token=None,
        extra_special_tokens={"start": "<s>"},
    )
    (path / "special_tokens_map.json").write_text('{"pad_token": "</s>", "eos_token": "<s>"}')
    found = check(path)
    assert "compared with nothing" in found.warnings[0]
    assert found.special_tokens == {
        "bos_token": "<s>", "eos_token": "<s>", "start": "<s>", "pad_token": "</s>"
    }  # fmt: skip


def test_an_engine_has_all_that_its_chats_need(models, tmp_path):
    """Named templates, and tokens that no file of the engine's but one of its own names."""
    target = tmp_path / "target"
    shutil.copytree(models / "target", target)
    letter = Tokenizer.from_file(str(target / "tokenizer.json")).id_to_token(5)
    (target / "special_tokens_map.json").write_text(json.dumps({"bos_token": letter}))
    (target / "chat_template.jinja").write_text("D{{ bos_token }}")
    (target / "additional_chat_templates").mkdir()
    for name in ("tool_use", "rag"):
        file = target / "additional_chat_templates" / f"{name}.jinja"
        file.write_text(name + "{{ bos_token }}{{ tools | length if tools }}")
    engine = tmp_path / "engine"
    build(target, [], engine, options(backend="eager"))
    messages, one = [{"role": "user", "content": "a"}], SamplingParams(max_tokens=1, temperature=0)
    tool = {"type": "function", "function": {"name": "f"}}
    with LLM(engine, verify=True) as llm:
        assert llm.chat(messages, one)[0].prompt == f"D{letter}"
        assert llm.chat(messages, one, tools=[tool])[0].prompt == f"tool_use{letter}1"
        assert llm.chat(messages, one, chat_template="rag")[0].prompt == f"rag{letter}"
