"""Texts on disk: what was kept is what is drawn, and a run that was ended leaves whole files."""

from __future__ import annotations

from pathlib import Path

import torch

from specc.fit.texts import Texts, TextStore


def texts(first: int, rows: int, length: int = 6) -> Texts:
    tokens = first + torch.arange(rows)[:, None].expand(rows, length).contiguous()
    return Texts(
        tokens,
        tokens[..., None].expand(rows, length, 4).to(torch.bfloat16).contiguous(),
        tokens[..., None].int(),
        torch.ones(rows, length, 1, dtype=torch.bfloat16),
        torch.full((rows,), 2),
        torch.full((rows,), length - 1),
        torch.ones(rows, dtype=torch.bool),
    )


def test_rows_are_drawn_from_all_files_alike(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    for first, rows in ((0, 1), (10, 4), (20, 5)):
        store.add("given", texts(first, rows))
    assert store.kinds() == ["given"]
    assert store.num_tokens("given") == 10 * 3
    assert (store.num_rows("given"), store.mean_length("given")) == (10, 5)
    assert store.num_bytes == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    generator, seen = torch.Generator().manual_seed(0), torch.zeros(30)
    for _ in range(600):
        drawn = store.draw("given", 3, generator)
        assert drawn.taps[:, 0, 0].long().equal(drawn.tokens[:, 0])
        seen += torch.bincount(drawn.tokens[:, 0], minlength=30)
    there = seen[[0, *range(10, 14), *range(20, 25)]]
    assert there.sum() == 1800
    assert (there - 180).abs().max() < 70


def test_a_later_run_finds_what_was_kept_and_no_half_file(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    store.add("greedy", texts(0, 2))
    store.add("given", texts(5, 2))
    # of a run that was killed while it wrote
    (tmp_path / "given-1.safetensors.part").write_bytes(b"half")
    again = TextStore(tmp_path)
    assert again.kinds() == ["given", "greedy"]
    assert again.parts("given")[0].tokens.equal(texts(5, 2).tokens)
    again.add("given", texts(7, 2))
    assert len(TextStore(tmp_path).parts("given")) == 2


def test_rows_of_other_lengths_are_filled_up(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    store.add("given", texts(1, 1, 4))
    store.add("given", texts(7, 1, 9))
    drawn = store.draw("given", 20, torch.Generator().manual_seed(1))
    assert set(drawn.ends.tolist()) == {3, 8}
    for number, (end, first) in enumerate(zip(drawn.ends, drawn.tokens[:, 0], strict=True)):
        assert first == (1 if end == 3 else 7)
        assert (drawn.taps[number, :end] == float(first)).all()
        assert not drawn.taps[number, end:].any()
        assert not drawn.odds[number, end:].any()


def test_a_row_has_no_more_than_its_tokens() -> None:
    row = texts(3, 2).row(1)
    assert row.length == 5
    assert row.taps.shape == (1, 5, 4)
    assert row.tokens.tolist() == [[4] * 5]
