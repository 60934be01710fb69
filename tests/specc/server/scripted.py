"""An engine whose target says what a test wants, through the real steps, many tokens a step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from specc.runtime.engine import Engine
from specc.runtime.requests.chat_template import ChatTemplate
from tests.runtime.conftest import build_engine
from tests.specc.server.serving import Server, serve

POSITIONS = 768
MARKERS = (
    "<eos>", "<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>",
    "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|constrain|>",
    "<|message|>", "<|end|>", "<|call|>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|START_THINKING|>",
    "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>",
    "<|END_ACTION|>",
)  # fmt: skip
# of the tests' prompts: what a chat is about does not matter to a script
TEMPLATE = (
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson if tools }}"
    "{{ thinking or '' }}"
)
# of a model that thinks, and calls tools when it wants to
AGENT = {
    "reasoning_parser": "qwen3", "tool_call_parser": "hermes", "enable_auto_tool_choice": True,
}  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """A token for each byte, and one, special, for each marker."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    return tokenizer


class Script:
    """What the target says, wherever the prompt ends; drafts miss a token now and then.

    A draft that is right for 0, 1, … 7 tokens in turn makes steps of 1 to 8 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, positions: int = POSITIONS) -> None:
        self._tokenizer = tokenizer
        self.token_ids: list[int] = []
        self._begin = 0
        self._missed = {0}
        at = 0
        for right in itertools.islice(itertools.cycle(range(8)), positions):
            at += right + 1
            self._missed.add(at)

    def set(self, text: str, prompt: str, whole_markers: bool = True) -> None:
        """From now on, the text follows the prompt, and then EOS.

        Args:
            whole_markers: markers in it are single tokens.
        """
        self._begin = len(self._tokenizer.encode(prompt).ids)
        alphabet = self._tokenizer.get_vocab()
        as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        if whole_markers:
            self.token_ids = list(self._tokenizer.encode(text).ids)
        else:
            pieces = as_letters.pre_tokenize_str(text)
            self.token_ids = [alphabet[letter] for piece, _ in pieces for letter in piece]

    def logits(self, positions: Tensor, is_draft: bool) -> Tensor:
        """[R, V] of the tokens after these [R] positions."""
        vocab_size = self._tokenizer.get_vocab_size()
        rows = torch.zeros(len(positions), vocab_size)
        for row, position in zip(rows, positions.tolist(), strict=True):
            at = position + 1 - self._begin
            token = self.token_ids[at] if 0 <= at < len(self.token_ids) else self._eos
            row[(token + 1) % vocab_size if is_draft and at in self._missed else token] = 50.0
        return rows

    @property
    def _eos(self) -> int:
        return self._tokenizer.token_to_id("<eos>")


def scripted_engine(
    plan: Sequence[int] = (1,) * 8,
    positions: int = POSITIONS,
    script_type: type[Script] = Script,
    max_num_seqs: int = 3,
) -> tuple[Engine, Script]:
    """An engine with plans off and `plan`, and what it says."""
    engine = build_engine(
        plans=((), tuple(plan)),
        max_seq_len=positions,
        draft_positions=positions,
        block_size=16,
        max_num_seqs=max_num_seqs,
        prefill_chunk=512,
    )
    tokenizer = byte_tokenizer()
    script = script_type(tokenizer, positions)

    def say(is_draft: bool) -> Any:
        def forward(tokens: Tensor, positions: Tensor, *others: Tensor, **more: Tensor) -> Tensor:
            logit_rows = others[5] if len(others) > 5 else more["logit_rows"]
            return script.logits(positions[logit_rows], is_draft)

        return forward

    engine.target.forward = say(False)
    for draft in engine.drafts:
        draft.forward = say(True)
    engine.tokenizer = tokenizer
    engine.vocab_size = tokenizer.get_vocab_size()
    engine.eos_token_ids = frozenset([tokenizer.token_to_id("<eos>")])
    return engine, script


@contextlib.contextmanager
def serve_scripted(
    template: str | ChatTemplate = TEMPLATE, **options: Any
) -> Iterator[tuple[Server, Script]]:
    """Serve such an engine; `options` as of `serve`."""
    engine, script = scripted_engine()
    with serve(engine, template, plan="chain-8", **options) as server:
        yield server, script
        server.wait_until_idle()
