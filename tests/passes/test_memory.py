"""The memory plan: bytes counted by hand, and a workspace of the measured order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specc.artifact.backends import NATIVE, PARTS, SPLIT, WHOLE, facts_of
from specc.artifact.manifest_entries import LimitsEntry
from specc.bench.synthetic.shapes import SHAPES, Shape
from specc.compiler.context import plan_model_memory
from specc.kernels import ops
from specc.passes.frontend.hf_model import build_on_meta
from specc.passes.frontend.trace import trace
from specc.passes.lower.cuda.phases import cuda_phases
from specc.passes.memory import ModelMemory, PassShape, StateCounts, peak_bytes, plan_memory
from specc.passes.pipeline import Pipeline
from specc.passes.program import StateLayer
from specc.passes.quantize.quantize_linear import quantize_phases
from specc.speculation.plans import OFF
from tests.models import POSITIONS, build_model
from tests.passes.modules import Tiny, compiled, flat_logits

# 12 tokens of 2 sequences, 5 rows of logits
SHAPE = PassShape(num_tokens=12, num_rows=5, batch_size=2, longest=6, context=32)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Tiny().eval()


@pytest.fixture(scope="module")
def program(model):
    return compiled(model)[0]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_by_hand(program, dtype, size):
    memory = plan_memory(program, dtype, 64, [SHAPE])
    # embeddings of 13 and 64 rows, q, k, v, o with its bias, the head
    parameters = 16 * (13 + 64) + 16 * (16 + 8 + 8) + 16 * 16 + 16 + 16 * 13
    assert memory.weights == parameters * size
    # one layer, keys and values of 2 heads of 4, 64 rows
    assert memory.cache == 2 * 2 * 4 * 64 * size
    # the trace is float32, whatever the weights are stored in
    assert memory.logits == 5 * 13 * 4


def test_largest_pass_counts(program):
    small = PassShape(2, 2, 1, 2, 32)
    one, both = (plan_memory(program, torch.float32, 64, s) for s in ([SHAPE], [small, SHAPE]))
    assert one == both
    most_rows = PassShape(2, 9, 1, 2, 32)
    assert plan_memory(program, torch.float32, 64, [SHAPE, most_rows]).logits == 9 * 13 * 4
    assert peak_bytes(program, small) < peak_bytes(program, SHAPE)


def test_total_and_json():
    memory = ModelMemory(1, 20, 300, 4000)
    assert memory.total == 4321
    sizes = {"weights": 1, "cache": 20, "logits": 300, "workspace": 4000}
    assert memory.to_json() == sizes | {"states": 0, "checkpoints": 0}


def test_workspace_grows_with_tokens_and_context(program):
    twice = PassShape(24, 5, 2, 12, 32)
    longer = PassShape(12, 5, 2, 6, 64)
    base = peak_bytes(program, SHAPE)
    assert base < peak_bytes(program, twice) <= 2.5 * base
    assert base < peak_bytes(program, longer) <= 2 * base


def test_native_attention_keeps_no_scores(program):
    """What C++ needs depends on the machine's threads; torch keeps scores of limited rows."""
    longer = PassShape(12, 5, 2, 6, 1 << 20)
    native = peak_bytes(program, SHAPE, NATIVE)
    assert native == peak_bytes(program, longer, NATIVE)
    # 64 threads: three accumulators of 128 rows, a tile of keys and values, queries and scores
    inside = 64 * 4 * (3 * 128 * (4 + 32) + 2 * 64 * 4 + 128 * (64 + 4))
    assert inside < native < inside + 20_000
    split, whole = (peak_bytes(program, longer, kind) for kind in (SPLIT, WHOLE))
    # 4 heads: the scores of 16 rows fit, of 6 all the more; keys and values of 2 heads of 4
    assert split == whole
    many = PassShape(120, 5, 2, 60, 1 << 20)
    split, whole = (peak_bytes(program, many, kind) for kind in (SPLIT, WHOLE))
    assert whole - split == 4 * 2 * 4 * (60 - 16) << 20


@pytest.mark.slow
def test_a_model_of_8b_at_128k():
    """Two of the 32 layers of Llama-3.1-8B in bfloat16, and its embedding and head of 128,256."""
    config = Shape("8b", SHAPES["llama-3.1-8b"]).make_config()
    config.num_hidden_layers = 2
    program = trace(build_on_meta(config, torch.bfloat16), "target")
    Pipeline().run(program)
    limits = LimitsEntry(8, 131072, 16, 512, 16, 512)
    plans = {
        name: plan_model_memory(program, limits, torch.bfloat16, [OFF], facts_of(name))
        for name in ("cpu", "eager", "onnx")
    }
    # 16 rows after the committed ones: one more block; 2 KiB of each key and of each value
    assert plans["cpu"].cache == 2 * 8 * (131072 + 16) * 2 * 2048
    layers = 2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 5 * 4096
    assert plans["cpu"].weights - 2 * (layers + 2 * 128256 * 4096) < 1 << 20
    # that of 512 tokens, most of it inner features; 15 rows of scores; 512 rows of them
    assert plans["cpu"].workspace < 100 << 20
    gathered = 4 * 2 * 8 * 128 * (131072 + 16)
    assert gathered + (490 << 20) < plans["eager"].workspace < gathered + (600 << 20)
    assert plans["onnx"].workspace > 17 << 30
    # room for two sequences in place of eight
    fewer = dataclasses.replace(limits, kv_cache_tokens=2 * 131072)
    small = plan_model_memory(program, fewer, torch.bfloat16, [OFF], facts_of("cpu"))
    assert small.cache == 2 * 2 * 131072 * 2 * 2048
    assert dataclasses.replace(small, cache=0) == dataclasses.replace(plans["cpu"], cache=0)


class Peak(TorchDispatchMode):
    """Bytes of storages that operators made and nobody has dropped."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, tuple] = {}
        self.known = {t.untyped_storage()._cdata for t in known}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        output = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(output):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known:
                    self.storages[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        live = [size for ref, size in self.storages.values() if ref() is not None]
        self.peak = max(self.peak, sum(live))
        return output


class Wide(Tiny):
    """Large enough that what a pass computes outweighs its index tensors."""

    num_heads, num_kv_heads, head_dim = 8, 4, 16


def test_workspace_is_of_the_measured_order():
    torch.manual_seed(0)
    model = Wide().eval()
    program, _ = compiled(model)
    count = 48
    inputs = {
        "tokens": torch.zeros(count, dtype=torch.int64),
        "positions": torch.arange(count),
        "q_start": torch.tensor([0, count], dtype=torch.int32),
        "slot": torch.arange(count, dtype=torch.int32),
        "cache_len": torch.zeros(1, dtype=torch.int32),
        "ancestors": None,
        "block_table": torch.arange(count, dtype=torch.int32)[None],
        "logit_rows": torch.arange(count),
    }
    known = [*model.parameters(), *(v for v in inputs.values() if v is not None)]
    with Peak(known) as measured:
        flat_logits(program, model, inputs, count)
    # the fused weight and the caches were made inside, and the logits are counted apart
    made = 128 * (128 + 64 + 64) * 4 + 2 * count * 64 * 4 + count * 13 * 4
    workspace = measured.peak - made
    planned = peak_bytes(program, PassShape(count, count, 1, count, count))
    assert workspace / 3 < planned < workspace * 3


def test_a_gpu_needs_memory_for_splits(model):
    """What attention needs there depends on the machine's size, not on the context."""
    program = compiled(model)[0]
    Pipeline(cuda_phases(POSITIONS)).run(program)
    scratch = 4 * 2 * 160 * 128 * (4 + 1)
    longer = PassShape(12, 5, 2, 6, 640)
    peaks = [peak_bytes(program, shape, PARTS) for shape in (SHAPE, longer)]
    assert scratch < peaks[0] == peaks[1]


def test_products_with_norms_need_what_they_are_made_of():
    """With many rows they run those operators, one after the other; inputs live on meanwhile."""
    model = build_model("llama")
    # so many that attention is not what needs the most
    many = PassShape(100_000, 5, 2, 50_000, 64)
    peaks = []
    fused_phases = cuda_phases(POSITIONS)
    for phases in (tuple(p for p in fused_phases if p[0] != "products"), fused_phases):
        program = compiled(model)[0]
        Pipeline(phases).run(program)
        peaks.append(peak_bytes(program, many))
    separate, fused = peaks
    assert separate < fused < 2 * separate


def test_products_decode_only_so_much_of_a_weight_at_a_time():
    """What a backend decodes of the largest weight, and what comes of that part for each row."""
    program = compiled(build_model("llama"))[0]
    Pipeline(quantize_phases("int8")).run(program)
    nodes = program.calls(ops.linear_q)
    wholes = sorted({4 * node.args[3] * node.args[0].meta["val"].shape[1] for node in nodes})
    largest = max(nodes, key=lambda n: n.args[3] * n.args[0].meta["val"].shape[1])
    size = int(largest.args[0].meta["val"].shape[1])
    # few values live beside them, so that the largest weight decides
    few, part = PassShape(3, 1, 1, 3, 8), wholes[-1] * 9 // 10
    assert wholes[-2] < part
    none, whole, half = (peak_bytes(program, few, SPLIT, decoded) for decoded in (0, 1 << 40, part))
    assert none < half < whole
    assert whole - half == wholes[-1] - (part + 3 * part // size)


def test_states_by_hand(program):
    """Of a convolution over 5 columns and a recurrence of 2 heads: states, rows, checkpoints."""
    layers = [
        StateLayer("conv", "conv", (3, 5), 5, torch.bfloat16),
        StateLayer("mixer", "recurrence", (2, 4, 8), 4 + 16 + 2, torch.float32, 1),
    ]
    program = dataclasses.replace(program, state_layers=layers)
    counts = StateCounts(num_seqs=3, num_nodes=7, num_kept=2)
    memory = plan_memory(program, torch.float32, 64, [SHAPE], states=counts)
    state, row = 3 * 5 * 2 + 2 * 4 * 8 * 4, 5 * 2 + 22 * 4
    assert memory.states == 3 * (state + 7 * row)
    assert memory.checkpoints == 2 * state
    plain = plan_memory(program, torch.float32, 64, [SHAPE])
    assert memory.total - plain.total == memory.states + memory.checkpoints
