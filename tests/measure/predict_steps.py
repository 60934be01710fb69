"""What steps of published shapes would take on an H200 once kernels are as designed: predicted.

    python tests/measure/predict_steps.py [CASE …] --json out/predicted.json

Shapes are compiled for `cuda` without weights; launches and bytes are those of the captured step
(`specc.bench.synthetic.nodes`). A product takes, in seconds,

    t0 + max(bytes / min(B, in flight / latency), instructions / slots, (bytes + rows of x) / L2)

with the constants below: instructions of a loop for each weight of a thread as counted in SASS for
9.0, everything else as measured on one H200 or, where it says so, assumed. What stands between
products is what its launches took there. `today` is checked against what was measured;
`fragments` and `fused` are nobody's measurement. `fused` is the step of an engine whose weights are
in fragments, as it is captured; `fragments` are its products in the launches of today's.
"""

from __future__ import annotations

import datetime
import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from specc.artifact.in_memory import BenchPrograms
from specc.bench.step_bytes import ModelShape, count_step_bytes
from specc.bench.synthetic.nodes import Launches, Node, step_nodes
from specc.cli.bench.synthetic import compile_for
from specc.cli.options.bench import BenchOptions, ShapesOptions
from specc.cost.graph_costs import ATTEND, PRODUCT
from specc.kernels.cuda.recorded import recorded
from specc.kernels.cuda.register import kernels
from specc.progress import PhaseTimer

# of a copy, measured; of reads from L2 and from a load to its data under load, assumed
COPY, L2, LATENCY = 4.19e12, 5.5e12, 0.75e-6
NUM_SMS = 132
# warp instructions a second: four schedulers each at 1.755 GHz, of whose slots 0.7 issue (assumed)
SLOTS = 4 * NUM_SMS * 1.755e9 * 0.7
# seconds of a launch that are no streaming: after an ordinary one (measured), and between two that
# depend on each other (measured of a layer in bfloat16)
ORDINARY, DEPENDENT = 2.4e-6, 1.3e-6
# seconds of launches that compute little, measured beside int4 products of 8B, in a mixture and in
# a model with latent attention
SMALL = {
    "rms_norm": 2.4e-6, "add_rms_norm": 2.4e-6, "act_and_mul": 1.2e-6, "rope_write": 2.6e-6,
    "topk": 4.7e-6,
}  # fmt: skip
OF_TORCH, BETWEEN = 1.9e-6, 3.1e-6
# attention of few rows over 1k keys: 7.0 µs of 8B, 5.6 of 1B, which reads half as much
ATTEND_S, ATTEND_S_A_BYTE = 4.2e-6, 0.67e-12
# bytes that one multiprocessor reads in a second from L2, and from a product to the next that adds
# to it: 64 bytes and 33 cycles, assumed. One more read in series of a program: measured
L2_OF_SM, CHAINED, IN_SERIES = 64 * 1.755e9, 33 / 1.755e9, 0.3e-6


def latent_few_s() -> float:
    """Seconds of `attend_latent_few`, of 16 rows and 1k keys: counted.

    What `attend_few` took of 8B with 1k keys (one row of four heads, 128 programs of 64 keys), and
    what one program waits for besides: bytes of its 64 keys, of its queries and of the 16 parts
    that the last one merges, in both; products that wait for one another; and two more rounds of
    parts, of which it loads eight at a time: the keys of this pass make a 17th.
    """
    few = 2 * 64 * 128 * 2 + 4 * 128 * 2 + 16 * 4 * 128 * 4
    own = 64 * 576 * 2 + 16 * 576 * 2 + 16 * 16 * 128 * 4
    # of two chains the longer one: what heads share, and two quarters
    chained = (64 + 2 * 128) // 16 - 128 // 16
    return 7.0e-6 + (own - few) / L2_OF_SM + chained * CHAINED + 2 * IN_SERIES


@dataclass(frozen=True)
class Form:
    """How a product reads a quantized weight.

    Args:
        instructions: of the loop, for each weight of a thread.
        outputs: of a program.
        in_flight: bytes of the weight that a program has asked for.
        resident: programs of a multiprocessor, at most.
        start_s: `ORDINARY` or `DEPENDENT`.
        norm: instructions of a warp for each `CHUNK` columns of rows that it norms before; then a
            program that is resident goes through several blocks of outputs, and reads the rows
            once, and as many to be added.
    """

    instructions: float
    outputs: int
    in_flight: int
    resident: int
    start_s: float
    norm: float = 0

    def seconds(self, rows: int, outputs: int, columns: int, num_bytes: float) -> float:
        """Of one product."""
        programs, reads = math.ceil(outputs / self.outputs), 1
        resident = min(self.resident * NUM_SMS, programs)
        if self.norm:
            programs, reads = resident, 2
        streamed = num_bytes / min(COPY, resident * self.in_flight / LATENCY)
        normed = programs * WARPS * math.ceil(columns / CHUNK) * self.norm
        issued = (self.instructions * outputs * columns / 32 + normed) / SLOTS
        shared = (num_bytes + 2 * reads * programs * rows * columns) / L2
        return self.start_s + max(streamed, issued, shared)


KIB = 1 << 10
# of a program, and columns that it norms at a time
WARPS, CHUNK = 8, 2048
# kind of a weight → form; counts of today's are of the design, those of fragments of cuda.md
TODAY = {
    "int4": Form(8.2, 32, 6 * KIB, 6, ORDINARY),
    "int8": Form(8.9, 32, 12 * KIB, 5, ORDINARY),
    "fp8": Form(13.7, 32, 12 * KIB, 5, ORDINARY),
}
# two of three steps of a ring, 8 warps with 256 columns in 4 bits, 128 in 8
FRAGMENTS = {
    "int4": Form(1.93, 32, 64 * KIB, 2, DEPENDENT),
    "int8": Form(2.42, 32, 64 * KIB, 2, DEPENDENT),
    "fp8": Form(2.41, 32, 64 * KIB, 2, DEPENDENT),
}
# most rows → what products with a norm in front have instead: one program of a multiprocessor has
# room for eight rows, two for one
NORMED = {1: {"resident": 2, "norm": 111}, 8: {"resident": 1, "norm": 584}}
# instructions of their loops, at most
NORMED_LOOPS = {"int4": 1.9, "int8": 2.38, "fp8": 2.37}


@dataclass(frozen=True)
class Mixture:
    """Experts of a model, of which one token has some: both products of each layer.

    Args:
        chosen: experts of a token.
        hidden: columns of the first product.
        size: outputs that it has of a gate, and columns of the second.
        layers: with such experts.
        bits: of a weight, with its share of a scale.
        forms: name → how experts are read.
    """

    chosen: int
    hidden: int
    size: int
    layers: int
    bits: float
    forms: Mapping[str, Form]

    def experts_ms(self, form: Form, bits: float) -> float:
        products = (2 * self.size, self.hidden), (self.hidden, self.size)
        found = 0.0
        for outputs, columns in products:
            outputs *= self.chosen
            found += form.seconds(1, outputs, columns, outputs * columns * bits / 8)
        return 1e3 * self.layers * found

    def predict(self) -> dict[str, Any]:
        floor = 3 * self.chosen * self.hidden * self.size * self.layers * self.bits / 8 / COPY
        found = {"floor_ms": 1e3 * floor, "bfloat16_ms": self.experts_ms(_FLOATS, 16)}
        return found | {f"{x}_ms": self.experts_ms(y, self.bits) for x, y in self.forms.items()}


# weights as they are: bytes alone
_FLOATS = Form(0, 32, 32 * KIB, 4, DEPENDENT)


def _forms(dot: float, fragments: float) -> dict[str, Form]:
    """Of experts: four steps of `dot`, or a ring of three of four warps; by their instructions."""
    return {
        "dot": Form(dot, 32, 6 * KIB, 6, DEPENDENT),
        "fragments": Form(fragments, 32, 32 * KIB, 4, DEPENDENT),
    }


MIXTURES = {
    "gpt-oss-20b experts": Mixture(4, 2880, 2880, 24, 4.25, _forms(16, 2.22)),
    "qwen3-30b-a3b experts int4": Mixture(8, 2048, 768, 48, 4.25, _forms(10.7, 1.93)),
}


def product_seconds(node: Node, kind: str, forms: Mapping[str, Form]) -> float:
    """Of one product.

    Args:
        kind: of the model's weights; a head's of 8 bits is int8 beside int4.
    """
    if node.product is None:
        start = DEPENDENT if node.is_dependent else ORDINARY
        return start + node.num_bytes / COPY
    rows, outputs, columns = node.product
    bits = 8 * node.num_bytes / (outputs * columns)
    of_node = "int8" if kind == "int4" and bits > 6 else kind
    form = forms[of_node]
    if node.operator.startswith("add_norm"):
        most = next(most for most in NORMED if rows <= most)
        form = replace(form, instructions=NORMED_LOOPS[of_node], **NORMED[most])  # type: ignore[arg-type]
    return form.seconds(rows, outputs, columns, node.num_bytes)


def node_seconds(node: Node, kind: str, forms: Mapping[str, Form]) -> float:
    """Of one launch."""
    if node.kind == ATTEND:
        if "latent" in node.name:
            return latent_few_s()
        return ATTEND_S + node.num_bytes * ATTEND_S_A_BYTE
    if node.kind == PRODUCT:
        return product_seconds(node, kind, forms)
    if not node.model:
        return BETWEEN
    return DEPENDENT if node.is_dependent else SMALL.get(node.operator, OF_TORCH)


def step_ms(nodes: Iterable[Node], kinds: Mapping[str, str], forms: Mapping[str, Form]) -> float:
    """Milliseconds of a step.

    Args:
        kinds: model → kind of its quantized weights.
    """
    return 1e3 * sum(node_seconds(n, kinds.get(n.model, ""), forms) for n in nodes)


@dataclass(frozen=True)
class Case:
    """Shapes, and what is predicted of them.

    Args:
        options: of `ShapesOptions`.
        kinds: model → kind of its quantized weights.
        measured_ms: today's, on one H200 in its fourth session.
        aim: times its floor, or milliseconds where it is not.
    """

    shapes: str
    plan: str = "off"
    options: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    measured_ms: float | None = None
    aim: str = ""


_GROUPS = ("quantize_group", 128)
_CHAIN = ("num_speculative_tokens", 5)
PAIR = "llama-3.1-8b/llama-3.2-1b"
CASES = {
    "8b": Case("llama-3.1-8b", measured_ms=4.04),
    "8b int4": Case(
        "llama-3.1-8b", "off", (("quantize", "int4"), _GROUPS), (("target", "int4"),), 7.05,
        "1.5 × floor",
    ),
    "8b int8": Case(
        "llama-3.1-8b", "off", (("quantize", "int8"),), (("target", "int8"),), 6.64
    ),
    "8b fp8": Case(
        "llama-3.1-8b", "off", (("quantize", "fp8"),), (("target", "fp8"),), 7.09, "1.25 × floor"
    ),
    "8b-1b": Case(PAIR, "chain-5", (_CHAIN,), measured_ms=8.82),
    "8b-1b int4 draft": Case(
        PAIR, "chain-5", (_CHAIN, ("draft_quantize", "int4"), _GROUPS), (("draft_0", "int4"),),
        None, "6.4 ms",
    ),
    "30b-a3b": Case("qwen3-30b-a3b", measured_ms=4.00, aim="1.5 × floor"),
    "v2-lite": Case("deepseek-v2-lite", measured_ms=3.92, aim="1.6 × floor"),
}  # fmt: skip


def predict(case: Case) -> dict[str, Any]:
    """A row of the table: milliseconds, and times the floor."""
    programs, nodes = _step(case)
    floor = floor_ms(programs, case.plan, ShapesOptions(case.shapes).num_context)
    kinds = dict(case.kinds)
    found = {"launches": len(nodes), "floor_ms": floor, "measured_ms": case.measured_ms}
    found["today_ms"] = step_ms(nodes, kinds, TODAY)
    if kinds:
        found["fragments_ms"] = step_ms(nodes, kinds, FRAGMENTS)
        _, fused = _step(case, weight_fragments=True)
        found["fused_launches"] = len(fused)
        found["fused_ms"] = step_ms(fused, kinds, FRAGMENTS)
    times = {
        name.removesuffix("_ms") + "_over_floor": value / floor
        for name, value in found.items()
        if name.endswith("_ms") and name != "floor_ms" and value is not None
    }
    return found | times | {"aim": case.aim}


def _step(case: Case, **more: Any) -> tuple[BenchPrograms, list[Node]]:
    """Programs, and nodes of the captured step; `more` options of `ShapesOptions`."""
    shapes = ShapesOptions(case.shapes, **dict(case.options), **more)
    programs = compile_for(shapes, BenchOptions(), PhaseTimer(lambda event: None), "cuda")
    plan = next(x for x in programs.plans if x.name == case.plan)
    launches = Launches(recorded, kernels())
    return programs, step_nodes(programs, plan, shapes.num_context, launches, is_filtered=False)


def floor_ms(programs: BenchPrograms, plan: str, context: int) -> float:
    """Milliseconds of a copy of as many bytes as a step reads."""
    models = {
        model.entry.name: ModelShape(
            model.program, model.entry.layers, model.entry.dtype, copies=model.copies
        )
        for model in programs.models
    }
    own = next(x for x in programs.plans if x.name == plan)
    read = count_step_bytes(programs.steps[plan], models, own, context, 1)
    return 1e3 * read.total / COPY


def main(
    cases: Annotated[list[str] | None, typer.Argument()] = None,
    output: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Compile, count, predict, print, and write the report."""
    rows = {}
    for name in cases or (*CASES, *MIXTURES):
        found = MIXTURES[name].predict() if name in MIXTURES else predict(CASES[name])
        rows[name] = {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in found.items()
        }
        print(name, rows[name], flush=True)
    report = {
        "what": "predicted, not measured",
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "tests/measure/predict_steps.py", *sys.argv[1:]]),
        "rows": rows,
    }
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
