"""Predicted text as a draft: where an output is in it, found again after edits, and its figures."""

from __future__ import annotations

import random

import pytest

from specc.runtime.drafters.prediction import LEAST, MOST, TRUST, Coverage, Prediction


def oracle(predicted: list[int], output: list[int]) -> list[int | None]:
    """Before each token of an output, and after the last: which place of the prediction follows.

    Written from the rule: no index, all places compared, from the beginning at each token.
    """
    at, follows, confirmed, needed = 0, bool(predicted), 0, LEAST
    found: list[int | None] = [0 if follows else None]
    for count, token in enumerate(output, start=1):
        if follows and predicted[at] == token:
            at, confirmed = at + 1, confirmed + 1
            follows = at < len(predicted)
        else:
            if follows and confirmed == 0:
                needed = min(2 * needed, MOST)
            elif follows and confirmed >= TRUST:
                needed = LEAST
            follows = False
            lengths = {
                place: max(
                    n for n in range(min(place, count, MOST) + 1)
                    if predicted[place - n : place] == output[count - n : count]
                )
                for place in range(1, len(predicted))
            }  # fmt: skip
            longest = max(lengths.values(), default=0)
            if longest >= needed:
                best = [place for place, length in lengths.items() if length == longest]
                on = [place for place in best if place >= at]
                at, follows, confirmed = min(on) if on else max(best), True, 0
        found.append(at if follows else None)
    return found


def edited(text: list[int], dice: random.Random, share: float) -> list[int]:
    """A text in which some tokens are replaced, left out, or have others before them."""
    output = []
    for token in text:
        if dice.random() >= share:
            output.append(token)
            continue
        kind = dice.choice(["replace", "insert", "delete"])
        if kind != "delete":
            output += dice.choices(range(12), k=dice.randint(1, 4))
        if kind == "insert":
            output.append(token)
    return output


@pytest.mark.parametrize("size", [3, 12, 400])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.7])
def test_where_an_output_is(size: int, share: float) -> None:
    """As the rule says, however many tokens a step brings."""
    for seed in range(12):
        dice = random.Random(f"{size} {share} {seed}")
        # fewer places of a pair than are compared
        text = dice.choices(range(size), k=dice.randint(0, 60 if size == 3 else 200))
        output = edited(text, dice, share)
        want = oracle(text, output)
        prediction, count = Prediction(text), 0
        while count <= len(output):
            tokens, length = prediction.propose(output[:count], 5)
            place = want[count]
            assert tokens == ([] if place is None else text[place : place + 5])
            assert (length > 0) is (place is not None)
            count += dice.randint(1, 6)
        came = {at for at, token in zip(want, output, strict=False)
                if at is not None and text[at] == token}  # fmt: skip
        assert prediction.coverage(output) == Coverage(len(came), len(text) - len(came))


def test_it_begins_before_anything_has_come() -> None:
    assert Prediction([5, 6, 7]).propose([], 2) == ([5, 6], MOST)
    assert Prediction([]).propose([], 2) == ([], 0)


def test_of_equal_matches_the_one_that_follows_on() -> None:
    """Not the latest, not the first: a file has the same lines again and again."""
    line = [1, 2, 3]
    prediction = Prediction([*line, 10, *line, 11, *line, 12, *line, 13])
    prediction.propose([*line, 10, *line], 1)
    # where 11 should have come, lines were inserted; after them the third line comes, not the last
    assert prediction.propose([*line, 10, *line, 40, 41, *line], 1) == ([12], 3)


def test_a_longer_match_wins_wherever_it_is() -> None:
    text = [7, 8, 1, 2, 50, 30, 31, 1, 2, 60]
    prediction = Prediction(text)
    # a pair follows on, three tokens do not
    assert prediction.propose([*text[:7], 40, 8, 1, 2], 1) == ([50], 3)


def test_a_wrong_prediction_proposes_less_and_less() -> None:
    """Pairs of another text that happen to be there: each guess has to match twice as much."""
    dice = random.Random(0)
    text, output = (dice.choices(range(6), k=2000) for _ in range(2))
    prediction = Prediction(text)
    guesses = [bool(prediction.propose(output[:n], 8)[0]) for n in range(len(output))]
    # of six tokens, three in a row match nearly everywhere
    assert sum(guesses[:200]) < 100
    assert sum(guesses[1000:]) < 20


def test_a_prediction_that_comes_late_wakes_up() -> None:
    """As after a long introduction; until then, nobody has to look at each step."""
    text = list(range(100, 200))
    prediction = Prediction(text)
    thought = list(range(1, 90))
    assert prediction.propose(thought[:10], 4) == ([], 0)
    assert prediction.is_awake
    assert prediction.propose(thought, 4) == ([], 0)
    assert not prediction.is_awake
    output = [*thought, *text[:MOST]]
    assert prediction.propose(output, 2) == (text[MOST : MOST + 2], MOST)
    assert prediction.is_awake


def test_a_prediction_that_was_said_to_its_end_is_over() -> None:
    prediction = Prediction([5, 6, 7])
    assert prediction.propose([5, 6, 7], 4) == ([], 0)
    assert prediction.coverage([5, 6, 7, 5]) == Coverage(3, 0)
