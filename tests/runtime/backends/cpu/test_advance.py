"""Steps for sequences that the host knows: from integers to integers, with a hook and without."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from specc.runtime.backends.step_io import MaskDrafts, StepInputs, StepResult, StepValues
from specc.runtime.llm import LLM
from specc.sampling.params import SamplingParams
from tests.lossless import PLAN_IDS, Zoo
from tests.runtime.backends.cpu.cpu_pair import Pair, load_pair, step_inputs

NAME = "gemma3-tied"
SPECULATIVE = PLAN_IDS[1:]


@pytest.fixture(scope="module")
def shared_pair(zoo: Zoo) -> Pair:
    return load_pair(zoo, NAME)


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    shared_pair.fill_caches()
    yield shared_pair
    for engine in (shared_pair.compiled, shared_pair.eager):
        for step in engine.steps.values():
            step.before_accept = None


def advance(
    pair: Pair,
    plan: str,
    batch: int,
    seed: int,
    *,
    eager: bool = False,
    is_greedy: bool = False,
    mask_drafts: MaskDrafts | None = None,
) -> StepResult:
    """A step over freshly filled caches: equal calls have equal results."""
    pair.fill_caches()
    engine = pair.eager if eager else pair.compiled
    inputs = step_inputs(engine, batch, seed, is_greedy)
    rows = [
        (*tokens, length)
        for tokens, length in zip(
            inputs["last_tokens"].tolist(), inputs["cache_len"].tolist(), strict=True
        )
    ]
    tensors = (inputs[name] for name in ("block_table", "sampling_values", "sampling_words"))
    given = StepInputs(rows, *tensors, mask_drafts=mask_drafts)
    return engine.steps[plan].advance(given, engine.cache.environment)


def found(result: StepResult) -> tuple[object, ...]:
    """All but the times."""
    return result._replace(stage_s={})


@pytest.mark.default("tree-2-2-1", "tree-3-2-1-1")
@pytest.mark.parametrize("plan", PLAN_IDS)
def test_results_equal_those_of_the_eager_step(pair: Pair, plan: str) -> None:
    for seed, batch in enumerate((1, 3, 2, 5, 1)):
        wanted = advance(pair, plan, batch, seed, eager=True)
        result = advance(pair, plan, batch, seed)
        assert found(result) == found(wanted)
        assert list(result.stage_s) == list(wanted.stage_s)


@pytest.mark.parametrize("plan", PLAN_IDS)
def test_a_hook_that_only_looks_changes_nothing(pair: Pair, plan: str) -> None:
    """Nor does the step after it, which has none; all rows of the caches are the same, too."""
    step, num_nodes = pair.compiled.steps[plan], pair.compiled.plans[plan].tree.num_nodes
    seen: list[tuple[torch.Size, torch.Size]] = []

    def look(values: StepValues) -> None:
        assert torch.is_inference_mode_enabled()
        seen.append((values["tokens"].shape, values["logits"].shape[:1]))

    for seed, batch in enumerate((1, 3, 2, 5, 1)):
        wanted = advance(pair, plan, batch, seed)
        rows = {name: slab.clone() for name, slab in pair.compiled.cache.environment.items()}
        if pair.compiled.plans[plan].speculates:
            step.before_accept = look
        else:
            step.before_accept = lambda values: seen.append((values["logits"].shape[:1],) * 2)
        result = advance(pair, plan, batch, seed)
        assert found(result) == found(wanted)
        assert list(result.stage_s) == list(wanted.stage_s)
        assert all(seconds > 0 for seconds in result.stage_s.values())
        for name, slab in pair.compiled.cache.environment.items():
            assert torch.equal(slab, rows[name]), name
        assert seen.pop()[1] == (batch * num_nodes,)
        step.before_accept = None
        assert found(advance(pair, plan, batch, seed)) == found(wanted)
    assert not seen


@pytest.mark.parametrize("replaces", [False, True], ids=["edits", "replaces"])
@pytest.mark.parametrize("plan", SPECULATIVE)
def test_a_hook_decides_what_is_accepted(pair: Pair, plan: str, replaces: bool) -> None:
    """The last child of the root, and token 7 after it; as in the eager step."""
    tree = pair.compiled.plans[plan].tree
    child = tree.levels[1][-1]

    def accept(values: StepValues) -> None:
        tokens, logits = values["tokens"], values["logits"]
        made = torch.zeros_like(logits) if replaces else logits.zero_()
        rows = made.view(len(tokens), tree.num_nodes, -1)
        rows[torch.arange(len(tokens)), 0, tokens[:, child]] = 1.0
        rows[:, child, 7] = 1.0
        # what the children of that node carry is not 7, or it would be accepted, too
        for node, parent in enumerate(tree.parents):
            if parent == child:
                tokens[:, node] = 8
        if replaces:
            values["logits"] = made

    for seed, batch in enumerate((2, 3, 1)):
        for eager in (True, False):
            engine = pair.eager if eager else pair.compiled
            engine.steps[plan].before_accept = accept
        wanted = advance(pair, plan, batch, seed, eager=True, is_greedy=True)
        result = advance(pair, plan, batch, seed, is_greedy=True)
        assert found(result) == found(wanted)
        assert result.num_accepted == [1] * batch
        assert [tokens[1] for tokens in result.output_tokens] == [7] * batch


def test_a_hook_names_what_there_is(pair: Pair) -> None:
    step = pair.compiled.steps[SPECULATIVE[-1]]
    for use in (
        lambda values: values["nothing"],
        lambda values: values.__setitem__("nothing", torch.zeros(1)),
        # of an earlier step
        lambda values: values["num_accepted"],
    ):
        step.before_accept = use
        with pytest.raises(KeyError):
            advance(pair, SPECULATIVE[-1], 2, 0)
    step.before_accept = None
    wanted = advance(pair, SPECULATIVE[-1], 2, 0, eager=True)
    assert found(advance(pair, SPECULATIVE[-1], 2, 0)) == found(wanted)


def other_caches(pair: Pair) -> dict[str, Tensor]:
    """Caches of the same shape that a step must not touch: NaN would spread."""
    return {
        name: torch.full_like(slab, -9 if name == "history" else torch.nan)
        for name, slab in pair.compiled.cache.environment.items()
    }


@pytest.mark.parametrize("plan", SPECULATIVE)
def test_other_caches_in_a_run_between_two_steps(pair: Pair, plan: str) -> None:
    """`run` brings its own caches; the next step moves rows in those that it names."""
    step, others = pair.compiled.steps[plan], other_caches(pair)

    def step_rows() -> dict[str, Tensor]:
        advance(pair, plan, 3, 1, is_greedy=True)
        return {name: slab.clone() for name, slab in pair.compiled.cache.environment.items()}

    step.before_accept = accept_second_children(pair, plan)
    wanted = step_rows()
    with torch.inference_mode():
        step.run(step_inputs(pair.compiled, 3, 1, is_greedy=True) | others)
    kept = {name: slab.clone() for name, slab in others.items()}
    again = step_rows()
    for name, slab in wanted.items():
        assert torch.equal(again[name], slab), name
        torch.testing.assert_close(others[name], kept[name], rtol=0, atol=0, equal_nan=True)


def accept_second_children(pair: Pair, plan: str) -> Callable[[StepValues], None]:
    """A hook: where nodes have two children the path is not in place, and rows must move."""
    tree = pair.compiled.plans[plan].tree
    path = [level[-1] for level in tree.levels]

    def accept(values: StepValues) -> None:
        tokens = values["tokens"]
        logits = values["logits"].zero_().view(len(tokens), tree.num_nodes, -1)
        for node, child in itertools.pairwise(path):
            logits[torch.arange(len(tokens)), node, tokens[:, child]] = 1.0

    return accept


@pytest.mark.parametrize("plan", PLAN_IDS)
def test_hooks_in_a_batch_of_two(pair: Pair, plan: str) -> None:
    """`LLM` over a step with a hook that looks: the tokens and counters of the one without."""
    prompts = [[1, 2, 3], list(range(40, 60))]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)

    def generate() -> tuple[list[list[int]], list[int]]:
        llm = LLM(pair.compiled, plan=plan)
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        stats = llm.get_metrics()
        return outputs, [stats.num_step_passes, stats.num_steps, stats.num_accepted_tokens]

    wanted = generate()
    sizes: list[int] = []
    num_nodes = pair.compiled.plans[plan].tree.num_nodes
    pair.compiled.steps[plan].before_accept = lambda values: sizes.append(len(values["logits"]))
    assert generate() == wanted
    # near the end of the context `off` takes over; here nothing is near it
    assert len(sizes) == wanted[1][0]
    assert max(sizes) == 2 * num_nodes


def masking(seen: list[object]) -> MaskDrafts:
    """Forbids two thirds of the tokens, others after each token and at each place."""

    def mask(inputs: Sequence[Tensor | None], logits: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        tokens, slots, logit_rows = inputs[0], inputs[3], inputs[7]
        seen.append([None if value is None else value.tolist() for value in inputs])
        place = (tokens + slots)[logit_rows]
        is_allowed = (torch.arange(logits.shape[1]) + place[:, None]) % 3 == 0
        return logits.masked_fill(~is_allowed, -torch.inf)

    return mask


@pytest.mark.parametrize("plan", SPECULATIVE)
def test_drafts_are_masked_as_in_the_eager_step(pair: Pair, plan: str) -> None:
    """Each pass with what it was fed, and what is drawn of it; the step after it has no mask."""
    engine = pair.compiled
    for seed, batch in enumerate((1, 3, 1)):
        whole = advance(pair, plan, batch, seed)
        calls: dict[bool, list[object]] = {True: [], False: []}
        trees: dict[bool, list[object]] = {True: [], False: []}
        results = []
        for eager, one in ((True, pair.eager), (False, engine)):
            own = trees[eager]
            one.steps[plan].before_accept = lambda values, own=own: own.append(
                values["tokens"].tolist()
            )
            mask = masking(calls[eager])
            results.append(advance(pair, plan, batch, seed, eager=eager, mask_drafts=mask))
            one.steps[plan].before_accept = None
        assert found(results[0]) == found(results[1])
        assert calls[True] == calls[False]
        assert trees[True] == trees[False]
        assert len(calls[True]) == engine.plans[plan].max_depth
        assert found(advance(pair, plan, batch, seed)) == found(whole)


@pytest.mark.parametrize("plan", SPECULATIVE[:1])
def test_a_mask_that_fails_leaves_the_step_as_it_was(pair: Pair, plan: str) -> None:
    wanted = advance(pair, plan, 2, 0)

    def fails(inputs: Sequence[Tensor | None], logits: Tensor) -> Tensor:
        raise ValueError("no mask")

    for eager in (False, True):
        with pytest.raises(ValueError, match="no mask"):
            advance(pair, plan, 2, 0, eager=eager, mask_drafts=fails)
        assert found(advance(pair, plan, 2, 0, eager=eager)) == found(wanted)
