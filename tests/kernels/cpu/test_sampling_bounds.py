"""What the C++ of `specc::draft_children` and `specc::accept` refuses, and what it never reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specc.sampling.rows import Rule, Word
from tests.kernels.sampling_cases import PADDING, int32, options

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def accept_args(batch: int = 2, **changes: Any) -> dict[str, Any]:
    """Arguments of `accept`, all of them good: a root, two children, one draft row."""
    values, words = options(Rule.MSS, batch, repetition=1.5)
    return {
        "logits": torch.randn(3 * batch, 40)[:, 3:20],
        "tokens": torch.arange(3 * batch).view(batch, 3),
        "parents": int32([-1, 0, 0]).expand(batch, -1),
        "max_depth": 1,
        "image": int32([0, 1, 2, 2]).expand(batch, -1),
        "q_rows": int32(-1, 0, 1, 2),
        "draft_logits": [torch.randn(batch, 17), torch.randn(2 * batch, 17)],
        "values": values,
        "words": words,
        "cache_len": torch.full((batch,), 5, dtype=torch.int32),
        "history": torch.zeros(2, 4, dtype=torch.int32),
        "block_table": int32([1, 0]).expand(batch, -1).contiguous(),
    } | changes


def children_args(batch: int = 2, **changes: Any) -> dict[str, Any]:
    values, words = options(Rule.COUPLED, batch)
    return {
        "logits": torch.randn(3 * batch, 40)[:, 3:20],
        "num_children": 2,
        "cache_len": torch.full((batch,), 5, dtype=torch.int32),
        "columns": int32(1, 3, 5),
        "depth": 1,
        "values": values,
        "words": words,
        "scored": True,
    } | changes


def test_padding_is_safe(operators):
    """Rows of padding have no tokens, no blocks and no rule; nothing of them is read."""
    args = accept_args(cache_len=int32(PADDING, -1))
    args["words"][:] = 1 << 40
    args["image"] = int32([9, 9, 9, 9], [-9, 99, 1 << 30, 0])
    args["block_table"] = int32([1 << 30, -7], [-1, 2])
    args["tokens"] = torch.full((2, 3), 1 << 60)
    path, count, output = operators.accept(**args)
    assert (path.tolist(), count.tolist()) == ([[0, -1]] * 2, [0, 0])
    assert output.tolist() == [[0, -1]] * 2
    children = children_args(cache_len=int32(PADDING, -1))
    children["words"][:] = 1 << 40
    tokens, _ = operators.draft_children(**children)
    assert ((tokens >= 0) & (tokens < 17)).all()


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.SWOR, Rule.COUPLED])
def test_tokens_that_the_vocabulary_lacks_are_never_accepted(operators, rule):
    values, words = options(rule, 2, repetition=1.5)
    tokens = torch.tensor([[17, -1, 1 << 40], [-5, 17, 1 << 31]])
    args = accept_args(tokens=tokens, values=values, words=words)
    for _ in range(5):
        args["words"][:, Word.SEED] += 1
        _, count, output = operators.accept(**args)
        assert count.tolist() == [0, 0]
        assert ((output[:, 0] >= 0) & (output[:, 0] < 17)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"logits": torch.zeros(5, 17)}, "logits is", id="too-few-rows"),
        pytest.param({"logits": torch.zeros(17, 6).T}, "logits is .* rows contiguous", id="column"),
        pytest.param({"logits": torch.zeros(6, 17).half()}, "float32 and bfloat16", id="fp16"),
        pytest.param({"num_children": 0}, "1 … V children", id="none"),
        pytest.param({"num_children": 18}, "1 … V children", id="more-than-tokens"),
        pytest.param({"cache_len": torch.zeros(2).long()}, "cache_len is .* int32", id="len-i64"),
        pytest.param({"columns": torch.zeros(3).long()}, "columns is .* int32", id="columns-i64"),
        pytest.param({"columns": int32(1, -3, 5)}, r"columns\[1\] = -3", id="negative-column"),
        pytest.param({"depth": -1}, "depth", id="negative-depth"),
        pytest.param({"values": torch.zeros(2, 5)}, "values is", id="five-values"),
        pytest.param(
            {"values": torch.zeros(2, 6).double()}, "values is .* float32", id="values-64"
        ),
        pytest.param({"values": torch.zeros(1, 6)}, "values is", id="values-of-one"),
        pytest.param({"words": torch.zeros(2, 4).int()}, "words is .* int64", id="words-i32"),
        pytest.param({"words": torch.zeros(2, 3).long()}, "words is", id="three-words"),
        pytest.param(
            {"words": torch.tensor([[0, 0, 3, 0], [0, 0, 4, 0]])},
            "rule 4 of sequence 1, needed 0 … 3",
            id="rule",
        ),
    ],
)
def test_draft_children_refuses(operators, changes, message):
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        operators.draft_children(**children_args(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"logits": torch.zeros(5, 17)}, "logits is", id="too-few-rows"),
        pytest.param({"logits": torch.zeros(17, 6).T}, "logits is .* rows contiguous", id="column"),
        pytest.param({"logits": torch.zeros(6, 17).half()}, "float32 and bfloat16", id="fp16"),
        pytest.param({"logits": torch.zeros(6, 0)}, "1 token", id="no-vocabulary"),
        pytest.param({"tokens": torch.zeros(2, 3).int()}, "tokens is .* int64", id="tokens-i32"),
        pytest.param({"parents": torch.zeros(2, 3).long()}, "parents is .* int32", id="parents"),
        pytest.param({"parents": torch.zeros(1, 3).int()}, "parents is", id="parents-of-one"),
        pytest.param({"max_depth": -1}, "max_depth", id="negative-depth"),
        pytest.param({"image": torch.zeros(2, 4).long()}, "image is .* int32", id="image-i64"),
        pytest.param({"image": torch.zeros(1, 4).int()}, "image is", id="image-of-one"),
        pytest.param(
            {"image": int32([0, 1, 2, 2], [0, 1, 3, 2])}, r"image\[1\]\[2\] = 3", id="no-such-node"
        ),
        pytest.param({"q_rows": int32(-1, 0, 1)}, "q_rows has", id="q_rows-short"),
        pytest.param({"q_rows": torch.zeros(4).long()}, "q_rows is .* int32", id="q_rows-i64"),
        pytest.param(
            {"q_rows": int32(-1, 0, 1, 3)}, r"q_rows\[3\] = 3, needed less than 3", id="no-such-row"
        ),
        pytest.param({"draft_logits": []}, r"q_rows\[1\] = 0, needed less than 0", id="no-drafts"),
        pytest.param({"draft_logits": [torch.zeros(3, 17)]}, "draft_logits are", id="draft-rows"),
        pytest.param({"draft_logits": [torch.zeros(2, 16)]}, "draft_logits are", id="draft-vocab"),
        pytest.param(
            {"draft_logits": [torch.zeros(4, 17).half()]}, "float32 and bfloat16", id="draft-fp16"
        ),
        pytest.param({"values": torch.zeros(2, 5)}, "values is", id="five-values"),
        pytest.param({"words": torch.zeros(2, 4).int()}, "words is .* int64", id="words-i32"),
        pytest.param({"cache_len": int32(5)}, "agree", id="cache_len-of-one"),
        pytest.param({"history": torch.zeros(2, 4).long()}, "history is .* int32", id="history-64"),
        pytest.param({"history": torch.zeros(2, 0).int()}, "1 row", id="history-empty"),
        pytest.param({"block_table": torch.zeros(2, 2).long()}, "block_table is", id="table-i64"),
        pytest.param({"cache_len": int32(5, 9)}, r"cache_len\[1\] = 9", id="beyond-the-blocks"),
        pytest.param(
            {"block_table": int32([1, 0], [1, 2])}, r"block_table\[1\]\[1\] = 2", id="no-such-block"
        ),
        pytest.param(
            {"words": torch.tensor([[0, 0, 3, 0], [0, 0, -1, 0]])},
            "rule -1 of sequence 1, needed 0 … 3",
            id="rule",
        ),
    ],
)
def test_accept_refuses(operators, changes, message):
    with pytest.raises(RuntimeError, match=f"specc: .*{message}"):
        operators.accept(**accept_args(**changes))


def test_history_is_read_only_for_penalties(operators):
    """Off them, block tables may hold anything."""
    values, words = options(Rule.MSS, 2)
    args = accept_args(values=values, words=words, block_table=int32([99, 99], [-1, -1]))
    operators.accept(**args)
    operators.accept(**args | {"cache_len": int32(1000, 1000)})
