"""Put low-rank terms of adapters beside a target's products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from specc.errors import WeightError
from specc.kernels import ops
from specc.lora.peft_files import LoraFiles, LoraPair, names_of
from specc.passes.base import Pass, PassResult
from specc.passes.program import (
    ADAPTERS,
    Program,
    add_placeholder,
    bind_args,
    emit_call,
    module_path,
)

aten = torch.ops.aten
# what a lookup reads of a weight that is a projection's, too, stays as it is
_BESIDE = (aten.linear.default, aten.embedding.default)
_SUFFIX = ".weight"


class AddLora(Pass):
    """`linear(x, W)` → `add_lora(linear(x, W), x, adapters, …)` where an adapter has a term.

    All share one more input, `adapters` [Nt, 1] int32, which says for each token which adapter it
    has, -1 for none. Terms of all adapters and of all parameters of a fused weight are together in
    four constants: rows of A, transposes of B, where each is, and its scale.

    It comes after projections are fused, and before they are rounded: so x is what the model
    multiplies, whatever order a rounded weight has its columns in, and the product is that of an
    engine without adapters.

    Args:
        adapters: in the order of their numbers.
        shapes: parameter → its shape in the model.
    """

    def __init__(self, adapters: Sequence[LoraFiles], shapes: Mapping[str, Sequence[int]]) -> None:
        self._adapters, self._shapes = adapters, shapes
        # by adapter: parameter → its term
        self._terms = [self._by_parameter(adapter) for adapter in adapters]

    def run(self, program: Program) -> PassResult:
        """See `Pass.run`.

        Raises:
            WeightError: a term is beside no product, or beside one of another size.
        """
        result = PassResult()
        taken: set[tuple[int, str]] = set()
        rows = _add_rows(program)
        for node in program.calls(aten.linear.default):
            source = bind_args(node)["weight"]
            weight = program.weights.get(source.target)
            if weight is None or not self._has_terms(weight.parameters):
                continue
            self._check_place(program, node, source, weight.parameters)
            dtype = bind_args(node)["input"].meta["val"].dtype
            pieces: list[tuple[int, ...]] = []
            scales: list[float] = []
            downs: list[Tensor] = []
            ups: list[Tensor] = []
            column = 0
            for parameter in weight.parameters:
                outputs, inputs = self._size(parameter, weight.is_turned)
                for number, terms in enumerate(self._terms):
                    if (pair := terms.get(parameter)) is None:
                        continue
                    self._check_size(number, pair, outputs, inputs)
                    first = sum(len(x) for x in downs)
                    pieces.append((number, column, outputs, first, pair.rank))
                    scales.append(pair.scale)
                    down, up = self._adapters[number].read(pair, dtype)
                    downs.append(down)
                    ups.append(up.reshape(-1))
                    taken.add((number, parameter))
                column += outputs
            assert column == weight.shape[0], f"rows of {weight.key}"
            values = {
                "down": torch.cat(downs),
                "up": torch.cat(ups),
                "pieces": torch.tensor(pieces, dtype=torch.int32),
                "scales": torch.tensor(scales, dtype=torch.float32),
            }
            _add_term(program, node, rows, f"lora_{result.rewrites}", values)
            result.rewrites += 1
        self._check_all(taken)
        return result

    def _by_parameter(self, adapter: LoraFiles) -> dict[str, LoraPair]:
        found: dict[str, LoraPair] = {}
        for module, pair in adapter.pairs.items():
            names = [name + _SUFFIX for name in names_of(module)]
            known = next((name for name in names if name in self._shapes), None)
            if known is None:
                raise WeightError(
                    f"adapter {adapter.name}: {module}, which the target has not",
                    "an adapter of this target",
                    "check base_model_name_or_path in its adapter_config.json",
                )
            found[known] = pair
        return found

    def _has_terms(self, parameters: Sequence[str]) -> bool:
        return any(name in terms for terms in self._terms for name in parameters)

    def _size(self, parameter: str, is_turned: bool) -> tuple[int, int]:
        first, second = (int(n) for n in self._shapes[parameter])
        return (second, first) if is_turned else (first, second)

    def _check_size(self, number: int, pair: LoraPair, outputs: int, inputs: int) -> None:
        if (pair.outputs, pair.inputs) != (outputs, inputs):
            raise WeightError(
                f"adapter {self._adapters[number].name}: {pair.module} with {pair.inputs} inputs"
                f" and {pair.outputs} outputs",
                f"{inputs} and {outputs}, as the target has",
                "pass an adapter of this target",
            )

    def _check_place(
        self, program: Program, node: fx.Node, source: fx.Node, parameters: Sequence[str]
    ) -> None:
        """Raises WeightError: not all that the weight does is products of a pass's tokens."""
        tokens = program.placeholder("tokens").meta["val"].shape[0]
        rows = bind_args(node)["input"].meta["val"].shape[-2]
        is_of_tokens = str(rows) == str(tokens)
        if is_of_tokens and all(user.target in _BESIDE for user in source.users):
            return
        raise self._no_product(
            next(i for i, terms in enumerate(self._terms) if terms.keys() & set(parameters)),
            module_path(node) or parameters[0].removesuffix(_SUFFIX),
        )

    def _check_all(self, taken: set[tuple[int, str]]) -> None:
        for number, terms in enumerate(self._terms):
            for parameter, pair in terms.items():
                if (number, parameter) not in taken:
                    raise self._no_product(number, pair.module)

    def _no_product(self, number: int, module: str) -> WeightError:
        return WeightError(
            f"adapter {self._adapters[number].name}: {module}",
            "projections of the target's layers: its head, embeddings, experts and latents that"
            " attention multiplies itself have no terms here",
            "train the adapter without this module, or merge it into the target and compile that",
        )


def with_adapters(inputs: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a target's inputs, and `adapters` after those that there are."""
    return (*inputs, ADAPTERS)


def _add_rows(program: Program) -> fx.Node:
    """The input `adapters` [Nt, 1], after the others of the runtime."""
    tokens: Tensor = program.placeholder("tokens").meta["val"]
    value = tokens.new_empty((tokens.shape[0], 1), dtype=torch.int32)
    last = program.placeholder(program.runtime_inputs[-1])
    program.runtime_inputs = with_adapters(program.runtime_inputs)
    program.row_inputs = (*program.row_inputs, ADAPTERS)
    return add_placeholder(program, ADAPTERS, value, last)


def _add_term(
    program: Program, node: fx.Node, rows: fx.Node, name: str, values: Mapping[str, Tensor]
) -> None:
    """The call after a product, over flattened rows, with its constants."""
    graph, x = program.graph, bind_args(node)["input"]
    constants = [_add_constant(program, f"{name}_{key}", value) for key, value in values.items()]
    shape = node.meta["val"].shape
    users = list(node.users)
    with graph.inserting_after(node):
        base = emit_call(graph, aten.reshape.default, node, [-1, shape[-1]])
    with graph.inserting_after(base):
        flat = emit_call(graph, aten.reshape.default, x, [-1, x.meta["val"].shape[-1]])
    with graph.inserting_after(flat):
        out = emit_call(graph, ops.add_lora, base, flat, rows, *constants)
    last = out
    if len(shape) != 2:
        leading = [size if isinstance(size, int) else -1 for size in shape[:-1]]
        with graph.inserting_after(out):
            last = emit_call(graph, aten.reshape.default, out, [*leading, shape[-1]])
    for made in (base, flat, out, last):
        made.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    for user in users:
        user.replace_input_with(node, last)


def _add_constant(program: Program, name: str, value: Tensor) -> fx.Node:
    inputs = program.graph.find_nodes(op="placeholder")
    first = next(node for node in inputs if node.target in program.runtime_inputs)
    like = program.placeholder("positions").meta["val"]
    # where the trace has its tensors
    made = torch.empty_like(value, device=like.device)
    fake = like.fake_mode.from_tensor(made, static_shapes=True)
    program.constants[name] = value
    return add_placeholder(program, name, fake, first.prev)
