"""`specc inspect` says what drafts of other tokens propose, and how much of a text that is."""

from __future__ import annotations

import json

import pytest

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.speculation.plans import SpecPlan
from tests.command_line import assert_refused, invoke
from tests.models import byte_tokenizer, save_tiny
from tests.vocabularies import save, sentencepiece


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """A draft whose tokenizer has letters alone; ab is a token of it that the target lacks."""
    root = tmp_path_factory.mktemp("coverage")
    target = save_tiny("llama", root / "target", num_hidden_layers=1)
    draft = save_tiny("llama", root / "draft", seed=1, num_hidden_layers=1)
    pieces = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    save(root / "draft", sentencepiece([*pieces, "ab"]), unk_token="<unk>")
    config = CompileConfig(
        plans=(SpecPlan.from_widths((1,)),), backend="eager", max_seq_len=32, max_batch_size=1,
        probe=False,
    )  # fmt: skip
    build(target, draft, root / "engine", config)
    return root / "engine"


def test_what_an_engine_says_of_it(engine):
    text = invoke("inspect", engine).stdout
    assert "draft_0 has other tokens than the target: it proposes 26 of 128 target ids" in text
    assert "and reads 102 as another token" in text
    (draft,) = json.loads(invoke("inspect", engine, "--json").stdout)["manifest"]["models"][1:]
    assert draft["vocabulary"] == {"num_proposed": 26, "num_target": 128, "num_unread": 102}
    assert draft["vocab_size"] == 128


def test_the_share_of_a_text(engine, tmp_path):
    file = tmp_path / "prompts.jsonl"
    # of these bytes, five are letters
    ids = byte_tokenizer().encode("a.c").ids
    lines = [{"prompt": "ab-cd"}, {"prompt_token_ids": ids[:2]}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = invoke("inspect", engine, "--prompts", file)
    assert result.stdout == "draft_0 can propose 5 of the 7 tokens (71.4%)\n"
    found = json.loads(invoke("inspect", engine, "--prompts", file, "--json").stdout)
    assert found == {"tokens": 7, "proposed": {"draft_0": pytest.approx(5 / 7)}}
    file.write_text('{"prompt_token_ids": [1, 128]}\n')
    assert_refused(invoke("inspect", engine, "--prompts", file), "token id 128")
    assert_refused(invoke("inspect", engine, "--prompts", tmp_path / "none"), "none")


def test_drafts_of_the_same_tokens(tiny_engine, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert_refused(invoke("inspect", tiny_engine, "--prompts", file), "without a draft of other")


@pytest.mark.parametrize("other", [("--verify",), ("--pass", "FuseQKV"), ("--tree", "a.svg")])
def test_one_thing_at_a_time(tiny_engine, tmp_path, other):
    result = invoke("inspect", tiny_engine, "--prompts", tmp_path / "any", *other)
    assert_refused(result, f"with {other[0]}")
