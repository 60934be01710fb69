"""A reader of tensors that has each of them from another one, under names of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from specc.artifact.safetensors_io import CHUNK_BYTES, Buffer, TensorReader
from specc.artifact.tensor_part import TensorPart


class ForwardingReader(ABC):
    """What `TensorReader` says of single tensors, asked of the reader that has them.

    Subclasses say which tensors there are, and where each of them is.
    """

    @abstractmethod
    def source_of(self, key: str) -> tuple[TensorReader, str]:
        """The reader that has a tensor, and the name that it has there.

        Raises:
            WeightError: there is none of this name.
        """

    def dtype(self, key: str) -> torch.dtype:
        reader, name = self.source_of(key)
        return reader.dtype(name)

    def shape(self, key: str) -> tuple[int, ...]:
        reader, name = self.source_of(key)
        return reader.shape(name)

    def read_chunks(
        self,
        key: str,
        chunk_bytes: int = CHUNK_BYTES,
        rows: tuple[int, int] | None = None,
        transpose: bool = False,
    ) -> Iterator[Buffer]:
        reader, name = self.source_of(key)
        return reader.read_chunks(name, chunk_bytes, rows, transpose)

    def read_part(
        self,
        key: str,
        part: TensorPart,
        transpose: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Buffer]:
        reader, name = self.source_of(key)
        return reader.read_part(name, part, transpose, chunk_bytes)
