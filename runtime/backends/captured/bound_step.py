"""A step for one batch size: its parts, and as functions without arguments, for graphs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from specc.kernels.cuda.launch import even_tokens, unfiltered
from specc.runtime.backends.failed_operator import OperatorError
from specc.runtime.backends.program_files import last_used

_SIZE = torch.ops.aten.sym_size.int
_STARTS = torch.ops.aten.arange.start_step
# place of `q_start` among the inputs of a model
_Q_START = 2


class StepParts(NamedTuple):
    """Stages, and static tensors for B sequences.

    Args:
        stages: name → graph, on the device.
        constants: name → tensor of the plan's tree.
        inputs: name → static tensor: last_tokens, cache_len and block_table of B rows, slabs; where
            parts of trees are verified, `live` [B] int32, how many nodes a sequence may have.
        results: [B, 2 + P + drafts] int64, written by the last stage: num_accepted,
            output_tokens, next_cache_len, then the length of each draft.
        draft_lens: names of these lengths.
    """

    stages: Mapping[str, fx.GraphModule]
    constants: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    results: Tensor
    draft_lens: tuple[str, ...] = ()


class BoundStep:
    """A step whose inputs are static tensors of one size.

    What follows from the batch size and the tree alone is computed once, here: a replay must not
    repeat it. `parts` are the stages as functions; run in their order they are one step, which
    leaves its results and the state that the next step starts from.

    Args:
        is_filtered: some row may have filters, or try proposals one by one; without, what finds out
            which is not launched.
    """

    def __init__(self, given: StepParts, is_filtered: bool = True) -> None:
        stages, constants, inputs, results, draft_lens = given
        self._is_filtered = is_filtered
        # name → value; what a stage that was captured by itself has put here keeps its address
        self.environment: dict[str, Any] = {**constants, **inputs}
        self._results = results
        self._draft_lens = draft_lens
        fixed = set(constants)
        self._stages = []
        with torch.inference_mode():
            for graph in stages.values():
                stage = BoundStage(graph, self.environment, fixed, set(inputs))
                fixed |= stage.folded_outputs
                self._stages.append(stage)
        self.fixed_names = frozenset(fixed)
        self._lasting_names = self.fixed_names | inputs.keys()

    @property
    def parts(self) -> list[Callable[[], None]]:
        """The stages; the last one also leaves the results.

        What they put into the environment stays there: a hook reads it between two of them.
        """
        *first, last = [stage.run for stage in self._stages]

        def finish() -> None:
            last()
            self._leave_results()

        return [torch.inference_mode()(part) for part in (*first, finish)]

    def run(self) -> None:
        """The whole step; what its stages hand to each other is let go again.

        Raises:
            OperatorError: an operator failed.
        """
        try:
            self.run_parts()
        finally:
            self.let_go()

    def run_parts(self, first: int = 0, last: int | None = None) -> None:
        """Some of the parts, and what they put into the environment stays there.

        Raises:
            OperatorError: an operator failed.
        """
        with unfiltered(not self._is_filtered):
            for part in self.parts[first:last]:
                part()

    def let_go(self) -> None:
        """Of what parts have put into the environment."""
        # nobody reads it after the step, and captured memory would stay taken for it
        for name in self.environment.keys() - self._lasting_names:
            del self.environment[name]

    def take(self, values: Mapping[str, Any]) -> None:
        """Put what another step has left into the environment, where it stays after a run."""
        self.environment |= values
        self._lasting_names = self._lasting_names | values.keys()

    def _leave_results(self) -> None:
        env = self.environment
        lens = [env[name] for name in self._draft_lens]
        # of one draft, a view: no launch
        draft_lens = torch.stack(lens) if len(lens) > 1 else lens[0][None] if lens else None
        torch.ops.specc.leave_step(
            self._results,
            *(env[name] for name in ("last_tokens", "cache_len", "num_accepted", "output_tokens")),
            *(env[name] for name in ("next_cache_len", "next_last_tokens")),
            draft_lens,
        )


class HookValues:
    """Values of real rows alone; a new value is copied into place.

    Args:
        bound: the step, whose environment holds the values.
        bucket: that it is bound for.
        batch: its requests.
        places: their rows; None is their order.
    """

    def __init__(
        self, bound: BoundStep, bucket: int, batch: int, places: Sequence[int] | None = None
    ) -> None:
        self._bound = bound
        self._bucket = bucket
        self._batch = batch
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        value = self._bound.environment[name]
        if self._is_common(name):
            return value
        # logits have a row for each node of each request
        if self._places is None:
            return value[: value.shape[0] // self._bucket * self._batch]
        return value[self._rows(value)]

    def __setitem__(self, name: str, value: Tensor) -> None:
        if self._places is None or self._is_common(name):
            self[name].copy_(value)
        else:
            whole = self._bound.environment[name]
            whole[self._rows(whole)] = value

    def _is_common(self, name: str) -> bool:
        return name in self._bound.fixed_names or bool(name.partition("_slab_")[1])

    def _rows(self, value: Tensor) -> Tensor:
        assert self._places is not None
        each = value.shape[0] // self._bucket
        rows = [place * each + i for place in self._places for i in range(each)]
        return torch.tensor(rows, device=value.device)


class BoundStage:
    """One stage: values that are known now, and the calls that are left.

    `run` is `begin`, `run_calls` over all of them, and `leave`.

    Args:
        environment: read now and at every run; gets the outputs.
        fixed: names in it whose values never change.
        inputs: names in it whose tensors never change, though their content does.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        environment: dict[str, Any],
        fixed: set[str],
        inputs: set[str],
    ) -> None:
        self._environment = environment
        self._known: dict[fx.Node, Any] = {}
        self._late: list[fx.Node] = []
        self._calls: list[tuple[fx.Node, Callable[..., Any]]] = []
        # nodes whose values are the same at every run
        self.constant = constant = set[fx.Node]()
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                if node.target in fixed | inputs:
                    self._known[node] = environment[node.target]
                else:
                    self._late.append(node)
                if node.target in fixed:
                    constant.add(node)
            elif node.op == "output":
                self._outputs: Mapping[str, fx.Node] = node.args[0]
            else:
                module = node.op == "call_module"
                function = graph.get_submodule(node.target) if module else node.target
                # a size is known as soon as the tensor is, whatever it holds
                is_size = node.target is _SIZE and node.args[0] in self._known
                if is_size or (not module and _is_pure(node, constant)):
                    constant.add(node)
                    self._known[node] = _call(node, function, self._known)
                else:
                    self._calls.append((node, function))
        kept = {*self._known, *self._late, *self._outputs.values()}
        self._last_used = last_used([node for node, _ in self._calls], kept)
        known_outputs = {k: n for k, n in self._outputs.items() if n in constant}
        environment |= {name: self._known[node] for name, node in known_outputs.items()}
        self.folded_outputs = set(known_outputs)

    def run(self) -> None:
        """The whole stage: its outputs go to the environment."""
        values = self.begin()
        self.run_calls(values, 0, len(self._calls))
        self.leave(values)

    def begin(self) -> dict[fx.Node, Any]:
        """What is there before the first call."""
        return self._known | {node: self._environment[node.target] for node in self._late}

    def run_calls(self, values: dict[fx.Node, Any], first: int, last: int) -> None:
        """Some of the calls: what they make is added to the values, what is used up leaves them.

        Raises:
            OperatorError: an operator failed.
        """
        for node, function in self._calls[first:last]:
            with even_tokens(is_even_pass(node)):
                values[node] = _call(node, function, values)
            # of one tile's logits after the other's, no two are alive
            for used in self._last_used[node]:
                del values[used]

    def leave(self, values: Mapping[fx.Node, Any]) -> None:
        """Put the outputs into the environment, after the last call."""
        self._environment |= {name: values[node] for name, node in self._outputs.items()}

    @property
    def output_names(self) -> Collection[str]:
        """Of what a run leaves in the environment."""
        return self._outputs.keys()

    @property
    def passes(self) -> list[tuple[int, fx.Node]]:
        """The calls of models: number among the calls, and node."""
        calls = enumerate(node for node, _ in self._calls)
        return [(number, node) for number, node in calls if node.op == "call_module"]

    @property
    def num_calls(self) -> int:
        return len(self._calls)


def is_even_pass(node: fx.Node) -> bool:
    """A pass of a model in which every sequence has as many tokens as the others."""
    if node.op != "call_module" or len(node.args) <= _Q_START:
        return False
    starts = node.args[_Q_START]
    return isinstance(starts, fx.Node) and starts.target is _STARTS and starts.args[0] == 0


def _is_pure(node: fx.Node, constant: set[fx.Node]) -> bool:
    """Computes the same at every run."""
    schema = getattr(node.target, "_schema", None)
    is_mutable = schema is not None and schema.is_mutable
    return not is_mutable and all(operand in constant for operand in node.all_input_nodes)


def _call(node: fx.Node, function: Callable[..., Any], values: Mapping[fx.Node, Any]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise OperatorError.of(node, error) from error
