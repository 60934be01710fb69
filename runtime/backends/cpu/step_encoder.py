"""A step's stages as instructions of the library's runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, fx

from specc.runtime.backends.cpu.encoder import Encoder
from specc.runtime.backends.cpu.program import CpuProgram, num_values
from specc.runtime.backends.cpu.segments import CpuSegments
from specc.runtime.backends.step_io import ADAPTERS, DRAFT_STATES, STATES, seen_by

# what a step gets anew from the host, in this order; a plan's own inputs follow
_HOST_INPUTS = ("last_tokens", "cache_len", "block_table")
_ROW_INPUTS = ("sampling_values", "sampling_words")
# what it returns as integers; drafts' lengths follow
_HOST_RESULTS = ("num_accepted", "output_tokens", "next_cache_len")


class DraftPass(NamedTuple):
    """A pass of a draft, at the end of a part of its stage.

    Args:
        inputs: slot of each input of the program; None where it is given none.
        logits: slot of the result.
    """

    inputs: list[int | None]
    logits: int


class StepEncoder:
    """Encodes stage graphs: every value of every stage gets a slot.

    Args:
        stages: name → graph; placeholders are names of the common environment.
        constants: name → tensor, of which only the names are read here.
        models: name → program.
        draft_lens: values that the host reads besides those of every plan.
    """

    def __init__(
        self,
        stages: Mapping[str, fx.Graph],
        constants: Mapping[str, Tensor],
        models: Mapping[str, CpuProgram | CpuSegments],
        draft_lens: Sequence[str],
    ) -> None:
        self._models = models
        produced: set[str] = set(constants)
        names: list[str] = [*_HOST_INPUTS, *_ROW_INPUTS]
        for graph in stages.values():
            needed = [node.target for node in graph.find_nodes(op="placeholder")]
            names += [n for n in needed if n not in produced and n not in names]
            produced |= set(_outputs(graph))
        self.inputs = names
        count = len(names) + len(constants)
        count += sum(num_values(graph) for graph in stages.values())
        self._encoder = Encoder(count)
        # environment name → slot; the inputs come first, as the runner expects
        self.input_slots = {name: self._encoder.input() for name in (*names, *constants)}
        self._slots = dict(self.input_slots)
        # the draft's, in their order
        self.passes: list[DraftPass] = []
        self._static = set(constants)
        self._after: list[dict[str, int]] = []
        for name, graph in stages.items():
            self._encoder.stage()
            self._encode_stage(graph, is_draft=name == "draft")
        self._encoder.finish()
        # what is set where somebody has it, and what comes with steps
        self.bindable = names[len(_HOST_INPUTS) :]
        extra = ("vote_weights", "proposals", "chosen_blocks", STATES, DRAFT_STATES, ADAPTERS)
        self.extra = [x for x in names if x in extra or x.startswith(seen_by(""))]
        made = self._after[-1]
        # slots of what the host reads after a step
        self.host_slots = [made[name] for name in (*_HOST_RESULTS, *draft_lens)]
        self.output_names, self.output_slots = list(made), list(made.values())

    @property
    def code(self) -> int:
        """The finished instructions."""
        return self._encoder.code

    @property
    def python_names(self) -> list[str]:
        """Operators without a kernel, of each instruction that calls one."""
        return self._encoder.python_names

    def slot_of(self, name: str) -> int:
        """Where the runner keeps a value that a stage computed."""
        return self._after[-1][name]

    def slots_before(self, stage: int) -> dict[str, int]:
        """Name → slot of what the stages before `stage` compute."""
        return self._after[stage - 1]

    def _encode_stage(self, graph: fx.Graph, is_draft: bool) -> None:
        """Encode a stage; that of the draft in parts, each up to the end of one of its passes."""
        encoder = self._encoder
        for node in graph.nodes:
            if node.op == "placeholder":
                encoder.slots[node] = self._slots[node.target]
                if node.target in self._static:
                    encoder.static.add(node)
            elif node.op == "output":
                # values that stages hand to each other stay until the step has ended
                made = {name: encoder.slot(value) for name, value in node.args[0].items()}
                self._slots |= made
                self._after.append((self._after[-1] if self._after else {}) | made)
                encoder.keep(made.values())
            elif node.op == "call_module":
                encoder.call(node, self._models[node.target].pointer)
                if is_draft:
                    given = [
                        encoder.slot(arg) if isinstance(arg, fx.Node) else None for arg in node.args
                    ]
                    # what a pass was fed is read right after it, before anything takes its place
                    self.passes.append(DraftPass(given, encoder.slot(node)))
                    encoder.stage()
            else:
                encoder.function(node, may_be_static=True)


def _outputs(graph: fx.Graph) -> Mapping[str, fx.Node]:
    (output,) = graph.find_nodes(op="output")
    return output.args[0]
