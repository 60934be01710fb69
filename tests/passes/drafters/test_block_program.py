"""Programs of block drafters: rows of the context and rows of a block in one pass, over slabs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from specc.artifact.graph_io import graph_from_json, graph_to_json
from specc.kernels import ops
from specc.passes.drafters.block_head import BlockHead
from specc.passes.drafters.head_source import head_source
from specc.passes.drafters.head_spec import TargetFacts
from specc.passes.drafters.recognise import recognise
from specc.passes.drafters.registry import drafter_of_files
from specc.passes.facts import features_are_read
from specc.passes.frontend.model_source import ModelSource
from specc.passes.frontend.read_program import read_program
from specc.passes.frontend.trace import trace
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.pipeline import PHASES, Phases, Pipeline
from specc.passes.program import bind_args, constant_key
from specc.passes.program_json import program_to_json
from specc.passes.proof.verify_graph import verify_graph
from tests.block_heads import BLOCK_CASES, MASK, write_block
from tests.block_reference import BlockReference
from tests.heads import LAYERS, VOCAB, WIDTH
from tests.passes.drafters.conftest import filled
from tests.tiers import only

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
BLOCK, BLOCKS = 4, 8
TARGET = TargetFacts("the target", WIDTH, LAYERS, VOCAB)


def program_of(source: ModelSource, more: Phases = ()) -> Any:
    rows = drafter_of_files(source.head).rows(source.head, torch.float32)
    program = trace(source.module, "draft_0", rows=rows)
    Pipeline((*PHASES, ("features", drafter_of_files(source.head).passes(source.head)), *more)).run(
        program
    )
    return program


@pytest.mark.parametrize("name", only(("z-lab", "z-lab-mixed", "speculators-mixed"), BLOCK_CASES))
def test_a_pass_over_context_and_block(name, target, tmp_path):
    check_pass(name, target, tmp_path)


@pytest.mark.parametrize("name", only(("z-lab-mixed",), BLOCK_CASES))
def test_a_pass_of_the_program_for_a_gpu(name, target, tmp_path):
    """The graph that is captured; its kernels are the oracles here."""
    check_pass(name, target, tmp_path, cuda_phases(130))


def check_pass(name: str, target: Any, tmp_path: Path, more: Phases = ()) -> None:
    """Two sequences; of the context a part is there, and a part comes with the block."""
    case = BLOCK_CASES[name]
    tensors = write_block(tmp_path, case)
    spec = recognise(tmp_path, TARGET)
    given = ModelSource.load("target", target, torch.float32)
    source = head_source(spec, given, torch.float32)
    module, program = filled(BlockHead(spec).eval(), source), program_of(source, more)
    ends = (target.get_input_embeddings(), target.get_output_embeddings())
    reference = BlockReference(case, tensors, *(end.weight.detach() for end in ends))
    generator = torch.Generator().manual_seed(1)
    lengths, known = (11, 6), (7, 2)
    taps = [torch.randn(n, spec.feature_columns, generator=generator) for n in lengths]
    anchors = (17, 80)
    tables = torch.randperm(2 * BLOCKS, generator=generator).int().view(2, -1)
    run = _Runner(program, module, tables, taps)
    # what is in the cache before has come without a block
    run(
        [[(i, MASK, 0) for i in range(n)] for n in known],
        [0, 0],
        is_tree=False,
    )
    size, is_causal = case.size, case.is_causal and not case.is_mixed
    rows = []
    for n, k, anchor in zip(lengths, known, anchors, strict=True):
        ids = [anchor] + [MASK] * (size - 1)
        bits = [(2 << j) - 1 if is_causal else (1 << size) - 1 for j in range(size)]
        own = [(i, MASK, 0) for i in range(k, n)]
        rows.append(own + [(n + j, ids[j], bits[j]) for j in range(size)])
    logits = run(rows, list(lengths), is_tree=True)
    start = 0
    for n, k, anchor, seen in zip(lengths, known, anchors, taps, strict=True):
        start += n - k
        wanted = reference.rows(seen, anchor)
        torch.testing.assert_close(logits[start : start + size], wanted, **CLOSE)
        start += size


@pytest.mark.slow
def test_what_is_written_is_read_back(target, tmp_path):
    """Graph, inputs, and that it has no slab of its own."""
    write_block(tmp_path, BLOCK_CASES["z-lab"])
    given = ModelSource.load("target", target, torch.float32)
    program = program_of(head_source(recognise(tmp_path, TARGET), given, torch.float32))
    data = program_to_json(program)
    constants = {constant_key(name): value for name, value in program.constants.items()}
    layers = [(layer.name, layer.window) for layer in program.layers]
    keys = [*(weight.key for weight in program.weights.values()), *constants]
    found = read_program(data, constants, layers, keys)
    assert program_to_json(found) == data
    assert features_are_read(found)
    assert (found.row_inputs, found.feature_width) == (("feature_rows",), 0)
    (slab,) = [entry for entry in data["inputs"] if entry["name"] == "features"]
    assert (slab["layer"], slab["shape"]) == (2, [2 * WIDTH])
    verify_graph(found, "reading", is_final=True)


@pytest.mark.default("None-3", "70-2")
@pytest.mark.parametrize(("pass_tokens", "count"), [(None, 3), (500, 3), (70, 2), (64, 1)])
def test_a_word_for_every_token_on_a_gpu(pass_tokens, count, target, tmp_path):
    """What a program says itself of rows that layers see has as many words as a pass may need."""
    write_block(tmp_path, BLOCK_CASES["z-lab-mixed"])
    given = ModelSource.load("target", target, torch.float32)
    source = head_source(recognise(tmp_path, TARGET), given, torch.float32)
    program = program_of(source, cuda_phases(130, pass_tokens))
    words = [bind_args(call)["ancestors"] for call in program.calls(ops.attend)]
    assert words[-1] is program.placeholder("ancestors")
    assert [node.meta["val"].shape[1] for node in words[:-1]] == [count] * (len(words) - 1)
    verify_graph(program, "widening", is_final=True)


class _Runner:
    """Runs a program over caches in blocks; what was never written is no number."""

    def __init__(self, program, module, tables, taps) -> None:
        self._graph = fx.Interpreter(
            graph_from_json(json.loads(json.dumps(graph_to_json(program.graph))))
        )
        self._program, self._tables = program, tables
        parameters = module.state_dict()
        self._stored = dict(program.constants)
        for name, weight in program.weights.items():
            self._stored[name] = torch.cat([parameters[key].detach() for key in weight.parameters])
        for name in (*program.caches, "features"):
            shape = program.placeholder(name).meta["val"].shape[2:]
            self._stored[name] = torch.full((tables.numel(), BLOCK, *map(int, shape)), torch.nan)
        for table, own in zip(tables.long(), taps, strict=True):
            for i, row in enumerate(own):
                self._stored["features"][table[i // BLOCK], i % BLOCK] = row

    def __call__(self, rows, lengths, is_tree):
        """Logits of all rows: (slot, token, bits of the block's rows that it sees)."""
        flat = [(row, n) for own, n in zip(rows, lengths, strict=True) for row in own]
        starts = torch.tensor([0, *(len(own) for own in rows)]).cumsum(0).int()
        slots = torch.tensor([row[0] for row, _ in flat])
        tapped = [(r[0], -1) if r[0] < n or not is_tree else (-1, n - 1 - r[0]) for r, n in flat]
        inputs = {
            "tokens": torch.tensor([row[1] for row, _ in flat]),
            "positions": slots,
            "q_start": starts,
            "slot": slots.int(),
            "cache_len": torch.tensor(lengths).int(),
            "ancestors": torch.tensor([[row[2]] for row, _ in flat]) if is_tree else None,
            "block_table": self._tables,
            "logit_rows": torch.arange(len(flat)),
            "feature_rows": torch.tensor(tapped, dtype=torch.int32),
        }
        names = [str(node.target) for node in self._program.graph.find_nodes(op="placeholder")]
        values = [self._stored[x] if x in self._stored else inputs[x] for x in names]
        with torch.no_grad():
            return self._graph.run(*values)
