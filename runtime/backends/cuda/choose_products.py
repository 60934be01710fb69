"""Which product runs for which shape: measured while an engine loads, before anything is captured.

The operators `add_norm_*`, `embed_norm_rope_write` and `skinny_linear` have kernels for few rows
beside the library's product, and `linear_q` beside that of the decoded weight. Nobody knows which
is faster on a GPU before it has run both, so each shape is timed with each number of rows, over the
weights of all layers in turn, as a step reads them: a kernel takes the library's place only where
it was faster. Where launches may be dependent, that is chosen besides for steps that are launched
so: which of both a plan gets, its whole step decides (`choose_launches`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from specc.artifact.quantized_layout import QuantizedLayout
from specc.errors import FaultError
from specc.runtime.backends.cuda.product_calls import (
    LINEAR,
    QUANTIZED,
    LinearCall,
    QuantizedCall,
    linear_call,
    quantized_call,
)
from specc.runtime.backends.cuda.product_candidates import (
    LIBRARY,
    Candidate,
    Stopwatch,
    Timer,
    best_dependent,
    best_ordinary,
    graph_timer,
    measure,
)
from specc.runtime.backends.graph_device import GraphDevice

# those that end with rotation and cache write, and all
_WRITERS = ("add_norm_rope_write", "embed_norm_rope_write")
OPERATORS = (
    "add_norm_linear", "add_norm_gate_up", "add_norm_head", *_WRITERS, LINEAR, QUANTIZED,
)  # fmt: skip
# rows of products with a norm that are measured; others are rounded up to one of them
ROWS = (1, 2, 4, 8, 16)


class DeviceLostError(FaultError):
    """After a kernel that was measured, the device takes no more work: a fault that came late.

    Args:
        report: what was found before, as `choose_products` returns it, and last the product whose
            kernel it was: with `lost`, the kernel's name, and chosen the library's.
    """

    def __init__(self, error: BaseException, report: list[dict[str, Any]]) -> None:
        last = report[-1]
        super().__init__(
            f"a device that takes no work after {last['lost']} of {last['operator']}"
            f" {last['shape']} in {last['dtype']} with {last['rows']} rows: {error}",
            "kernels that run on this device",
            "load the engine again: what was measured is kept, and this kernel left out. Report it",
        )
        self.report = report


class GraphProgram(Protocol):
    """What is read of a model's program on a device: its graph, and the values of its inputs.

    Of quantized weights also their shapes [N, K] by the names of inputs, and the type of rows.
    """

    @property
    def graph(self) -> fx.Graph: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]: ...

    @property
    def quantized_shapes(self) -> Mapping[str, tuple[int, int]]: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class ProductCall:
    """A call of an operator in a model's graph, with the tensors that do not change.

    Args:
        eps: of the norm.
        unit_offset: of the norm.
        weight: [N, K], or its blocks.
        shape: of the weight, [N, K].
        dtype: of rows.
        last: bias or activation, whatever follows the weight.
        caches: k and v cache of those that write to them.
        embedding: [V, K] of those that start with tokens, else None.
        layout: of a quantized weight; None of one that is not.
    """

    operator: str
    eps: float
    unit_offset: bool
    gamma: Tensor
    weight: Tensor
    shape: tuple[int, int]
    dtype: torch.dtype
    last: Any
    caches: tuple[Tensor, ...]
    embedding: Tensor | None = None
    layout: QuantizedLayout | None = None
    rows = ROWS

    def product(self, rows: int) -> Any:
        """What a choice is made for."""
        from specc.kernels.cuda.few_rows import Product

        name = "" if self.layout is None else self.layout.unpaired.name
        return Product.of_layout(self.operator, rows, self.dtype, self.shape, name)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls that run the same code."""
        last = type(self.last).__name__ if isinstance(self.last, Tensor) else self.last
        shapes = tuple(cache.shape[2:] for cache in self.caches)
        return self.operator, self.dtype, self.shape, self.layout, last, shapes

    def bind(self, rows: int) -> Callable[[], object]:
        """The call for this many rows, which writes no row of a cache."""
        device, dtype, size = self.weight.device, self.dtype, self.shape[1]
        operator = getattr(torch.ops.specc, self.operator)
        dice = torch.Generator().manual_seed(rows)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=dice).to(device, dtype)

        first: tuple[Tensor, ...] = (draw(1, rows, size), draw(1, rows, size))
        if self.embedding is not None:
            ids = torch.randint(self.embedding.shape[0], (1, rows), generator=dice)
            first = ids.to(device), self.embedding
        args = [*first, self.gamma, self.eps, self.unit_offset, self.weight, self.last]
        if self.operator == "add_norm_head":
            args.append(torch.arange(rows, device=device))
        if self.caches:
            width = self.caches[0].shape[3]
            args += [draw(rows, width), draw(rows, width), *self.caches]
            args += [
                torch.tensor([0, rows], dtype=torch.int32, device=device),
                torch.full((rows,), -1, dtype=torch.int32, device=device),
                torch.zeros(1, 1, dtype=torch.int32, device=device),
            ]
        if self.layout is not None:
            args.append(self.layout.name)
        return lambda: operator(*args)


Call = ProductCall | LinearCall | QuantizedCall


def calls_of(program: GraphProgram) -> Iterator[Call]:
    """Calls of the operators in a model's graph, in order."""
    tensors = program.tensors

    def value(argument: Any) -> Any:
        return tensors[argument.target] if isinstance(argument, fx.Node) else argument

    for node in program.graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        name = getattr(packet, "__name__", "")
        if getattr(node.target, "namespace", "") != "specc" or name not in OPERATORS:
            continue
        if name == QUANTIZED:
            yield quantized_call(node, tensors, program.quantized_shapes, program.dtype)
            continue
        if name == LINEAR:
            yield linear_call(node, tensors)
            continue
        _, second, gamma, eps, unit_offset, weight, last = node.args[:7]
        caches = node.args[9:11] if name in _WRITERS else ()
        is_quantized = value(weight).dtype == torch.uint8
        yield ProductCall(
            name,
            float(eps),
            bool(unit_offset),
            value(gamma),
            value(weight),
            program.quantized_shapes[weight.target] if is_quantized else value(weight).shape,
            program.dtype if is_quantized else value(weight).dtype,
            value(last),
            tuple(value(cache) for cache in caches),
            value(second) if name == "embed_norm_rope_write" else None,
            # the last argument
            QuantizedLayout.named(node.args[-1]) if is_quantized else None,
        )


# what this process has measured so far, as `choose_products` returns it
measured: list[dict[str, Any]] = []


def choose_products(
    programs: Iterable[GraphProgram],
    graphs: GraphDevice,
    timer: Timer | None = None,
    rows: Iterable[int] | None = None,
    can_depend: bool = False,
) -> list[dict[str, Any]]:
    """Measure every shape of these programs that was not measured before, and choose.

    Args:
        timer: what measures; None replays graphs.
        rows: numbers of rows that steps have; None is all that kernels are for, and so it is of
            quantized weights always: without a measurement prompts take a kernel for them, too.
        can_depend: the device has dependent launches: tiles are timed so, too, where their kernels
            have them.
    Returns:
        what was found, ready for JSON: `operator`, `shape` [N, K], `dtype`, `rows`, `layout` of
        quantized weights, `ms` of all layers' calls by candidate (see `Candidate.name`), `chosen`
        for ordinary launches, `dependent` what was chosen for dependent ones, where some can be,
        and `seconds` that measuring has taken, by its parts.
    Raises:
        DeviceLostError: a kernel has ended the work of the device.
    """
    watch = Stopwatch()
    timer = timer or graph_timer(graphs, watch)
    with _no_collections():
        report = _choose(
            programs, timer, watch, graphs, None if rows is None else tuple(rows), can_depend
        )
    measured.extend(report)
    return report


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collect garbage once, and not before each of some hundred captures.

    Modules and graphs of programs are hundreds of thousands of objects: to pass over them takes
    longer than all that is measured.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _choose(
    programs: Iterable[GraphProgram],
    timer: Timer,
    watch: Stopwatch,
    graphs: GraphDevice,
    rows: Sequence[int] | None,
    can_depend: bool,
) -> list[dict[str, Any]]:
    # Triton is optional where an engine runs on any other backend
    from specc.kernels.cuda import few_rows

    groups: dict[tuple[Any, ...], list[Call]] = {}
    for program in programs:
        for call in calls_of(program):
            groups.setdefault(call.kind, []).append(call)
    report: list[dict[str, Any]] = []
    with graphs.active(), torch.inference_mode():
        for calls in groups.values():
            counts: tuple[int, ...] = calls[0].rows
            if rows is not None and calls[0].operator != QUANTIZED:
                counts = tuple(count for count in counts if count in rows)
            for count in counts:
                product = calls[0].product(count)
                if product in few_rows.choices or not product.tiles:
                    continue
                with watch.part("bind"):
                    # memory that calls of another shape have left goes back to the device
                    graphs.free_bytes()
                    bound = [call.bind(count) for call in calls]
                item: dict[str, Any] = {
                    "operator": product.operator,
                    "shape": list(product.shape),
                    "dtype": str(product.dtype).removeprefix("torch."),
                    "rows": product.rows,
                }
                if product.layout:
                    item["layout"] = product.layout
                can_start_early = can_depend and product.can_start_early
                found: dict[Candidate, float] = {}
                for candidate, seconds in measure(
                    bound, len(product.tiles), can_start_early, timer, watch
                ):
                    if seconds is not None:
                        found[candidate] = seconds
                    elif (error := _fault(graphs)) is not None:
                        item |= _said(found, LIBRARY, LIBRARY if can_start_early else None)
                        item["lost"] = candidate.name
                        raise DeviceLostError(error, [*report, item]) from error
                best = best_ordinary(found)
                dependent = best_dependent(found) if can_start_early else None
                few_rows.choices[product] = choice_of(product, best, dependent)
                report.append(item | _said(found, best, dependent) | {"seconds": watch.take()})
    return report


def choice_of(product: Any, best: Candidate, dependent: Candidate | None) -> Any:
    """What products of few rows look up.

    Args:
        product: a `Product`.
        dependent: for dependent ones; None where its kernel has none, or they were not measured.
    """
    from specc.kernels.cuda.few_rows import Choice

    def tile(candidate: Candidate) -> Any:
        return None if candidate.number is None else product.tiles[candidate.number]

    if dependent is None:
        return Choice.of(tile(best))
    early = tile(dependent)
    return Choice(tile(best), early and replace(early, starts_early=dependent.is_early))


def _fault(graphs: GraphDevice) -> Exception | None:
    """What the device says when it is waited for; None where it works."""
    try:
        graphs.record_event().synchronize()
    except Exception as error:
        return error
    return None


def _said(
    found: Mapping[Candidate, float], best: Candidate, dependent: Candidate | None
) -> dict[str, Any]:
    """Milliseconds by candidate, and what was chosen."""
    said: dict[str, Any] = {
        "ms": {candidate.name: 1e3 * seconds for candidate, seconds in found.items()},
        "chosen": best.name,
    }
    return said if dependent is None else said | {"dependent": dependent.name}
