"""Controls along trees: against each path alone by transformers' processors, and accepted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specc.errors import RequestError
from specc.runtime.constraints.grammar_masks import TreeMasks, has_masks, mask_roots
from specc.runtime.constraints.logit_controls import LogitControls, bad_word_tokens
from specc.runtime.scheduling.request import Request
from specc.sampling.params import SamplingParams
from specc.sampling.rows import Rule
from specc.speculation.plans import OFF, SpecPlan
from tests.drafts import PLANS
from tests.runtime.constraints.test_grammar_masks import accept, draw, draw_tree, path_to

VOCAB, EOS = 12, frozenset({10})
# of one token, of several, and two that begin alike
BAD = [(3,), (1, 2), (1, 1, 4), (1, 1, 5), (2, 2, 2, 2)]
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {0: 2.5, 4: -100.0}},
    "allowed": {"allowed_token_ids": [0, 1, 2, 5, 10]},
    "words": {"bad_words": ["as in BAD"]},
    "length": {"min_tokens": 6, "stop_token_ids": [7]},
    "all": {
        "logit_bias": {1: 1.0, 2: 1.0, 11: 100.0},
        "allowed_token_ids": [1, 2, 4, 5, 7, 10],
        "bad_words": ["as in BAD"],
        "min_tokens": 5,
        "stop_token_ids": [7],
    },
}


def make_request(
    prompt: Sequence[int], output: Sequence[int] = (), vocab_size: int = VOCAB, **options: Any
) -> Request:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 64, **options})
    controls = None
    if params.has_controls:
        ends = {*EOS, *params.stop_token_ids}
        controls = LogitControls(params, BAD if params.bad_words else (), vocab_size, ends)
    request = Request("0", list(prompt), params, max_seq_len=128, controls=controls)
    request.token_ids += output
    return request


def processed(params: SamplingParams, output: Sequence[int], logits: Tensor) -> Tensor:
    """What transformers makes of a row [V] of logits after an output."""
    found = LogitsProcessorList()
    if params.logit_bias:
        found.append(SequenceBiasLogitsProcessor({(i,): b for i, b in params.logit_bias.items()}))
    if params.allowed_token_ids:
        banned = [i for i in range(len(logits)) if i not in params.allowed_token_ids]
        found.append(SuppressTokensLogitsProcessor(banned, device="cpu"))
    if params.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in BAD]))
    if params.min_tokens:
        ends = [*EOS, *params.stop_token_ids]
        found.append(MinNewTokensLengthLogitsProcessor(0, params.min_tokens, ends, device="cpu"))
    ids = torch.tensor([list(output)], dtype=torch.int64)
    return found(ids, logits[None])[0]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(
    "plan",
    [OFF, PLANS[0], SpecPlan.from_widths((2, 1, 1)), PLANS[2], PLANS[4]],
    ids=lambda plan: plan.name,
)
def test_every_node_has_the_logits_of_its_path_alone(kind: str, plan: SpecPlan) -> None:
    dice = random.Random(kind)
    size, num_changed = plan.num_nodes, 0
    for num_output in (1, 2, 4, 9):
        # the prompt's end is the beginning of a bad word, and does not count
        output = [dice.choice([1, 1, 2, 5]) for _ in range(num_output)]
        request = make_request([1, 1], output, **OPTIONS[kind])
        free = make_request([1, 1], output)
        parents = list(plan.tree.parents) if plan.is_static else draw_tree(dice, size)
        tokens = [[dice.choice([1, 1, 1, 2, 2, 4, 7, 10]) for _ in range(size)] for _ in range(3)]
        logits = torch.randn(3 * size, VOCAB)
        values = {"tokens": torch.tensor(tokens), "logits": logits.clone()}
        if not plan.is_static:
            values["parents"] = torch.tensor([parents] * 3, dtype=torch.int32)
        requests = [request, free, request]
        TreeMasks(requests, plan)(values)
        found = values["logits"].view(3, size, VOCAB)
        before = logits.view(3, size, VOCAB)
        assert torch.equal(found[1], before[1])
        for b in (0, 2):
            for node in range(size):
                path = path_to(node, parents)
                if path is not None:
                    whole = [*output, *(tokens[b][i] for i in path)]
                    wanted = processed(request.params, whole, before[b, node])
                    torch.testing.assert_close(found[b, node], wanted, rtol=0, atol=0)
                    num_changed += not torch.equal(wanted, before[b, node])
    assert num_changed > 2


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_first_token_follows_no_output(kind: str) -> None:
    """Whatever the prompt ends with."""
    logits = torch.randn(2, VOCAB)
    found = mask_roots(logits, [make_request([1, 1]), make_request([1, 1], **OPTIONS[kind])])
    assert torch.equal(found[0], logits[0])
    wanted = processed(
        SamplingParams(max_tokens=64, **{"temperature": 0, **OPTIONS[kind]}), [], logits[1]
    )
    torch.testing.assert_close(found[1], wanted, rtol=0, atol=0)


def test_a_least_length_that_was_reached_needs_no_hook() -> None:
    assert has_masks([make_request([0], [1, 1], min_tokens=3)])
    assert not has_masks([make_request([0], [1, 1, 1], min_tokens=3)])
    assert has_masks([make_request([0], [1, 1, 1], min_tokens=3, logit_bias={1: 1})])


def test_logits_of_half_precision_keep_their_type() -> None:
    """A bias is added to what they are, and the sum rounded once."""
    logits = torch.randn(1, VOCAB).bfloat16()
    found = mask_roots(logits, [make_request([0], logit_bias={2: 0.3})])
    assert found.dtype == torch.bfloat16
    wanted = logits.float()
    wanted[0, 2] += torch.tensor(0.3)
    assert torch.equal(found, wanted.bfloat16())


# the default tier has it with masks of grammars: test_grammar_masks.py
@pytest.mark.slow
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name.lower())
def test_tokens_are_distributed_as_the_changed_target(rule: Rule) -> None:
    """Two levels: the second depends on what the first has drawn, and how deep it is."""
    batch, options = 800, OPTIONS["all"] | {"temperature": 1.0, "min_tokens": 2}
    request = make_request([0], [1], **options)
    draft = torch.randn(VOCAB, VOCAB)
    # ends are likely, and allowed at the second place alone
    draft[:, [7, 10]] += 1.5
    draft[1] = torch.randn(VOCAB)
    draft[:, [1, 2]] += 1.5
    target = draft + torch.randn(VOCAB, VOCAB)
    seeds = range(5000, 5000 + batch)
    first = draft[1].repeat(batch, 1)
    children = draw(first, 2, 1.0, rule, seeds)
    second = draft[children.flatten()]
    below = torch.ops.specc.draft_children(
        second, 1, torch.full((batch,), 3, dtype=torch.int32), torch.arange(2).int(), 1,
        *_rows(batch, rule, seeds),
    )[0].view(batch, 2)  # fmt: skip
    tokens = torch.cat([torch.ones(batch, 1, dtype=torch.int64), children, below], dim=1)
    parents = [-1, 0, 0, 1, 2]
    logits = target[tokens.flatten()]
    values = {"tokens": tokens, "logits": logits, "parents": torch.tensor([parents] * batch)}
    TreeMasks([request] * batch, SpecPlan.from_widths((2, 1)))(values)
    q_rows = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
    above = torch.tensor([parents] * batch, dtype=torch.int32)
    _, accepted, output = accept(
        values["logits"], tokens, above, 2, None, q_rows, [first, second], 1.0, rule, seeds
    )  # fmt: skip
    assert int((accepted == 1).sum()) > 0
    assert int((accepted == 2).sum()) > 0
    counts = torch.zeros(VOCAB)
    pairs = torch.zeros(VOCAB, VOCAB)
    for count, row in zip(accepted.tolist(), output.tolist(), strict=True):
        counts[row[0]] += 1
        if count:
            pairs[row[0], row[1]] += 1
    wanted = processed(request.params, [1], target[1]).softmax(0)
    assert_shares(counts, wanted)
    for token in (1, 2, 4, 5):
        if pairs[token].sum() > 30:
            assert_shares(
                pairs[token], processed(request.params, [1, token], target[token]).softmax(0)
            )
    assert pairs[:, [7, 10]].sum() > 0, "ends are drawn where they are allowed"


def _rows(batch: int, rule: Rule, seeds: Sequence[int]) -> tuple[Tensor, Tensor]:
    values = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]] * batch)
    return values, torch.tensor([[seed, 0, rule, 1] for seed in seeds])


def assert_shares(counts: Tensor, wanted: Tensor) -> None:
    """Impossible tokens never, the others within five standard deviations."""
    assert counts[wanted == 0].sum() == 0
    total = counts.sum()
    deviation = (wanted * (1 - wanted) / total).sqrt()
    assert bool(((counts / total - wanted).abs() <= 5 * deviation + 1 / total).all())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_node_that_nothing_can_follow_has_finite_logits(temperature: float) -> None:
    """No rule meets a row of -inf; the request refuses whatever is drawn there, and keeps none."""
    request = make_request([0], [1], allowed_token_ids=[1, 2], bad_words=["as in BAD"])
    options = {"allowed_token_ids": [2], "bad_words": ["as in BAD"]}
    stuck = make_request([0], [2, 2, 2], **options)
    logits = torch.randn(2, VOCAB)
    found = mask_roots(logits, [request, stuck])
    assert torch.equal(found[1], torch.zeros(VOCAB))
    assert torch.equal(found[0].isinf(), torch.tensor([i != 1 for i in range(VOCAB)]))
    for token in range(VOCAB):
        own = make_request([0], [2, 2, 2], **options)
        assert own.append([token, 2]) == 0
        assert (own.finish_reason, own.output_token_ids) == ("error", [2, 2, 2])
        assert own.stop_reason == "allowed_token_ids and bad_words leave no token that can follow"


def test_what_is_refused_ends_an_output_after_what_was_taken() -> None:
    request = make_request([0], [1], bad_words=["as in BAD"])
    assert request.append([1, 4, 0]) == 1
    assert (request.output_token_ids, request.finish_reason) == ([1, 1], "error")
    first = make_request([0], allowed_token_ids=[1])
    first.append_first(2)
    assert (first.output_token_ids, first.finish_reason) == ([], "error")
    assert first.stats.num_output_tokens == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [1, VOCAB]}, "allowed_token_ids"),
        ({"allowed_token_ids": [10], "min_tokens": 1}, "min_tokens and allowed_token_ids that"),
        ({"allowed_token_ids": [3], "bad_words": ["x"]}, "allowed_token_ids and bad_words that"),
    ],
    ids=repr,
)
def test_what_nothing_can_begin_with_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        make_request([0], **options)
    assert says in caught.value.found


def word_tokenizer() -> Tokenizer:
    pieces = ["a", "b", "c", "Ġ", "ab", "Ġa", "Ġab", "Ġabc", "d", "e"]
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "ab"), ("Ġab", "c")]
    made = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return made


def test_words_are_tokenized_alone_and_after_a_space() -> None:
    made = word_tokenizer()
    # "abc" has other tokens after a space, "d" has the same ones after a space of its own
    assert bad_word_tokens(["abc"], made, 10) == [(4, 2), (7,)]
    assert bad_word_tokens([" abc"], made, 10) == [(4, 2), (7,)]
    assert bad_word_tokens(["d", "e d"], made, 10) == [(8,), (9, 3, 8)]
    assert bad_word_tokens([], None, 10) == []


@pytest.mark.parametrize(
    ("tokenizer", "word", "vocab_size"),
    [(None, "a", 10), (word_tokenizer(), "é", 10), (word_tokenizer(), "d", 8)],
    ids=["no-tokenizer", "no-tokens", "outside"],
)
def test_words_that_have_no_tokens(tokenizer: Tokenizer, word: str, vocab_size: int) -> None:
    with pytest.raises(RequestError) as caught:
        bad_word_tokens([word], tokenizer, vocab_size)
    assert caught.value.found.startswith("bad_words=")
