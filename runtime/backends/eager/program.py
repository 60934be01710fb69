"""A model's graph, or its segments, as torch runs them, with weights and caches bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json
from specc.artifact.segments import SegmentedModel
from specc.errors import EngineError
from specc.runtime.backends.eager.rehearsal import Rehearsal, cannot_run
from specc.runtime.backends.program_files import (
    bind_weights,
    check_program,
    place,
    slab_of,
    takes_adapters,
    takes_mass,
    takes_states,
)

_DO = "compile the engine again"
# of a program, before what only some take
_NUM_INPUTS = 8


class ModelProgram(nn.Module):
    """A model's graph with its weights and caches bound.

    Args:
        program: content of `program.json`.
        weights: key → tensor of each weight and constant input.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
        device: that weights and caches lie on.
        states: per layer that keeps some, states [places, …] and replay rows [places, R, W].
        rehearses: its graph is somebody else's, and stays as it is: look before it runs whether it
            can, and what it takes.
    Raises:
        EngineError: an input has no weight, or one of another shape or dtype.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        device: torch.device | str = "cpu",
        rehearses: bool = False,
        states: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__()
        check_program(program, len(caches), len(states))
        self.name: str = program["name"]
        self.weights = weights
        # plain lists: as parameters or buffers, nn.Module would list and move the mapped file
        self._weights: list[Tensor] = bind_weights(program, weights)
        # caches and states, in the order of the inputs
        bound = (slab_of(entry, caches, states) for entry in program["inputs"])
        self._caches: list[Tensor] = [slab for slab in bound if slab is not None]
        self.quantized_shapes: dict[str, tuple[int, int]] = {
            entry["name"]: (entry["quantized_of"][0], entry["quantized_of"][1])
            for entry in program["inputs"]
            if "quantized_of" in entry
        }
        self._no_mass = [torch.empty(1, 0, device=device)] if takes_mass(program) else []
        self._has_adapters = takes_adapters(program)
        self._num_inputs = _NUM_INPUTS + takes_states(program) + self._has_adapters
        graph = graph_from_json(program["graph"])
        taken = len(graph.graph.find_nodes(op="placeholder"))
        if taken != len(program["inputs"]):
            raise EngineError(
                f"{self.name} has {len(program['inputs'])} inputs, its graph takes {taken}",
                "as many",
                _DO,
            )
        self._graph = place(graph, torch.device(device))
        # a segment that is not the last one returns hidden states, and reads no rows of logits
        read = self.graph.find_nodes(op="placeholder")[len(self._weights) :][:_NUM_INPUTS]
        self._makes_logits = len(read) == _NUM_INPUTS and bool(read[-1].users)
        # of a rehearsal, without values
        self._logits: Tensor | None = None
        self._rehearsal: Rehearsal | None = None
        if rehearses:
            self._rehearsal = Rehearsal(self.name, self.graph, bound=self._weights)

    @property
    def graph(self) -> fx.Graph:
        return self._graph.graph

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights, constants and caches by the names of the graph's inputs."""
        names = [node.target for node in self.graph.find_nodes(op="placeholder")]
        first = len(names) - len(self._caches)
        return {
            **dict(zip(names, self._weights, strict=False)),
            **dict(zip(names[first:], self._caches, strict=True)),
        }

    @property
    def dtype(self) -> torch.dtype:
        """That of keys and values, and of what products read."""
        return self._caches[0].dtype if self._caches else torch.float32

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
        *more: Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """One pass over the flat tokens of all sequences; writes their K and V to the caches.

        Args:
            tokens: [Nt] int64.
            positions: [Nt] int64.
            q_start: [B + 1] int32; sequence b owns tokens q_start[b] … q_start[b + 1] - 1.
            slot: [Nt] int32 cache row of each token, -1 for none.
            cache_len: [B] int32 committed rows.
            ancestors: [Nt, W] int64, or None for a causal pass.
            block_table: [B, n] int32.
            logit_rows: [R] int64 flat rows that get logits.
            more: `states` [B, 2] int32 of programs that take them, see
                `specc.runtime.execution.state_rows`; then, of those that take them, the adapter
                [Nt, 1] int32 of each token, without which none has one; then the mass [M, n]
                float32, changed; without it nobody votes. See `block_mass_reference`. In its place
                heads take [Nt, 2] int32: the row of the target's hidden states that each token
                reads, and that of what the head has kept itself; one of them is -1. So do block
                drafters, of which row j of a block has -1 and -1 - j.
            hidden: of a segment of a model that is not its first: what the one before it returned.
        Returns:
            [R, V] logits; of a segment that is not the last, what the next one takes as `hidden`.
        """
        given = [tokens, positions, q_start, slot, cache_len, ancestors, block_table, logit_rows]
        inputs = self._inputs([*given, *more], hidden)
        if self._rehearsal is None:
            # not the call of the module, which drops the traceback of an error and prints it
            return self._graph.forward(*self._weights, *inputs)
        self._rehearsal.check(inputs)
        try:
            return self._graph.forward(*self._weights, *inputs)
        except Exception as error:
            raise cannot_run(self.name, error) from error

    def rehearse(self, *given: Tensor | None, hidden: Tensor | None = None) -> Any:
        """`forward` on the meta device.

        In full once: of other calls only the number of rows is another one, and whatever calls
        this before a step calls `forward` in it, which looks at the sizes of the program itself.
        """
        rows = given[_NUM_INPUTS - 1]
        if self._logits is not None and rows is not None and hidden is None:
            return self._logits.new_empty(rows.shape[0], *self._logits.shape[1:])
        rehearsal = self._rehearsal or Rehearsal(self.name, self.graph, bound=self._weights)
        inputs = self._inputs(given, hidden)
        made = rehearsal.run([None if x is None else x.to("meta") for x in inputs])
        if self._makes_logits and isinstance(made, Tensor):
            self._logits = made
        return made

    def _inputs(self, given: Sequence[Tensor | None], hidden: Tensor | None) -> list[Tensor | None]:
        """What the graph takes after its weights."""
        if self._has_adapters and len(given) == self._num_inputs - 1 and given[0] is not None:
            none = torch.full((given[0].shape[0], 1), -1, dtype=torch.int32, device=given[0].device)
            given = [*given, none]
        return [
            *given,
            *(self._no_mass if len(given) == self._num_inputs else []),
            *([] if hidden is None else [hidden]),
            *self._caches,
        ]


class SegmentedProgram(nn.Module):
    """As `ModelProgram`, of a model in segments: each runs on what the one before it hands on.

    Args:
        name: of the model.
        segments: in order; each is called as `ModelProgram.forward`, and all but the first with
            `hidden`.
    """

    # key → tensor, as of `ModelProgram`: of the whole model
    weights: Mapping[str, Tensor]

    def __init__(self, name: str, segments: Sequence[ModelProgram]) -> None:
        super().__init__()
        self.name = name
        self.segments = list(segments)

    @classmethod
    def bind(
        cls,
        model: SegmentedModel,
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        rehearses: bool = False,
        states: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> SegmentedProgram:
        """Programs of all segments.

        Args:
            model: the segments.
            weights: key → tensor of each weight and constant.
            caches: per layer of the whole model, the k and v cache [blocks, block_size, HK, D].
            rehearses: see `ModelProgram`.
            states: per layer of the whole model that keeps some, see `ModelProgram`.
        Raises:
            EngineError: an input has no weight, or one of another shape or dtype.
        """
        segments: list[ModelProgram] = []
        for number, segment in enumerate(model.segments):
            own = [caches[layer] for layer in segment.layers]
            kept = [states[layer] for layer in segment.states]
            program = model.program(number)
            segments.append(ModelProgram(program, weights, own, "cpu", rehearses, kept))
        made = cls(model.name, segments)
        made.weights = weights
        return made

    @classmethod
    def load(
        cls,
        path: Path,
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        rehearses: bool = False,
        states: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> SegmentedProgram:
        """See `bind`; `path` is the file of the segments."""
        return cls.bind(SegmentedModel.read(path), weights, caches, rehearses, states)

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Inputs and result are those of `ModelProgram.forward`, of a whole model."""
        first, *others = self.segments
        value = first(*inputs)
        for segment in others:
            value = segment(*inputs, hidden=value)
        return value

    def rehearse(self, *inputs: Tensor | None) -> Any:
        """`forward` on the meta device."""
        value = None
        for segment in self.segments:
            value = segment.rehearse(*inputs, hidden=value)
        return value
