"""Where outputs of GGUF files end.

Right values are what llama.cpp's `llama_vocab_is_eog` said of files with these tokens (of
llama-cpp-python 0.3.36), but where a file names no eos: llama.cpp takes a number, and so commas.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from specc.passes.frontend import hf_model
from specc.passes.frontend.gguf_ends import end_token_ids
from specc.passes.frontend.gguf_tokenizer import tokenizer_of
from tests import gguf_files
from tests.passes.frontend.test_gguf_directory import plain_file

NORMAL, CONTROL, USER = 1, 3, 4


def fields(*special: str, kind: str = "gpt2", type_: int = CONTROL, **named: int) -> dict[str, Any]:
    """Sixteen letters, then these tokens from 16 on."""
    tokens = [*"abcdefghijklmnop", *special]
    own = {
        "model": kind, "tokens": tokens, "merges": [], "pre": "gpt-2",
        "token_type": [NORMAL] * 16 + [type_] * len(special), "scores": [0.0] * len(tokens),
        "add_bos_token": False,
    } | {f"{name}_token_id": number for name, number in named.items()}  # fmt: skip
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


@pytest.mark.parametrize(
    "text",
    [
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]",
        "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>",
        "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>",
        "<|file_sep|>",
    ],
)  # fmt: skip
@pytest.mark.parametrize("type_", [NORMAL, CONTROL, USER])
def test_tokens_known_by_their_text(text, type_) -> None:
    assert end_token_ids(fields(text, "x", type_=type_, eos=17)) == [17, 16]


@pytest.mark.parametrize(
    "text",
    ["<|im_start|>", "<|fim_prefix|>", "<|fim_middle|>", "<pad>", "<|start_header_id|>", "<unk>",
     "<start_of_turn>", "<|assistant|>", "EOS", "<|im_end|> ", "[PAD7]", "<|EOT_ID|>"],
)  # fmt: skip
def test_tokens_that_end_nothing(text) -> None:
    assert end_token_ids(fields(text, "x", eos=17)) == [17]


@pytest.mark.parametrize(
    ("made", "ends"),
    [
        pytest.param(fields("x", "y", "z", eos=16, eot=17, eom=18), [16, 17, 18], id="fields"),
        pytest.param(fields("x", eos=16, eot=3), [16, 3], id="a-letter"),
        pytest.param(fields("x", "y", eos=16, bos=17, unknown=5, padding=4), [16], id="no-others"),
        # what a field names is not looked for by its text, and ends by its text all the same
        pytest.param(fields("<|eot_id|>", "y", "z", eos=18, eot=17), [18, 16, 17], id="both"),
        pytest.param(fields("x", "y", eos=16, fim_pad=17), [16, 17], id="fim-pad"),
        pytest.param(fields("x", "y", eos=16, fim_rep=17), [16, 17], id="fim-repository"),
        pytest.param(fields("x", "y", eos=16, fim_sep=17), [16, 17], id="fim-file"),
        pytest.param(
            fields("x", "y", "z", "w", eos=16, fim_pre=17, fim_suf=18, fim_mid=19),
            [16],
            id="fim-parts-end-nothing",
        ),
        # of those, the text counts where no field does
        pytest.param(fields("<|fim_pad|>", "y", "x", eos=18, fim_pad=17), [18, 17], id="fim-named"),
        pytest.param(fields("x", eos=16, eot=99), [16], id="out-of-range"),
        pytest.param(
            fields("<|return|>", "<|call|>", "<|end|>", eos=16), [16, 17], id="harmony"
        ),
        pytest.param(
            fields("<|calls|>", "<|flush|>", "<|end|>", "x", eos=19), [19, 16, 17], id="solar"
        ),
        pytest.param(fields("<|return|>", "<|end|>", eos=16), [16, 17], id="no-harmony"),
        pytest.param(
            fields("<|return|>", "<|call|>", "<|end|>", eos=18), [16, 17], id="even-as-eos"
        ),
        pytest.param(fields("<|tool_response>", "</s>", "x", eos=18), [18, 16], id="gemma-4"),
        pytest.param(fields("</s>", "<|plamo:eos|>", eos=17), [17], id="plamo"),
        pytest.param(fields("</s>", "<eos>", eos=17), [17, 16], id="no-plamo"),
        # where no field names eos: the usual one of the kind
        pytest.param(fields("x", "</s>", kind="llama"), [17], id="none-by-text"),
        pytest.param(fields(kind="gpt2"), [], id="a-letter-ends-nothing"),
    ],
)  # fmt: skip
def test_ends(made, ends) -> None:
    assert end_token_ids(made) == ends


def test_usual_ends() -> None:
    """Without a field, eos is 2 of SentencePiece, and 11 of byte-level tokens."""
    for kind, usual in (("llama", 2), ("gpt2", 11)):
        made = fields(kind=kind)
        made["tokenizer.ggml.token_type"][usual] = CONTROL
        assert end_token_ids(made) == [usual]


def test_ends_are_control_tokens() -> None:
    """Known by its text, a token is one, whatever the file calls it; by a field alone not."""
    made = fields("<|im_end|>", "x", type_=NORMAL, eos=17)
    found = Tokenizer.from_buffer(tokenizer_of(made, "a file"))
    assert found.encode("ab<|im_end|>").ids == [0, 1, 16]
    assert found.decode([0, 16, 17]) == "ax"


def test_ends_of_a_file(tmp_path) -> None:
    """They are those of the model that is compiled."""
    own = gguf_files.byte_fields()["tokenizer.ggml.tokens"]
    tokens = [*own[:100], "<|im_end|>", *own[101:]]
    named = {"tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 5}
    file = plain_file(tmp_path, **{"tokenizer.ggml.tokens": tokens}, **named)
    directory = hf_model.resolve_directory(file)
    config = hf_model.load_config(directory)
    assert hf_model.eos_token_ids(directory, config) == [7, 5, 100]
    # a configuration beside the file names others: all of them end outputs
    beside = tmp_path / "beside"
    config.eos_token_id = 3
    config.save_pretrained(beside)
    file.rename(beside / "model.gguf")
    config = hf_model.load_config(hf_model.resolve_directory(beside))
    assert hf_model.eos_token_ids(beside, config) == [3, 7, 5, 100]
