"""The example that tells tokens that texts repeat from new ones counts each where it is drafted."""

from __future__ import annotations

import sys

import torch

from tests.examples.head_examples import imported, tiny_target
from tests.heads import VOCAB

BOUNDARIES, CONTEXT = (2, 4, 5), 5


def test_a_token_is_copied_where_it_ends_three_that_came_before() -> None:
    rows = [[1, 2, 3, 1, 2, 3, 2, 3, 1, 2], [7, 7, 7, 7, 7, 1, 7, 7, 7, 1], [1, 2]]
    with imported("measure_copies") as module:
        for row in rows:
            wanted = [
                end >= 3 and any(row[i - 3 : i] == row[end - 3 : end] for i in range(3, end))
                for end in range(1, len(row) + 1)
            ]
            assert module.completes_gram(torch.tensor(row)).tolist() == wanted


@torch.no_grad()
def test_first_choices_are_compared_with_the_token_that_came() -> None:
    target = tiny_target()
    torch.manual_seed(2)
    with imported("measure_copies") as module:
        texts = sys.modules["head_texts"]
        prompts = torch.randint(VOCAB, (4, CONTEXT))
        tokens = texts.continue_texts(target, prompts, 24, 0.0)
        own = [
            texts.read_texts(target, row[None], BOUNDARIES, CONTEXT, torch.float32)
            for row in tokens
        ]
        head = sys.modules["eagle_head"].build_head(
            target, len(BOUNDARIES), 24, 40, 2, 1, 8, 64, torch.arange(VOCAB)
        )
        # it remembers half of the texts
        head.lm_head.weight.zero_()
        for text in own[:2]:
            known = head.unroll(text.taps[:, :-2], text.tokens[:, 1:-1], 1, 0)[0][0]
            head.lm_head.weight.index_add_(0, text.tokens[0, 2:], known)
        hits = {
            "target": lambda text: module.draft_hits(target, text),
            "head": lambda text: module.head_hits(head, text),
        }
        found = module.compare(own, hits)
        copied = {"copied": 0, "new": 0}
        right = {"copied": 0, "new": 0}
        for text in own:
            for place in range(CONTEXT + 1, text.length):
                row = text.tokens[0, : place + 1].tolist()
                grams = [tuple(row[i : i + 3]) for i in range(len(row) - 2)]
                kind = "copied" if grams[-1] in grams[:-1] else "new"
                copied[kind] += 1
                # the head knows the target up to two tokens before, and one token more
                rows = head.unroll(text.taps[:, : place - 1], text.tokens[:, 1:place], 1, 0)[0]
                right[kind] += int(head.lm_head(rows[0, -1]).argmax() == row[-1])
    # a target agrees with its own greedy text
    assert set(found["right"]["target"].values()) == {1.0}
    assert found["tokens"] == 4 * 23
    assert found["copied"] == copied["copied"]
    assert min(copied.values()) > 5
    for kind, count in copied.items():
        assert found["right"]["head"][kind] == round(right[kind] / count, 4)
    assert 0 < sum(right.values()) < found["tokens"]
