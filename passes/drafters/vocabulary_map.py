"""The target's ids of a head's rows: `d2t` and `t2d`, read and compared."""

from __future__ import annotations

import torch
from torch import Tensor

from specc.artifact.safetensors_io import TensorReader
from specc.errors import HeadError
from specc.passes.drafters.head_spec import HEAD

# offsets: the target's id of row i is i + d2t[i]
OFFSETS = "d2t"
# which of the target's ids have a row
KEPT = "t2d"
_DO = "pass the head of this target, or download it again"


def num_rows_of(reader: TensorReader, said: int | None, vocab_size: int, name: str) -> int:
    """Vd, which three places may say; where none does, the target's V.

    Args:
        said: what config.json says.
        vocab_size: V of the target.
        name: of the head, for errors.
    Raises:
        HeadError: two places say different numbers.
    """
    names = set(reader.keys())
    found = {"config.json": said}
    for key in (HEAD, OFFSETS):
        if key in names and reader.shape(key):
            found[key] = reader.shape(key)[0]
    known = {place: size for place, size in found.items() if size is not None}
    if len(set(known.values())) > 1:
        told = ", ".join(f"{size} in {place}" for place, size in known.items())
        raise HeadError(f"{name}: ids of the head: {told}", "one number of ids", _DO)
    return next(iter(known.values()), vocab_size)


def read_target_ids(
    reader: TensorReader, num_rows: int, vocab_size: int, name: str
) -> Tensor | None:
    """The target's id of each row of a head.

    Args:
        num_rows: Vd.
        vocab_size: V of the target.
    Returns:
        [Vd] int64, ascending; None where row i is id i.
    Raises:
        HeadError: no map where one is needed, or one that is not that of this target.
    """
    names = set(reader.keys())
    if OFFSETS not in names:
        if num_rows != vocab_size:
            raise HeadError(
                f"{name}: a head of {num_rows} rows for {vocab_size} ids, and no {OFFSETS}",
                f"{OFFSETS} [{num_rows}], the offset of each row's id",
                _DO,
            )
        return None
    offsets = read_integers(reader, OFFSETS, (num_rows,), (torch.int64, torch.int32), name).long()
    ids = torch.arange(num_rows) + offsets
    if bool((ids.diff() <= 0).any()):
        place = int((ids.diff() <= 0).nonzero()[0])
        raise HeadError(
            f"{name}: {OFFSETS} maps rows {place} and {place + 1} to ids {int(ids[place])} and"
            f" {int(ids[place + 1])}",
            "offsets whose ids ascend",
            _DO + "; maps of ids in place of offsets are not read",
        )
    if not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise HeadError(
            f"{name}: {OFFSETS} maps rows to ids {int(ids[0])} … {int(ids[-1])}",
            f"ids of the target, 0 … {vocab_size - 1}",
            _DO,
        )
    if num_rows == vocab_size:
        # ascending ids of all are all ids; heads that need no map may have one of zeros
        return None
    if KEPT in names:
        kept = read_integers(reader, KEPT, (vocab_size,), (torch.bool, torch.uint8), name).bool()
        if not torch.equal(kept.nonzero().flatten(), ids):
            raise HeadError(
                f"{name}: {KEPT} keeps {int(kept.sum())} ids that are not those of {OFFSETS}",
                f"one set of ids in {OFFSETS} and {KEPT}",
                _DO,
            )
    return ids


def read_integers(
    reader: TensorReader,
    key: str,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    name: str,
) -> Tensor:
    """A map in a head's checkpoint, of one of these types.

    Raises:
        HeadError: another shape or type.
    """
    found, dtype = reader.shape(key), reader.dtype(key)
    if found != shape or dtype not in dtypes:
        raise HeadError(
            f"{name}: {key} is {dtype} {list(found)}",
            f"{' or '.join(str(item) for item in dtypes)} {list(shape)}",
            _DO,
        )
    data = bytearray().join(bytes(chunk) for chunk in reader.read_chunks(key))
    return torch.frombuffer(data, dtype=dtype)
