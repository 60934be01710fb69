"""Programs of models with states compute what transformers does, by the oracles of operators.

Prompts in chunks, token by token, and trees; no engine and no runtime. What a node of a tree gets
is compared with transformers' own float32 logits after the tokens of its path alone.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from specc.passes.program import Program
from specc.speculation.tree import TokenTree
from tests import hybrids, models
from tests.passes.modules import compiled, dense_logits
from tests.state_session import Sessions
from tests.tiers import only

TOLERANCE = {"rtol": 3e-5, "atol": 3e-5}
ROOT = TokenTree((-1,))
CHAIN = TokenTree((-1, 0, 1, 2))
# 2,2,1, and a node of which nothing follows
TREE = TokenTree((-1, 0, 0, 1, 1, 2, 2, 0, 3, 4, 5))
every = pytest.mark.parametrize("name", only(hybrids.COVERING, hybrids.CONFIGS))


@functools.lru_cache(maxsize=1)
def made(name: str) -> tuple[Any, Program]:
    model = models.build_model(name)
    program, _ = compiled(model)
    return model, program


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, models.VOCAB, (n,), generator=generator).tolist() for n in lengths]


def wanted(model: Any, tokens: list[int]) -> Tensor:
    return dense_logits(model, torch.tensor(tokens))


@every
def test_prompts_and_plain_tokens(name):
    """Prompts of two sequences in chunks, then the tokens that `generate` continues them with."""
    model, program = made(name)
    texts = prompts(21, 13)
    session = Sessions(program, model, 2)
    parts = [
        session.prompt([texts[0][:9], texts[1][:12]]),
        session.prompt([texts[0][9:], texts[1][12:]]),
    ]
    for text, found in zip(texts, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(found), wanted(model, text), **TOLERANCE)
    last = [part[-1] for part in parts[1]]
    outputs = [
        model.generate(
            torch.tensor([text]), max_new_tokens=12, do_sample=False, use_cache=True,
            output_logits=True, return_dict_in_generate=True,
        )
        for text in texts
    ]  # fmt: skip
    for place in range(12):
        for i, output in enumerate(outputs):
            torch.testing.assert_close(last[i], output.logits[place][0], rtol=1e-4, atol=1e-4)
            assert int(last[i].argmax()) == int(output.sequences[0, len(texts[i]) + place])
        tokens = [[int(output.sequences[0, len(text) + place])]
                  for text, output in zip(texts, outputs, strict=True)]  # fmt: skip
        last = [part[0] for part in session.step(tokens, ROOT)]
        session.commit([[0], [0]])


@every
def test_trees(name):
    """Chains and branches one after the other, of which a path is kept each time."""
    model, program = made(name)
    (text,) = prompts(17)
    session = Sessions(program, model)
    session.prompt([text])
    kept = ([0, 1, 4, 9], [0, 1, 2, 3], [0], [0, 2], [0, 1, 2])
    for number, path in enumerate(kept):
        tree = CHAIN if number in (1, 4) else TREE
        (tokens,) = prompts(tree.num_nodes)
        (logits,) = session.step([tokens], tree)
        for node in range(tree.num_nodes):
            line = [tokens[x] for x in path_to(tree, node)]
            torch.testing.assert_close(logits[node], wanted(model, text + line)[-1], **TOLERANCE)
        session.commit([path])
        text = text + [tokens[x] for x in path]


def path_to(tree: TokenTree, node: int) -> list[int]:
    found = [node]
    while (parent := tree.parents[found[0]]) >= 0:
        found.insert(0, parent)
    return found


@every
def test_states_say_something(name):
    """A token long ago changes the logits of each model, and each of its states."""
    model, program = made(name)
    (text,) = prompts(24)
    found = [Sessions(program, model), Sessions(program, model)]
    found[0].prompt([text])
    found[1].prompt([[(text[0] + 1) % models.VOCAB, *text[1:]]])
    recurrent = [f"state_{i}" for i, x in enumerate(program.state_layers) if x.kind != "conv"]
    states = [session.states() for session in found]
    for name in recurrent:
        difference = (states[0][name] - states[1][name]).abs().max()
        assert difference > 1e-3 * states[0][name].abs().max()
