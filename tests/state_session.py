"""Sequences that a program with states computes pass by pass, as a runtime does, by the oracles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.kernels import ops
from specc.passes.program import FEATURES, STATES, Program
from specc.speculation.tree import TokenTree
from tests.passes.modules import stored_rows

BLOCK_SIZE, NUM_BLOCKS, NUM_STATES, NUM_ROWS = 4, 32, 5, 12


class Sessions:
    """Sequences of one program; what no pass has written yet is noise.

    Args:
        program: before weights are stored in blocks.
        model: whose weights it has.
        count: of sequences.
    """

    def __init__(self, program: Program, model: nn.Module, count: int = 1) -> None:
        self._program = program
        self.places = torch.randperm(NUM_STATES, generator=torch.Generator().manual_seed(2))[:count]
        self.lengths = [0] * count
        generator = torch.Generator().manual_seed(11)
        parameters: dict[str, Tensor] = dict(model.named_buffers())
        parameters |= dict(model.named_parameters(remove_duplicate=False))
        self.values: dict[str, Tensor] = {}
        for node in program.graph.find_nodes(op="placeholder"):
            name, value = str(node.target), node.meta["val"]
            if name in program.weights:
                self.values[name] = stored_rows(program.weights[name], parameters)
            elif name in program.constants:
                self.values[name] = program.constants[name]
            elif name in program.caches or name == FEATURES:
                shape = (NUM_BLOCKS * count, BLOCK_SIZE, *value.shape[2:])
                self.values[name] = 9 * torch.randn(shape, generator=generator)
            elif name in program.states:
                is_state = program.states[name][1] == "state"
                first = (NUM_STATES,) if is_state else (NUM_STATES, NUM_ROWS)
                shape = (*first, *value.shape[len(first) :])
                noise = 9 * torch.randn(shape, generator=generator)
                self.values[name] = noise.to(value.dtype)
        self._table = torch.randperm(NUM_BLOCKS * count, generator=generator).view(count, -1).int()

    def prompt(self, tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Tokens after those that are committed, which are committed themselves."""
        plain = [TokenTree(tuple(range(-1, len(part) - 1))) for part in tokens]
        logits = self._run(tokens, plain, [len(part) for part in tokens], is_causal=True)
        self.lengths = [n + len(part) for n, part in zip(self.lengths, tokens, strict=True)]
        return logits

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        tree: TokenTree,
        nodes: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """A tree after what is committed, or some nodes of it; the root is certain.

        Args:
            tokens: of all nodes of each sequence's tree.
            tree: of every sequence.
            nodes: that are fed, as in a tile; None is all.
        """
        count = len(tokens)
        return self._run(tokens, [tree] * count, [1] * count, nodes)

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these nodes of each sequence's last tree, the root first."""
        longest = max(map(len, paths))
        slots = [
            [length + node for node in path] + [-1] * (longest - len(path))
            for length, path in zip(self.lengths, paths, strict=True)
        ]
        source = torch.tensor(slots, dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        for name in self._program.caches:
            self._move(self.values[name], source)
        found: dict[int, dict[str, Tensor]] = {}
        for name, (number, part) in self._program.states.items():
            found.setdefault(number, {})[part] = self.values[name][None]
        for number, layer in enumerate(self._program.state_layers):
            slabs = found[number]["state"], found[number]["rows"]
            given = *slabs, source, lengths, self._states([1] * len(paths))
            if layer.kind == "conv":
                ops.fold_conv(*given)
            else:
                sizes = {"key_heads": layer.key_heads, "has_beta": layer.has_beta}
                ops.fold_recurrence(*given, **sizes)
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths, strict=True)]

    def rows(self, name: str) -> list[Tensor]:
        """What each sequence has committed in a cache."""
        cache = self.values[name]
        return [
            torch.stack([self._row(cache, b, slot) for slot in range(length)])
            for b, length in enumerate(self.lengths)
        ]

    def states(self) -> dict[str, Tensor]:
        """What is kept of the sequences, by name of the input."""
        return {
            name: self.values[name][self.places].clone()
            for name, (_, part) in self._program.states.items()
            if part == "state"
        }

    def _states(self, certain: Sequence[int]) -> Tensor:
        return torch.stack([self.places, torch.tensor(certain)], 1).int()

    def _move(self, cache: Tensor, source: Tensor) -> None:
        for b, row in enumerate(source.tolist()):
            kept = [self._row(cache, b, slot).clone() for slot in row if slot >= 0]
            for i, value in enumerate(kept):
                self._row(cache, b, self.lengths[b] + i).copy_(value)

    def _row(self, cache: Tensor, b: int, slot: int) -> Tensor:
        return cache[int(self._table[b, slot // BLOCK_SIZE]), slot % BLOCK_SIZE]

    def _run(
        self,
        tokens: Sequence[Sequence[int]],
        trees: Sequence[TokenTree],
        certain: Sequence[int],
        nodes: Sequence[int] | None = None,
        is_causal: bool = False,
    ) -> list[Tensor]:
        picked = [list(range(tree.num_nodes) if nodes is None else nodes) for tree in trees]
        ids, positions, slots, words = [], [], [], []
        for part, tree, fed, length in zip(tokens, trees, picked, self.lengths, strict=True):
            ids += [part[node] for node in fed]
            positions += [length + tree.depths[node] for node in fed]
            slots += [length + node for node in fed]
            words.append(tree.ancestor_words()[fed])
        counts = [len(fed) for fed in picked]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        inputs: dict[str, Any] = {
            "tokens": torch.tensor(ids),
            "positions": torch.tensor(positions),
            "q_start": torch.tensor(starts, dtype=torch.int32),
            "slot": torch.tensor(slots, dtype=torch.int32),
            "cache_len": torch.tensor(self.lengths, dtype=torch.int32),
            "ancestors": None if is_causal else torch.cat(words),
            "block_table": self._table,
            "logit_rows": torch.arange(len(ids)),
            STATES: self._states(certain),
        }
        placeholders = self._program.graph.find_nodes(op="placeholder")
        values = [
            self.values[x.target] if x.target in self.values else inputs[x.target]
            for x in placeholders
        ]
        with torch.no_grad():
            logits = fx.Interpreter(self._program.graph_module).run(*values)
        return list(logits.split(counts))
