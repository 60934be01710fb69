"""Sequences of the long demo target, and what its evaluation compares."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[2]
NEWLINE = 3


@pytest.fixture(scope="module")
def long_data():
    return _import("long_data")


@pytest.fixture(scope="module")
def long_eval():
    return _import("long_eval")


def _import(name):
    sys.path.insert(0, str(REPOSITORY / "examples"))
    try:
        return __import__(name)
    finally:
        sys.path.pop(0)


def make_documents(long_data):
    """Three directories; a file's ids say which file it is and where in it a token stands."""
    files = iter(range(9))
    groups = []
    for _ in range(3):
        groups.append(tuple(1000 * next(files) + torch.arange(1, 300) for _ in range(3)))
    return long_data.Documents(tuple(groups), NEWLINE)


def test_a_sequence_is_whole_files_of_a_directory(long_data):
    documents = make_documents(long_data)
    assert len(documents) == 9 * 299
    seen = set()
    for seed in range(20):
        ids = documents.draw(1400, torch.Generator().manual_seed(seed))
        assert ids.shape == (1400,)
        files = (ids // 1000).unique_consecutive().tolist()
        # all three files of a directory, before another one begins
        assert len(files) >= 4
        assert {file // 3 for file in files[:3]} == {files[0] // 3}
        assert len(set(files[:3])) == 3
        # the second file is there from its beginning to its end
        place = int((ids // 1000 != files[0]).nonzero()[0])
        assert ids[place : place + 299].tolist() == list(
            range(1000 * files[1] + 1, 1000 * files[1] + 300)
        )
        seen.add(files[0])
    assert len(seen) > 5


def test_planted_spans_are_copies_from_far_back(long_data):
    documents = make_documents(long_data)
    ids = 100 + torch.arange(4000)
    ids[::37] = NEWLINE
    planted = documents.plant(ids, torch.Generator().manual_seed(1), share=0.3)
    assert planted.shape == ids.shape
    half = len(ids) // 2
    assert torch.equal(planted[:half], ids[:half])
    changed = (planted != ids).nonzero()[:, 0]
    assert 0.15 * half < len(changed) < 0.7 * half
    for place in changed.tolist():
        if int(planted[place]) != NEWLINE:
            # ids say where a token came from: the first half
            assert int(planted[place]) - 100 < half
    first = int(changed[0])
    assert int(ids[first - 1]) == NEWLINE or int(planted[first - 1]) == NEWLINE


def test_nothing_is_planted_where_there_is_no_line(long_data):
    ids = 100 + torch.arange(400)
    planted = make_documents(long_data).plant(ids, torch.Generator().manual_seed(1))
    assert torch.equal(planted, ids)


class Counting:
    """A model of a table of bigrams; with `far`, it also knows tokens that it has seen before."""

    def __init__(self, vocab, far):
        torch.manual_seed(0)
        self.table, self.far = torch.randn(vocab, vocab), far

    def __call__(self, input_ids, use_cache, logits_to_keep):
        logits = self.table[input_ids]
        if self.far:
            seen = torch.zeros(len(input_ids), self.table.shape[0])
            rows = []
            for column in input_ids.T:
                seen = seen.scatter(1, column[:, None], 1.0)
                rows.append(seen)
            logits = logits + 5.0 * torch.stack(rows, 1)
        return types.SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_both_losses_are_of_the_same_tokens(long_eval):
    """Whoever looks at one token alone cannot tell a whole text from a cut one."""
    text = torch.randint(0, 50, (long_eval.LENGTH + 1,), generator=torch.Generator().manual_seed(2))
    model = Counting(50, far=False)
    whole, cut = long_eval.far_losses(model, text)
    assert whole.shape == cut.shape == (long_eval.BEYOND,)
    torch.testing.assert_close(whole, cut)
    last = model.table[text[-2]].log_softmax(-1)[text[-1]]
    torch.testing.assert_close(whole[-1], -last)
    first = long_eval.LENGTH - long_eval.BEYOND
    wanted = model.table[text[first]].log_softmax(-1)[text[first + 1]]
    torch.testing.assert_close(whole[0], -wanted)


def test_what_was_cut_off_is_not_seen(long_eval):
    """Tokens that come a second time, 700 tokens later: the cut text has lost the first."""
    period = torch.randperm(700, generator=torch.Generator().manual_seed(3))
    text = period.repeat(long_eval.LENGTH // 700 + 2)[: long_eval.LENGTH + 1]
    whole, cut = long_eval.far_losses(Counting(700, far=True), text)
    assert (cut > whole).float().mean() > 0.5
    near = period[:400].repeat(long_eval.LENGTH // 400 + 2)[: long_eval.LENGTH + 1]
    whole, cut = long_eval.far_losses(Counting(700, far=True), near)
    torch.testing.assert_close(whole, cut)


def test_interval_of_resampled_means(long_eval):
    values = torch.randn(400, generator=torch.Generator().manual_seed(4)) + 1.0
    low, high = long_eval.interval(values)
    assert low < values.mean().item() < high
    assert 0.15 < high - low < 0.25
