"""Compiled programs and steps against the same engine run operator by operator."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from specc.errors import EngineError
from specc.runtime.backends.cpu.program import CpuProgram
from specc.runtime.backends.eager.program import ModelProgram
from specc.runtime.backends.program_files import MappedWeights, read_json
from specc.runtime.engine import Engine
from specc.speculation.tree import TokenTree
from tests import models
from tests.lossless import PLAN_IDS, Zoo
from tests.runtime.backends.cpu.cpu_pair import (
    Environment,
    Pair,
    block_table,
    load_pair,
    load_program,
    step_inputs,
)
from tests.tiers import every

NAMES = ("gemma3-tied", "opt")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
NARROW = 64  # passes of more tokens run element-wise loops on all threads
MAX_BATCH = 5


@pytest.fixture(scope="module")
def pairs(zoo: Zoo) -> dict[str, Pair]:
    return {name: load_pair(zoo, name) for name in NAMES}


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Iterator[Pair]:
    pair = pairs[request.param]
    pair.fill_caches()
    with torch.inference_mode():
        yield pair


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest, pair: Pair) -> Iterator[int]:
    """Threads of torch and of the programs, which keep the number that they were loaded with."""
    models = [pair.compiled.target, *pair.compiled.drafts]
    before = [model.num_threads for model in models]
    for model in models:
        model.set_num_threads(request.param)
    ambient = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(ambient)
    for model, number in zip(models, before, strict=True):
        model.set_num_threads(number)


def run_both(
    pair: Pair, plan: str, batch: int, seed: int, is_greedy: bool = False
) -> tuple[Environment, Environment]:
    """One step of both engines; all that they compute is compared."""
    engines, step = (pair.compiled, pair.eager), pair.eager.steps[plan]
    found, wanted = (step_inputs(engine, batch, seed, is_greedy) for engine in engines)
    seconds = pair.compiled.steps[plan].run(found)
    assert list(seconds) == list(step.run(wanted))
    assert all(value > 0 for value in seconds.values())
    assert found.keys() == wanted.keys() - step._constants.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], **TOLERANCE, msg=lambda m, n=name: n + m)
    return found, wanted


@contextlib.contextmanager
def hook(pair: Pair, plan: str, function: Callable[[Environment], object]) -> Iterator[None]:
    steps = pair.compiled.steps[plan], pair.eager.steps[plan]
    for step in steps:
        step.before_accept = function
    try:
        yield
    finally:
        for step in steps:
            step.before_accept = None


@pytest.mark.parametrize("plan", every(2, PLAN_IDS))
def test_batch_sizes_that_change_between_steps(pair: Pair, plan: str) -> None:
    """The runner keeps what depends on the batch size alone, while that stays."""
    for seed, batch in enumerate((1, 3, 2, 3, 3, 5, 1, 1)):
        run_both(pair, plan, batch, seed)


@pytest.mark.default("opt")
def test_plans_take_turns(pair: Pair) -> None:
    for seed, plan in enumerate(PLAN_IDS * 4):
        run_both(pair, plan, 1 + seed % 3, seed)


def test_models_take_turns(pairs: dict[str, Pair]) -> None:
    with torch.inference_mode():
        for seed in range(6):
            pairs[NAMES[seed % 2]].fill_caches()
            run_both(pairs[NAMES[seed % 2]], PLAN_IDS[-1 - seed % 3], 1 + seed % 3, seed)


@pytest.mark.parametrize("plan", PLAN_IDS)
def test_a_step_leaves_the_results_of_the_last_one_alone(pair: Pair, plan: str) -> None:
    first, _ = run_both(pair, plan, 2, 1)
    slabs = pair.compiled.cache.environment
    kept = {name: value.clone() for name, value in first.items() if name not in slabs}
    run_both(pair, plan, 2, 2)
    for name, value in kept.items():
        assert torch.equal(first[name], value), name


@pytest.mark.parametrize("plan", every(2, PLAN_IDS, 1))
def test_the_hook_edits_logits_in_place(pair: Pair, plan: str) -> None:
    """Every sequence accepts its whole longest path, and its bonus token is 7."""
    tree = pair.compiled.plans[plan].tree
    path = [level[0] for level in tree.levels]

    def accept_all(environment: Environment) -> None:
        tokens = environment["tokens"]
        logits = environment["logits"].view(len(tokens), tree.num_nodes, -1)
        logits.zero_()
        for node, child in itertools.pairwise(path):
            logits[torch.arange(len(tokens)), node, tokens[:, child]] = 1.0
        logits[:, path[-1], 7] = 1.0

    with hook(pair, plan, accept_all):
        for seed, batch in enumerate((2, 3, 3, 1)):
            found, _ = run_both(pair, plan, batch, seed, is_greedy=True)
            assert found["num_accepted"].tolist() == [tree.max_depth] * batch
            assert found["output_tokens"][:, -1].tolist() == [7] * batch
            assert torch.equal(found["output_tokens"][:, :-1], found["tokens"][:, path[1:]])
    run_both(pair, plan, 3, 9)


def test_the_hook_replaces_logits(pair: Pair) -> None:
    """`EagerStep` promises it to benchmarks."""

    def replace(environment: Environment) -> None:
        environment["logits"] = torch.zeros_like(environment["logits"])
        environment["logits"][:, 7] = 1.0

    with hook(pair, "off", replace):
        found, _ = run_both(pair, "off", 1, 0, is_greedy=True)
    assert found["output_tokens"].tolist() == [[7]]


def test_the_hook_fails(pair: Pair) -> None:
    def fail(environment: Environment) -> None:
        raise KeyboardInterrupt

    plan = "tree-2-2-1"
    run_both(pair, plan, 3, 0)
    with hook(pair, plan, fail):
        for batch in (3, 2):
            with pytest.raises(KeyboardInterrupt):
                pair.compiled.steps[plan].run(step_inputs(pair.compiled, batch, 1))
    for batch in (3, 2):
        pair.fill_caches()
        run_both(pair, plan, batch, 2)


BROKEN = {
    "block-table-of-fewer-sequences": lambda e: {"block_table": e["block_table"][:-1]},
    "cache-len-int64": lambda e: {"cache_len": e["cache_len"].long()},
    "slab-of-another-rank": lambda e: {"target_slab_0": e["target_slab_0"][0]},
    "slab-missing": lambda e: {"target_slab_0": None},
    "sampling-of-fewer-sequences": lambda e: {"sampling_words": e["sampling_words"][:-1]},
    "sampling-values-float64": lambda e: {"sampling_values": e["sampling_values"].double()},
    "history-int64": lambda e: {"history": e["history"].long()},
    "history-missing": lambda e: {"history": None},
}


# with two threads: tests/kernels/cpu/test_threads.py; here they would stall beside other work
@pytest.mark.default(
    "gemma3-tied-block-table-of-fewer-sequences-off-1-thread",
    "gemma3-tied-slab-of-another-rank-tree-2-2-1-1-thread",
    "opt-block-table-of-fewer-sequences-off-1-thread",
    "opt-slab-of-another-rank-tree-2-2-1-1-thread",
)
@pytest.mark.parametrize("threads", [1], indirect=True, ids=["1-thread"])
@pytest.mark.parametrize(
    ("broken", "plan"),
    [
        # a step that moves no rows takes no slab
        *every(3, ((name, "off") for name in BROKEN if "slab" not in name)),
        *every(2, ((name, "tree-2-2-1") for name in BROKEN)),
    ],
)
def test_a_good_step_after_one_that_failed(
    pair: Pair, threads: int, broken: str, plan: str
) -> None:
    """Also with another batch size: nothing of the failed step is kept."""
    run_both(pair, plan, 3, 0)
    for broken_batch, batch in ((2, 3), (3, 3), (1, 2)):
        inputs = step_inputs(pair.compiled, broken_batch, 1)
        inputs = {k: v for k, v in (inputs | BROKEN[broken](inputs)).items() if v is not None}
        with pytest.raises((EngineError, RuntimeError, KeyError)):
            pair.compiled.steps[plan].run(inputs)
        assert torch.get_num_threads() == threads
        pair.fill_caches()
        run_both(pair, plan, batch, 2)


# two threads stall beside other work: of each model, every other plan runs on them
@pytest.mark.default(
    "gemma3-tied-1-threads-off",
    "gemma3-tied-1-threads-tree-2-2-1",
    "gemma3-tied-2-threads-chain-4",
    "opt-1-threads-chain-1",
    "opt-1-threads-tree-3-2-1-1",
)
@pytest.mark.parametrize(
    ("pair", "threads", "plan"),
    [
        pytest.param(
            name, threads, plan,
            id=f"{name}-{threads}-threads-{plan}",
            marks=[pytest.mark.slow] if threads == 2 and (i + j) % 2 else [],
        )
        for i, name in enumerate(NAMES)
        for threads in (1, 2)
        for j, plan in enumerate(PLAN_IDS)
    ],
    indirect=["pair", "threads"],
)  # fmt: skip
def test_steps_restore_the_threads(pair: Pair, threads: int, plan: str) -> None:
    run_both(pair, plan, MAX_BATCH, 0)
    assert torch.get_num_threads() == threads


def pass_inputs(
    engine: Engine,
    num_tokens: int,
    words: int | None,
    num_rows: int | None = None,
    seed: int = 0,
    max_length: int = 7,
) -> list[Tensor | None]:
    """A pass over up to four sequences of unequal lengths, with up to `max_length` committed rows.

    `words` of 64 ancestors each make trees; None is causal. `num_rows` get logits, in no order.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *sizes, end: torch.randint(0, end, sizes, generator=generator)  # noqa: E731
    starts = sorted({num_tokens * b * (b + 1) // 20 for b in range(5)})
    lengths, slots, positions, masks = [], [], [], []
    for first, last in itertools.pairwise(starts):
        count, length = last - first, int(draw(end=max_length + 1))
        tree = TokenTree.chain(count - 1)
        if words is not None:
            tree = TokenTree((-1, *(int(draw(end=i)) for i in range(1, count))))
            found = tree.ancestor_words()
            masks.append(nn.functional.pad(found, (0, words - found.shape[1])))
        lengths.append(length)
        slots.append(torch.arange(count) + length)
        positions.append(torch.tensor(tree.depths) + length)
    return [
        draw(num_tokens, end=models.VOCAB),
        torch.cat(positions),
        torch.tensor(starts, dtype=torch.int32),
        torch.cat(slots).to(torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.cat(masks) if masks else None,
        block_table(engine, len(lengths), seed),
        torch.randperm(num_tokens, generator=generator)[:num_rows],
    ]


def assert_equal_caches(pair: Pair) -> None:
    wanted = pair.eager.cache.environment
    for name, slab in pair.compiled.cache.environment.items():
        torch.testing.assert_close(slab, wanted[name], **TOLERANCE)


def check_pass(pair: Pair, inputs: Sequence[Tensor | None]) -> Tensor:
    found, wanted = (engine.target(*inputs) for engine in (pair.compiled, pair.eager))
    assert found.shape == (len(inputs[-1]), models.VOCAB)
    torch.testing.assert_close(found, wanted, **TOLERANCE)
    assert_equal_caches(pair)
    return found


@pytest.mark.default(
    "gemma3-tied-1-thread-causal",
    "gemma3-tied-2-threads-causal",
    "opt-1-thread-causal",
    "opt-2-threads-causal",
)
@pytest.mark.parametrize(
    "words", every(2, [None, 1, 2, 3]), ids=["causal", "1-word", "2-words", "3-words"]
)
def test_numbers_of_tokens(pair: Pair, threads: int, words: int | None) -> None:
    sizes = (1, 2, NARROW - 1, NARROW, NARROW + 1, 300, 5, 1, NARROW + 1)
    for seed, num_tokens in enumerate(sizes if words != 1 else sizes[:4]):
        check_pass(pair, pass_inputs(pair.eager, num_tokens, words, seed=seed))
        assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [2], indirect=True, ids=["2-threads"])
def test_threads_of_the_loops_change_no_bit(pair: Pair, threads: int) -> None:
    """How many share the loops between products depends on rows and widths (`narrow_rows`)."""
    target = pair.compiled.target
    for num_tokens in (1, 2, 5, 9, 33):
        inputs = pass_inputs(pair.eager, num_tokens, None, seed=num_tokens)
        found = []
        for narrow in (64, 1):
            target.set_narrow_rows(narrow)
            pair.fill_caches()
            logits = pair.compiled.target(*inputs).clone()
            found.append([logits, *(s.clone() for s in pair.compiled.cache.environment.values())])
        target.set_narrow_rows(64)
        assert all(map(torch.equal, *found)), num_tokens


@pytest.mark.parametrize("num_rows", [0, 1, 2, 40])
@pytest.mark.parametrize("num_tokens", [40, 120])
def test_logits_of_some_rows(pair: Pair, num_tokens: int, num_rows: int) -> None:
    """In the order of `logit_rows`, also twice; none, where a draft only fills its cache."""
    inputs = pass_inputs(pair.eager, num_tokens, None, num_rows)
    inputs[-1] = inputs[-1].repeat(2)
    found = check_pass(pair, inputs)
    assert torch.equal(found[:num_rows], found[num_rows:])


@pytest.mark.parametrize("index", range(8))
def test_inputs_that_are_not_contiguous(pair: Pair, index: int) -> None:
    """Right or refused, never misread; the plan off passes a column of `last_tokens`."""
    inputs = pass_inputs(pair.eager, 11, 2)
    want = check_pass(pair, inputs)
    value = inputs[index]
    inputs[index] = torch.stack([value, value + 1], -1)[..., 0]
    assert not inputs[index].is_contiguous()
    if index == 0:
        check_pass(pair, inputs)
    try:
        found = pair.compiled.target(*inputs)
    except RuntimeError:
        return
    assert torch.equal(found, want)


def test_a_good_pass_after_one_that_failed(pair: Pair, threads: int) -> None:
    for num_tokens in (NARROW, NARROW + 1):
        good = pass_inputs(pair.eager, num_tokens, None)
        for index, value in ((3, good[3].long()), (6, good[6][:-1]), (2, good[2][:-1])):
            broken = [*good[:index], value, *good[index + 1 :]]
            with pytest.raises(RuntimeError):
                pair.compiled.target(*broken)
            assert torch.get_num_threads() == threads
        pair.fill_caches()
        check_pass(pair, good)


def test_one_program_loaded_twice_writes_two_caches(pair: Pair) -> None:
    inputs = pass_inputs(pair.eager, 20, None, max_length=0)
    want = check_pass(pair, inputs)
    (slab,) = pair.compiled.cache.slabs["target"]
    other, before = torch.zeros_like(slab), slab.clone()
    caches = [(layer[0], layer[1]) for layer in other]
    second = load_program(pair.path / "target", caches)
    assert torch.equal(second(*inputs), want)
    assert torch.equal(slab, before)
    assert other.count_nonzero() == 20 * other[:, :, 0, 0].numel()
    inputs[0] = inputs[0].flip(0)
    check_pass(pair, inputs)


def target_caches(engine: Engine) -> list[tuple[Tensor, Tensor]]:
    (slab,) = engine.cache.slabs["target"]
    return [(layer[0], layer[1]) for layer in slab]


def bound_program(pair: Pair, kind: type, weights: dict[str, Tensor]) -> ModelProgram:
    program, caches = read_json(pair.path / "target/program.json"), target_caches(pair.eager)
    return kind(program, weights, caches)


@pytest.mark.default("opt")
def test_weights_are_used_where_they_lie(pair: Pair) -> None:
    """Each one: what is written to its memory is what the next pass reads."""
    mapped = MappedWeights(pair.path / "target/weights.safetensors")
    weights = {key: value.clone() for key, value in mapped.items()}
    compiled = bound_program(pair, CpuProgram, weights)
    inputs = pass_inputs(pair.eager, 12, None)
    before = compiled(*inputs)
    for key, value in weights.items():
        value *= 1.5
        eager = bound_program(pair, ModelProgram, weights)
        found = compiled(*inputs)
        torch.testing.assert_close(found, eager(*inputs), rtol=1e-3, atol=1e-3, msg=key)
        assert not torch.equal(found, before), key
        value.copy_(mapped[key])


def test_weights_live_as_long_as_the_program(pair: Pair) -> None:
    mapped = MappedWeights(pair.path / "target/weights.safetensors")
    program = bound_program(pair, CpuProgram, {k: v.clone() for k, v in mapped.items()})
    gc.collect()
    junk = [torch.full_like(value, torch.nan) for value in mapped.values()]
    inputs = pass_inputs(pair.eager, 12, None)
    found = program(*inputs)
    assert junk
    torch.testing.assert_close(found, pair.eager.target(*inputs), **TOLERANCE)


def test_loading_keeps_the_file_mapped(pair: Pair) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps")
    file = str((pair.path / "target/weights.safetensors").resolve())
    count = lambda: sum(line.endswith(file) for line in maps.read_text().splitlines())  # noqa: E731
    before = count()
    program = load_program(pair.path / "target", target_caches(pair.compiled))
    gc.collect()
    assert count() > before
    assert program.name == "target"


def test_a_loaded_engine_keeps_what_passes_free(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[int] = []
    monkeypatch.setattr("specc.runtime.backends.cpu.backend.keep_freed_memory", kept.append)
    engine = Engine.load(pair.path)
    plan = engine.manifest.memory_plan.values()
    assert kept == [max(entry.workspace + entry.logits for entry in plan)]
    assert kept[0] > 0
