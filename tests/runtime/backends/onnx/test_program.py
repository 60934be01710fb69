"""A model's ONNX program against its flat one: logits, and every row of the caches."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from specc.errors import EngineError
from specc.passes.lower.onnx.operators import OPSET
from specc.runtime.backends.onnx import program as onnx_program
from specc.runtime.backends.onnx.program import OnnxProgram, load_onnx
from specc.speculation.tree import TokenTree
from tests import models
from tests.flat_passes import PADDING, Inputs, causal_pass, first_level, random_tree, tree_pass
from tests.onnx_models import ROWS, BothPrograms, Lowered, lowered, model_entry, write_onnx

BLOCKS = 6
PRODUCT = ("a", "b", "logits")
TOLERANCE = 1e-5
LEVELS = TokenTree((-1, 0, 0, 0, 1, 1, 3, 3, 4, 6))
CHOOSER = random.Random(3)
# the window of tests/models.py is 16 rows: passes begin inside of one and after one
PASSES: dict[str, list[Inputs]] = {
    "prefill": [causal_pass([0], [40], [2]), causal_pass([40], [33], [2])],
    "one-token": [causal_pass([0], [1], [0]), causal_pass([9, 70, 15, 16], [1] * 4, [1, 2, 3, 4])],
    "chain": [tree_pass([0, 5, 60], [TokenTree.chain(4)] * 3, [0, 1, 2])],
    "random-tree": [
        tree_pass([30, 7, 0], [random_tree(CHOOSER, 12) for _ in range(3)], [3, 4, 5]),
        # two words of ancestors
        tree_pass([12, 61], [random_tree(CHOOSER, 70) for _ in range(2)], [1, 2]),
    ],
    "ragged": [
        causal_pass([0, 0, 0], [7, 33, 1], [1, 2, 3]),
        causal_pass([7, 33, 1, 90], [26, 1, 14, 40], [1, 2, 3, 5]),
    ],
    "shuffled": [
        causal_pass([17, 3, 40, 21], [5] * 4, [4, 1, 3, 2]),
        causal_pass([22, 8, 45], [3, 9, 1], [4, 1, 3]),
        tree_pass([20, 6], [random_tree(CHOOSER, 6) for _ in range(2)], [1, 0]),
    ],
    "holes": [
        causal_pass([11, 40, 18], [6] * 3, [0, 2, 5]),
        causal_pass([17, 46, 24, 3], [2, 5, 1, 30], [5, 0, 2, 3]),
        tree_pass([16, 2, 33], [random_tree(CHOOSER, 6) for _ in range(3)], [1, 3, 4]),
    ],
    "front": [first_level([0, 1, 2, 40], 3, [0, 1, 2, 3]), first_level([1, 0], 2, [4, 2])],
    "levels": [
        tree_pass([0, 20], [LEVELS] * 2, [2, 3], nodes)
        for nodes in ([0], [1, 2, 3], [4, 5, 6, 7], [8, 9])
    ],
    "no-part": [
        tree_pass([9, PADDING, 0], [TokenTree.chain(3)] * 3, [0, 1, 2]),
        first_level([PADDING, 12], 2, [3, 4]),
    ],
    # 252 rows leave no room to be filled up to 90 tokens
    "near-the-end": [causal_pass([252, 2], [4, 90], [1, 2]), causal_pass([255], [1], [3])],
}
# layers with windows and without; learned positions and biases are in test_engine.py, beside the
# eager graphs, too, and all others in the slow tier
NAMES = [
    pytest.param(name, marks=() if name == "gemma3" else pytest.mark.slow)
    for name in (*models.ARCHITECTURES, *models.ROTARY_VARIANTS, "gemma3-tied")
]


class Programs:
    """Programs and files of tiny models, each made once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[tuple[object, ...], tuple[Lowered, Path]] = {}

    def files(self, name: str, dtype: torch.dtype = torch.float32) -> tuple[Lowered, Path]:
        key = (name, dtype)
        if key not in self._made:
            path = self._root / str(len(self._made))
            pair = lowered(name, ROWS, dtype)
            write_onnx(pair, path)
            self._made[key] = pair, path
        return self._made[key]

    def both(self, *key: Any) -> BothPrograms:
        return BothPrograms(*self.files(*key), BLOCKS)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="module")
def small(programs: Programs) -> tuple[Lowered, Path]:
    """Programs and files of a model with windows."""
    return programs.files("gemma3")


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize("name", NAMES)
def test_passes_equal_those_of_the_flat_program(programs: Programs, name: str, kind: str) -> None:
    both = programs.both(name)
    for inputs in PASSES[kind]:
        both.compare(inputs, TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_passes_build_upon_each_other(programs: Programs, name: str) -> None:
    """Prefill in chunks, then trees, of two sequences among others, all in one cache."""
    both = programs.both(name)
    for start in (0, 13, 26):
        both.compare(causal_pass([start, start], [13, 13], [1, 3]), TOLERANCE)
    for step in range(3):
        trees = [random_tree(CHOOSER, 7) for _ in range(2)]
        both.compare(tree_pass([39 + step, 39 + 2 * step], trees, [1, 3]), TOLERANCE)


@pytest.mark.parametrize("rows", [[], [0], [16, 3, 3, 0], [2, 1]], ids=str)
@pytest.mark.parametrize("kind", ["even", "ragged", "holes"])
def test_logits_of_any_rows(small: tuple[Lowered, Path], rows: list[int], kind: str) -> None:
    both = BothPrograms(*small, BLOCKS)
    inputs = {
        "even": causal_pass([3, 8], [10, 10], [1, 2]),
        "ragged": causal_pass([3, 8], [5, 12], [1, 2]),
        "holes": causal_pass([3, 8], [5, 12], [4, 2]),
    }[kind]
    picked = torch.tensor(rows, dtype=torch.int64)
    logits = both.compare(inputs | {"logit_rows": picked}, TOLERANCE)
    assert logits.shape == (len(rows), models.VOCAB)


def test_words_of_no_ancestors_are_causal(small: tuple[Lowered, Path]) -> None:
    both = BothPrograms(*small, BLOCKS)
    inputs = causal_pass([3, 8], [10, 10], [1, 2])
    wanted = both.compare(inputs, TOLERANCE)
    found = both.onnx(**inputs | {"ancestors": torch.zeros(20, 0, dtype=torch.int64)})
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))


def test_what_fills_up_has_the_position_of_the_last_token(
    small: tuple[Lowered, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model may have none after it: 253 + 64 is beyond its positions."""
    both, given, last = BothPrograms(*small, BLOCKS), [], models.POSITIONS - 3
    run = both.onnx.run
    monkeypatch.setattr(both.onnx, "run", lambda *a: given.append(a[2]) or run(*a))
    both.onnx(**causal_pass([0, last], [64, 3], [0, 1]))
    (padded,) = given
    assert padded.positions.tolist() == [[*range(64)], [last, last + 1, *[last + 2] * 62]]


# beside the eager graphs, with learned positions
@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_filling_up_stays_within_the_learned_positions(programs: Programs, name: str) -> None:
    """A short span at the last positions beside a long one: 253 + 64 is beyond the table."""
    both = programs.both(name)
    last = models.POSITIONS - 3
    both.compare(causal_pass([0, last], [64, 3], [0, 1]), TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_float16(programs: Programs, name: str) -> None:
    both = programs.both(name, torch.float16)
    for kind in ("prefill", "random-tree", "ragged", "front"):
        for inputs in PASSES[kind]:
            logits = both.compare(inputs, 1e-2)
    assert both.onnx(**inputs).dtype is torch.float32, "what the operators of a step read"
    assert logits.dtype is torch.float16


def test_a_write_past_the_end_is_refused(small: tuple[Lowered, Path]) -> None:
    """What lies after a cache is dropped by onnxruntime without a word."""
    both = BothPrograms(*small, BLOCKS)
    last = ROWS.slots
    both.onnx(**causal_pass([last - 4], [4], [1]))
    before = [part.clone() for pair in both.onnx_caches for part in pair]
    for inputs in (causal_pass([last - 3], [4], [1]), causal_pass([last], [1], [1])):
        with pytest.raises(EngineError, match=f"slots up to {ROWS.slots - 1}") as caught:
            both.onnx(**inputs)
        assert "--max-seq-len" in str(caught.value)
    after = [part for pair in both.onnx_caches for part in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.fixture
def loud(small: tuple[Lowered, Path]) -> onnxruntime.InferenceSession:
    """A session that warns where it copies what could be updated in place."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 2
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(small[1] / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "copied"])
def test_caches_are_updated_in_place(
    small: tuple[Lowered, Path],
    loud: onnxruntime.InferenceSession,
    in_place: bool,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The session gets one address for a cache and its output; it warns where it gets two."""
    pair, _ = small
    both = BothPrograms(*small, BLOCKS)
    program = OnnxProgram("target", loud, both.onnx_caches, pair.reaches, ROWS)
    bound: dict[str, set[int]] = {}
    kept = []
    bind = onnx_program._bind

    def record(call: Callable[..., None], name: str, value: torch.Tensor) -> None:
        if not in_place and name.endswith("_out"):
            value = value.clone()
            kept.append(value)
        bound.setdefault(name.removesuffix("_out"), set()).add(value.data_ptr())
        bind(call, name, value)

    monkeypatch.setattr(onnx_program, "_bind", record)
    capfd.readouterr()
    program(**causal_pass([3, 8], [4, 4], [1, 2]))
    text = "".join(capfd.readouterr())
    caches = {f"{part}_cache_{i}" for part in "kv" for i in range(len(both.onnx_caches))}
    assert {len(bound[name]) for name in caches} == {1 if in_place else 2}
    assert ("in-place" in text) is not in_place, text


def test_an_even_pass_of_neighbours_is_one_run(
    small: tuple[Lowered, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as few runs as there are holes, whatever the order of the sequences."""
    both = BothPrograms(*small, BLOCKS)
    runs = []
    run = both.onnx.run
    monkeypatch.setattr(both.onnx, "run", lambda *a: runs.append(a[:2]) or run(*a))
    for blocks, counts, wanted in (
        ([1, 2, 3], [4, 4, 4], [(1, 3)]),
        ([3, 1, 2], [4, 4, 4], [(1, 3)]),
        ([1, 2, 3], [4, 1, 9], [(1, 3)]),
        ([0, 4, 1], [4, 4, 4], [(0, 2), (4, 1)]),
        ([5, 3, 1], [4, 2, 3], [(1, 1), (3, 1), (5, 1)]),
    ):
        both.onnx(**causal_pass([3, 8, 20], counts, blocks))
        assert runs == wanted
        runs.clear()


def test_files_of_other_inputs_are_refused(small: tuple[Lowered, Path]) -> None:
    pair, path = small
    entry = model_entry(pair)
    both = BothPrograms(*small, 1)
    layers = tuple(replace(layer, window=7) for layer in entry.layers)
    with pytest.raises(EngineError, match="too many or too few") as caught:
        load_onnx(path, replace(entry, layers=layers), both.onnx_caches, ROWS)
    assert "mask_window_7" in str(caught.value)
    with pytest.raises(EngineError, match="too many or too few"):
        load_onnx(path, entry, both.onnx_caches[:1], ROWS)


def test_bfloat16_is_refused_at_load(tmp_path: Path, small: tuple[Lowered, Path]) -> None:
    """On CPUs onnxruntime has no product of it; whole engines: test_engine.py."""
    pair, _ = small
    entry, caches = model_entry(pair), BothPrograms(*small, 1).onnx_caches

    def refusal(dtype: str, kind: int) -> EngineError:
        a, b, logits = (helper.make_tensor_value_info(name, kind, [2, 2]) for name in PRODUCT)
        graph = helper.make_graph(
            [helper.make_node("MatMul", PRODUCT[:2], PRODUCT[2:])], "product", [a, b], [logits]
        )
        opset = helper.make_opsetid("", OPSET)
        made = helper.make_model(graph, opset_imports=[opset], ir_version=10)
        onnx.save(made, tmp_path / entry.onnx_file)
        with pytest.raises(EngineError) as caught:
            load_onnx(tmp_path, replace(entry, dtype=dtype), caches, ROWS)
        return caught.value

    refused = refusal("bfloat16", TensorProto.BFLOAT16)
    assert "cannot run" in refused.found
    assert "does not compute in bfloat16" in refused.needed
    assert "--backend eager" in refused.do
    # the same in a type that it has
    assert "with inputs" in refusal("float32", TensorProto.FLOAT).found
