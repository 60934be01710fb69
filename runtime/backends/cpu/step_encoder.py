"""A step's stages as instructions of the native runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from specc.artifact.graph_io import target_name
from specc.runtime.backends.cpu.compiled_program import CompiledProgram
from specc.runtime.backends.cpu.compiled_segments import CompiledSegments
from specc.runtime.backends.program_files import last_used
from specc.runtime.backends.step_io import StepInputs

# what a step gets anew from the host, in this order; a plan's own inputs follow
_HOST_INPUTS = ("last_tokens", "cache_len", "block_table")
_ROW_INPUTS = ("sampling_values", "sampling_words")
# what it returns as integers; drafts' lengths follow
_HOST_RESULTS = ("num_accepted", "output_tokens", "next_cache_len")
_TENSOR = torch.TensorType.get()


class DraftPass(NamedTuple):
    """A pass of a draft, at the end of a part of its stage.

    Args:
        inputs: slot of each input of the program; None where it is given none.
        logits: slot of the result.
    """

    inputs: list[int | None]
    logits: int


class StepEncoder:
    """Encodes stage graphs for `StepRunner`: every value of every stage gets a slot.

    Args:
        stages: name → graph; placeholders are names of the common environment.
        constants: name → tensor.
        models: name → program.
        draft_lens: values that the host reads besides those of every plan.
    """

    def __init__(
        self,
        stages: Mapping[str, fx.GraphModule],
        constants: Mapping[str, Tensor],
        models: Mapping[str, CompiledProgram | CompiledSegments],
        draft_lens: Sequence[str],
    ) -> None:
        self._models = models
        produced: set[str] = set(constants)
        names: list[str] = [*_HOST_INPUTS, *_ROW_INPUTS]
        for graph in stages.values():
            needed = [node.target for node in graph.graph.find_nodes(op="placeholder")]
            names += [n for n in needed if n not in produced and n not in names]
            produced |= set(_outputs(graph))
        self.inputs = names
        # environment name → slot; the inputs come first, as the runner expects
        self._slots = {name: i for i, name in enumerate([*names, *constants])}
        num_values = len(self._slots) + sum(len(graph.graph.nodes) for graph in stages.values())
        self.runner = torch.classes.specc.StepRunner(num_values)
        # the draft's, in their order
        self.passes: list[DraftPass] = []
        for name, value in constants.items():
            self.runner.set_constant(self._slots[name], value)
        self._next = len(self._slots)
        static = set(constants)
        self._after: list[dict[str, int]] = []
        # slots of what stages hand to each other
        self._passed_on: list[int] = []
        for name, graph in stages.items():
            if self._after:
                self.runner.pass_on(self._passed_on)
            self.runner.begin_stage()
            self._encode_stage(graph, static, is_draft=name == "draft")
        self._bound: Mapping[str, Tensor] | None = None
        self._rows: dict[str, Tensor] = {}
        extra = ("vote_weights", "proposals", "chosen_blocks")
        self._extra = [name for name in names if name in extra]
        made = self._after[-1]
        # slots of what the host reads after a step
        self.host_slots = [made[name] for name in (*_HOST_RESULTS, *draft_lens)]
        self.output_names = list(self._after[-1])
        self.output_slots = list(self._after[-1].values())

    def bind(self, slabs: Mapping[str, Tensor]) -> None:
        """Set the caches, which stay the same from step to step."""
        if slabs is self._bound:
            return
        for name in self.inputs[len(_HOST_INPUTS) :]:
            if name in slabs:
                self.runner.set_constant(self._slots[name], slabs[name])
        self._bound = slabs

    def bind_rows(self, inputs: StepInputs) -> None:
        """Set the tensors that came with a step and are not those of the step before."""
        self._bind_row("sampling_values", inputs.sampling_values)
        self._bind_row("sampling_words", inputs.sampling_words)
        for name in self._extra:
            self._bind_row(name, inputs.extra[name])

    def _bind_row(self, name: str, value: Tensor) -> None:
        if self._rows.get(name) is not value:
            self._rows[name] = value
            self.runner.set_constant(self._slots[name], value)

    def unbind(self) -> None:
        """Caches that came as inputs of a run have taken the place of the bound ones."""
        self._bound = None
        self._rows.clear()

    def slot_of(self, name: str) -> int:
        """Where the runner keeps a value that a stage computed."""
        return self._after[-1][name]

    def slots_before(self, stage: int) -> dict[str, int]:
        """Name → slot of what the stages before `stage` compute."""
        return self._after[stage - 1]

    def _encode_stage(self, graph: fx.GraphModule, static_names: set[str], is_draft: bool) -> None:
        """Encode a stage; that of the draft in parts, each up to the end of one of its passes."""
        slots: dict[fx.Node, int] = {}
        static: set[fx.Node] = set()
        free: list[int] = []
        kept = {*graph.graph.find_nodes(op="placeholder"), *_outputs(graph).values()}
        releases = last_used([n for n in graph.graph.nodes if n.op != "output"], kept)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                slots[node] = self._slots[node.target]
                if node.target in static_names:
                    static.add(node)
            elif node.op == "output":
                made = {name: slots[value] for name, value in node.args[0].items()}
                self._slots |= made
                self._after.append((self._after[-1] if self._after else {}) | made)
                inputs = set(graph.graph.find_nodes(op="placeholder"))
                given = [n for n in node.args[0].values() if n not in static and n not in inputs]
                self._passed_on += [slots[value] for value in given]
            else:
                slots[node] = self._next
                self._next += 1
                self._encode_node(node, slots, static)
                free += [slots[used] for used in releases[node] if used not in static]
                if is_draft and node.op == "call_module":
                    # what a pass was fed can be read up to the next instruction, which follows
                    given = [slots.get(arg) for arg in node.args]
                    self.passes.append(DraftPass(given, slots[node]))
                    self.runner.begin_stage()
                    continue
                for slot in free:
                    self.runner.release(slot)
                free.clear()

    def _encode_node(self, node: fx.Node, slots: dict[fx.Node, int], static: set[fx.Node]) -> None:
        runner, result = self.runner, slots[node]
        if node.op == "call_module":
            self._models[node.target].call_in(runner, result)
            for arg in node.args:
                self._argument(arg, slots)
            return
        name = target_name(node.target)
        if name == "operator.getitem":
            source, index = node.args
            runner.getitem(slots[source], index, result)
        elif name == "aten.sym_size.int":
            source, dim = node.args
            runner.size(slots[source], dim, result)
            static.add(node)  # of a step, only the batch size varies
        elif name in ("operator.add", "operator.mul"):
            runner.arithmetic(name.removeprefix("operator."), result)
            for arg in node.args:
                self._argument(arg, slots)
            static.add(node)
        else:
            self._encode_operator(node, slots, static)

    def _encode_operator(
        self, node: fx.Node, slots: dict[fx.Node, int], static: set[fx.Node]
    ) -> None:
        schema = node.target._schema
        is_static = not schema.is_mutable and all(n in static for n in node.all_input_nodes)
        if is_static:
            static.add(node)
        overload = node.target._overloadname
        name = schema.name.replace("specc::", "specc_cpu::")
        self.runner.call(name, "" if overload == "default" else overload, slots[node], is_static)
        for i, argument in enumerate(schema.arguments):
            if i < len(node.args):
                value = node.args[i]
            else:
                value = node.kwargs.get(argument.name, argument.default_value)
            if isinstance(value, int | float) and argument.type.isSubtypeOf(_TENSOR):
                value = torch.tensor(value)  # as torch's own parser of arguments does
            self._argument(value, slots)

    def _argument(self, value: Any, slots: dict[fx.Node, int]) -> None:
        if isinstance(value, fx.Node):
            self.runner.value(slots[value])
        elif isinstance(value, list | tuple) and (
            not value or any(isinstance(x, fx.Node) for x in value)
        ):
            # an empty list has the type that the schema says
            self.runner.list(len(value))
            for item in value:
                self._argument(item, slots)
        else:
            self.runner.literal(list(value) if isinstance(value, tuple) else value)


def _outputs(graph: fx.GraphModule) -> Mapping[str, fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    return output.args[0]
