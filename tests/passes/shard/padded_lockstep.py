"""A padded program as one, and as those of all ranks: as graphs, or as files of ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, fx

from specc.artifact.cache_rows import CacheRows, cache_output, reaches_of
from specc.kernels import ops
from specc.kernels.reference.ranks import LockstepGroup
from specc.passes.lower.onnx.lower import OnnxFile, lower_ranks
from specc.passes.lower.onnx.operators import COLLECTIVE
from specc.passes.pipeline import PHASES, Phases, Pipeline
from specc.passes.program import Program
from specc.passes.rewrite.padded import padded_program
from specc.passes.shard.shard import Shard
from specc.runtime.backends.padded.padded_batch import named_inputs, padded_batch
from specc.sharding.shard_plan import ShardPlan
from specc.speculation.plans import SpecPlan
from tests import models
from tests.passes.shard.lockstep import ThreadRanks, whole_weights
from tests.traces import shared_traces, trace_once

ROWS = CacheRows.of(32, 16, 1)
BATCH = 2
Values = dict[str, Tensor]


class PaddedRanks:
    """A model whose padded program is whole, and cut for ranks.

    Args:
        changes: fields of the model's configuration.
    """

    def __init__(
        self,
        name: str,
        num_ranks: int,
        rows: CacheRows = ROWS,
        dtype: torch.dtype = torch.float32,
        phases: Phases = PHASES,
        **changes: Any,
    ) -> None:
        model = models.build_model(name, **changes).to(dtype)
        flat = trace_once(model, "target")
        Pipeline(phases).run(flat)
        layers = tuple(flat.layers)
        with shared_traces():
            self.whole, _ = padded_program(model, flat, rows.total)
            Pipeline((("shard", (partial(Shard, num_ranks),)),)).run(flat)
            self.cut, _ = padded_program(model, flat, rows.total, whole_layers=layers)
        assert self.cut.shard is not None
        self.plan: ShardPlan = self.cut.shard
        self.weights = whole_weights(model, self.whole)
        self.reaches = reaches_of(layers)
        generator = torch.Generator().manual_seed(5)
        # no zeros: whoever attends to a row that was never written is found out
        self.caches = {
            name: torch.randn(
                (BATCH, *self.whole.placeholder(name).meta["val"].shape[1:]), generator=generator
            )
            for name in self.whole.caches
        }

    def part_of_cache(self, name: str, whole: Tensor, rank: int) -> Tensor:
        """The heads [B, HK, L, D] that a rank has of a cache."""
        heads = int(self.cut.placeholder(name).meta["val"].shape[1])
        copies = self.plan.num_ranks * heads // whole.shape[1]
        return whole.narrow(1, rank // copies * heads, heads).clone()

    def weights_of(self, rank: int) -> Values:
        """Key → what a rank's file holds."""
        by_key = self.plan.by_key
        return {key: by_key[key].take(value, rank) for key, value in self.weights.items()}

    def run_whole(self, inputs: Values) -> tuple[Tensor, Values]:
        """Logits, and caches after the pass."""
        given = {name: self.weights[w.key] for name, w in self.whole.weights.items()}
        run = _Graph(self.whole, given | self.whole.constants | self.caches | inputs)
        with torch.inference_mode():
            return run(), run.written

    def run_graphs(self, inputs: Values) -> list[tuple[Tensor, Values]]:
        """Of each rank, whose sums are those of the oracle."""
        runs = []
        for rank in range(self.plan.num_ranks):
            own = self.weights_of(rank)
            given = {name: own[weight.key] for name, weight in self.cut.weights.items()}
            constants = {item.name: item.value(rank) for item in self.plan.constants}
            caches = {n: self.part_of_cache(n, x, rank) for n, x in self.caches.items()}
            given |= self.cut.constants | constants | caches | inputs
            runs.append(_Graph(self.cut, given))
        logits = ThreadRanks(len(runs)).run(runs)
        return [(found, run.written) for found, run in zip(logits, runs, strict=True)]

    def write(self, directory: Path) -> OnnxFile:
        files = []
        for rank in range(self.plan.num_ranks):
            weights = directory / f"rank-{rank}.weights.safetensors"
            save_file({k: v.contiguous() for k, v in self.weights_of(rank).items()}, weights)
            files.append((directory / f"rank-{rank}.model.onnx", weights))
        return lower_ranks(self.cut, files)

    def run_files(self, directory: Path, inputs: Values) -> list[tuple[Tensor, Values]]:
        """Of each rank: its file on onnxruntime from sum to sum, which are made between them."""
        import onnx

        given = []
        for rank in range(self.plan.num_ranks):
            caches = {n: self.part_of_cache(n, x, rank) for n, x in self.caches.items()}
            given.append(caches | inputs)
        ranks = [
            onnx.load(str(directory / f"rank-{rank}.model.onnx"))
            for rank in range(self.plan.num_ranks)
        ]
        sums = [
            (node.input[0], node.output[0])
            for node in ranks[0].graph.node
            if node.op_type == COLLECTIVE
        ]
        group = LockstepGroup(self.plan.num_ranks)
        for part, total in sums:
            parts = [_run(m, [part], values)[0] for m, values in zip(ranks, given, strict=True)]
            for values, found in zip(given, group.all_reduce(parts), strict=True):
                values[total] = found
        names = ["logits", *map(cache_output, self.cut.caches)]
        found = []
        for model, values in zip(ranks, given, strict=True):
            logits, *written = _run(model, names, values)
            found.append((logits, dict(zip(self.cut.caches, written, strict=True))))
        return found

    def prompt(self) -> Values:
        """Prompts of 7 tokens, logits of each."""
        generator = torch.Generator().manual_seed(3)
        tokens = torch.randint(models.VOCAB, (BATCH, 7), generator=generator)
        positions = torch.arange(7).repeat(BATCH, 1)
        lengths = torch.zeros(BATCH, dtype=torch.int32)
        rows = torch.arange(BATCH * 7)
        return named_inputs(
            padded_batch(
                ROWS, self.reaches, tokens, positions, positions.int(), lengths, None, rows
            )
        )

    def tree(self, widths: Sequence[int] = (3, 2, 1)) -> Values:
        """The nodes of a tree after 7 and 5 committed rows."""
        shape = SpecPlan.from_widths(tuple(widths)).tree
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randint(models.VOCAB, (BATCH, shape.num_nodes), generator=generator)
        lengths = torch.tensor([7, 5], dtype=torch.int32)
        slots = lengths[:, None] + torch.arange(shape.num_nodes, dtype=torch.int32)
        positions = lengths[:, None] + torch.tensor(shape.depths)
        words = shape.ancestor_words().repeat(BATCH, 1, 1)
        rows = torch.arange(tokens.numel())
        return named_inputs(
            padded_batch(ROWS, self.reaches, tokens, positions.long(), slots, lengths, words, rows)
        )


class _Graph(fx.Interpreter):
    """A padded graph with values for all of its inputs; keeps what caches are after the pass."""

    def __init__(self, program: Program, given: Values) -> None:
        super().__init__(program.graph_module)
        names = [node.target for node in program.graph.find_nodes(op="placeholder")]
        self._given = [given[name] for name in names]
        self.written: Values = {}

    def __call__(self) -> Tensor:
        return self.run(*self._given)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.target is ops.cache_write:
            assert n.args[0].target not in self.written, "a cache is written once"
            self.written[n.args[0].target] = value
        return value


def _run(model: Any, outputs: list[str], given: Values) -> list[Tensor]:
    """Values of a file, from those of its inputs and of the sums that are known."""
    import onnx
    import onnxruntime

    reads, needed = set(outputs), []
    for node in reversed(model.graph.node):
        if reads & set(node.output) and not set(node.output) <= given.keys():
            assert node.op_type != COLLECTIVE, "a sum that is not known yet"
            needed.append(node)
            reads |= set(node.input)
    types = {torch.float32: 1, torch.int64: 7, torch.bool: 9}
    make = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        needed[::-1],
        "part",
        [make(name, types[x.dtype], list(x.shape)) for name, x in given.items() if name in reads],
        [make(name, 1, None) for name in outputs],
        [item for item in model.graph.initializer if item.name in reads],
    )
    opset = [onnx.helper.make_opsetid("", 24)]
    part = onnx.helper.make_model(graph, opset_imports=opset, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        part.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {item.name: given[item.name].numpy() for item in session.get_inputs()}
    return [torch.from_numpy(value) for value in session.run(outputs, feeds)]


Ranks = Callable[[Values], list[tuple[Tensor, Values]]]
