"""Embeddings that read integers: whose, in which layout, and which ones keep their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from specc.artifact.backends import backend_names, facts_of
from specc.artifact.decoders.kept_integers import KeptIntegers
from specc.artifact.quantized_layout import QuantizedLayout, dequantize
from specc.artifact.rounding import quantize
from specc.kernels import ops
from specc.passes.lower.cpu.phases import CPU_PHASES, LAYOUT_PHASES
from specc.passes.pipeline import PHASES, PassRecord, Pipeline
from specc.passes.program import Program
from specc.passes.proof.verify_tokenwise import verify_tokenwise
from specc.passes.quantize.quantize_linear import quantize_phases
from specc.passes.shard.shard import Shard
from tests.models import build_model
from tests.passes.modules import aten
from tests.traces import trace_once


def compiled(
    name: str,
    layout: str | None = "int4-g32",
    *,
    kept: dict[str, KeptIntegers] | None = None,
    before: tuple = (),
    **options,
) -> tuple[Program, PassRecord]:
    given = {"lookups": True, "embeddings": layout} | options
    quantized = quantize_phases(layout, kept is not None, **given)
    pipeline = Pipeline((*PHASES, *before, *quantized, *LAYOUT_PHASES, *CPU_PHASES))
    program = trace_once(build_model(name), "target")
    for weight in program.weights.values():
        for part, integers in (kept or {}).items():
            program.integers |= {n: integers for n in weight.parameters if part in n}
    pipeline.run(program)
    verify_tokenwise(program, "quantize")
    return program, next(item for item in pipeline.records if item.name == "QuantizeEmbeddings")


def layouts(program: Program) -> dict[str, str]:
    return {weight.key: weight.layout for weight in program.weights.values()}


def test_a_tied_embedding_reads_the_integers_of_the_head() -> None:
    program, record = compiled("gemma3-tied")
    assert record.rewrites == 1
    (lookup,) = program.calls(ops.embedding_q)
    heads = [call for call in program.calls(ops.linear_q) if call.args[1] is lookup.args[0]]
    assert len(heads) == 1
    found = layouts(program)
    assert found["lm_head.weight:int8"] == "blocks-int8"
    assert "lm_head.weight" not in found
    assert program.calls(aten.embedding.default, ops.embedding_of_blocks) == []


@pytest.mark.parametrize(
    ("layout", "own"),
    [("int4-g32", "int8"), ("int8", "int8"), ("int8-g64", "int8-g64"), ("fp8", "int8")],
)
def test_an_embedding_of_its_own_is_in_the_layout_of_heads(layout: str, own: str) -> None:
    program, _ = compiled("llama", layout)
    (lookup,) = program.calls(ops.embedding_q)
    assert lookup.args[2:] == (128, 64, own)
    assert layouts(program)[f"model.embed_tokens.weight:{own}"] == f"blocks-{own}"
    assert "model.embed_tokens.weight" not in layouts(program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_rounded_once(dtype: torch.dtype) -> None:
    """To the type that the embedding has in the graph, and in its shape."""
    program = trace_once(build_model("llama").to(dtype), "target")
    (before,) = program.calls(aten.embedding.default)
    shape = before.meta["val"].shape
    Pipeline((*PHASES, *quantize_phases("int8", embeddings="int8", lookups=True))).run(program)
    (lookup,) = program.calls(ops.embedding_q)
    graph = fx.Graph()
    copied = {item: graph.placeholder(item.name) for item in lookup.args[:2]}
    last = lookup
    while True:
        # sizes of tokens are nodes, too
        copied[last] = graph.node_copy(last, lambda item: copied.get(item, -1))
        if last.target is aten.reshape.default:
            break
        (last,) = last.users
    graph.output(list(graph.nodes)[-1])
    assert last.meta["val"].shape == shape
    assert last.meta["val"].dtype == dtype
    table, ids = torch.randn(128, 64), torch.tensor([3, 127, 3, 0, 40])
    stored = quantize(table, QuantizedLayout(8))
    found = fx.Interpreter(fx.GraphModule({}, graph)).run(stored, ids)
    want = dequantize(stored, (128, 64), QuantizedLayout(8))[ids].to(dtype)
    assert torch.equal(found.view(5, 64), want)


@pytest.mark.parametrize(("layout", "own"), [(None, "rows"), ("int8", "blocks-int8")])
def test_integers_of_the_checkpoint_are_kept(layout: str | None, own: str) -> None:
    """Before what is asked for; without both, it keeps its numbers."""
    int4 = KeptIntegers(QuantizedLayout(4, 32))
    program, _ = compiled("llama", layout, kept={"embed_tokens": int4})
    assert layouts(program)["model.embed_tokens.weight:int4-g32"] == "blocks-int4-g32"
    program, record = compiled("llama", layout, kept={"down_proj": int4})
    (key,) = (key for key in layouts(program) if "embed_tokens" in key)
    assert layouts(program)[key] == own
    reasons = [item.reason for item in record.declined]
    assert reasons == (["the checkpoint has no integers of its weight"] if own == "rows" else [])


@pytest.mark.parametrize(("name", "part"), [("llama", "embed_tokens"), ("gemma3-tied", "lm_head")])
def test_columns_in_another_order_are_not_looked_up(name: str, part: str) -> None:
    """Nor those of a head that it is tied to, which gathers its rows in this order."""
    columns = 64
    order = torch.randperm(columns).numpy().tobytes()
    kept = {part: KeptIntegers(QuantizedLayout(4, 32), order)}
    program, record = compiled(name, "int8", kept=kept)
    assert program.calls(ops.embedding_q) == []
    assert "not in rows as they are looked up" in record.declined[0].reason


def test_positions_keep_their_numbers() -> None:
    """Tables that are looked up by positions: their errors would be every token's."""
    program, record = compiled("gpt2")
    assert record.rewrites == 1
    assert [item.reason for item in record.declined] == ["it is not looked up by tokens"]
    assert any("wpe" in key and layout == "rows" for key, layout in layouts(program).items())


@pytest.mark.slow
def test_ranks_look_their_rows_up() -> None:
    """Of a vocabulary that is cut: a rank's blocks are of its rows, rounded before the cut."""
    for name in ("llama", "gemma3-tied"):
        program, _ = compiled(name, "int8", before=(("shard", (lambda: Shard(2),)),))
        (lookup,) = program.calls(ops.embedding_q)
        assert lookup.args[2] == 64
        weight = program.weights[lookup.args[0].target]
        assert program.shard is not None
        assert program.shard.by_key[weight.key].shape == (128, 64)
        assert sum(key.startswith(weight.parameters[0]) for key in program.shard.by_key) == 1


def test_backends_that_look_numbers_up_keep_them() -> None:
    pipeline = Pipeline((*PHASES, *quantize_phases("int8")))
    program = trace_once(build_model("gemma3-tied"), "target")
    pipeline.run(program)
    assert layouts(program)["lm_head.weight"] == "rows"
    assert len(program.calls(aten.embedding.default)) == 1
    # what the others read as integers is tested by their engines
    assert [x for x in backend_names() if facts_of(x).looks_up_quantized] == ["cpu", "eager"]
