"""Acceptance tables: what users write, and what a tree of them yields."""

from __future__ import annotations

import pytest

from specc.cost.acceptance import expected_tokens, node_acceptance, parse_acceptance, parse_ranks
from specc.errors import ConfigError
from specc.speculation.tree import TokenTree

# two children of the root, one of the first and two of the second
UNEVEN = TokenTree((-1, 0, 0, 1, 2, 2))


def test_expected_tokens():
    def expected(probabilities, *widths):
        return expected_tokens(TokenTree.from_widths(widths), [probabilities])

    assert expected((0.5,), 1, 1) == pytest.approx(1 + 0.5 + 0.25)
    assert expected((0.5, 0.2), 2, 1) == pytest.approx(1 + 0.7 + 0.7 * 0.5)
    assert expected((0.5,), 2, 1) == pytest.approx(1 + 0.5 + 0.25)
    assert expected((1.0,), 1, 1, 1, 1) == 5
    assert expected_tokens(TokenTree.chain(0), [(0.5,)]) == 1
    wanted = 1 + 0.5 + 0.2 + 0.5 * 0.5 + 0.2 * (0.5 + 0.2)
    assert expected_tokens(UNEVEN, [(0.5, 0.2)]) == pytest.approx(wanted)


def test_acceptance_of_nodes_is_by_depth_and_rank():
    assert node_acceptance(UNEVEN, [[0.5, 0.2], [0.6]]) == [1.0, 0.5, 0.2, 0.6, 0.6, 0.0]
    # the last row stands for every greater depth
    assert node_acceptance(TokenTree.chain(3), [[0.5], [0.6]]) == [1.0, 0.5, 0.6, 0.6]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a", "numbers"),
        ("", "numbers"),
        ("0.5,", "numbers"),
        ("0.7;0.1", "numbers"),
        ("0.5/", "numbers"),
        ("-0.1", "0 … 1"),
        ("1.5", "0 … 1"),
        ("nan", "0 … 1"),
        ("0.5/nan", "0 … 1"),
        ("0.7,0.4", "at most 1"),
        ("0.7/0.6,0.5", "at most 1"),
    ],
)
def test_bad_acceptance(text, word):
    for parse in (parse_acceptance, parse_ranks):
        with pytest.raises(ConfigError, match="found:  --dice") as caught:
            parse(text, "--dice")
        assert word in caught.value.needed


def test_good_acceptance():
    assert parse_acceptance("0.7,0.1/0.8", "--dice") == [[0.7, 0.1], [0.8]]
    # zeros tell how many siblings there are
    assert parse_ranks("0.7,0.2,0", "--dice") == [0.7, 0.2, 0.0]
    with pytest.raises(ConfigError, match="2 depths") as caught:
        parse_ranks("0.7/0.6", "--dice")
    assert "every depth" in caught.value.needed
