"""The parts of a GGUF file that is split: which files they are, and that none is lost.

Every part says which it is (`split.no`, from 0 on), of how many (`split.count`), and how many
tensors all have together (`split.tensors.count`); names end as `-00001-of-00003.gguf`. A part
alone is a file like others, in which whatever is optional seems not to be: without its head, a
model looks like one that takes its embedding for one.
Source: llama.cpp, src/llama-model-loader.cpp; tools/gguf-split.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specc.errors import WeightError

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_NUMBER, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"
_DO = "download all parts, with the names that they have, into one directory"


def part_name(stem: str, number: int, count: int) -> str:
    """Name of the part of this number, from 0 on."""
    return f"{stem}-{number + 1:05}-of-{count:05}.gguf"


def part_count(path: Path, fields: Mapping[str, Any]) -> int:
    """Files that a model is in, by the fields of one of them.

    Raises:
        WeightError: its name says that it is one of several, and its fields do not.
    """
    count = fields.get(_COUNT, 1)
    found = _NAME.fullmatch(path.name)
    # 0 is what llama-gguf-split --merge leaves
    if count == 0:
        return 1
    if type(count) is not int or count < 1 or (count == 1 and found and int(found[3]) > 1):
        raise WeightError(
            f"{path} has {_COUNT} {fields.get(_COUNT)}",
            "a count of parts, that of its name where that is the name of a part",
            _DO,
        )
    return count


def parts_of(path: Path, count: int) -> list[Path]:
    """All parts, the first one first.

    Args:
        count: how many there are.
    Raises:
        WeightError: the name is not that of one of so many parts, or a part is not there.
    """
    found = _NAME.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise WeightError(
            f"{path} is one of {count} parts of a model ({_COUNT})",
            f"the name of one, as {part_name('NAME', 0, count)}, by which the others are found",
            _DO,
        )
    parts = [path.with_name(part_name(found[1], number, count)) for number in range(count)]
    if lost := [part for part in parts if not part.is_file()]:
        raise WeightError(
            f"{path} is one of {count} parts of a model, and {lost[0].name} is not beside it",
            f"all {count} parts",
            _DO,
        )
    return parts


def check_part(path: Path, number: int, count: int, fields: Mapping[str, Any]) -> None:
    """See that a file is the part that its name says.

    Raises:
        WeightError: it says something else.
    """
    for name, wanted in ((_NUMBER, number), (_COUNT, count)):
        if fields.get(name) != wanted:
            raise WeightError(
                f"{path} has {name} {fields.get(name)}",
                f"{wanted}, as its name and the parts beside it say",
                _DO,
            )


def check_whole(path: Path, fields: Mapping[str, Any], num_tensors: int) -> None:
    """See that all parts have the tensors that there are, by the fields of the first one.

    Raises:
        WeightError: there are more or fewer.
    """
    wanted = fields.get(_TENSORS)
    if wanted != num_tensors:
        raise WeightError(
            f"the parts of {path} hold {num_tensors} tensors, and {_TENSORS} says {wanted}",
            "parts of one model, and all of it",
            _DO,
        )


def first_part(files: Sequence[Path]) -> Path | None:
    """The first of these files where all are parts of one model; else None.

    Args:
        files: in order of their names.
    """
    found = [_NAME.fullmatch(file.name) for file in files]
    kinds = {(name[1], name[3]) for name in found if name is not None}
    return files[0] if len(kinds) == 1 and None not in found else None
