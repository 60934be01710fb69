"""Small modules that trace in a third of a second, and a way to run programs on numbers.

`Tiny` is one attention layer whose parts a test overrides: each override is one spelling that a
pass has to rewrite, or one near miss that it has to decline or refuse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from specc.artifact.graph_io import graph_from_json, graph_to_json
from specc.artifact.rounding import quantize
from specc.artifact.weight_layout import to_blocks
from specc.passes.base import Pass, PassResult
from specc.passes.pipeline import PHASES, Phases, Pipeline
from specc.passes.program import Program, Weight
from tests.traces import trace_once

aten = torch.ops.aten
VOCAB = 13
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Tiny(nn.Module):
    """(input_ids, position_ids) [1, T] → logits [1, T, VOCAB], one attention layer."""

    num_heads, num_kv_heads, head_dim, has_bias = 4, 2, 4, False

    def __init__(self) -> None:
        super().__init__()
        width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.width = width
        self.embedding = nn.Embedding(VOCAB, width)
        self.place = nn.Embedding(64, width)
        self.q = nn.Linear(width, width, bias=self.has_bias)
        self.k = nn.Linear(width, kv_width, bias=self.has_bias)
        self.v = nn.Linear(width, kv_width, bias=self.has_bias)
        self.o = nn.Linear(width, width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.embedding(ids) + self.place(positions)

    def split(self, x: Tensor) -> Tensor:
        """[1, T, H·D] → [1, H, T, D]."""
        return x.view(1, -1, x.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)

    def repeat(self, x: Tensor) -> Tensor:
        """[1, HK, T, D] → [1, H, T, D], as repeat_kv does."""
        group = self.num_heads // self.num_kv_heads
        x = x[:, :, None].expand(-1, -1, group, -1, -1)
        return x.reshape(1, self.num_heads, -1, self.head_dim)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = self.repeat(self.split(self.k(x))), self.repeat(self.split(self.v(x)))
        return self.split(self.q(x)), k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def after(self, x: Tensor, positions: Tensor) -> Tensor:
        return x

    def project(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Any:
        x = self.embed(input_ids, position_ids)
        attended = self.attend(*self.operands(x), position_ids)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return self.project(self.after(x, position_ids))


def traced(model: nn.Module, *passes: Pass) -> tuple[Program, list[PassResult]]:
    """A model's program after these passes, without the verification between phases."""
    program = trace_once(model.eval(), "target")
    return program, [item.run(program) for item in passes]


def compiled(model: nn.Module, phases: Phases = PHASES) -> tuple[Program, Pipeline]:
    """A model's program after the whole pipeline, or these phases."""
    program = trace_once(model.eval(), "target")
    pipeline = Pipeline(phases)
    pipeline.run(program)
    return program, pipeline


def rewrites(pipeline: Pipeline, name: str) -> int:
    return next(record.rewrites for record in pipeline.records if record.name == name)


def reasons(pipeline: Pipeline, name: str) -> list[str]:
    return [d.reason for record in pipeline.records if record.name == name for d in record.declined]


def random_tokens(count: int = 9) -> Tensor:
    """Ids of `Tiny`, in no order."""
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(7))


def dense_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """[T, V] logits of the module itself."""
    ids, positions = tokens[None], torch.arange(len(tokens))[None]
    with torch.no_grad():
        if hasattr(model, "config"):
            output = model(input_ids=ids, position_ids=positions, use_cache=False)
        else:
            output = model(ids, positions)
    output = getattr(output, "logits", output)
    return (output[0] if isinstance(output, tuple) else output)[0]


def program_logits(
    program: Program, model: nn.Module, tokens: Tensor, rows: Sequence[int] | None = None
) -> Tensor:
    """[R, V] logits of one causal pass over one sequence of a program, also before rewriting."""
    count = len(tokens)
    rows = range(count) if rows is None else rows
    return flat_logits(
        program,
        model,
        {
            "tokens": tokens,
            "positions": torch.arange(count),
            "q_start": torch.tensor([0, count], dtype=torch.int32),
            "slot": torch.arange(count, dtype=torch.int32),
            "cache_len": torch.zeros(1, dtype=torch.int32),
            "ancestors": None,
            "block_table": torch.arange(count, dtype=torch.int32)[None],
            "logit_rows": torch.tensor(list(rows), dtype=torch.int64),
        },
        count,
    )


def flat_logits(
    program: Program, model: nn.Module, inputs: dict[str, Tensor | None], num_blocks: int
) -> Tensor:
    """Run a program on given runtime inputs, with zeroed caches of blocks of one row."""
    # and buffers that a checkpoint holds
    parameters = dict(model.named_buffers()) | dict(model.named_parameters(remove_duplicate=False))
    values: list[Any] = []
    for node in program.graph.find_nodes(op="placeholder"):
        name = node.target
        if name in program.weights:
            values.append(_weight(program, node, parameters))
        elif name in program.constants:
            values.append(program.constants[name])
        elif name in program.caches:
            values.append(torch.zeros(num_blocks, 1, *node.meta["val"].shape[2:]))
        elif name == "geometry":
            values.append(torch.zeros(1, 1, 1, 1, dtype=torch.int32))
        else:
            values.append(inputs[name])
    with torch.no_grad():
        return fx.Interpreter(_runnable(program)).run(*values)


def stored_rows(weight: Weight, tensors: Mapping[str, Tensor]) -> Tensor:
    """A weight in rows, made of a model's tensors by name."""
    parts = [tensors[key].detach() for key in weight.parameters]
    if weight.is_turned:
        parts = [part.mT.contiguous() for part in parts]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _weight(program: Program, node: fx.Node, parameters: Mapping[str, Tensor]) -> Tensor:
    """A weight as the graph reads it: in rows, or in blocks once it is lowered."""
    weight = program.weights[node.target]
    rows = stored_rows(weight, parameters)
    if weight.quantized is not None:
        return torch.cat([quantize(x, weight.quantized) for x in rows.view(-1, *rows.shape[-2:])])
    return rows if tuple(node.meta["val"].shape) == weight.shape else to_blocks(rows)


BLOCK_SIZE, BLOCKS_A_ROW = 4, 8
# two sequences; node 2 is a sibling of node 1, nodes 3 and 4 are children of node 1
TREE = (-1, 0, 0, 1, 1)


class Runner:
    """A program as it is now, through the file format, with random caches that passes change."""

    def __init__(self, program: Program, model: nn.Module) -> None:
        self.graph_module = _runnable(program)
        self.caches: dict[str, Tensor] = {}
        self._values: list[Any] = []
        # and buffers that a checkpoint holds
        parameters = dict(model.named_buffers())
        parameters |= dict(model.named_parameters(remove_duplicate=False))
        generator = torch.Generator().manual_seed(11)
        for node in program.graph.find_nodes(op="placeholder"):
            name = node.target
            if name in program.weights:
                self._values.append(_weight(program, node, parameters))
            elif name in program.constants:
                self._values.append(program.constants[name])
            elif name in program.caches:
                layer = program.layers[program.caches[name][0]]
                # one block belongs to nobody
                columns = int(node.meta["val"].shape[-1])
                shape = (2 * BLOCKS_A_ROW + 1, BLOCK_SIZE, layer.num_kv_heads, columns)
                rows = torch.randn(shape, generator=generator).to(node.meta["val"].dtype)
                self.caches[name] = rows
                self._values.append(rows)
            else:
                self._values.append(name)

    def run(self, inputs: dict[str, Tensor | None]) -> Tensor:
        values = [inputs[x] if isinstance(x, str) else x for x in self._values]
        with torch.no_grad():
            return fx.Interpreter(self.graph_module).run(*values)


def several_passes(vocab: int = VOCAB) -> list[dict[str, Tensor | None]]:
    """Prefill of two sequences, a tree for each, and plain decoding; each has one dead token."""
    lengths, generator = torch.tensor([19, 4]), torch.Generator().manual_seed(3)
    table = torch.randperm(2 * BLOCKS_A_ROW, generator=generator).view(2, -1).to(torch.int32)
    parents = torch.tensor(TREE)
    allowed, depth = [], []
    for i, parent in enumerate(TREE):
        allowed.append((allowed[parent] if i else 0) | 1 << i)
        depth.append(depth[parent] + 1 if i else 0)
    passes = [
        # positions of each sequence, rows before it, whether it is a tree
        ([torch.arange(n) for n in lengths.tolist()], torch.zeros(2), False),
        ([n + torch.tensor(depth) for n in lengths], lengths, True),
        ([n + 1 + torch.zeros(1) for n in lengths], lengths + 1, False),
    ]
    result = []
    for positions, cache_len, is_tree in passes:
        flat = torch.cat([*positions, torch.zeros(1)]).long()
        counts = torch.tensor([len(p) for p in positions])
        counts[1] += 1  # the dead token
        slots = (n + torch.arange(len(parents)) for n in cache_len) if is_tree else positions
        slot = torch.cat([*slots, torch.tensor([-1])])
        words = torch.tensor([*allowed, *allowed, 0])[:, None]
        result.append(
            {
                "tokens": torch.randint(0, vocab, (len(flat),), generator=generator),
                "positions": flat,
                "q_start": torch.cat([torch.zeros(1), counts.cumsum(0)]).to(torch.int32),
                "slot": slot.to(torch.int32),
                "cache_len": cache_len.to(torch.int32),
                "ancestors": words if is_tree else None,
                "block_table": table,
                "logit_rows": torch.arange(len(flat) - 1),
            }
        )
    return result


def assert_runs_alike(
    before: Runner, after: Runner, vocab: int = VOCAB, **tolerance: float
) -> None:
    """Several passes give the same logits, and the same caches in the end."""
    for inputs in several_passes(vocab):
        want, got = before.run(inputs), after.run(inputs)
        torch.testing.assert_close(got, want, **(TOLERANCE | tolerance))
    for name, rows in before.caches.items():
        torch.testing.assert_close(after.caches[name], rows, **(TOLERANCE | tolerance))


def _runnable(program: Program) -> fx.GraphModule:
    if program.caches:  # also through the file format, as the runtime gets it
        return graph_from_json(json.loads(json.dumps(graph_to_json(program.graph))))
    return program.graph_module


def assert_same_numbers(program: Program, model: nn.Module, **tolerance: float) -> None:
    """The program computes what the module computes, for every token of one sequence."""
    tokens = random_tokens()
    got, want = program_logits(program, model, tokens), dense_logits(model, tokens)
    torch.testing.assert_close(got.view_as(want), want, **(TOLERANCE | tolerance))


def assert_same_numbers_flat(program: Program, model: nn.Module) -> None:
    """Two sequences in one flat pass give what each gives alone: tokens meet in attention only."""
    tokens = random_tokens()
    first, second = tokens[:4], tokens[4:]
    places = torch.cat([torch.arange(4), torch.arange(5)])
    inputs = {
        "tokens": tokens,
        "positions": places,
        "q_start": torch.tensor([0, 4, 9], dtype=torch.int32),
        "slot": places.to(torch.int32),
        "cache_len": torch.zeros(2, dtype=torch.int32),
        "ancestors": None,
        "block_table": torch.arange(10, dtype=torch.int32).view(2, 5),
        "logit_rows": torch.arange(9),
    }
    got = flat_logits(program, model, inputs, 10)
    want = torch.cat([dense_logits(model, first), dense_logits(model, second)])
    torch.testing.assert_close(got, want, **TOLERANCE)


def lower_for_cuda(model: Any, before: Phases = ()) -> tuple[Runner, Runner, Program, Pipeline]:
    """Runners before and after the phases of CUDA, the program, and the pipeline.

    Args:
        before: phases that come first.
    """
    from specc.passes.lower.cuda.phases import cuda_phases
    from tests.models import POSITIONS

    program, _ = compiled(model, (*PHASES, *before))
    before = Runner(program, model)
    pipeline = Pipeline(cuda_phases(POSITIONS))
    pipeline.run(program)
    return before, Runner(program, model), program, pipeline
