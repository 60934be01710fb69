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

from specc.errors import UnsupportedGraphError
from specc.passes.pipeline import PHASES
from specc.passes.program import FEATURES, Program
from specc.passes.rewrite.tap_features import TapFeatures
from specc.speculation.taps import Taps
from specc.speculation.tree import TokenTree
from tests import hybrids, models
from tests.passes.modules import compiled, dense_logits
from tests.state_session import Sessions
from tests.tiers import only

# float32 of transformers is as far from float64: of Zamba2, 1.4e-4
TOLERANCE = {"rtol": 1e-3, "atol": 5e-4}
# whose layers each have attention or a recurrence
TAPPED = (
    "qwen3_next_hybrid", "qwen3_5", "lfm2", "granite4_hybrid", "falcon_h1", "olmo_hybrid",
    "kimi_linear",
)  # fmt: skip
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
            torch.testing.assert_close(last[i], output.logits[place][0], **TOLERANCE)
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


@pytest.mark.parametrize("name", only(("lfm2",), TAPPED))
def test_rows_of_hidden_states(name):
    """What drafts may read of a target: the stream at each boundary of a layer of any kind."""
    model = models.build_model(name)
    count = len(model.config.layer_types)
    taps = Taps(tuple(range(count + 1)), is_last_normed=True)
    phases = (*PHASES, ("taps", (functools.partial(TapFeatures, taps),)))
    program, _ = compiled(model, phases)
    (text,) = prompts(9)
    session = Sessions(program, model)
    session.prompt([text])
    with torch.no_grad():
        states = model(torch.tensor([text]), output_hidden_states=True, use_cache=False)
    rows = session.rows(FEATURES)[0].split(model.config.hidden_size, dim=-1)
    for row, wanted in zip(rows, states.hidden_states, strict=True):
        torch.testing.assert_close(row, wanted[0], **TOLERANCE)


def test_layers_without_a_mixer_are_not_counted_by_guess():
    kinds = ["linear_attention", "mlp", "full_attention", "linear_attention"]
    model = models.build_model("nemotron_h", layers_block_type=kinds)
    taps = Taps((1,))
    with pytest.raises(UnsupportedGraphError, match="add to the stream once, and others twice"):
        compiled(model, (*PHASES, ("taps", (functools.partial(TapFeatures, taps),))))


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
