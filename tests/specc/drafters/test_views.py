"""Self-drafts as users write them, and how many blocks and columns they take."""

from __future__ import annotations

import pytest
import torch

from specc.drafters.registry import drafters_of
from specc.drafters.self import SelfDraft
from specc.drafters.views import View
from specc.errors import ConfigError
from specc.speculation.choose_plans import choose_plans, split_drafts
from specc.speculation.plans import SpecPlan


@pytest.mark.parametrize(
    ("text", "view"),
    [
        ("self:window=512", View(512, 4)),
        ("self:window=64,sink=0", View(64, 0)),
        ("self:sink=20,window=64", View(64, 20)),
        ("self:blocks=128,window=64,sink=8", View(64, 8, 128)),
        ("self:sink=8,window=64,blocks=128", View(64, 8, 128)),
        ("self:window=64,blocks=128", View(64, 4, 128)),
        ("self:blocks=128", View(128, 4, 128)),
        ("self:blocks=0,window=64", View(64, 4)),
        ("lookup:3", None),
        ("models/self", None),
        ("selfish:window=3", None),
    ],
)
def test_options(text, view):
    assert View.parse(text) == view
    if view is not None:
        assert View.parse(view.option) == View.named(view.name) == view
        assert SelfDraft.named(view.name) == SelfDraft(view)
        assert split_drafts(["D/", text]) == (["D/"], drafters_of("draft_0", view.name))


@pytest.mark.parametrize(
    "text",
    [
        "self", "self:", "self:512", "self:window=", "self:sink=4", "self:window=-1",
        "self:window=64,window=32", "self:window=64,sink=4,", "self:window=64;sink=4",
        "self:blocks=64,blocks=64", "self:blocks=64,window=0", "self:blocks=",
        "self:blocks=99999999,window=64", "self:window=0", "self:window=99999999",
    ],
)  # fmt: skip
def test_malformed_options(text):
    with pytest.raises(ConfigError) as error:
        split_drafts(text)
    assert text.split(",")[0].split(";")[0] in error.value.found
    assert "self:window=512" in error.value.do


def test_names_of_blocks():
    (chain,) = choose_plans([], None, (View(64, 4, 128).name, "self_w16_s0_b17"), "merge")
    assert chain.name == "merge-selfw64s4b128+selfw16s0b17-chain-4"
    assert chain.chooses_blocks
    assert [chain.num_chosen(16, v) for v in (None, *chain.drafts)] == [10, 0, 8]
    assert not SpecPlan("off", drafters=chain.drafters[:1]).chooses_blocks
    assert View.named("self_w64_s4_b128").num_rows == 196


@pytest.mark.parametrize(
    ("view", "blocks", "most"),
    [
        (View(16, 0), (0, 0, 1), 31),
        (View(17, 1), (1, 0, 2), 63),
        (View(64, 16), (1, 0, 4), 95),
        (View(64, 17), (2, 0, 4), 111),
        (View(64, 17, 33), (2, 3, 4), 159),
    ],
)
def test_blocks(view, blocks, most):
    assert (view.blocks(16), view.most_rows(16)) == (blocks, most)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 16, 17, 18, 33])
def test_columns_hold_every_row_of_a_step(block_size, num_rows):
    """Wherever in its block the first of them lies; and no column is never used."""
    view = View(2 * block_size, 3, block_size + 1)
    last = max(
        (block_size * sum(view.blocks(block_size)) + start + num_rows - 1) // block_size
        for start in range(block_size)
    )
    assert view.num_columns(block_size, num_rows) == last + 1


VIEW = View(8, 3, 6)
# of blocks 0 … 11; the sink is block 0, and 10 or 11 are in the window
MASS = torch.tensor([9.0, 1, 5, 2, 5, 0, 3, 0, 4, 5, 8, 7])


@pytest.mark.parametrize(
    ("length", "chosen"),
    [
        # sink, chosen ones and window are the sequence, or more than it
        (0, [1, 2]), (19, [1, 2]), (20, [1, 2]), (23, [1, 2]),
        # blocks 1 … 3, then 1 … 4: of equals the later one
        (24, [2, 3]), (28, [2, 4]), (40, [2, 4]), (44, [2, 4]), (48, [4, 9]), (52, [9, 10]),
    ],
)  # fmt: skip
def test_choice(length: int, chosen: list[int]) -> None:
    assert VIEW.choose(MASS, length, 4) == chosen
    columns, seen = VIEW.columns(length, 4, MASS)
    own = length // 4
    run = range(max(own - 2, 3), own + 1)
    assert columns == [*(c for c in (0, *chosen) if c <= own), *run]
    assert len(set(columns)) == len(columns)
    assert seen == length - 4 * (own + 1 - len(columns))


def test_choice_without_votes() -> None:
    """The latest blocks, as a longer window has them; blocks that nobody could vote on count 0."""
    assert VIEW.choose(None, 44, 4) == [7, 8]
    assert VIEW.columns(44, 4)[0] == [0, 7, 8, 9, 10, 11]
    assert VIEW.choose(torch.zeros(12), 44, 4) == [7, 8]
    assert VIEW.choose(MASS[:3], 44, 4) == [1, 2]
    assert VIEW.choose(MASS[:2], 44, 4) == [1, 8]
    assert View(8, 3).choose(MASS, 44, 4) == []
