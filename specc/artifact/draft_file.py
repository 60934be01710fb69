"""A file of new weights for a draft of an engine: what it holds, and whether it may be taken.

It is a safetensors file of the tensors that the engine's own file of the draft has, in the same
layout, without constants of its graph and without what the draft shares with its target: those stay
as they are. Its metadata name the draft by a hash of the graph and of the name, shape and dtype of
each tensor, so that a file of another engine is refused although its shapes may fit.

Whoever writes to a server's folder may be its enemy: a file is read once, from one descriptor, into
memory whose size follows from the engine alone, and looked at as a whole before any of it is used.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specc.artifact.lent_keys import bound_key
from specc.artifact.manifest import Manifest
from specc.artifact.model_entry import ModelEntry
from specc.artifact.quantized_layout import QuantizedLayout, check_parts, unpack
from specc.artifact.safetensors_io import DTYPES, read_exactly, tensor_bytes
from specc.artifact.weight_layout import BLOCK
from specc.errors import ConfigError, WeightError
from specc.system.files import format_bytes, read_checked
from specc.system.json_file import JsonError, parse_json

# what `__metadata__` has to hold
FORMAT = "specc-draft-weights-1"
# of a header: of each tensor, and besides
_ENTRY_BYTES, _OTHER_BYTES = 1024, 16 << 10
# of tensors that are looked at, at a time
_CHUNK = 4 << 20
_CONSTANT = "constant."
_DO = "write it with specc draft-weights, for this engine"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class DraftTensor:
    """A tensor as the engine stores it.

    Args:
        dtype: of its elements.
        shape: stored.
        layout: of a quantized weight.
        columns: K of a quantized weight.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: QuantizedLayout | None = None
    columns: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_fixed(self) -> bool:
        """Places in tables rather than weights: no file may have other ones."""
        return self.layout is None and not self.dtype.is_floating_point


@dataclass(frozen=True)
class DraftForm:
    """What a file of new weights has to hold.

    Args:
        name: `draft_0`, ….
        identity: of the draft, hexadecimal.
        tensors: by key.
    """

    name: str
    identity: str
    tensors: Mapping[str, DraftTensor]

    @classmethod
    def of(
        cls, engine: Path, manifest: Manifest, name: str, tensors: Mapping[str, Any]
    ) -> DraftForm:
        """Of a draft of an engine.

        Args:
            engine: directory.
            manifest: as it was when the engine was loaded.
            name: of a draft model.
            tensors: key → dtype and shape of each tensor that its file holds.
        Raises:
            EngineError: its program cannot be read, or is no longer that of the manifest.
        """
        entry = draft_entry(manifest, name)
        file = engine / entry.program_file
        # the directory may hold another engine by now
        digest = manifest.files[entry.program_file].sha256
        program = parse_json(read_checked(file, digest), exact=True)
        inputs = {bound_key(x): x for x in program["inputs"] if x["kind"] == "weight"}
        own: dict[str, DraftTensor] = {}
        for key in sorted(tensors):
            item = inputs.get(key, {})
            if key.startswith(_CONSTANT) or "of_target" in item:
                continue
            dtype, shape = tensors[key]
            layout, columns = None, 0
            if "quantized_of" in item:
                layout = QuantizedLayout.named(item["layout"].removeprefix("blocks-"))
                columns = int(item["quantized_of"][-1])
            own[key] = DraftTensor(dtype, tuple(shape), layout, columns)
        stated = [[key, str(x.dtype), list(x.shape)] for key, x in own.items()]
        text = json.dumps([FORMAT, digest, stated], ensure_ascii=False)
        return cls(name, hashlib.sha256(text.encode()).hexdigest(), own)

    @property
    def metadata(self) -> dict[str, str]:
        """Of a file."""
        return {"format": FORMAT, "draft": self.name, "identity": self.identity}


@dataclass(frozen=True)
class NewWeights:
    """A file that was looked at as a whole.

    Args:
        form: of the draft.
        tensors: by key, on the CPU.
        digest: sha256 of what it holds, hexadecimal.
    """

    form: DraftForm
    tensors: Mapping[str, Tensor]
    digest: str


def draft_entry(manifest: Manifest, name: str | None = None) -> ModelEntry:
    """A draft model of an engine; None is the only one.

    Raises:
        ConfigError: it has none of this name, or several to choose from.
    """
    entries = {entry.name: entry for entry in manifest.models[1:]}
    if name is None and len(entries) == 1:
        return next(iter(entries.values()))
    if name in entries:
        return entries[name]
    names = ", ".join(entries) or "none: what it drafts with has no weights of its own"
    asked = "a draft that is not named" if name is None else f"draft {name!r:.60}"
    raise ConfigError(f"{asked}, of this engine", f"one of its draft models: {names}", "name one")


@contextlib.contextmanager
def opened(path: Path, folder: Path | None = None) -> Iterator[int]:
    """Open a plain file for reading; what was opened is compared, not what its name led to before.

    Args:
        path: relative to the folder, where there is one.
        folder: that it has to lie in, however its name leads there; None: anywhere.
    Returns:
        descriptor.
    Raises:
        WeightError: there is none, it is something else than a plain file, or lies outside.
    """
    where = path if folder is None else folder / path
    try:
        # a pipe would be waited for
        descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "no name of a file"
        if folder is not None and not _is_within(Path(os.path.realpath(where)), folder):
            # whether there is such a file is nobody's business
            raise _outside(path, folder) from None
        raise WeightError(f"{path}: {reason}", "a file of new weights", _DO) from error
    try:
        if folder is not None:
            really = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if not _is_within(really, folder):
                raise _outside(path, folder)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise WeightError(f"{path} is no plain file", "a safetensors file", _DO)
        yield descriptor
    finally:
        os.close(descriptor)


def _is_within(really: Path, folder: Path) -> bool:
    return really.is_relative_to(os.path.realpath(folder))


def _outside(path: Path, folder: Path) -> WeightError:
    return WeightError(
        f"{path} is outside of the folder for new weights",
        f"a file in {folder}",
        "put the file there, or start the server with another --draft-weights-dir",
    )


def read_new_weights(
    path: Path, form: DraftForm, own: Mapping[str, Tensor], folder: Path | None = None
) -> NewWeights:
    """Read a file, and find out whether all of it may be taken.

    Args:
        path: of the file, see `opened`.
        form: what it has to hold.
        own: tensors that the draft has now; those that are fixed are compared.
        folder: that the file has to lie in, or None.
    Raises:
        WeightError: another engine's or draft's file; names, shapes, types or sizes that do not
            fit; numbers that are not finite, or scales and zero points that no kernel takes.
    """
    with opened(path, folder) as descriptor:
        places = _places(path, descriptor, form)
        digest, tensors = hashlib.sha256(), {}
        with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
            for key, begin in sorted(places.items(), key=lambda item: item[1]):
                stated = form.tensors[key]
                tensor = torch.empty(stated.shape, dtype=stated.dtype)
                data = tensor_bytes(tensor)
                read_exactly(file, data, begin, lambda reason: _wrong(path, reason))
                digest.update(key.encode() + b"\0")
                digest.update(data)
                tensors[key] = tensor
    for key, tensor in tensors.items():
        _check_values(path, key, tensor, form.tensors[key], own[key])
    return NewWeights(form, tensors, digest.hexdigest())


def _places(path: Path, descriptor: int, form: DraftForm) -> dict[str, int]:
    """Key → where its data begin in a file whose header says what the draft is."""
    size, total = os.fstat(descriptor).st_size, sum(x.num_bytes for x in form.tensors.values())
    most = _OTHER_BYTES + sum(_ENTRY_BYTES + 2 * len(key) for key in form.tensors)
    length = int.from_bytes(_read(descriptor, 8, 0), "little") if size >= 8 else 0
    if not 2 <= length <= most or size < 8 + length:
        raise _wrong(path, f"it has a header of {length} bytes; at most {most} are taken")
    try:
        header = parse_json(_read(descriptor, length, 8), exact=True)
    except JsonError as error:
        raise _wrong(path, f"its header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise _wrong(path, "its header is no object")
    _check_identity(path, header.pop("__metadata__", None), form)
    if header.keys() != form.tensors.keys():
        lacking = sorted(form.tensors.keys() - header.keys())[:3]
        more = sorted(header.keys() - form.tensors.keys())[:3]
        said = [f"it lacks {_listed(lacking)}"] * bool(lacking)
        said += [f"it has {_listed(more)}, which the draft has not"] * bool(more)
        raise _wrong(path, "; ".join(said))
    found, spans = {}, []
    for key, stated in form.tensors.items():
        entry = header[key]
        wanted = {"dtype": _NAMES[stated.dtype], "shape": list(stated.shape)}
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        is_pair = isinstance(offsets, list) and [type(x) for x in offsets] == [int, int]
        if not is_pair or {k: v for k, v in entry.items() if k != "data_offsets"} != wanted:
            shown = json.dumps(entry, ensure_ascii=False)[:120]
            raise _wrong(path, f"{key} is {shown}, and {json.dumps(wanted)} in the engine")
        assert offsets is not None
        first, last = offsets
        if last - first != stated.num_bytes:
            raise _wrong(path, f"{key} has {last - first} bytes of {stated.num_bytes}")
        spans.append((first, last))
        found[key] = 8 + length + first
    # without holes, and nothing twice
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise _wrong(path, f"its tensors overlap, or leave a hole, at byte {end}")
        end = last
    if size != 8 + length + total:
        held = f"{format_bytes(size)} ({size} bytes)"
        raise _wrong(path, f"it has {held}, where {8 + length + total} are said")
    return found


def _check_identity(path: Path, metadata: Any, form: DraftForm) -> None:
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _wrong(path, "it is no file of new weights of a draft")
    if metadata.get("identity") != form.identity:
        raise WeightError(
            f"{path} is for a draft {metadata.get('identity')!s:.12}…, of another engine, or in"
            " another layout",
            f"one for {form.name} of this engine, {form.identity[:12]}…",
            _DO,
        )


def _check_values(path: Path, key: str, tensor: Tensor, stated: DraftTensor, own: Tensor) -> None:
    if stated.is_fixed:
        if not torch.equal(tensor, own.cpu()):
            raise _wrong(path, f"{key}, which says places in a table, is another one")
        return
    if stated.layout is not None:
        rows = max(1, _CHUNK // max(1, tensor.shape[1]))
        for chunk in tensor.split(rows):
            try:
                _check_stored(chunk, stated.columns, stated.layout)
            except ValueError as error:
                raise _wrong(path, f"{key} has {error}") from error
        return
    for part in tensor.view(-1).split(_CHUNK):
        if not part.isfinite().all():
            raise _wrong(path, f"{key} has numbers that are not finite")


def _read(descriptor: int, count: int, offset: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.pread(descriptor, count - len(parts), offset + len(parts))
        if not part:
            break
        parts += part
    return bytes(parts)


def _wrong(path: Path, reason: str) -> WeightError:
    return WeightError(f"{path}: {reason}", "a file of new weights of this draft", _DO)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{name:.80}" for name in names)


def _check_stored(stored: Tensor, columns: int, layout: QuantizedLayout) -> None:
    """Look at blocks that somebody else has packed.

    Args:
        stored: uint8 [blocks, bytes of a block].
        columns: K.
    Raises:
        ValueError: scales or levels that are not finite, or zero points that no kernel takes.
    """
    levels, scales, zeros = unpack(stored, (len(stored) * BLOCK, columns), layout.unpaired)
    numbers = layout.scales(scales)
    if layout.blocks is None:
        check_parts(levels, scales, zeros if layout.has_zeros else None, layout)
    else:
        numbers = layout.blocks.numbers(levels, scales)
    if not numbers.isfinite().all():
        raise ValueError("scales that are not finite")
