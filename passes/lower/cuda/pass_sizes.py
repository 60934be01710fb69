"""Sizes of the passes that steps make: what code for sizes that never change has to be made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from specc.passes.step.fuse_step import StepProgram, fuse_step
from specc.passes.step.step_graph import HISTORY, PROPOSALS, VOTE_WEIGHTS
from specc.sampling.rows import Value, Word
from specc.speculation.plans import SpecPlan

# stages that call models
_STAGES = ("draft", "verify")


@dataclass(frozen=True, order=True)
class PassSizes:
    """Sizes of one pass of a model.

    Args:
        tokens: of all sequences.
        rows: that get logits.
        batch: sequences.
        words: of the ancestors of a token; 0 is a causal pass, without ancestors.
    """

    tokens: int
    rows: int
    batch: int
    words: int


def step_sizes(
    plans: Sequence[SpecPlan],
    vocab_sizes: Mapping[str, int],
    batches: Sequence[int],
    blocks_per_sequence: int,
    is_padded: bool = False,
) -> dict[str, list[PassSizes]]:
    """Sizes of every pass that a step of these plans makes, for each model, ascending.

    Args:
        vocab_sizes: model name → size; the target first.
        batches: sequences of a step.
        blocks_per_sequence: width of the block table.
        is_padded: see `fuse_step`.
    """
    found: dict[str, set[PassSizes]] = {name: set() for name in vocab_sizes}
    for plan in plans:
        # the stages that follow are those of the caches, which no model pass is in
        step = fuse_step(plan, dict.fromkeys(vocab_sizes, 0), is_padded)
        for batch in batches:
            models = {name: _Recorder(size) for name, size in vocab_sizes.items()}
            _run(step, models, batch, blocks_per_sequence)
            for name, model in models.items():
                found[name] |= model.sizes
    return {name: sorted(sizes) for name, sizes in found.items()}


def batch_sizes(max_batch: int) -> list[int]:
    """Batch sizes that the runtime captures unless it is told others: powers of two, the largest.

    Any other batch is padded to the next of these.
    """
    powers = (1 << i for i in range(max_batch.bit_length()))
    return sorted({*(size for size in powers if size < max_batch), max_batch})


class _Recorder(nn.Module):
    """Stands for a model: keeps the sizes of its passes."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self.sizes: set[PassSizes] = set()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        q_start: Tensor,
        slot: Tensor,
        cache_len: Tensor,
        ancestors: Tensor | None,
        block_table: Tensor,
        logit_rows: Tensor,
    ) -> Tensor:
        words = 0 if ancestors is None else ancestors.shape[1]
        sizes = PassSizes(tokens.shape[0], logit_rows.shape[0], cache_len.shape[0], words)
        self.sizes.add(sizes)
        return torch.empty(sizes.rows, self._vocab_size)


def _run(
    step: StepProgram, models: Mapping[str, nn.Module], batch: int, blocks_per_sequence: int
) -> None:
    """Run the stages that call models, on tensors without data."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        environment = {
            "last_tokens": torch.zeros(batch, step.plan.catch_up, dtype=torch.int64),
            "cache_len": torch.zeros(batch, dtype=torch.int32),
            "block_table": torch.zeros(batch, blocks_per_sequence, dtype=torch.int32),
            "sampling_values": torch.zeros(batch, len(Value)),
            "sampling_words": torch.zeros(batch, len(Word), dtype=torch.int64),
            HISTORY: torch.zeros(1, 1, dtype=torch.int32),
            VOTE_WEIGHTS: torch.zeros(batch, len(step.plan.drafts)),
            PROPOSALS: torch.zeros(batch, step.plan.max_depth, dtype=torch.int64),
            **step.constants,
        }
        for name in _STAGES:
            if name not in step.stages:
                continue
            graph = step.stages[name]
            inputs = [environment[n.target] for n in graph.find_nodes(op="placeholder")]
            environment |= fx.GraphModule(dict(models), graph)(*inputs)
