"""A part of the comparison of all plans under drawn grammars."""

from __future__ import annotations

import pytest

from tests.grammar_sweep import PLANS, compare, compiled, table_engine


@pytest.mark.parametrize(
    ("plans", "count"),
    [
        pytest.param([PLANS[2].name], 5, id="tree"),
        pytest.param([plan.name for plan in PLANS[1:]], 45, id="all", marks=pytest.mark.slow),
    ],
)
def test_plans_put_out_what_plain_decoding_does(plans: list[str], count: int) -> None:
    engine = table_engine()
    rows = compare(engine, compiled(engine, 1, count), plans, 1)
    # some end because of a dead end
    assert 0 < rows["off"]["ends"]["error"] < rows["off"]["outputs"] / 2
    for name, row in rows.items():
        assert (name, row["broken"], row.get("differ", 0)) == (name, 0, 0), row
