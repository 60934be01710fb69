"""Heads of every published layout compute what their formulas say."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from specc.passes.drafters.feature_head import FeatureHead
from tests.head_reference import hidden_states
from tests.heads import CASES, VOCAB

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_path(name, load, target):
    """Rows with the target's features, then rows with those of the row before them."""
    loaded, chooser = load(name), random.Random(name)
    head, reference = loaded.module, loaded.reference
    tokens = [chooser.randrange(VOCAB) for _ in range(12)]
    taps = hidden_states(target, tokens[:-1], CASES[name].boundaries)
    path = [chooser.randrange(VOCAB) for _ in range(3)]
    rows, num_own = tokens[1:] + path, len(path)
    positions = torch.arange(len(rows))[None]
    features = torch.full((1, len(rows), taps.shape[1]), float("nan"))
    features[0, : len(taps)] = taps
    own = torch.full((1, len(rows), CASES[name].width), float("nan"))
    is_tapped = torch.arange(len(rows))[None, :, None] < len(taps)
    for depth in range(num_own + 1):
        count = len(taps) + depth
        ids = torch.tensor([rows[:count]])
        inputs = (positions, features, own, is_tapped)
        with torch.no_grad():
            handed_on, logits = head(ids, *(item[:, :count] for item in inputs))
        want = reference.logits(taps, tokens, path[:depth])
        torch.testing.assert_close(logits[0, -1], want, **CLOSE)
        if depth < num_own:
            own[0, count] = handed_on[0, -1]


def test_logits_are_those_of_the_targets_ids(load):
    loaded = load("safeailab")
    kept = loaded.reference.w["t2d"]
    x = torch.zeros(1, 1, 1)
    spec = loaded.spec
    with torch.no_grad():
        _, logits = loaded.module(
            x[..., 0].long(),
            x[..., 0].long(),
            x.expand(-1, -1, spec.feature_columns),
            x.expand(-1, -1, spec.width),
            x.bool(),
        )
    assert torch.equal(torch.isfinite(logits[0, 0]), kept)


def test_width_does_not_say_whether_a_row_is_tapped(load):
    """With one tap, what is handed on may be as wide as the target's features."""
    spec = replace(load("safeailab").spec, boundaries=(4,))
    torch.manual_seed(1)
    head = FeatureHead(spec).eval()
    features, own = torch.randn(2, 1, 3, spec.width)
    assert features.shape[-1] == spec.feature_columns
    ids, places = torch.tensor([[5, 6, 7]]), torch.arange(3)[None]
    with torch.no_grad():
        tapped, _ = head(ids, places, features, own, torch.ones(1, 3, 1).bool())
        projected, _ = head(ids, places, own, head.fc(features), torch.zeros(1, 3, 1).bool())
    torch.testing.assert_close(tapped, projected)
