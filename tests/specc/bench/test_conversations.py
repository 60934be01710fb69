"""Conversations turn by turn: prompts, answers, what is left out, and figures by category."""

from __future__ import annotations

import copy

import pytest

from specc.bench.conversations import (
    ConversationContender,
    Tokens,
    category_figures,
    find_talk_differences,
    join,
)
from specc.bench.questions import MT_BENCH, Question, by_category
from specc.runtime.requests.chat_template import ChatTemplate
from tests.runtime.conftest import EOS, build_engine
from tests.specc.server.serving import TEMPLATE, greedy_ids

MAX_TOKENS = 9
QUESTIONS = [
    Question("7", "letters", ("abc", "de")),
    Question("8", "words", ("hello", "more", "again")),
    Question("9", "letters", ("x",)),
    Question("10", "letters", ("qrs", "t")),
]


@pytest.fixture(scope="module")
def engine():
    return build_engine(eos=(EOS,))


@pytest.fixture(scope="module")
def template():
    found = ChatTemplate(TEMPLATE, {})
    yield found
    found.close()


def contender(engine, plan="off", template=None, batch_size=1, questions=QUESTIONS):
    return ConversationContender(
        engine,
        plan,
        plan,
        by_category(questions),
        Tokens(engine, template, MAX_TOKENS),
        MAX_TOKENS,
        batch_size,
    )


def talk(engine, turns, template=None):
    """Prompts and answers of one conversation, by an oracle that knows nothing of contenders."""
    said, found = [], []
    for turn in turns:
        said.append(turn)
        text = "\n\n".join(said)
        if template is not None:
            roles = ("u", "a")
            text = "".join(f"{roles[i % 2]}{what} " for i, what in enumerate(said)) + "A"
        prompt = engine.tokenizer.encode(text).ids
        answer = greedy_ids(engine, text, MAX_TOKENS)
        found.append((prompt, answer))
        said.append(engine.tokenizer.decode(answer, skip_special_tokens=True))
    return found


@pytest.mark.default("1-False-off", "1-False-chain-4")
@pytest.mark.parametrize("plan", ["off", "chain-4"])
@pytest.mark.parametrize("has_template", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_answers_are_the_model_s_own(engine, template, plan, has_template, batch_size):
    used = template if has_template else None
    found = contender(engine, plan, used, batch_size).run()
    wanted = {}
    # by category: the places are 0, 1, 2 of letters, and 3 of words
    for place, index in enumerate((0, 2, 3, 1)):
        pairs = talk(engine, QUESTIONS[index].turns, used)
        wanted |= {(place, turn): pair for turn, pair in enumerate(pairs)}
    got = zip(found.prompts, found.outputs, strict=True)
    assert dict(zip(found.turns, got, strict=True)) == wanted
    assert found.num_left_out == 0


@pytest.mark.slow
def test_a_category_has_what_happened_in_it(engine):
    found = contender(engine, "chain-4").run()
    assert list(found.parts) == ["letters", "words"]
    letters, words = found.parts.values()
    assert (letters.num_questions, len(letters.outputs)) == (3, 5)
    assert (words.num_questions, len(words.outputs)) == (1, 3)
    # the categories of others say nothing of it, and together they are all
    alone = contender(engine, "chain-4", questions=QUESTIONS[1:2]).run()
    assert alone.mean_acceptance_length == words.mean_acceptance_length
    assert alone.num_steps == words.num_steps
    assert found.num_steps == letters.num_steps + words.num_steps
    assert found.elapsed_s == letters.elapsed_s + words.elapsed_s
    assert found.outputs == letters.outputs + words.outputs
    steps = [part.stats.num_spec_steps for part in (letters, words)]
    lengths = [part.mean_acceptance_length for part in (letters, words)]
    mean = sum(s * n for s, n in zip(steps, lengths, strict=True)) / sum(steps)
    assert found.mean_acceptance_length == pytest.approx(mean)
    assert lengths[0] != lengths[1]


@pytest.mark.slow
def test_a_group_is_no_category_of_its_own(engine):
    names = ["writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem"]
    names += ["humanities", "rag"]
    questions = [Question(name, name, (name[:3],)) for name in names]
    found = contender(engine, "chain-4", questions=questions).run()
    assert list(found.parts) == [*names, MT_BENCH]
    group = found.parts[MT_BENCH]
    assert group.outputs == found.outputs[:8]
    assert group.elapsed_s == pytest.approx(found.elapsed_s - found.parts["rag"].elapsed_s)
    # all of them are counted once
    assert (found.num_questions, group.num_questions, len(found.outputs)) == (9, 8, 9)


def test_turns_that_do_not_fit_end_a_conversation(engine):
    room = engine.max_seq_len - MAX_TOKENS
    questions = [
        Question("1", "a", ("x" * room, "y")),
        Question("2", "a", ("x" * (room + 1), "y", "z")),
    ]
    found = contender(engine, questions=questions).run()
    # the first turn of one fits to the token, what follows it does not
    assert found.turns == [(0, 0)]
    assert found.num_left_out == 4
    assert len(found.outputs[0]) <= MAX_TOKENS


def test_an_answer_ends_where_the_model_ends_it(engine):
    """Of prompts whose answers the oracle ends early, the last token is the end."""
    ends = [
        text
        for text in ("ab", "hello", "k", "zz", "QRS", "m0", "abcd", "W", "t5")
        if len(greedy_ids(engine, text, 40)) < 40
    ]
    assert ends, "a prompt that ends by itself"
    questions = [Question(text, "a", (text,)) for text in ends]
    tokens = Tokens(engine, None, 40)
    found = ConversationContender(engine, "off", "off", {"a": questions}, tokens, 40).run()
    assert found.outputs == [greedy_ids(engine, text, 40) for text in ends]
    assert all(output[-1] == EOS for output in found.outputs)


def test_figures_compare_within_a_category(engine):
    off = contender(engine).run()
    fast = copy.deepcopy(off)
    fast.parts["letters"].elapsed_s = off.parts["letters"].elapsed_s / 4
    figures = category_figures([fast], [off])
    assert figures["letters"]["speedup_over_off"]["median"] == pytest.approx(4)
    assert figures["words"]["speedup_over_off"]["median"] == pytest.approx(1)
    assert figures["letters"]["num_turns"] == 5
    measured = [off]
    assert category_figures(measured, measured)["words"]["speedup_over_off"] is None


def test_only_the_first_difference_counts(engine):
    off = contender(engine).run()
    assert find_talk_differences(off, [off, off]) == []
    other = copy.deepcopy(off)
    words = off.turns.index((3, 1))
    other.outputs[words][2] += 1
    # what follows had another prompt, or no room
    del other.outputs[words + 1], other.turns[words + 1]
    (difference,) = find_talk_differences(off, [off, other])
    assert (difference.prompt, difference.position) == (words, 2)
    other.outputs[0][0] += 1
    assert [item.prompt for item in find_talk_differences(off, [other])] == [0, words]


def test_joining_adds(engine):
    off = contender(engine).run()
    twice = join([off, off])
    assert twice.num_output_tokens == 2 * off.num_output_tokens
    assert twice.elapsed_s == 2 * off.elapsed_s
    assert twice.stats.num_requests == 2 * off.stats.num_requests
