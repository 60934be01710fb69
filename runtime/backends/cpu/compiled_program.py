"""Compiled programs and steps: as `backends/program.py` has them, without Python inside."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from specc.artifact.graph_io import graph_from_json, target_name
from specc.errors import EngineError
from specc.runtime.backends.cpu.unpacked_package import unpacked_package
from specc.runtime.backends.last_use import last_used
from specc.runtime.backends.mapped_weights import MappedWeights
from specc.runtime.backends.program import (
    BeforeAccept,
    Drafted,
    StepInputs,
    StepResult,
    bind_weights,
    check_program,
    draft_lens_of,
    plan_of,
    read_json,
)
from specc.runtime.backends.step_constants import step_constants

_DO = "compile the engine again"
# what a step gets anew from the host, in this order; a plan's own inputs follow
_HOST_INPUTS = ("last_tokens", "cache_len", "block_table")
_ROW_INPUTS = ("sampling_values", "sampling_words")
# what it returns as integers; drafts' lengths follow
_HOST_RESULTS = ("num_accepted", "output_tokens", "next_cache_len")
_TENSOR = torch.TensorType.get()
# position of `ancestors` in the inputs of a program
_ANCESTORS = 5


class CompiledProgram:
    """A model's package with its weights and caches bound; needs the native library loaded.

    Args:
        program: content of `program.json`, which names the inputs.
        package: the compiled `.pt2`.
        weights: key → tensor of each weight and constant input.
        caches: per layer, the k and v cache [blocks, block_size, HK, D].
        sha256: of the package, where that is known.
    Raises:
        EngineError: the package cannot be loaded or was altered, or an input has no weight.
    """

    def __init__(
        self,
        program: Mapping[str, Any],
        package: Path,
        weights: Mapping[str, Tensor],
        caches: Sequence[tuple[Tensor, Tensor]],
        sha256: str | None = None,
    ) -> None:
        check_program(program, len(caches))
        self.name: str = program["name"]
        self.weights = weights
        try:
            with unpacked_package(package, sha256) as path:
                self.native = torch.classes.specc.CompiledProgram(path)
        except RuntimeError as error:
            raise EngineError(
                f"{package} cannot be loaded: {str(error).strip().splitlines()[0]}",
                f"a program that AOTInductor compiled with torch {torch.__version__}",
                _DO,
            ) from error
        bound = bind_weights(program, weights)
        # torch keeps a reference to each bound tensor that nothing ever drops: these share the
        # memory of the weights, and let go of it when the program goes
        # (the stubs of set_ know neither of its two forms here)
        aliases = [torch.empty(0, dtype=w.dtype).set_(w) for w in bound]  # type: ignore[call-overload]
        weakref.finalize(self, _release, aliases).atexit = False
        names = {f"w{i}": alias for i, alias in enumerate(aliases)}
        used = self.native.weight_names()
        if unknown := sorted(set(used) - names.keys()):
            raise EngineError(
                f"{package} reads {unknown[0]}", f"one of {len(names)} weights of program.json", _DO
            )
        self.native.bind_weights(used, [names[name] for name in used])
        self.native.expect_flat_inputs()
        self.native.bind_caches(
            [
                caches[entry["layer"]][entry["part"] == "v"]
                for entry in program["inputs"]
                if entry["kind"] == "cache"
            ]
        )

    @classmethod
    def load(
        cls,
        directory: Path,
        caches: Sequence[tuple[Tensor, Tensor]],
        sha256: str | None = None,
    ) -> CompiledProgram:
        """Bind the weights of an engine's model directory without copying them.

        Raises:
            EngineError: a file is absent or cannot be read.
        """
        return cls(
            read_json(directory / "program.json"),
            directory / "program.pt2",
            MappedWeights(directory / "weights.safetensors"),
            caches,
            sha256,
        )

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        """Run over flat tokens; inputs and result are those of `ModelProgram.forward`."""
        given = list(inputs)
        if given[_ANCESTORS] is None:
            # no words at all: causal
            assert given[0] is not None
            given[_ANCESTORS] = torch.empty(given[0].shape[0], 0, dtype=torch.int64)
        return self.native.run(given)


class CompiledStep:
    """One plan's step as instructions of the native runner; see `StepProgram` for the contract.

    Args:
        program: content of `steps/<plan>.json`.
        models: name → program, for the stages' calls.
    Raises:
        EngineError: a malformed program.
    """

    def __init__(self, program: Mapping[str, Any], models: Mapping[str, CompiledProgram]) -> None:
        self.plan = plan_of(program)
        self.before_accept: BeforeAccept | None = None
        stages = {
            stage["name"]: graph_from_json(stage["graph"], modules=dict.fromkeys(models, _NOTHING))
            for stage in program["stages"]
        }
        draft_lens = draft_lens_of(self.plan)
        self._drafts = list(draft_lens)
        constants = step_constants(program, self.plan)
        self._encoder = _Encoder(stages, constants, models, list(draft_lens.values()))
        self._stages = list(stages)
        self._accept = self._stages.index("accept_commit")
        self._native = self._encoder.runner
        self._values = _RunnerValues(self._native, self._encoder.slots_before(self._accept))
        self._width = self.plan.max_depth + 1

    @classmethod
    def load(cls, path: Path, models: Mapping[str, CompiledProgram]) -> CompiledStep:
        return cls(read_json(path), models)

    @property
    def runner(self) -> Any:
        """The native runner: `seconds()` and `program_seconds()` of each stage, for profiles."""
        return self._native

    @torch.inference_mode()
    def run(self, environment: dict[str, Tensor]) -> dict[str, float]:
        """Run all stages; results are added to the environment.

        Returns:
            seconds of each stage, by name.
        """
        encoder, native = self._encoder, self._native
        encoder.unbind()
        self._run_stages([environment[name] for name in encoder.inputs])
        results = native.outputs(encoder.output_slots)
        environment.update(zip(encoder.output_names, results, strict=True))
        return dict(zip(self._stages, native.seconds(), strict=True))

    def advance(
        self, inputs: StepInputs, slabs: Mapping[str, Tensor], reads: Sequence[str] = ()
    ) -> StepResult:
        """Run the step for sequences that are known on the host; see `program.advance`."""
        self._encoder.bind(slabs)
        self._encoder.bind_rows(inputs)
        # Python between two steps finds its code evicted by the weights: few calls, plain slices
        rows, block_table = inputs.rows, inputs.block_table
        flat_rows = [value for row in rows for value in row]
        native, first = self._native, 0
        if self.before_accept is not None:
            first = self._accept
            native.step(flat_rows, block_table, [], 0, first, [])
            with torch.inference_mode():
                self.before_accept(self._values)
        return self._finish(flat_rows, block_table, first, reads)

    def draft(self, inputs: StepInputs, slabs: Mapping[str, Tensor]) -> Drafted:
        """Run what stands before the target's pass; see `Drafted`."""
        self._encoder.bind(slabs)
        self._encoder.bind_rows(inputs)
        verify = self._stages.index("verify")
        flat_rows = [value for row in inputs.rows for value in row]
        self._native.step(flat_rows, inputs.block_table, [], 0, verify, [])

        def accept(values: Mapping[str, Tensor], reads: Sequence[str]) -> StepResult:
            for name, value in values.items():
                self._values[name] = value
            if self.before_accept is not None:
                with torch.inference_mode():
                    self.before_accept(self._values)
            return self._finish(flat_rows, inputs.block_table, self._accept, reads)

        return Drafted(self._values, accept)

    def _finish(
        self, flat_rows: list[int], block_table: Tensor, first: int, reads: Sequence[str]
    ) -> StepResult:
        """Run the stages that are left, and read the results."""
        native = self._native
        slots, last = self._encoder.host_slots, len(self._stages)
        kept = [self._encoder.slot_of(name) for name in reads]
        ints, seconds = native.step(flat_rows, block_table, slots, first, last, kept)
        batch = block_table.shape[0]
        width = self._width
        end = batch * (1 + width)
        if batch == 1:
            outputs = [ints[1:end]]
        else:
            outputs = [ints[b : b + width] for b in range(batch, end, width)]
        starts = range(end + batch, len(ints), batch)
        return StepResult(
            ints[:batch],
            outputs,
            ints[end : end + batch],
            {
                draft: ints[start : start + batch]
                for draft, start in zip(self._drafts, starts)  # noqa: B905
            },
            dict(zip(self._stages, seconds)),  # noqa: B905
            {name: native.get(slot) for name, slot in zip(reads, kept)},  # noqa: B905
        )

    def _run_stages(self, inputs: list[Tensor]) -> None:
        native, last = self._native, len(self._stages)
        if self.before_accept is None:
            native.run(inputs, 0, last)
            return
        native.run(inputs, 0, self._accept)
        self.before_accept(self._values)
        native.run([], self._accept, last)


class _RunnerValues:
    """What the stages before a hook computed, where the runner keeps it.

    A hook pays for the values that it looks at.
    """

    def __init__(self, runner: Any, slots: Mapping[str, int]) -> None:
        self._runner = runner
        self._slots = slots

    def __getitem__(self, name: str) -> Tensor:
        return self._runner.get(self._slots[name])

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._runner.set_constant(self._slots[name], value)


class _Encoder:
    """Encodes stage graphs for `StepRunner`: every value of every stage gets a slot.

    Args:
        stages: name → graph; placeholders are names of the common environment.
        constants: name → tensor.
        models: name → program.
        draft_lens: values that the host reads besides `_HOST_RESULTS`.
    """

    def __init__(
        self,
        stages: Mapping[str, fx.GraphModule],
        constants: Mapping[str, Tensor],
        models: Mapping[str, CompiledProgram],
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
        for name, value in constants.items():
            self.runner.set_constant(self._slots[name], value)
        self._next = len(self._slots)
        static = set(constants)
        self._after: list[dict[str, int]] = []
        # slots of what stages hand to each other
        self._passed_on: list[int] = []
        for graph in stages.values():
            if self._after:
                self.runner.pass_on(self._passed_on)
            self.runner.begin_stage()
            self._encode_stage(graph, static)
        self._bound: Mapping[str, Tensor] | None = None
        self._rows: dict[str, Tensor] = {}
        self._extra = [name for name in names if name in ("vote_weights", "proposals")]
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

    def _encode_stage(self, graph: fx.GraphModule, static_names: set[str]) -> None:
        slots: dict[fx.Node, int] = {}
        static: set[fx.Node] = set()
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
                for used in releases[node]:
                    if used not in static:
                        self.runner.release(slots[used])

    def _encode_node(self, node: fx.Node, slots: dict[fx.Node, int], static: set[fx.Node]) -> None:
        runner, result = self.runner, slots[node]
        if node.op == "call_module":
            runner.call_program(self._models[node.target].native, result)
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


@torch.inference_mode()
def _release(aliases: Iterable[Tensor]) -> None:
    for alias in aliases:
        alias.set_()  # type: ignore[call-overload]


class _Nothing(torch.nn.Module):
    """Stands for a program while a step's graph is read."""


_NOTHING = _Nothing()
