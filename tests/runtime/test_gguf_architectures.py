"""Engines of GGUF files alone, of every architecture, against transformers on the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import specc
from tests import models
from tests.passes.frontend.gguf_recordings import recordings, write_recorded

NUM_TOKENS = 16
# to the context of the shortest
MAX_SEQ_LEN = 64
PROMPTS = models.prompts()


@pytest.mark.slow
@pytest.mark.parametrize("name", recordings())
def test_greedy_tokens(tmp_path: Path, name: str) -> None:
    base, changes = recordings()[name]["config"]
    model = models.build_model(base, **changes)
    write_recorded(tmp_path / "model.gguf", name, model.state_dict())
    specc.compile(
        tmp_path / "model.gguf", None, tmp_path / "engine", backend="eager", probe=False,
        max_seq_len=MAX_SEQ_LEN,
    )  # fmt: skip
    params = specc.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with specc.LLM(tmp_path / "engine") as llm:
        given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = [list(item.outputs[0].token_ids) for item in llm.generate(given, params)]
    for prompt, tokens in zip(PROMPTS, found, strict=True):
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert tokens == output[0, len(prompt) :].tolist()
