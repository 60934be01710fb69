"""Drafts that obey a grammar, in pieces of captured steps: in float32, what the CPU drafts.

The grammar is one of token ids, made here: nothing has to be installed for it, and its masks cost
the host next to nothing. So what a step in pieces takes more than one in two graphs, whose drafts
know nothing of the grammar, is what the pieces cost.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tests.gpu import products
from tests.gpu.count_compiles import count_compiles
from tests.gpu.pair import pair_engine, pair_prompts
from tests.gpu.replay import require_graphs
from tests.gpu.results import Device, Results

NUM_PROMPTS, NUM_TOKENS = 3, 48
# states of the automaton, in each of which so many of as many classes of tokens may follow
_STATES, _ALLOWED = 5, 2


class Automaton:
    """A regular grammar over token ids, with what `GrammarState` asks of a matcher.

    Args:
        vocab_size: V.
        ends: tokens that are never allowed: outputs go on.
    """

    def __init__(self, vocab_size: int, ends: Sequence[int]) -> None:
        self._path = [0]
        self._masks = []
        for state in range(_STATES):
            bits = bytearray(-(-vocab_size // 8))
            for token in range(vocab_size):
                if (3 * token + state) % _STATES < _ALLOWED and token not in ends:
                    bits[token >> 3] |= 1 << (token & 7)
            self._masks.append(bytes(bits))

    def compute_bitmask(self) -> bytes:
        return self._masks[self._path[-1]]

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        """How many of them may follow, and have been taken."""
        for count, token in enumerate(tokens):
            if not self.compute_bitmask()[token >> 3] >> (token & 7) & 1:
                return count
            # what follows depends on all tokens so far
            self._path.append((2 * self._path[-1] + token // _STATES + 1) % _STATES)
        return len(tokens)

    def deep_copy(self) -> Automaton:
        copied = copy.copy(self)
        copied._path = [*self._path]
        return copied

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False


class Grammars:
    """In place of an engine's: every request has the automaton."""

    def __init__(self, engine: Any) -> None:
        self._vocab_size, self._ends = engine.vocab_size, tuple(engine.eos_token_ids)

    def start(self, params: Any) -> Any:
        from specc.runtime.constraints.grammar import GrammarState
        from specc.runtime.constraints.grammar_compile import Ends

        matcher: Any = Automaton(self._vocab_size, self._ends)
        return GrammarState(matcher, self._vocab_size, Ends(self._ends, False))

    def close(self) -> None:
        """Nothing is held."""


def check(results: Results, device: Device, dtype: str) -> None:
    """Each plan of the demo pair that drafts."""
    device.prepare()
    from specc.runtime.backends.capture_limits import CaptureLimits
    from specc.runtime.engine import Engine

    count = count_compiles(device)
    products.watch(results)
    results.begin("compile")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pair"
        engine = pair_engine(path, dtype, CaptureLimits.lazy())
        engine.__dict__["grammars"] = Grammars(engine)
        host = None
        if dtype == "float32":
            host = Engine.load(path, backend="eager")
            host.__dict__["grammars"] = Grammars(host)
        prompts = [engine.tokenizer.encode(text).ids for text in pair_prompts(NUM_PROMPTS)]
        for plan in (name for name, plan in engine.plans.items() if plan.speculates):
            results.check(plan, partial(compare, engine, host, plan, prompts))
            results.note(compiles=count())


def compare(
    engine: Any, host: Any | None, plan: str, prompts: Sequence[list[int]]
) -> dict[str, Any]:
    """Steps that are queued ahead, in pieces, have the tokens of those that are not.

    With a host, tokens, and how many of each depth were accepted, are the host's; and drafts that
    know nothing of the grammar have these tokens in more steps. In bfloat16 these are roundings
    apart.

    Returns:
        tokens a step, and ms an iteration, prompts included, both ways.
    Raises:
        AssertionError: another token, other drafts, or a step that ran operator by operator.
    """
    wanted, accepted, _ = generate(engine if host is None else host, plan, prompts, waits=True)
    tokens, own, masked = timed(engine, plan, prompts)
    require_alike(tokens, wanted)
    assert own == accepted, f"accepted at depth 1, 2, …: {own}, not {accepted}"
    step = engine.steps[plan]
    require_graphs(step)
    pieces = {len(graphs) for (_, kind), graphs in step._captured.items() if _is_in_pieces(kind)}
    # a pass of the draft for each depth, then verification, then what comes after the masks
    assert pieces == {step.plan.max_depth + 2}, f"graphs of a step: {pieces}"
    with unmasked():
        others, _, plain = timed(engine, plan, prompts)
    if host is not None:
        require_alike(others, tokens)
    return {"graphs": max(pieces), "masked": masked, "unmasked": plain}


def require_alike(found: Sequence[list[int]], wanted: Sequence[list[int]]) -> None:
    """Raises AssertionError: where the first token of a prompt differs."""
    for i, (own, other) in enumerate(zip(found, wanted, strict=True)):
        place = next((k for k, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)
        assert place is None, f"prompt {i}, token {place}: {own[place]}, not {other[place]}"


def _is_in_pieces(kind: Any) -> bool:
    return getattr(kind, "masks_drafts", False)


def timed(
    engine: Any, plan: str, prompts: Sequence[list[int]]
) -> tuple[list[list[int]], list[int], dict[str, float]]:
    """As `generate`, twice: the first time kernels are compiled, and graphs captured."""
    generate(engine, plan, prompts)
    return generate(engine, plan, prompts)


def generate(
    engine: Any, plan: str, prompts: Sequence[list[int]], waits: bool = False
) -> tuple[list[list[int]], list[int], dict[str, float]]:
    """Greedy output, of which the second request has no grammar; accepted tokens of each depth.

    Args:
        engine: with a `Grammars`.
        waits: no step is queued before the results of the last one are there.
    """
    from specc.runtime.llm import LLM
    from specc.runtime.policies.base import FixedPolicy
    from specc.sampling.params import SamplingParams
    from specc.sampling.structured import StructuredOutputsParams

    free = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    # the text is nobody's: see `Grammars`
    grammar = StructuredOutputsParams(regex=".*")
    own = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, structured_outputs=grammar
    )
    policy = FixedPolicy(plan)
    policy.needs_results = waits
    llm = LLM(engine, plan=plan, policy=policy)
    begin_s = time.perf_counter()
    params = [free if i == 1 else own for i in range(len(prompts))]
    outputs = llm.generate(list(prompts), params)
    seconds, stats = time.perf_counter() - begin_s, llm.get_metrics()
    reasons = {output.outputs[0].finish_reason for output in outputs}
    assert reasons == {"length"}, [output.outputs[0].stop_reason for output in outputs]
    figures = {
        "tokens_a_step": stats.mean_acceptance_length,
        "ms_an_iteration": 1000 * seconds / max(1, stats.num_step_passes),
    }
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return tokens, list(stats.accepted_at_depth), figures


@contextlib.contextmanager
def unmasked() -> Iterator[None]:
    """Drafts know nothing of grammars, verification does."""
    from specc.runtime.constraints.draft_masks import DraftMasks

    with mock.patch.object(DraftMasks, "of", return_value=None):
        yield
