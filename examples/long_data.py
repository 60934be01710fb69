"""Long training sequences for ``train_long.py``: files of one directory, one after the other.

Files of one package share names, idioms and licences, so what stands thousands of tokens back
helps to predict what comes. On top of that a share of the sequences holds *planted* repetitions:
spans of the first half are copied, from one line end to another, over spans of the second half.
Real far repetition is rare in a corpus this small, and looking it up has to be learned from
something. Held-out text is never planted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pair_data import SourceFile
from torch import Tensor
from transformers import PreTrainedTokenizerFast


def directory_of(file: SourceFile) -> str:
    """The part of the file's name before its last slash, "." where there is none."""
    return file.name.rpartition("/")[0] or "."


@dataclass(frozen=True)
class Documents:
    """Token ids of files, each after an end token, grouped by directory.

    Args:
        groups: for each directory, the int64 [n] ids of each of its files.
        newline: the id of a line end.
    """

    groups: tuple[tuple[Tensor, ...], ...]
    newline: int

    @classmethod
    def encode(cls, tokenizer: PreTrainedTokenizerFast, files: list[SourceFile]) -> Documents:
        groups: dict[str, list[Tensor]] = {}
        for file in files:
            ids = [tokenizer.eos_token_id, *tokenizer(file.text, verbose=False)["input_ids"]]
            groups.setdefault(directory_of(file), []).append(torch.tensor(ids))
        newline = tokenizer("\n")["input_ids"][0]
        return cls(tuple(tuple(group) for group in groups.values()), newline)

    def __len__(self) -> int:
        return sum(len(ids) for group in self.groups for ids in group)

    def draw(self, length: int, generator: torch.Generator) -> Tensor:
        """Ids, int64 [length]: files of one directory in random order, then of another, …

        The first file is drawn by its length and begins anywhere, so that every token of the
        corpus is about equally likely to be seen, at every position.
        """
        pieces: list[Tensor] = []
        missing = length
        while missing > 0:
            sizes = torch.tensor([sum(map(len, group)) for group in self.groups]).float()
            group = self.groups[int(torch.multinomial(sizes, 1, generator=generator))]
            lengths = torch.tensor([len(ids) for ids in group]).float()
            order = torch.multinomial(lengths, len(group), generator=generator).tolist()
            for place, index in enumerate(order):
                ids = group[index]
                if not pieces and place == 0:
                    ids = ids[int(torch.randint(len(ids), (), generator=generator)) :]
                pieces.append(ids[:missing])
                missing -= len(pieces[-1])
                if missing == 0:
                    break
        return torch.cat(pieces)

    def plant(self, ids: Tensor, generator: torch.Generator, share: float = 0.3) -> Tensor:
        """Copy spans of the first half over spans of the second half, about ``share`` of it.

        Args:
            ids: int64 [length]; it is not changed.
            generator: draws spans and places.
            share: of the second half that becomes copies.

        Returns:
            int64 [length]. A span is 64 to 512 tokens, at most an eighth of the text, and begins
            after a line end, as does the place that it is copied to.
        """
        ids = ids.clone()
        half = len(ids) // 2
        lines = (ids == self.newline).nonzero()[:, 0] + 1
        early, late = lines[lines < half], lines[lines >= half]
        if not len(early) or not len(late):
            return ids
        planted = 0
        while planted < share * half:
            size = int(torch.randint(64, 513, (), generator=generator))
            source = int(early[torch.randint(len(early), (), generator=generator)])
            place = int(late[torch.randint(len(late), (), generator=generator)])
            size = min(size, len(ids) // 8, half - source, len(ids) - place)
            ids[place : place + size] = ids[source : source + size].clone()
            planted += max(size, 16)
        return ids
