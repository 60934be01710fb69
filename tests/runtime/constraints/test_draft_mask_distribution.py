"""Tokens of requests with grammars are distributed as without drafts that obey them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specc.runtime.constraints.draft_masks import DraftMasks
from specc.runtime.constraints.grammar_masks import mask_rows, tree_masks
from specc.runtime.constraints.grammars import Grammars
from specc.sampling.rows import Rule
from specc.sampling.structured import StructuredOutputsParams
from tests.native_library import load_native
from tests.runtime.constraints.test_grammar_masks import (
    CHOICES,
    EOS,
    VOCAB,
    BruteForce,
    byte_tokenizer,
)
from tests.tiers import every


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(byte_tokenizer(["<|end|>", "<|eot|>"]), VOCAB, EOS)


@pytest.fixture(scope="module")
def native_operators() -> Any:
    load_native()
    return torch.ops.specc_cpu


class Toy:
    """One step of a draft with the tree 2, 2 for many sequences, whose target is a table.

    Draft and target like forbidden tokens as much as allowed ones. Level by level as a step does:
    mask, draw, feed.
    """

    def __init__(self, grammars: Grammars, operators: Any, rule: Rule, first_seed: int) -> None:
        self.batch, self.operators, self.rule = 2000, operators, rule
        values = torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]] * self.batch)
        words = torch.tensor([[first_seed + b, 0, rule, 1] for b in range(self.batch)])
        self.sampling = (values, words)
        self.lengths = torch.full((self.batch,), 3, dtype=torch.int32)
        self.own = [
            grammars.start(StructuredOutputsParams(choice=CHOICES)) for _ in range(self.batch)
        ]
        self.masks = DraftMasks(self.own)
        generator = torch.Generator().manual_seed(5)
        # after token v
        self.target, self.draft = torch.randn(2, VOCAB, VOCAB, generator=generator)
        liked = byte_tokenizer().encode("abcé xyz").ids
        for table in (self.target, self.draft):
            table[:, liked] += 5.0
            table[:, [*EOS]] += 5.0

    def levels(self, keeps_whole: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Tokens [B, 7] and what is kept for q."""
        batch, lengths = self.batch, self.lengths
        root = torch.zeros(batch, 1, dtype=torch.int64)
        tokens, kept = [root], []
        for depth, (count, nodes, columns) in enumerate(((1, [0], [1]), (2, [1, 2], [3, 5]))):
            fed = tokens[-1]
            words = torch.tensor([[1]] if depth == 0 else [[0b011], [0b101]])
            slots = lengths[:, None] + torch.tensor(nodes, dtype=torch.int32)
            logits = self.draft[fed.flatten()]
            masked = self.masks(
                (
                    fed.flatten(),
                    None,
                    torch.arange(0, batch * count + 1, count),
                    slots.flatten(),
                    lengths,
                    words.repeat(batch, 1),
                    None,
                    torch.arange(batch * count),
                ),
                logits,
            )
            kept.append(logits if keeps_whole else masked)
            column = torch.tensor(columns, dtype=torch.int32)
            drawn = self.operators.draft_children(
                masked, 2, lengths, column, depth, *self.sampling, False
            )[0]
            tokens.append(drawn.view(batch, 2 * count))
        return torch.cat(tokens, dim=1), kept

    def outputs(self, keeps_whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted tokens of each sequence, and its output [B, 3]."""
        tokens, kept = self.levels(keeps_whole)
        parents = [-1, 0, 0, 1, 1, 2, 2]
        above = torch.tensor([parents] * self.batch, dtype=torch.int32)
        rows: dict[int, bytes] = {}
        for b, (grammar, row) in enumerate(zip(self.own, tokens.tolist(), strict=True)):
            found = tree_masks(grammar, row, parents)
            rows |= {b * 7 + node: mask for node, mask in found.items()}
        logits = mask_rows(self.target[tokens.flatten()], rows)
        q_rows = torch.tensor([-1, 0, 0, 1, 1, 2, 2], dtype=torch.int32)
        history = torch.zeros(1, 16, dtype=torch.int32)
        table = torch.zeros(self.batch, 1, dtype=torch.int32)
        _, accepted, output = self.operators.accept(
            logits, tokens, above, 2, None, q_rows, kept, *self.sampling,
            self.lengths, history, table,
        )  # fmt: skip
        return accepted, output

    def deviations(self, keeps_whole: bool = False) -> Iterator[float]:
        """Of the first token, and of the second after each first one: in standard deviations."""
        oracle = BruteForce(byte_tokenizer(["<|end|>", "<|eot|>"]))
        accepted, output = self.outputs(keeps_whole)
        for place, path in ((0, ()), *((1, (v,)) for v in oracle.allowed(()))):
            is_there = accepted >= place
            for depth, token in enumerate(path):
                is_there &= output[:, depth] == token
            found, count = output[is_there, place], int(is_there.sum())
            # delta proposes the same two after each node
            assert count > 20 or (place and self.rule == Rule.DELTA)
            if not count:
                continue
            allowed = sorted(oracle.allowed(path))
            shares = self.target[path[-1] if path else 0, allowed].softmax(0)
            for token, share in zip(allowed, shares.tolist(), strict=True):
                spread = (share * (1 - share) / count) ** 0.5
                off = abs((found == token).float().mean().item() - share)
                yield off / spread if spread else off * 1e9


@pytest.mark.parametrize("rule", every(2, Rule), ids=lambda rule: rule.name.lower())
def test_tokens_are_distributed_as_in_plain_decoding(grammars, native_operators, rule) -> None:
    assert max(Toy(grammars, native_operators, rule, 7000).deviations()) < 4.5


@pytest.mark.parametrize("rule", [Rule.MSS, Rule.SWOR], ids=["mss", "swor"])
def test_whole_logits_kept_for_q_are_noticed(grammars, native_operators, rule) -> None:
    """What was drawn from is masked: acceptance by anything else puts out something else."""
    assert max(Toy(grammars, native_operators, rule, 7000).deviations(keeps_whole=True)) > 9
