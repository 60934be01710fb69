"""A model as one program and as those of all ranks, which run as threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from specc.kernels.reference.ranks import LockstepGroup, use_group
from specc.passes.pipeline import PHASES, Phases, Pipeline
from specc.passes.program import Program, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.shard.shard import Shard
from specc.runtime.backends.eager.program import ModelProgram
from specc.sharding.shard_plan import ShardPlan
from specc.speculation.plans import SpecPlan
from tests import models
from tests.passes.modules import stored_rows
from tests.traces import trace_once

BLOCK_SIZE, NUM_BLOCKS = 16, 8
NUM_STATES, NUM_ROWS = 3, 16
# float32 sums in another order: about a hundred times less than what a wrong piece makes
TOLERANCE = 5e-5
Inputs = tuple[Tensor | None, ...]


def shard_phases(num_ranks: int) -> Phases:
    return (*PHASES, ("shard", (partial(Shard, num_ranks),)))


def fused(model: torch.nn.Module) -> Program:
    """The whole program of a model as a cut finds it."""
    program = trace_once(model, "target")
    Pipeline(PHASES).run(program)
    return program


@cache
def _known(name: str) -> tuple[torch.nn.Module, Program]:
    model = models.build_model(name)
    return model, fused(model)


def whole_weights(model: torch.nn.Module, program: Program) -> dict[str, Tensor]:
    """Key → weight of a program that is not cut."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return {weight.key: stored_rows(weight, tensors) for weight in program.weights.values()}


class ThreadRanks:
    """Ranks that are threads of this process: each call waits for all of them; see `Ranks`.

    Args:
        num_ranks: threads that call every operator in the same order, by `run`.
    """

    def __init__(self, num_ranks: int) -> None:
        self.group = LockstepGroup(num_ranks)
        self._rank = threading.local()
        self._given: list[tuple[Tensor, ...]] = [()] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=60.0)
        # bytes of each sum, as rank 0 gives them
        self.sums: list[int] = []

    def all_reduce(self, xs: Sequence[Tensor]) -> list[Tensor]:
        if self._rank.value == 0:
            self.sums.append(xs[0].nbytes)
        return self._meet(self.group.all_reduce, *xs)

    def gather_rows(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return self._meet(self.group.gather_rows, *xs)

    def from_first(self, xs: Sequence[Tensor]) -> list[Tensor]:
        return self._meet(self.group.from_first, *xs)

    def best_of_ranks(self, scores: Sequence[Tensor], tokens: Sequence[Tensor]) -> list[Tensor]:
        return self._meet(self.group.best_of_ranks, *scores, *tokens)

    def _meet(self, call: Callable[..., list[Tensor]], *own: Tensor) -> list[Tensor]:
        rank = self._rank.value
        self._given[rank] = own
        self._barrier.wait()
        found = call(*(list(values) for values in zip(*self._given, strict=True)))
        # nobody gives the next values before all have read these
        self._barrier.wait()
        return [found[rank]]

    def run(self, calls: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """What each rank's call returns; the error of the first that fails."""
        found: list[Tensor | BaseException] = [torch.empty(0)] * len(calls)

        def run(rank: int) -> None:
            self._rank.value = rank
            try:
                with torch.inference_mode():
                    found[rank] = calls[rank]()
            except BaseException as error:
                found[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(calls))]
        use_group(self)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            use_group(None)
        errors = [item for item in found if isinstance(item, BaseException)]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [item for item in found if isinstance(item, Tensor)]


@dataclass
class Both:
    """One program and its cut.

    Args:
        ranks: the same program for each rank, with its weights and caches.
        caches: of the whole one and of each rank: k and v of each layer.
        sums: bytes of each sum of the last pass of all ranks.
        states: as caches: states and replay rows of each layer that keeps some.
    """

    whole: ModelProgram
    ranks: list[ModelProgram]
    plan: ShardPlan
    caches: list[list[tuple[Tensor, Tensor]]]
    sums: Sequence[int] = ()
    states: Sequence[list[tuple[Tensor, Tensor]]] = ()

    @classmethod
    def make(cls, name: str, num_ranks: int, **changes: Any) -> Both:
        """`changes` replace fields of the model's configuration."""
        if changes:
            return cls.of(models.build_model(name, **changes), num_ranks)
        model, whole = _known(name)
        return cls.of(model, num_ranks, whole=whole)

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        num_ranks: int,
        lowering: Phases = (),
        whole: Program | None = None,
    ) -> Both:
        """`lowering` are phases of a backend, of the cut program alone; `whole` is `fused`."""
        whole = whole or fused(model)
        cut = whole.copy("target")
        Pipeline((("shard", (partial(Shard, num_ranks),)), *lowering)).run(cut)
        plan = cut.shard
        assert plan is not None
        weights = whole_weights(model, whole)
        kept = {
            constant_key(key): value for key, value in (whole.constants | cut.constants).items()
        }
        caches, states = [make_caches(whole)], [make_states(whole)]
        program_json = program_to_json(whole)
        programs = [ModelProgram(program_json, weights | kept, caches[0], states=states[0])]
        lowered = program_to_json(cut)
        for rank in range(num_ranks):
            own = {key: plan.by_key[key].take(value, rank) for key, value in weights.items()}
            own |= kept | {constant_key(c.name): c.value(rank) for c in plan.constants}
            caches.append(make_caches(cut))
            states.append(make_states(cut))
            programs.append(ModelProgram(lowered, own, caches[-1], states=states[-1]))
        return cls(programs[0], programs[1:], plan, caches, states=states)

    def run_ranks(self, inputs: Inputs) -> list[Tensor]:
        """The logits of each rank: its columns."""
        calls = [partial(program, *inputs) for program in self.ranks]
        ranks = ThreadRanks(len(calls))
        found = ranks.run(calls)
        self.sums = ranks.sums
        return found

    def logits(self, inputs: Inputs) -> Tensor:
        """Of all ranks together [R, V]."""
        parts = self.run_ranks(inputs)
        if not self.plan.cuts_vocabulary:
            for part in parts[1:]:
                # who sees all columns has to see the same ones as rank 0
                assert torch.equal(part, parts[0])
            return parts[0]
        return torch.cat(parts, 1)


def assert_alike(found: Tensor, wanted: Tensor) -> None:
    """Equal but for rounding, and the same winner wherever it wins by more than that."""
    scale = wanted.abs().max().item()
    assert (found[:, : wanted.shape[1]] - wanted).abs().max().item() < TOLERANCE * scale
    best = wanted.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 2 * TOLERANCE * scale
    assert is_clear.any()
    # columns that pad the vocabulary are among those that could win
    assert torch.equal(found.argmax(1)[is_clear], wanted.argmax(1)[is_clear])


def make_caches(program: Program) -> list[tuple[Tensor, Tensor]]:
    """Of a program's own heads; rows that nobody has written are no zeros."""
    made = []
    for layer in program.layers:
        shape = (NUM_BLOCKS, BLOCK_SIZE, layer.num_kv_heads)
        widths = layer.head_dim, layer.columns_of_values
        keys, values = (torch.full((*shape, width), 30.0) for width in widths)
        if layer.values_in_keys:
            values = keys[..., : widths[1]]
        made.append((keys, values))
    return made


def make_states(program: Program) -> list[tuple[Tensor, Tensor]]:
    """Of a program's own heads and channels; what nobody has written is noise."""
    return [
        (
            torch.full((NUM_STATES, *layer.shape), 30.0, dtype=layer.dtype),
            torch.full((NUM_STATES, NUM_ROWS, layer.columns), 30.0, dtype=layer.dtype),
        )
        for layer in program.state_layers
    ]


def with_states(inputs: Inputs, certain: Sequence[int]) -> Inputs:
    """A pass of sequences of which so many nodes each are certain; places are not in order."""
    places = torch.arange(NUM_STATES - 1, NUM_STATES - 1 - len(certain), -1)
    return (*inputs, torch.stack([places, torch.tensor(certain)], 1).int())


def prompt_inputs(prompts: Sequence[Sequence[int]]) -> Inputs:
    """Causal passes over whole prompts, logits of every token."""
    counts = [len(prompt) for prompt in prompts]
    positions = torch.cat([torch.arange(count) for count in counts])
    return (
        torch.tensor([token for prompt in prompts for token in prompt]),
        positions,
        torch.tensor([0, *counts]).cumsum(0).int(),
        positions.int(),
        torch.zeros(len(prompts), dtype=torch.int32),
        None,
        block_table(len(prompts)),
        torch.arange(sum(counts)),
    )


def tree_inputs(plan: SpecPlan, tokens: Tensor, committed: Sequence[int]) -> Inputs:
    """A pass over the nodes [B, N] of a static tree for each sequence, after its rows."""
    batch, count = tokens.shape
    lengths = torch.tensor(committed, dtype=torch.int32)
    depths = torch.tensor(plan.tree.depths, dtype=torch.int32)
    slots = lengths[:, None] + torch.arange(count, dtype=torch.int32)
    return (
        tokens.reshape(-1),
        (lengths[:, None] + depths).reshape(-1).long(),
        torch.arange(0, batch * count + 1, count, dtype=torch.int32),
        slots.reshape(-1),
        lengths,
        plan.tree.ancestor_words().repeat(batch, 1),
        block_table(batch),
        torch.arange(batch * count),
    )


def block_table(batch: int) -> Tensor:
    """Blocks of sequences, not in order."""
    return torch.arange(NUM_BLOCKS, dtype=torch.int32).flip(0).view(-1, batch).t().contiguous()
