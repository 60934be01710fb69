"""What tests of `build` share: options, a model of somebody's own, its tokens, refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specc.compiler.build import build
from specc.config import CompileConfig
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from specc.speculation.plans import SpecPlan

PROMPTS = [[5, 17, 3, 99, 41, 7, 7], [64]]
NUM_TOKENS = 20
TREE = SpecPlan.from_widths((2, 2, 1))


def options(*plans, **changes):
    """A configuration of two sequences of 64 tokens, chunks of four, and no probe."""
    fields = {"max_batch_size": 2, "max_seq_len": 64, "prefill_chunk": 4, "probe": False}
    return CompileConfig(plans=plans, **(fields | changes))


class Custom(nn.Module):
    """A language model of somebody's own: learned positions, grouped heads, no configuration."""

    def __init__(self, seed: int = 0, vocab: int = 128, window: int = 100, dim: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.window, self.dim = window, dim
        self.tokens, self.places = nn.Embedding(vocab, 32), nn.Embedding(64, 32)
        self.qkv = nn.Linear(32, 8 * dim)
        self.out, self.head = nn.Linear(4 * dim, 32), nn.Linear(32, vocab, bias=False)
        self.register_buffer("gain", torch.linspace(0.5, 3, 32), persistent=False)
        self.head.weight.data *= 4

    def forward(self, input_ids, position_ids):
        x = self.tokens(input_ids) + self.places(position_ids)
        sizes = [count * self.dim for count in (4, 2, 2)]
        q, k, v = self.qkv(F.layer_norm(x, (32,))).split(sizes, -1)
        q, k, v = (item.unflatten(-1, (-1, self.dim)).transpose(1, 2) for item in (q, k, v))
        distance = position_ids[0][:, None] - position_ids[0][None]
        mask = (distance >= 0) & (distance < self.window)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return self.head(x * self.gain)


def near(model, noise=0.02):
    """A draft that is mostly right: the model, disturbed."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.out.weight += noise * torch.randn_like(draft.out.weight)
    return draft


def greedy(logits_of, prompt, count=NUM_TOKENS):
    """Plain greedy decoding by whole passes."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        ids = torch.tensor([tokens])
        with torch.no_grad():
            logits = logits_of(ids, torch.arange(len(tokens))[None])
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def generate(engine, plan=None, prompts=PROMPTS):
    """Tokens of the prompts by an engine directory, and its metrics."""
    llm = LLM(engine, plan=plan)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    return outputs, llm.get_metrics()


def refused(error, tmp_path, *args, **kwargs):
    """What is said to be found, of a build that is refused and leaves nothing behind.

    `args` and `kwargs` are those of `build`, without the directory of the engine.
    """
    output = tmp_path / "out" / "engine"
    output.parent.mkdir()
    with pytest.raises(error) as caught:
        build(args[0], args[1], output, args[2], **kwargs)
    assert list(output.parent.iterdir()) == []
    assert caught.value.needed
    assert caught.value.do
    return caught.value.found
