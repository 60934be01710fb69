"""Conversations of a data set: turn by turn, with the model's own answers in between."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specc.bench.engine import measurement_of
from specc.bench.questions import Question, groups_of
from specc.bench.rounds import Difference, Measurement, first_difference, summarize
from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.llm import LLM
from specc.runtime.requests.chat_template import ChatTemplate
from specc.runtime.requests.request_maker import RequestMaker
from specc.sampling.generation_config import NONE
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats

# between what user and model say, where there is no chat template
_BETWEEN = "\n\n"
# of the figures of a run, those that a category has, too
_FIGURES = (
    "tokens_per_s", "tokens_per_s_min", "tokens_per_s_max", "decode_tokens_per_s",
    "speedup_over_off", "mean_acceptance_length", "accepted_per_depth", "num_output_tokens",
    "num_steps",
)  # fmt: skip
_COUNTS = ("num_output_tokens", "num_steps")


@dataclass
class TalkMeasurement(Measurement):
    """A run over conversations: an output for each turn that was asked.

    Args:
        turns: of each output, the question's place in the data set and the turn's in it.
        prompts: token ids that each output follows.
        num_questions: conversations.
        num_left_out: turns that did not fit into the engine, with those after them.
        stats: counters, from which measurements are joined.
    """

    turns: list[tuple[int, int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    num_questions: int = 0
    num_left_out: int = 0
    stats: SpecStats = field(default_factory=SpecStats)
    parts: dict[str, TalkMeasurement] = field(default_factory=dict)


class Tokens:
    """From a conversation to token ids.

    Args:
        engine: whose tokenizer and limits hold.
        template: of chats; None joins what user and model said by empty lines.
        max_tokens: of an answer, for which there has to be room.
    """

    def __init__(self, engine: Engine, template: ChatTemplate | None, max_tokens: int) -> None:
        self._maker = RequestMaker(engine, None)
        self._template = template
        self._most = min(engine.max_seq_len, engine.position_limit) - max_tokens

    def of(self, messages: Sequence[Mapping[str, str]]) -> list[int] | None:
        """Of a conversation that the user has spoken last in; None where there is no room.

        Raises:
            RequestError: the template refuses it.
        """
        if self._template is None:
            text = _BETWEEN.join(message["content"] for message in messages)
        else:
            text = self._template.render(messages)
        try:
            ids = self._maker.tokenize(text, has_special_tokens=self._template is not None)
        except RequestError:
            # text of whatever length was looked at when it was read: it is too long
            return None
        return ids if 0 < len(ids) <= self._most else None


class ConversationContender:
    """Holds the conversations of a data set with one plan of a loaded engine.

    Categories run one after another, so each has times of its own. An answer ends where the model
    ends it: what a model writes after that is easy to draft, and no answer.

    Args:
        tokens: makes prompts.
        max_tokens: output tokens of a turn at most.
        batch_size: conversations of a category that go on together, turn by turn.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        plan: str,
        questions: Mapping[str, Sequence[Question]],
        tokens: Tokens,
        max_tokens: int,
        batch_size: int = 1,
    ) -> None:
        self.name = name
        self.plan: str | None = plan
        self._engine = engine
        self._questions = questions
        self._tokens = tokens
        self._params = SamplingParams(temperature=0, max_tokens=max_tokens)
        self._batch_size = batch_size

    def run(self) -> TalkMeasurement:
        parts: dict[str, TalkMeasurement] = {}
        begin = 0
        for category, questions in self._questions.items():
            parts[category] = self._hold(begin, questions)
            begin += len(questions)
        total = join(list(parts.values()))
        groups = groups_of(parts)
        total.parts = parts | {
            group: join([parts[name] for name in names]) for group, names in groups.items()
        }
        return total

    def _hold(self, begin: int, questions: Sequence[Question]) -> TalkMeasurement:
        """All conversations of a category; `begin` is the place of the first one."""
        # it knows no rows of earlier runs: what conversations share is theirs
        llm = LLM(self._engine, plan=self.plan, generation_config=NONE)
        outputs: dict[tuple[int, int], list[int]] = {}
        prompts: dict[tuple[int, int], list[int]] = {}
        elapsed_s, num_left_out = 0.0, 0
        for first in range(0, len(questions), self._batch_size):
            batch = questions[first : first + self._batch_size]
            talks: list[list[dict[str, str]]] = [[] for _ in batch]
            open_talks = set(range(len(batch)))
            for turn in range(max(len(question.turns) for question in batch)):
                asked: dict[int, list[int]] = {}
                for i in sorted(open_talks):
                    if turn == len(batch[i].turns):
                        open_talks.remove(i)
                        continue
                    talks[i].append({"role": "user", "content": batch[i].turns[turn]})
                    ids = self._tokens.of(talks[i])
                    if ids is None:
                        num_left_out += len(batch[i].turns) - turn
                        open_talks.remove(i)
                    else:
                        asked[i] = ids
                if not asked:
                    continue
                start_s = time.perf_counter()
                answers = llm.generate(list(asked.values()), self._params)
                elapsed_s += time.perf_counter() - start_s
                for (i, ids), answer in zip(asked.items(), answers, strict=True):
                    key = (begin + first + i, turn)
                    prompts[key], outputs[key] = ids, list(answer.outputs[0].token_ids)
                    talks[i].append({"role": "assistant", "content": answer.outputs[0].text})
        keys = sorted(outputs)
        return _measurement(
            llm.get_metrics(),
            elapsed_s,
            outputs=[outputs[key] for key in keys],
            turns=keys,
            prompts=[prompts[key] for key in keys],
            num_questions=len(questions),
            num_left_out=num_left_out,
        )


def join(parts: Sequence[TalkMeasurement]) -> TalkMeasurement:
    """Measurements that followed one another, as one."""
    stats = SpecStats()
    for part in parts:
        stats.merge(part.stats)
    return _measurement(
        stats,
        sum(part.elapsed_s for part in parts),
        outputs=[output for part in parts for output in part.outputs],
        turns=[turn for part in parts for turn in part.turns],
        prompts=[prompt for part in parts for prompt in part.prompts],
        num_questions=sum(part.num_questions for part in parts),
        num_left_out=sum(part.num_left_out for part in parts),
    )


def _measurement(
    stats: SpecStats, elapsed_s: float, outputs: list[list[int]], **more: Any
) -> TalkMeasurement:
    common = vars(measurement_of(stats, outputs, elapsed_s))
    return TalkMeasurement(**common, stats=stats, **more)


def category_figures(
    measured: Sequence[TalkMeasurement], off: Sequence[TalkMeasurement]
) -> dict[str, dict[str, Any]]:
    """Figures of each category for JSON: as those of a run, with its questions and turns.

    What is measured is None where no turn of a category fitted: nothing ran, and a speed of 0 would
    be taken into means.

    Args:
        measured: of a contender, one a round.
        off: of plain decoding in the same rounds.
    """
    figures: dict[str, dict[str, Any]] = {}
    for category, first in measured[0].parts.items():
        offs = [m.parts[category] for m in off]
        own = offs if measured is off else [m.parts[category] for m in measured]
        found = summarize(own, offs, offs)
        figures[category] = {
            "num_questions": first.num_questions,
            "num_turns": len(first.turns),
            "num_left_out": first.num_left_out,
        } | {name: found[name] if name in _COUNTS or first.turns else None for name in _FIGURES}
    return figures


def find_talk_differences(
    reference: TalkMeasurement, measured: Sequence[TalkMeasurement]
) -> list[Difference]:
    """Of each conversation the first difference from the reference, in any of the rounds.

    What follows it has other prompts, and nothing to be compared with. `prompt` of a difference is
    the place of the turn among the reference's.
    """
    found: dict[int, Difference] = {}
    answers = [dict(zip(m.turns, m.outputs, strict=True)) for m in measured]
    turns = zip(reference.turns, reference.outputs, strict=True)
    for place, ((question, turn), want) in enumerate(turns):
        if question in found:
            continue
        # a turn that one of them left out has other prompts, too: it was told before
        pairs = [first_difference(place, want, own[question, turn]) for own in answers]
        first = min(filter(None, pairs), key=lambda item: item.position, default=None)
        if first is not None:
            found[question] = first
    return list(found.values())
