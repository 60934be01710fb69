"""Texts that a draft learns from, with what the target computes along them, on disk.

A row of a text keeps the hidden states that drafts read of each token, and what the target finds
likeliest after it. Both are computed once, in `Target.read`, and lie in files of some rows each,
which are mapped into memory: training takes as much of it as it has drawn.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_INDEX = "texts.json"


@dataclass(frozen=True)
class Texts:
    """Rows of one length, filled up on the right.

    Args:
        tokens: [rows, length] int64.
        taps: [rows, length, A · H], hidden states that a draft reads, side by side.
        ids: [rows, length, K] int32, the target's likeliest next tokens, best first.
        odds: [rows, length, K], their probabilities.
        begins: [rows] int64, place of the first token that somebody learns to predict.
        ends: [rows] int64, tokens of a row.
        is_greedy: [rows] bool, whether the target has chosen its likeliest token from `begins` on.
    """

    tokens: Tensor
    taps: Tensor
    ids: Tensor
    odds: Tensor
    begins: Tensor
    ends: Tensor
    is_greedy: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens of a row, those that fill it up among them."""
        return self.tokens.shape[1]

    @property
    def num_taught(self) -> int:
        """Tokens that somebody learns to predict."""
        return int((self.ends - self.begins).clamp_min(0).sum())

    def to(self, device: torch.device) -> Texts:
        """The same on a device."""
        return Texts(*(getattr(self, name).to(device) for name in _FIELDS))

    def row(self, number: int) -> Texts:
        """One row, without what fills it up."""
        end = int(self.ends[number])
        parts = {name: getattr(self, name)[number : number + 1] for name in _FIELDS}
        cut = {name: parts[name][:, :end] for name in _ALONG}
        return Texts(**(parts | cut))


_FIELDS = tuple(field.name for field in dataclasses.fields(Texts))
# those that have something for each token
_ALONG = ("tokens", "taps", "ids", "odds")


def _joined(rows: Sequence[Texts]) -> Texts:
    """Rows of any lengths, copied, and filled up to the longest."""
    longest, parts = max(row.length for row in rows), {}
    for name in _FIELDS:
        values = [getattr(row, name) for row in rows]
        if name in _ALONG:
            first = values[0]
            whole = first.new_zeros(len(rows), longest, *first.shape[2:])
            for number, value in enumerate(values):
                whole[number, : value.shape[1]] = value[0]
            parts[name] = whole
        else:
            parts[name] = torch.cat(values)
    return Texts(**parts)


class TextStore:
    """Texts in files of a directory, which are read as far as rows are drawn.

    Args:
        directory: is made where there is none; files of an earlier run count.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._kinds: dict[str, list[Texts]] = {}
        index = directory / _INDEX
        names = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else []
        self._names: list[str] = names
        for name in names:
            self._map(name)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum((self._directory / name).stat().st_size for name in self._names)

    def kinds(self) -> list[str]:
        """Of texts that are there."""
        return sorted(self._kinds)

    def parts(self, kind: str) -> Sequence[Texts]:
        """Texts of a kind, a file each."""
        return self._kinds.get(kind, [])

    def num_tokens(self, kind: str) -> int:
        """Tokens of texts of a kind that somebody learns to predict."""
        return sum(texts.num_taught for texts in self.parts(kind))

    def add(self, kind: str, texts: Texts) -> None:
        """Keep texts; a run that is ended meanwhile leaves them out."""
        name = f"{kind}-{len(self.parts(kind))}.safetensors"
        whole = {field: getattr(texts, field).contiguous().cpu() for field in _FIELDS}
        partial = self._directory / f"{name}.part"
        save_file(whole, partial)
        partial.replace(self._directory / name)
        self._names.append(name)
        index = self._directory / f"{_INDEX}.part"
        index.write_text(json.dumps(self._names), encoding="utf-8")
        index.replace(self._directory / _INDEX)
        self._map(name)

    def num_rows(self, kind: str) -> int:
        """Rows of a kind."""
        return sum(map(len, self.parts(kind)))

    def mean_length(self, kind: str) -> float:
        """Tokens of a row of a kind."""
        return sum(int(part.ends.sum()) for part in self.parts(kind)) / self.num_rows(kind)

    def draw(self, kind: str, count: int, generator: torch.Generator) -> Texts:
        """Some rows of a kind, all rows alike."""
        parts = self.parts(kind)
        ends = list(itertools.accumulate(map(len, parts)))
        found = []
        for drawn in torch.randint(ends[-1], (count,), generator=generator).tolist():
            number = bisect.bisect_right(ends, drawn)
            place = drawn - ends[number] + len(parts[number])
            found.append(parts[number].row(place))
        return _joined(found)

    def _map(self, name: str) -> None:
        # mapped, not read: the system gives its pages back
        texts = Texts(**load_file(self._directory / name))
        self._kinds.setdefault(name.rpartition("-")[0], []).append(texts)
