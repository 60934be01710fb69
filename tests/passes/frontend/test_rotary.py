"""Rotary frequencies that depend on length: equal to transformers up to a model's own length.

Beyond it the oracle is transformers, too: its frequencies follow the largest position of a pass, so
a second row of a batch that reaches position N - 1 makes it rotate the first as `--rope-length N`.
"""

from __future__ import annotations

import dataclasses
import types

import pytest
import torch

from specc.errors import ConfigError, UnsupportedGraphError, UnsupportedRotaryError
from specc.passes.frontend import hf_model, rotary
from specc.passes.frontend.trace import trace
from specc.passes.frontend.trace_padded import trace_padded
from specc.passes.pipeline import Pipeline
from tests.models import POSITIONS, VOCAB, build_model, tiny_config
from tests.passes.modules import TOLERANCE, dense_logits, program_logits
from tests.tiers import only

ORIGINAL = 64
_FACTORS = {
    "short_factor": [1 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **_FACTORS}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
_ORIGINAL = {"original_max_position_embeddings": ORIGINAL}
# layers of both kinds; those with a window keep their frequencies
_MIXED = {
    "full_attention": _DYNAMIC,
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
}
# of as many layers as there are kinds of them: a trace takes a second for each
_ONE = {"num_hidden_layers": 1}
_BOTH = {"num_hidden_layers": 2, "layer_types": list(_MIXED)}
MODELS = {
    "dynamic": ("llama", {"rope_parameters": _DYNAMIC, "max_position_embeddings": ORIGINAL} | _ONE),
    "longrope": ("phi3", {"rope_parameters": _LONGROPE | _ORIGINAL, **_ORIGINAL} | _ONE),
    "layer-types": (
        "gemma3",
        {"rope_parameters": _MIXED, "max_position_embeddings": ORIGINAL} | _BOTH,
    ),
}
kinds = pytest.mark.parametrize("kind", MODELS)


def model_of(kind: str, **changes):
    name, fields = MODELS[kind]
    return build_model(name, **fields, **changes)


def config_of(kind: str, **changes):
    name, fields = MODELS[kind]
    return tiny_config(name, **(fields | changes))


def tokens_of(count: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count))


def compiled(model, rope_length):
    """Logits of tokens, by the program."""
    program = trace(model, "target", rope_length)
    Pipeline().run(program)
    return lambda tokens: program_logits(program, model, tokens)


def logits_as_in_a_pass_of(model, length, tokens):
    """[T, V] of transformers, in a batch whose other row ends at position length - 1."""
    count = len(tokens)
    ids = torch.stack([tokens, tokens])
    positions = torch.stack([torch.arange(count), torch.arange(length - count, length)])
    mask = torch.ones(2, 1, count, count, dtype=torch.bool).tril()
    masks = {kind: mask for kind in ("full_attention", "sliding_attention")}
    with torch.no_grad():
        return model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=masks if model.config.model_type == "gemma3_text" else mask,
            use_cache=False,
        ).logits[0]


@pytest.mark.parametrize("kind", only(("longrope",), MODELS))
def test_up_to_the_original_length_it_is_transformers(kind):
    model = model_of(kind)
    assert hf_model.max_position(model.config) == ORIGINAL
    logits = compiled(model, None)
    for count in (1, ORIGINAL):
        tokens = tokens_of(count)
        expected = dense_logits(model, tokens)
        torch.testing.assert_close(logits(tokens), expected, **TOLERANCE)


@pytest.mark.parametrize("kind", only(("dynamic", "layer-types"), MODELS))
def test_a_rope_length_is_a_pass_of_that_length(kind):
    """Short passes, and one that ends at the last position."""
    model, length = model_of(kind), 3 * ORIGINAL
    assert hf_model.max_position(model.config, length) == length
    few = tokens_of(12)
    logits = compiled(model, length)
    frozen = logits(few)
    expected = logits_as_in_a_pass_of(model, length, few)
    torch.testing.assert_close(frozen, expected, **TOLERANCE)
    # the oracle has to differ from what transformers computes without the other row
    assert (logits_as_in_a_pass_of(model, len(few), few) - expected).abs().max() > 0.02
    assert (compiled(model, None)(few) - expected).abs().max() > 0.02
    whole = tokens_of(length)
    torch.testing.assert_close(logits(whole), dense_logits(model, whole), **TOLERANCE)


@pytest.mark.parametrize("kind", only(("dynamic",), MODELS))
@pytest.mark.parametrize("length", [None, pytest.param(3 * ORIGINAL, marks=pytest.mark.slow)])
def test_modules_that_ran_and_modules_without_weights_have_the_same_numbers(kind, length):
    """A longer pass leaves its frequencies in a module; a module on the meta device has none."""
    used = model_of(kind)
    with torch.no_grad():
        used(input_ids=tokens_of(5 * ORIGINAL)[None] % VOCAB, use_cache=False)
    before = {name: value.clone() for name, value in used.named_buffers()}
    empty = hf_model.build_on_meta(config_of(kind), torch.float32)
    found = [trace(model, "target", length).constants for model in (used, empty)]
    assert found[0].keys() == found[1].keys()
    assert any(len(value) == 8 for value in found[0].values() if value.ndim == 1)
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=0, atol=0)
    padded = trace_padded(empty, "target", length).constants
    frequencies = [v for v in found[1].values() if v.shape == (8,)]
    for value in (v for v in padded.values() if v.shape == (8,)):
        assert any(torch.equal(value, other) for other in frequencies)
    # and the module is as it was
    for name, value in used.named_buffers():
        assert torch.equal(value, before[name]), name
    assert all("forward" not in vars(module) for module in used.modules())
    tokens = tokens_of(9)
    torch.testing.assert_close(
        dense_logits(used, tokens), dense_logits(model_of(kind), tokens), **TOLERANCE
    )


def test_buffers_keep_the_type_that_a_module_has():
    model = model_of("dynamic").to(torch.bfloat16)
    (found,) = (v for v in trace(model, "target", 256).constants.values() if v.shape == (8,))
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "rope_length", "constant", "frozen"),
    [
        ("dynamic", None, ORIGINAL, None),
        ("dynamic", ORIGINAL, ORIGINAL, None),
        ("dynamic", ORIGINAL + 1, ORIGINAL + 1, ORIGINAL + 1),
        ("dynamic", 4096, 4096, 4096),
        ("longrope", None, ORIGINAL, None),
        ("longrope", POSITIONS, POSITIONS, POSITIONS),
        ("layer-types", None, ORIGINAL, None),
        ("layer-types", 200, 200, 200),
    ],
)
def test_lengths(kind, rope_length, constant, frozen):
    config = config_of(kind)
    assert rotary.constant_length(config, rope_length) == constant
    assert rotary.frozen_length(config, rope_length) == frozen


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "llama-llama3", "llama-linear", "gpt2"])
def test_other_scalings_have_no_such_length(name):
    config = tiny_config(name)
    assert rotary.constant_length(config, 1024) is None
    assert hf_model.max_position(config, 1024) == POSITIONS
    rotary.check_rotary(config, name, POSITIONS, None)
    with pytest.raises(ConfigError, match="no model has rotary") as caught:
        rotary.check_rope_length({"target": config, "draft_0": None}, 1024)
    assert caught.value.do == "leave out --rope-length"


@kinds
def test_beyond_the_length_it_is_refused(kind):
    config = config_of(kind)
    rotary.check_rotary(config, kind, ORIGINAL, None)
    rotary.check_rotary(config, kind, None, None)
    rotary.check_rotary(config, kind, 200, 200)
    with pytest.raises(UnsupportedRotaryError) as caught:
        rotary.check_rotary(config, kind, 100, None)
    error = caught.value
    assert error.found.startswith(f"--max-seq-len 100; {kind}: rotary scaling ")
    assert error.found.endswith(f"constant up to {ORIGINAL} tokens")
    assert f"--max-seq-len {ORIGINAL}" in error.do
    assert "--rope-length 100" in error.do
    with pytest.raises(UnsupportedRotaryError, match="kept at those of 200 tokens"):
        rotary.check_rotary(config, kind, 201, 200)


def test_longrope_ends_with_its_positions():
    with pytest.raises(ConfigError) as caught:
        rotary.check_rotary(config_of("longrope"), "m", None, POSITIONS + 1)
    assert caught.value.do == f"pass --rope-length {POSITIONS}"


def test_a_rope_length_is_said_aloud_or_refused():
    configs = {"target": config_of("dynamic"), "draft_0": tiny_config("llama")}
    (told,) = rotary.check_rope_length(configs, 200)
    assert told.startswith("target: --rope-length 200")
    assert "differ from those of trans" in told
    assert len(rotary.check_rope_length(configs | {"draft_0": config_of("longrope")}, 200)) == 2
    assert rotary.check_rope_length(configs, None) == []
    with pytest.raises(ConfigError, match=f"constant up to {ORIGINAL}"):
        rotary.check_rope_length(configs, ORIGINAL)


def test_a_scaling_without_a_length():
    config = types.SimpleNamespace(rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedRotaryError, match="without a length"):
        rotary.length_scalings(config)


class Foreign(torch.nn.Module):
    """Says that its frequencies follow lengths, and has no module of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(8, 8)
        self.config = types.SimpleNamespace(rope_scaling=_DYNAMIC, max_position_embeddings=64)

    def forward(self, input_ids, position_ids):
        return self.embedding(input_ids)


def test_unknown_rotary_modules_are_refused():
    with pytest.raises(UnsupportedRotaryError, match="no module that holds its frequencies"):
        trace(Foreign(), "target")


def test_frequencies_that_no_graph_reads_are_refused(monkeypatch):
    """A model that computes its own would keep them, whatever its buffers hold."""
    model = model_of("dynamic")
    kind = type(model.model.rotary_emb)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * torch.ones(16)
        return angles.cos(), angles.sin()

    monkeypatch.setattr(kind, "forward", forward)
    with pytest.raises(UnsupportedGraphError, match=r"model\.rotary_emb\.inv_freq"):
        trace(model, "target", 200)


def test_scalings_are_values():
    """One for each kind of layers that has one."""
    (found,) = rotary.length_scalings(config_of("layer-types"))
    assert dataclasses.astuple(found) == ("dynamic", ORIGINAL, None, "full_attention")
    assert rotary.length_scalings(None) == ()
